"""`convert`: converts a safetensors checkpoint to one GGUF file, tokenizer and configuration included.

The export stage for float types: tensors keep their type, or get the requested one; small tensors that readers expect
in float32 become float32. `quantize.py` makes smaller files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from rlx.errors import ArgumentError, ModelFileError, named_refusals
from rlx.export.hf import model_from_hf
from rlx.export.mix import FILE_TYPES, kept_type
from rlx.export.model import ExportModel, ExportTensor
from rlx.export.quantizers import Quantizer
from rlx.export.writer import Progress, check_output, write_gguf
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.runtime.cache import CompileCache
from rlx.weights import WeightLoader, open_weights
from rlx.weights.safetensors import INDEX_NAME, SINGLE_NAME

AUTO = "auto"
TYPES: dict[str, DType] = {"F32": F32, "F16": F16, "BF16": BF16}


@dataclass(frozen=True)
class Converted:
    """The result of `convert`.

    Attributes:
        path: the file.
        arch: `general.architecture`.
        type: the type of most numbers in it: F32, F16 or BF16.
        nbytes: its size.
        tensors: (name, type in the checkpoint, type in the file) of each tensor, in the order of the file.
        left_out: names in the checkpoint of tensors that are not part of the language model.
    """

    path: Path
    arch: str
    type: str
    nbytes: int
    tensors: tuple[tuple[str, DType, DType], ...]
    left_out: tuple[str, ...]

    @property
    def types(self) -> Counter[DType]:
        """How many tensors have each type."""
        return Counter(dtype for _, _, dtype in self.tensors)


@named_refusals()
def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    target: str = AUTO,
    *,
    force: bool = False,
    progress: Progress | None = None,
    cache: CompileCache | None = None,
) -> Converted:
    """Writes a safetensors checkpoint as a GGUF file.

    Args:
        source: a folder with `model.safetensors` or its index, `config.json` and tokenizer; or one of the first two.
        out: the file to write; it is created only when it is complete.
        target: F32, F16 or BF16 for all matrices, or "auto": each keeps its own, and FP8 becomes BF16.
        force: replaces `out` if it exists.
        progress: called with ("writing tensors", bytes done, bytes in all).
        cache: the cache for compiled conversions; by default the shared compile cache.

    Raises:
        ArgumentError: an unknown type, or an `out` that must not be written.
        OutputError, ResourceError: the file cannot be written, the disk is full, or memory runs out.
        ModelFileError: there is no safetensors model; its subclasses name the missing or wrong key or tensor, or the
            unknown architecture.
        TokenizerError: there is no tokenizer, or GGUF cannot represent it.
    """
    wanted, path = _target(target), Path(out)
    if path.suffix.lower() == ".safetensors":  # with `force` it could replace its own source
        raise ArgumentError("the result is a GGUF file", where=path, hint="Give it a name that ends in .gguf.")
    check_output(path, Path(source), force=force)
    with open_checkpoint(source) as model:
        types = [file_dtype(tensor, wanted) for tensor in model.tensors]
        name = _most(model.tensors, types) if wanted is None else wanted.name.upper()
        with Quantizer(cache=cache) as encoder:
            plan = [encoder.planned(t, dtype) for t, dtype in zip(model.tensors, types, strict=True)]
            nbytes = write_gguf(path, model, plan, FILE_TYPES[name].ggml, progress)
    tensors = tuple((t.name, t.dtype, dtype) for t, dtype in zip(model.tensors, types, strict=True))
    return Converted(path, model.arch, name, nbytes, tensors, model.left_out)


def open_checkpoint(source: str | os.PathLike[str]) -> ExportModel:
    """Describes a checkpoint in GGUF's terms, also if its folder contains GGUF files, too.

    Raises:
        ModelFileError: there is no checkpoint; see `convert`.
    """
    path = Path(source)
    inside = [path / name for name in (SINGLE_NAME, INDEX_NAME) if (path / name).is_file()]
    loader = open_weights(inside[0] if inside else path)
    try:
        _check_format(loader)
        return model_from_hf(loader)
    except BaseException:
        loader.close()
        raise


def _check_format(loader: WeightLoader) -> None:
    if loader.format != "safetensors":
        hint = "`rlx quantize` writes GGUF files of another type"
        raise ModelFileError("this is a GGUF file already, expected a safetensors model", where=loader.path, hint=hint)


def _target(name: str) -> DType | None:
    """The type of all matrices; None: each keeps its own."""
    if name.lower() == AUTO:
        return None
    if name.upper() not in TYPES:
        hint = f"Choose one of {', '.join((AUTO, *TYPES))}; `rlx quantize` writes smaller ones."
        raise ArgumentError(f"{name!r} is not a type for conversion", where="TYPE", hint=hint)
    return TYPES[name.upper()]


def file_dtype(tensor: ExportTensor, wanted: DType | None) -> DType:
    """The type of a tensor in the file: float32 for norms and other small ones, else `wanted` or its own."""
    if kept_type(replace(tensor, dtype=F16)) is F32:
        return F32
    if wanted is not None:
        return wanted
    return tensor.dtype if tensor.dtype in TYPES.values() else BF16


def _most(tensors: Iterable[ExportTensor], types: Iterable[DType]) -> str:
    """Name of the type that most numbers have."""
    counts: Counter[str] = Counter()
    for tensor, dtype in zip(tensors, types, strict=True):
        counts[dtype.name.upper()] += prod(tensor.shape)
    return counts.most_common(1)[0][0]
