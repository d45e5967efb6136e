"""`convert`: converts a safetensors checkpoint to GGUF: one file with tokenizer and configuration, one with its tower.

The export stage for float types: tensors keep their type, or get the requested one; small tensors that readers expect
in float32 become float32. `quantize.py` makes smaller files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from rlx.errors import ArgumentError, ModelFileError, MultimodalError, named_refusals
from rlx.export.hf import model_from_hf
from rlx.export.mix import FILE_TYPES, is_kept, kept_type
from rlx.export.model import ExportModel, ExportTensor
from rlx.export.quantizers import Quantizer
from rlx.export.tower import tower_config, tower_from_hf
from rlx.export.writer import Progress, check_output, write_gguf
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.store.cache import CompileCache
from rlx.weights import WeightLoader, open_weights
from rlx.weights.locate import INDEX_NAME, SINGLE_NAME

AUTO = "auto"
ALL, MODEL, MMPROJ = PARTS = ("all", "model", "mmproj")
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
        left_out: names in the checkpoint of tensors that belong to neither the language model nor its vision tower.
        mmproj: the file with the vision tower, if it was written beside this one.
        no_mmproj: why the checkpoint's tower was not written, where it has one that rlx does not support.
    """

    path: Path
    arch: str
    type: str
    nbytes: int
    tensors: tuple[tuple[str, DType, DType], ...]
    left_out: tuple[str, ...]
    mmproj: Converted | None = None
    no_mmproj: str | None = None

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
    part: str = ALL,
    force: bool = False,
    progress: Progress | None = None,
    cache: CompileCache | None = None,
) -> Converted:
    """Writes a safetensors checkpoint as a GGUF file, and its vision tower as another one (mmproj) beside it.

        convert("gemma-3-4b-it", "gemma3.gguf").mmproj.path   # mmproj-gemma3.gguf

    Args:
        source: a folder with `model.safetensors` or its index, `config.json` and tokenizer; or one of the first two.
        out: the file to write; it is created only when it is complete.
        target: F32, F16 or BF16 for all matrices, or "auto": each keeps its own, and FP8 becomes BF16.
        part: "all"; "model", the language model only; or "mmproj", the tower only, which `out` then is.
        force: replaces the files if they exist.
        progress: called with ("writing tensors", bytes done, bytes in all), of each file.
        cache: the cache for compiled conversions; by default the shared compile cache.

    Raises:
        ArgumentError: an unknown type or part, or a file that must not be written.
        OutputError, ResourceError: a file cannot be written, the disk is full, or memory runs out.
        ModelFileError: there is no safetensors model; its subclasses name the missing or wrong key or tensor, or the
            unknown architecture.
        MultimodalError: `part` is "mmproj", and there is no tower that rlx supports.
        TokenizerError: there is no tokenizer, or GGUF cannot represent it.
    """
    wanted, path = _target(target), Path(out)
    if part not in PARTS:
        raise ArgumentError(
            f"{part!r} is no part of a checkpoint", where="part", hint=f"Choose one of {', '.join(PARTS)}."
        )
    _check_output(path, Path(source), force)
    with ExitStack() as opened:
        tower, refusal = (None, None) if part == MODEL else _tower(source, part, opened)
        beside = mmproj_path(path)
        if tower is not None and part == ALL:
            _check_output(beside, Path(source), force)
        encoder = opened.enter_context(Quantizer(cache=cache))
        write = partial(_write, wanted=wanted, encoder=encoder, progress=progress)
        if part == MMPROJ:
            assert tower is not None
            return replace(write(path, tower), left_out=())
        done = write(path, opened.enter_context(open_checkpoint(source)))
        if tower is None:
            return replace(done, no_mmproj=refusal)
        mmproj = write(beside, tower)
    left_out = tuple(name for name in done.left_out if name in set(mmproj.left_out))
    return replace(done, left_out=left_out, mmproj=replace(mmproj, left_out=left_out))


def mmproj_path(out: Path) -> Path:
    """The name of the file with the tower beside `out`, under which it is found there."""
    return out.with_name(f"mmproj-{out.name}")


def _check_output(path: Path, source: Path, force: bool) -> None:
    if path.suffix.lower() == ".safetensors":  # with `force` it could replace its own source
        raise ArgumentError("the result is a GGUF file", where=path, hint="Give it a name that ends in .gguf.")
    check_output(path, source, force=force)


def _tower(source: str | os.PathLike[str], part: str, opened: ExitStack) -> tuple[ExportModel | None, str | None]:
    """The checkpoint's tower, None where it has none; or why it cannot be written beside the language model."""
    loader = opened.enter_context(_open_safetensors(source))
    try:
        config = tower_config(loader)
    except MultimodalError as error:
        if part == MMPROJ:
            raise
        return None, str(error)
    if config is None and part == MMPROJ:
        raise MultimodalError("the checkpoint has no vision tower", where=loader.path)
    return (None if config is None else tower_from_hf(loader, config)), None


def _write(
    path: Path, model: ExportModel, *, wanted: DType | None, encoder: Quantizer, progress: Progress | None
) -> Converted:
    types = [file_dtype(tensor, wanted) for tensor in model.tensors]
    name = _most(model.tensors, types) if wanted is None else wanted.name.upper()
    plan = [encoder.planned(t, dtype) for t, dtype in zip(model.tensors, types, strict=True)]
    nbytes = write_gguf(path, model, plan, FILE_TYPES[name].ggml, progress)
    tensors = tuple((t.name, t.dtype, dtype) for t, dtype in zip(model.tensors, types, strict=True))
    return Converted(path, model.arch, name, nbytes, tensors, model.left_out)


def open_checkpoint(source: str | os.PathLike[str]) -> ExportModel:
    """Describes a checkpoint in GGUF's terms, also if its folder contains GGUF files, too.

    Raises:
        ModelFileError: there is no checkpoint; see `convert`.
    """
    loader = _open_safetensors(source)
    try:
        return model_from_hf(loader)
    except BaseException:
        loader.close()
        raise


def _open_safetensors(source: str | os.PathLike[str]) -> WeightLoader:
    path = Path(source)
    inside = [path / name for name in (SINGLE_NAME, INDEX_NAME) if (path / name).is_file()]
    loader = open_weights(inside[0] if inside else path)
    if loader.format != "safetensors":
        loader.close()
        hint = "`rlx quantize` writes GGUF files of another type"
        raise ModelFileError("this is a GGUF file already, expected a safetensors model", where=path, hint=hint)
    return loader


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
    chosen = wanted or (tensor.dtype if tensor.dtype in TYPES.values() else BF16)
    return tensor.instead.get(chosen, chosen)


def _most(tensors: Iterable[ExportTensor], types: Iterable[DType]) -> str:
    """Name of the type that most numbers have, of the matrices that `quantize` would encode."""
    counts: Counter[str] = Counter()
    for tensor, dtype in zip(tensors, types, strict=True):
        counts[dtype.name.upper()] += 0 if is_kept(tensor) else prod(tensor.shape)
    return counts.most_common(1)[0][0]
