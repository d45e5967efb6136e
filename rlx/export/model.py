"""A model ready to be written as GGUF, whatever it was read from.

First step of the export stage: a GGUF file (here) or a safetensors directory (`hf.py`) in GGUF's terms: its keys, its
tensor names, its row order. What follows (`convert`, `quantize`) only chooses types and writes. Nothing is read before
it is asked for; a tensor costs memory while its values are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ConfigError
from rlx.ir.dtypes import DType
from rlx.weights import TensorInfo
from rlx.weights.closing import Closing
from rlx.weights.gguf import GgufFile
from rlx.weights.values import dequantize

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Said anew by whoever writes the file: how it is quantized, laid out and divided.
WRITERS_KEYS = frozenset({
    "general.file_type", "general.quantization_version", "general.alignment",
    "split.no", "split.count", "split.tensors.count",
})  # fmt: skip


@dataclass(frozen=True)
class ExportTensor:
    """One tensor of the file to be.

    Attributes:
        name: GGUF name.
        shape: row-major, the reverse of GGUF's `ne`.
        dtype: type in the source.
        values: dequantized float32 of `shape`, permutations and additions done; reads the source.
        raw: 1-D bytes where they can be copied unchanged as `dtype`, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    values: Callable[[], Floats]
    raw: Callable[[], Bytes] | None


@dataclass(frozen=True)
class ExportModel(Closing):
    """A source of GGUF metadata and tensors; a context manager that closes the source.

    Attributes:
        path: what was opened.
        arch: `general.architecture`.
        metadata: GGUF key -> (value, its `gguf.GGUFValueType`), and (value, (ARRAY, type of the elements)) of an
            array; strings in arrays are str, or bytes where they come from a GGUF file, which may hold any bytes.
            Without `WRITERS_KEYS`.
        tensors: in the order in which they are to be written.
        left_out: the source's names of tensors that are no part of the language model.
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
    """The model of an open file, which then belongs to it; `ConfigError` if the file does not say its architecture."""
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
    """A key's value with its type, exactly as the file has them."""
    from gguf import GGUFValueType

    kinds = {
        "u8": GGUFValueType.UINT8, "i8": GGUFValueType.INT8, "u16": GGUFValueType.UINT16, "i16": GGUFValueType.INT16,
        "u32": GGUFValueType.UINT32, "i32": GGUFValueType.INT32, "u64": GGUFValueType.UINT64,
        "i64": GGUFValueType.INT64, "f32": GGUFValueType.FLOAT32, "f64": GGUFValueType.FLOAT64,
        "bool": GGUFValueType.BOOL, "string": GGUFValueType.STRING,
    }  # fmt: skip
    name = file.metadata.type_of(key)
    element = name.removeprefix("array of ")
    if element == name:
        return file.metadata[key], kinds[name]
    value = file.metadata_bytes(key) if element == "string" else file.metadata[key].tolist()
    return value, (GGUFValueType.ARRAY, kinds[element])


def _gguf_tensor(file: GgufFile, info: TensorInfo) -> ExportTensor:
    return ExportTensor(
        name=info.name,
        shape=info.shape,
        dtype=info.dtype,
        values=lambda: dequantize(file.raw(info.name), info.dtype, info.shape),
        raw=lambda: file.raw(info.name),
    )
