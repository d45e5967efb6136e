"""Describes a safetensors checkpoint as an `ExportModel`: configuration, tensors and tokenizer in GGUF's terms.

Export stage, called by `opened.open_model`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from rlx.export.hf_config import GgufType, Metadata, TextConfig, metadata_from_config
from rlx.export.hf_encoder import as_ranker, encoder_metadata, encoder_tensors, is_qwen3_reranker, pooling_metadata
from rlx.export.hf_tensors import (
    Change,
    changes,
    check_tensors,
    differs_by_layer,
    export_tensor,
    in_layer,
    rope_tensors,
)
from rlx.export.hf_tokenizer import tokenizer_metadata
from rlx.export.model import ExportModel, ExportTensor, model_from_gguf
from rlx.ir.dtypes import F32
from rlx.models import build, build_predictor, views
from rlx.models.encoder import encoder_config
from rlx.models.keys import Keys
from rlx.weights import ModelWeights, WeightLoader, open_weights
from rlx.weights.gguf import GgufFile
from rlx.weights.prediction import predicting_blocks, with_prediction
from rlx.weights.recommended import gguf_keys, recommended
from rlx.weights.sentence_modules import WithDense, sentence_modules

_COMMIT = re.compile(r"[0-9a-f]{40}")
_EXPERTS = "_exps.weight"


@dataclass(frozen=True)
class Described:
    """A checkpoint in GGUF's terms, without tokenizer and names.

    Attributes:
        config: the text part of its configuration.
        metadata: the keys `<architecture>.*` with their types.
        tensors: in the order of the output file.
        weights: the checkpoint's own tensors.
    """

    config: TextConfig
    metadata: Metadata
    tensors: list[ExportTensor]
    weights: ModelWeights

    @property
    def arch(self) -> str:
        return self.config.file_arch


def describe(source: WeightLoader, where: Path) -> Described:
    """The checkpoint's configuration and tensors; reads no weights.

    Args:
        where: its `config.json`, for messages.

    Raises:
        ConfigError, UnsupportedModelError, WeightError: see `open_model`.
    """
    config = TextConfig(source.metadata, where)
    config.predicting = predicting_blocks(source, config.arch)
    metadata = metadata_from_config(config)
    weights = ModelWeights(with_prediction(source, config.layers) if config.predicting else source, config.arch)
    names = [*weights.names]
    parts = _parts(config, weights)
    tensors = _tensors(config, weights, names, parts)
    check_tensors(config, [tensor.name for tensor in tensors], weights)
    return Described(config, metadata, tensors, weights)


def model_from_hf(source: WeightLoader) -> ExportModel:
    """Describes the checkpoint; reads its configuration and tokenizer, but no weights.

    Raises:
        ConfigError, UnsupportedModelError, WeightError, TokenizerError: see `open_model`.
    """
    folder = source.path if source.path.is_dir() else source.path.parent
    path, close, where = source.path, source.close, folder / "config.json"
    modules = sentence_modules(source)
    if modules.folders:
        source = WithDense(source, modules)
    encoder = encoder_config(source.format, source.metadata, where)
    if encoder is None:
        found = describe(source, where)
        arch, metadata, tensors = found.arch, found.metadata, found.tensors
        left_out, tokens_of = _left_out(found.config, found.weights), found.config.arch
        if arch == "qwen3" and is_qwen3_reranker(folder):
            tensors, ranking = as_ranker(tensors, arch, folder)
            metadata = metadata | ranking
    else:
        weights, keys = ModelWeights(source, encoder.arch), Keys(source.metadata, where)
        arch = tokens_of = encoder.arch
        metadata, tensors = encoder_metadata(encoder, keys, weights), encoder_tensors(encoder, weights)
        left_out = weights.unused
    rows = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    return ExportModel(
        path=path,
        arch=arch,
        metadata=general_metadata(arch, folder, tensors)
        | _sampling(source)
        | metadata
        | pooling_metadata(arch, modules, source)
        | tokenizer_metadata(folder, source.metadata, tokens_of, rows),
        tensors=tuple(tensors),
        left_out=tuple(left_out),
        close=close,
    )


def _parts(config: TextConfig, weights: ModelWeights) -> dict[str, list[str]]:
    """Tensor of the checkpoint -> those that GGUF has instead. Builds the graphs, which name what is missing."""
    found: dict[str, list[str]] = {}
    model = config.model
    for view in [*views(model, weights.has)]:
        weights.define(*view)
        found.setdefault(view.source, []).append(view.name)
    build(model, weights, F32, place=weights.place)
    if config.predicting:
        build_predictor(model, weights, F32, 1, place=weights.place)
    return found if differs_by_layer(config) and config.row.hybrid != "mamba" else {}


def _tensors(
    config: TextConfig, weights: ModelWeights, names: Sequence[str], parts: Mapping[str, Sequence[str]]
) -> list[ExportTensor]:
    """All tensors, those of the whole decoder first, then layer by layer in the checkpoint's order.

    Args:
        names: the tensors of the checkpoint.
        parts: tensors of the checkpoint -> those that GGUF has instead.
    """
    found = rope_tensors(config)
    for canonical in names:
        if (canonical == "output.weight" and config.tied) or _layer(canonical) in config.left_out:
            continue  # a copy of the embedding table; what predicts further tokens
        where = weights.place(canonical)
        for name in parts.get(canonical, ()):
            found.append(export_tensor(name, weights.info(name), partial(weights.raw, name), Change(), where=where))
        info, raw = weights.info(canonical), partial(weights.raw, canonical)
        for name, change in () if canonical in parts else changes(config, canonical):
            found.append(export_tensor(name, info, raw, change, where=where))
    return sorted(found, key=lambda tensor: _layer(tensor.name))


def _left_out(config: TextConfig, weights: ModelWeights) -> list[str]:
    """The names in the checkpoint of the tensors that are not written."""
    layers = (name for canonical, name in weights.names.items() if _layer(canonical) in config.left_out)
    return [*weights.unused, *layers]


def _layer(name: str) -> int:
    prefix, _ = in_layer(name)
    return int(prefix.split(".")[1]) if prefix else -1


def general_metadata(arch: str, folder: Path, tensors: Sequence[ExportTensor], kind: str = "model") -> Metadata:
    """The keys `general.*`: what the file is, its name and its number of parameters."""
    texts = {
        "general.architecture": arch,
        "general.type": kind,
        "general.name": _name(folder),
        "general.size_label": _size_label(tensors),
    }
    return {key: (value, GgufType.STRING) for key, value in texts.items()}


def _sampling(source: WeightLoader) -> Metadata:
    """The checkpoint's recommended sampling options."""
    opts = recommended(source)
    values = {} if opts is None else gguf_keys(opts)
    kinds = {int: GgufType.INT32, float: GgufType.FLOAT32}
    return {key: (value, kinds[type(value)]) for key, value in values.items()}


def _name(folder: Path) -> str:
    """Name of the model: its folder, or its repository if the folder is a snapshot in a download cache."""
    folder = folder.absolute()
    if _COMMIT.fullmatch(folder.name) and folder.parent.name == "snapshots":
        return folder.parent.parent.name.split("--")[-1]
    return folder.name


def _size_label(tensors: Sequence[ExportTensor]) -> str:
    """The number of parameters as a label, `7B`, or number of experts times their size, `8x7B`."""
    from gguf import size_label

    experts = [tensor.shape for tensor in tensors if tensor.name.endswith(_EXPERTS)]
    single = sum(prod(shape[1:]) for shape in experts)
    total = sum(prod(tensor.shape) for tensor in tensors)
    shared = total - sum(prod(shape) for shape in experts)
    return size_label(total, shared, single, experts[0][0] if experts else 0)


def open_model(path: str | os.PathLike[str]) -> ExportModel:
    """Opens a GGUF file or a safetensors checkpoint with its configuration and tokenizer.

    Raises:
        ModelFileError: there is no readable model; subclasses name the invalid file, the missing key or tensor, or the
            unsupported feature.
        TokenizerError: a checkpoint's tokenizer is missing, or GGUF cannot represent it.
    """
    source = open_weights(path)
    try:
        if isinstance(source, GgufFile):
            return model_from_gguf(source)
        return model_from_hf(source)
    except BaseException:
        source.close()
        raise
