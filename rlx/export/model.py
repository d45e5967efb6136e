"""A model ready to be written as GGUF, whatever its source.

First step of the export stage: describes a GGUF file (here) or a safetensors directory (`hf.py`) in GGUF's terms: keys,
tensor names, row order. The following steps (`convert`, `quantize`) only choose types and write. Values are read
lazily; a tensor takes memory only while its values are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ConfigError
from rlx.export.hf_keys import GgufType
from rlx.ir.dtypes import DType
from rlx.ir.stored import dequantize
from rlx.weights import TensorInfo
from rlx.weights.gguf import GgufFile
from rlx.weights.mapped import Closing

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Keys that the writer of the file sets: quantization, layout and split of the file.
WRITERS_KEYS = frozenset({
    "general.file_type", "general.quantization_version", "general.alignment",
    "split.no", "split.count", "split.tensors.count",
})  # fmt: skip


@dataclass(frozen=True)
class ExportTensor:
    """One tensor of the output file.

    Attributes:
        name: GGUF name.
        shape: row-major, the reverse of GGUF's `ne`.
        dtype: type in the source.
        values: returns dequantized float32 of `shape`, after permutations and additions; reads the source.
        raw: returns the 1-D bytes if they can be copied unchanged as `dtype`; else None.
        instead: types that readers of the format do not take for it -> the ones that take their place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    values: Callable[[], Floats]
    raw: Callable[[], Bytes] | None
    instead: Mapping[DType, DType] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportModel(Closing):
    """A source of GGUF metadata and tensors; a context manager that closes the source.

    Attributes:
        path: the opened path.
        arch: `general.architecture`.
        metadata: GGUF key -> (value, its `GgufType`), and (value, (ARRAY, type of the elements)) of an
            array; strings in arrays are str, or bytes where they come from a GGUF file, which may hold any bytes.
            Without `WRITERS_KEYS`.
        tensors: in the order of the output file.
        left_out: names in the source of tensors that are not part of the language model.
        close: closes the source; tensors can no longer be read.
    """

    path: Path
    arch: str
    metadata: Mapping[str, tuple[Any, Any]]
    tensors: tuple[ExportTensor, ...]
    left_out: tuple[str, ...]
    close: Callable[[], None]


# -- GGUF -------------------------------------------------------------------------------------------------------------


def model_from_gguf(file: GgufFile) -> ExportModel:
    """Describes an open file and takes ownership of it; `ConfigError` if the file names no architecture."""
    if "general.architecture" not in file.metadata:
        raise ConfigError("the key 'general.architecture' is missing", where=file.path)
    return ExportModel(
        path=file.path,
        arch=str(file.metadata["general.architecture"]),
        metadata={key: _gguf_entry(file, key) for key in file.metadata if key not in WRITERS_KEYS},
        tensors=tuple(_gguf_tensor(file, info) for info in file.tensors.values()),
        left_out=(),
        close=file.close,
    )


def _gguf_entry(file: GgufFile, key: str) -> tuple[Any, Any]:
    """A key's value and type, exactly as in the file."""
    kinds = {
        "u8": GgufType.UINT8, "i8": GgufType.INT8, "u16": GgufType.UINT16, "i16": GgufType.INT16,
        "u32": GgufType.UINT32, "i32": GgufType.INT32, "u64": GgufType.UINT64,
        "i64": GgufType.INT64, "f32": GgufType.FLOAT32, "f64": GgufType.FLOAT64,
        "bool": GgufType.BOOL, "string": GgufType.STRING,
    }  # fmt: skip
    name = file.metadata.type_of(key)
    element = name.removeprefix("array of ")
    if element == name:
        return file.metadata[key], kinds[name]
    value = file.metadata_bytes(key) if element == "string" else file.metadata[key].tolist()
    return value, (GgufType.ARRAY, kinds[element])


def _gguf_tensor(file: GgufFile, info: TensorInfo) -> ExportTensor:
    return ExportTensor(
        name=info.name,
        shape=info.shape,
        dtype=info.dtype,
        values=lambda: dequantize(file.raw(info.name), info.dtype, info.shape),
        raw=lambda: file.raw(info.name),
    )
