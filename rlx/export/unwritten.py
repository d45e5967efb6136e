"""Headers of models without weights: from a `config.json`, or from the name of a shape.

Export stage: the header that `rlx convert` or `rlx quantize` would write, without any weights. With it, programs can be
compiled for a file that is still being downloaded. The compile keys are those of that file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.arguments import did_you_mean
from rlx.errors import ArgumentError, ConfigError, UnsupportedModelError
from rlx.export.convert import file_dtype
from rlx.export.hf import describe
from rlx.export.mix import FileType, file_type, tensor_types
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.models import from_hf
from rlx.models.expected import expected_shapes
from rlx.models.shapes import SHAPES, Shape, metadata, rope_freqs, tensors
from rlx.weights.mapped import Header, TensorInfo
from rlx.weights.names import file_names
from rlx.weights.safetensors import read_config

DEFAULT_TYPE = "Q4_K_M"  # file type for a shape: the one that most people download
_CHECKPOINTS = {"float32": F32, "float16": F16, "bfloat16": BF16}
_ROPE = "rope_freqs.weight"


@dataclass(frozen=True)
class _Planned:
    """A tensor whose type is not chosen yet."""

    name: str
    shape: tuple[int, ...]
    dtype: DType = BF16
    instead: Mapping[DType, DType] = field(default_factory=dict)


def header_of_shape(shape: str | Shape, weights: str | None = None) -> Header:
    """The GGUF file of a published model's shape.

    Args:
        shape: a key of `SHAPES`, such as "qwen3-0.6b", or the numbers themselves.
        weights: the type of the file, as for `rlx quantize`; `DEFAULT_TYPE` if None.

    Raises:
        ArgumentError: an unknown shape or type.
    """
    name, shape = (shape, _known(shape)) if isinstance(shape, str) else (shape.arch, shape)
    target = file_type(weights or DEFAULT_TYPE)
    keys = {"general.architecture": shape.arch, **metadata(shape)}
    infos = _typed([_Planned(*tensor) for tensor in tensors(shape)], shape.arch, keys, target)
    return Header(Path(f"{name}-{target.name}"), "gguf", _stored(keys), infos, _values(shape, infos))


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
    config = read_config(path)
    target = None if weights is None else file_type(weights)
    model = from_hf(config, where=path)
    rows = _rows(config, model.arch, model.vocab_size)
    shapes = expected_shapes(model, rows, lambda name: len(file_names(name, model.arch)) > 1)
    if target is None and config.get("quantization_config"):
        what = "the checkpoint's weights are quantized, and the configuration does not say which of them"
        raise UnsupportedModelError(what, where=path, hint="name the type of a GGUF file: weights=Q4_K_M, for example")
    dtype = _checkpoint_type(config, path)
    infos = [_info(name, shape, dtype) for name, shape in shapes.items()]
    checkpoint = Header(path, "safetensors", config, infos)
    if target is None:
        return checkpoint
    described = describe(checkpoint, path)
    keys = {key: value for key, (value, _) in described.metadata.items()}
    keys = {"general.architecture": described.arch, f"{described.arch}.vocab_size": model.vocab_size, **keys}
    typed = _typed(described.tensors, described.arch, keys, target)
    values = {tensor.name: tensor.values() for tensor in described.tensors if tensor.name == _ROPE}
    return Header(path, "gguf", _stored(keys), typed, values)


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


def _values(shape: Shape, infos: Iterable[TensorInfo]) -> dict[str, Any]:
    return {info.name: rope_freqs(shape) for info in infos if info.name == _ROPE}


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
