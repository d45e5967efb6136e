"""`convert`: converts a safetensors checkpoint to GGUF: one file with tokenizer and configuration, one with its tower.

The export stage for float types: tensors keep their type, or get the requested one; small tensors that readers expect
in float32 become float32. `quantize.py` makes smaller files. The header alone, without any weights, is also made from a
`config.json` or from the name of a shape: with it, programs can be compiled for a file that is still being downloaded.
The compile keys are those of that file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arguments import did_you_mean
from rlx.closing import on_error
from rlx.errors import (
    ArgumentError,
    ConfigError,
    ModelFileError,
    MultimodalError,
    UnsupportedModelError,
    named_refusals,
)
from rlx.export.hf import describe, model_from_hf
from rlx.export.model import ExportModel, ExportTensor, Progress, Written, check_output, write_model
from rlx.export.quantize import FILE_TYPES, FileType, file_type, is_kept, kept_type, tensor_types
from rlx.export.quantizers import Quantizer
from rlx.export.tower import tower_config, tower_from_hf
from rlx.ir.dtypes import BF16, F16, F32, MXFP4, DType
from rlx.models import from_hf
from rlx.models.builder import expected_shapes
from rlx.models.shapes import SHAPES, Shape
from rlx.store.cache import CompileCache
from rlx.weights import WeightLoader, open_weights
from rlx.weights.locate import INDEX_NAME, SINGLE_NAME
from rlx.weights.mapped import Header, TensorInfo
from rlx.weights.names import file_names
from rlx.weights.safetensors import read_config

DEFAULT_TYPE = "Q4_K_M"  # file type for a shape: the one that most people download
_CHECKPOINTS = {"float32": F32, "float16": F16, "bfloat16": BF16}
_ROPE = "rope_freqs.weight"
_MXFP4_MOE = 38  # the type of a file whose experts are in MXFP4


def header_of_shape(shape: str | Shape, weights: str | None = None) -> Header:
    """The GGUF file of a published model's shape.

    Args:
        shape: a key of `SHAPES`, such as "qwen3-0.6b", or the numbers themselves.
        weights: the type of the file, as for `rlx quantize`; `DEFAULT_TYPE` if None.

    Raises:
        ArgumentError: an unknown shape or type.
    """
    name, shape = (shape, _known(shape)) if isinstance(shape, str) else (shape.arch, shape)
    target = file_type(weights or DEFAULT_TYPE).name
    return _header_of(shape.config, Path(f"{name}-{target}"), target)


def header_of_config(path: str | os.PathLike[str], weights: str | None = None) -> Header:
    """The model of a `config.json`.

    Args:
        path: the file.
        weights: the type of a GGUF file made of the checkpoint, as for `rlx quantize`. None: the safetensors checkpoint
            itself, in the type that the configuration names (`dtype` or `torch_dtype`), else BF16.

    Raises:
        ConfigError, UnsupportedModelError: the configuration cannot be used.
        ArgumentError: an unknown type.
    """
    path = Path(path)
    return _header_of(read_config(path), path, weights)


def _header_of(config: dict[str, Any], path: Path, weights: str | None) -> Header:
    """The model of a parsed `config.json`; `path` stands in errors."""
    target = None if weights is None else file_type(weights)
    checkpoint = checkpoint_header(config, path)
    if target is None and config.get("quantization_config"):
        what = "the checkpoint's weights are quantized, and the configuration does not say which of them"
        raise UnsupportedModelError(what, where=path, hint="name the type of a GGUF file: weights=Q4_K_M, for example")
    if target is None:
        return checkpoint
    described = describe(checkpoint, path)
    keys = {key: value for key, (value, _) in described.metadata.items()}
    vocabulary = described.config.model.vocab_size
    keys = {"general.architecture": described.arch, f"{described.arch}.vocab_size": vocabulary, **keys}
    typed = _typed(described.tensors, described.arch, keys, target)
    values = {tensor.name: tensor.values() for tensor in described.tensors if tensor.name == _ROPE}
    return Header(path, "gguf", _stored(keys), typed, values)


def checkpoint_header(config: dict[str, Any], path: Path) -> Header:
    """The safetensors checkpoint of a parsed `config.json`, with canonical names, in the type that it names, or BF16.

    Raises:
        ConfigError, UnsupportedModelError: the configuration cannot be used.
    """
    model = from_hf(config, where=path)
    rows = _rows(config, model.arch, model.vocab_size)
    shapes = expected_shapes(model, rows, lambda name: len(file_names(name, model.arch)) > 1)
    dtype = _checkpoint_type(config, path)
    return Header(path, "safetensors", config, [_info(name, shape, dtype) for name, shape in shapes.items()])


def _known(name: str) -> Shape:
    if name not in SHAPES:
        hint = did_you_mean(name, SHAPES, shown=str, most=3)
        raise ArgumentError(f"{name!r} is not a known shape", where="shape", hint=hint)
    return SHAPES[name]


def _typed(planned: Iterable[Any], arch: str, keys: dict[str, Any], target: FileType) -> list[TensorInfo]:
    """The tensors with the types that `rlx convert` or `rlx quantize` would choose."""
    tensors = list(planned)
    if target.dtype.is_quantized:
        types = tensor_types(tensors, arch, keys, target)
    else:
        types = [file_dtype(tensor, target.dtype) for tensor in tensors]
    return [_info(tensor.name, tensor.shape, dtype) for tensor, dtype in zip(tensors, types, strict=True)]


def _stored(value: Any) -> Any:
    """Metadata as read back from a GGUF file: its floats are float32."""
    if isinstance(value, dict):
        return {key: _stored(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_stored(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _info(name: str, shape: tuple[int, ...], dtype: DType) -> TensorInfo:
    return TensorInfo(name, dtype, shape, dtype.size(shape))


def _rows(config: dict[str, Any], arch: str, vocabulary: int) -> dict[str, int]:
    """Sizes that only a checkpoint's tensors have, or `config.json` under other names (Gemma 3n and 4)."""
    text = {**config, **(config.get("text_config") or {})}
    found = {"laurel_l.weight": text.get("laurel_rank")}
    if arch == "gemma4":  # a scale for each expert; for other architectures only quantized files have such scales
        found["ffn_down_exps.scale"] = text.get("num_experts")
    if text.get("hidden_size_per_layer_input"):
        found["per_layer_token_embd.weight"] = text.get("vocab_size_per_layer_input", vocabulary)
    return {name: rows for name, rows in found.items() if isinstance(rows, int) and rows > 0}


def _checkpoint_type(config: dict[str, Any], path: Path) -> DType:
    text = config.get("text_config") or {}
    name = next((part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key)), "bfloat16")
    if name not in _CHECKPOINTS:
        hint = f"known are {', '.join(_CHECKPOINTS)}"
        raise ConfigError(f"the type of the checkpoint is {name!r}", where=path, hint=hint)
    return _CHECKPOINTS[name]


AUTO = "auto"
ALL, MODEL, MMPROJ = PARTS = ("all", "model", "mmproj")
TYPES: dict[str, DType] = {"F32": F32, "F16": F16, "BF16": BF16}


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
) -> Written:
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
    dtype, path = _target(target), Path(out)
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
        write = partial(_write, target=dtype, encoder=encoder, force=force, progress=progress)
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
    path: Path, model: ExportModel, *, target: DType | None, encoder: Quantizer, force: bool, progress: Progress | None
) -> Written:
    types = [file_dtype(tensor, target) for tensor in model.tensors]
    name = "MXFP4" if MXFP4 in types else _most(model.tensors, types) if target is None else target.name.upper()
    plan = [encoder.planned(t, dtype) for t, dtype in zip(model.tensors, types, strict=True)]
    number = FILE_TYPES[name].ggml if name in FILE_TYPES else _MXFP4_MOE
    return write_model(path, model, plan, name, number, force=force, progress=progress)


def open_checkpoint(source: str | os.PathLike[str]) -> ExportModel:
    """Describes a checkpoint in GGUF's terms, also if its folder contains GGUF files, too.

    Raises:
        ModelFileError: there is no checkpoint; see `convert`.
    """
    loader = _open_safetensors(source)
    with on_error(loader.close):
        return model_from_hf(loader)


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


def file_dtype(tensor: ExportTensor, target: DType | None) -> DType:
    """The type of a tensor in the file: float32 for norms and other small ones, else `target` or its own.

    Experts in MXFP4 stay as they are, because 16 bits would only make them larger.
    """
    if kept_type(replace(tensor, dtype=F16)) is F32:
        return F32
    if tensor.dtype is MXFP4 and target is not F32:
        return MXFP4
    chosen = target or (tensor.dtype if tensor.dtype in TYPES.values() else BF16)
    return tensor.instead.get(chosen, chosen)


def _most(tensors: Iterable[ExportTensor], types: Iterable[DType]) -> str:
    """Name of the type that most numbers have, of the matrices that `quantize` would encode."""
    counts: Counter[str] = Counter()
    for tensor, dtype in zip(tensors, types, strict=True):
        counts[dtype.name.upper()] += 0 if is_kept(tensor) else prod(tensor.shape)
    return counts.most_common(1)[0][0]
