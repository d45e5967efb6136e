"""Describes a safetensors checkpoint as an `ExportModel`: configuration, tensors and tokenizer in GGUF's terms.

Export stage. Decoders come first, then what differs for text encoders: BERT, XLM-RoBERTa, Nomic BERT, ModernBERT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from rlx.closing import on_error
from rlx.errors import UnsupportedModelError
from rlx.export.hf_config import GgufType, Metadata, TextConfig, Writer, metadata_from_config
from rlx.export.hf_tensors import (
    Change,
    changes,
    check_tensors,
    differs_by_layer,
    export_tensor,
    layer_of,
    rope_tensors,
)
from rlx.export.hf_tokenizer import tokenizer_metadata
from rlx.export.model import ExportModel, ExportTensor, model_from_gguf
from rlx.ir.dtypes import F32
from rlx.models import build, build_predictor, views
from rlx.models.encoder import EncoderConfig, classifier, encoder_config, encoder_views
from rlx.models.keys import Keys
from rlx.models.registry import ENCODERS
from rlx.text import load_tokenizer
from rlx.text.rerank import ANSWERS, INSTRUCTION, QWEN3, answer_ids
from rlx.weights import ModelWeights, WeightLoader, open_weights
from rlx.weights.gguf import GgufFile
from rlx.weights.names import predicting_blocks, with_prediction
from rlx.weights.recommended import gguf_keys, recommended
from rlx.weights.sentence_modules import GGUF_POOLINGS, RANK, SentenceModules, WithDense, sentence_modules

_COMMIT = re.compile(r"[0-9a-f]{40}")
_EXPERTS = "_exps.weight"
_LABELS, _CLASSES = "classifier.output_labels", "cls.output.weight"
_PERIOD = 3  # of the layers of ModernBERT that see the whole text: its GGUF files have one number for all
_TYPES = "tokenizer.ggml.token_type_count"


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
    config.model = replace(config.model, tied=config.tied and not weights.has_own_head)
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
        if arch == "qwen3" and _is_qwen3_reranker(folder):
            tensors, ranking = _as_ranker(tensors, arch, folder)
            metadata = metadata | ranking
    else:
        weights, keys = ModelWeights(source, encoder.arch), Keys(source.metadata, where)
        arch = tokens_of = encoder.arch
        metadata, tensors = _encoder_metadata(encoder, keys, weights), _encoder_tensors(encoder, weights)
        left_out = weights.unused
    rows = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    return ExportModel(
        path=path,
        arch=arch,
        metadata=general_metadata(arch, folder, tensors)
        | _sampling(source)
        | metadata
        | _pooling_metadata(arch, modules, source)
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
        if (canonical == "output.weight" and config.tied) or layer_of(canonical) in config.left_out:
            continue  # a copy of the embedding table; what predicts further tokens
        where = weights.place(canonical)
        for name in parts.get(canonical, ()):
            found.append(export_tensor(name, weights.info(name), partial(weights.raw, name), Change(), where=where))
        info, raw = weights.info(canonical), partial(weights.raw, canonical)
        for name, change in () if canonical in parts else changes(config, canonical):
            found.append(export_tensor(name, info, raw, change, where=where))
    return sorted(found, key=lambda tensor: layer_of(tensor.name))


def _left_out(config: TextConfig, weights: ModelWeights) -> list[str]:
    """The names in the checkpoint of the tensors that are not written."""
    layers = (name for canonical, name in weights.names.items() if layer_of(canonical) in config.left_out)
    return [*weights.unused, *layers]


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
    with on_error(source.close):
        return model_from_gguf(source) if isinstance(source, GgufFile) else model_from_hf(source)


# -- text encoders -----------------------------------------------------------------------------------------------------


def _encoder_metadata(config: EncoderConfig, keys: Keys, weights: ModelWeights) -> Metadata:
    """The keys `<architecture>.*`, and the number of token types.

    Raises:
        UnsupportedModelError: a setting that GGUF has no key for.
    """
    out, modern = Writer(config.arch), config.arch == "modern-bert"
    out.u32("block_count", config.layers)
    out.u32("context_length", config.context)
    out.u32("embedding_length", config.hidden)
    out.u32("feed_forward_length", config.ffn)
    out.u32("attention.head_count", config.heads)
    out.f32("attention.layer_norm_epsilon", config.eps)
    out.flag("attention.causal", False)
    if modern:
        _modern(config, keys, out)
    elif config.activation != (usual := "silu" if config.arch == "nomic-bert" else "gelu_erf"):
        what = f"the activation is {config.activation}, and GGUF files of {config.arch} mean {usual}"
        raise UnsupportedModelError(what, where=keys.where)
    elif config.bases[0] is not None:
        out.f32("rope.freq_base", config.bases[0])
    if weights.has(_CLASSES):
        count, labels = weights.info(_CLASSES).shape[0], keys.get("id2label", {})
        names = [str(labels.get(str(i), f"LABEL_{i}")) for i in range(count)]
        out.found[f"{config.arch}.{_LABELS}"] = names, (GgufType.ARRAY, GgufType.STRING)
    if config.types:
        out.found[_TYPES] = config.types, GgufType.UINT32
    return out.found


def _modern(config: EncoderConfig, keys: Keys, out: Writer) -> None:
    full, local = (
        {base for i, base in enumerate(config.bases) if bool(i % _PERIOD) is slides} for slides in (False, True)
    )
    slides = [window is not None for window in config.windows]
    if slides != [bool(layer % _PERIOD) for layer in range(config.layers)]:
        what = f"the layers with a window are not all but every {_PERIOD}rd one"
        raise UnsupportedModelError(what, where=keys.where, hint="use the safetensors checkpoint itself")
    if config.classifier != "gelu_erf":
        keys.unsupported("classifier_activation", config.classifier, "GGUF files of modern-bert mean gelu")
    out.f32("attention.layer_norm_rms_epsilon", config.eps)
    for name, bases in (("freq_base", full), ("freq_base_swa", local or full)):
        out.f32(f"rope.{name}", next(each for each in bases if each is not None))
    out.text("rope.scaling.type", "none")
    out.u32("attention.sliding_window", keys.integer("local_attention", (1, 1 << 20), 128))
    out.u32("attention.sliding_window_pattern", _PERIOD)
    out.u32("vocab_size", config.vocab_size)
    out.text("hidden_activation", keys.text("hidden_activation", "gelu"))
    out.u32("classifier.pooling_type", _number(config.pooling))


def _encoder_tensors(config: EncoderConfig, weights: ModelWeights) -> list[ExportTensor]:
    """The tensors in the checkpoint's order.

    Raises:
        WeightError: one is missing.
        UnsupportedModelError: one that GGUF has no place for.
    """
    names = [*weights.names]
    for view in encoder_views(config):
        if weights.has(view.source):
            weights.define(*view)
    ENCODERS[config.arch].build(config, weights)
    scores = classifier(config, weights) is not None
    if scores and not weights.has("cls.weight"):
        what, hint = "GGUF has no place for the pooler of a cross-encoder", "use the safetensors checkpoint itself"
        raise UnsupportedModelError(what, where=weights.place("pooler.weight"), hint=hint)
    first = config.first_position  # no text has a position before it
    after = Change(lambda shape: (shape[0] - first, shape[1]), lambda array: array[first:]) if first else Change()
    return [
        export_tensor(
            name,
            weights.info(name),
            partial(weights.raw, name),
            after if name == "position_embd.weight" else Change(),
            where=weights.place(name),
        )
        for name in names
        if not name.startswith("pooler.")
    ]


def _pooling_metadata(arch: str, modules: SentenceModules, source: WeightLoader) -> Metadata:
    """How hidden states become a vector: the pooling, and the sizes of dense layers.

    Raises:
        UnsupportedModelError: GGUF has no word for it.
    """
    out = Writer(arch)
    if modules.pooling is not None:
        out.u32("pooling_type", _number(modules.pooling))
    for name, activation in modules.dense:
        if activation is not None or f"{name}.bias" in source.tensors:
            what = f"{name} has an activation or a bias, and GGUF has neither"
            raise UnsupportedModelError(what, where=source.path, hint="use the safetensors checkpoint itself")
        rows, columns = source.tensors[f"{name}.weight"].shape
        out.u32(f"{name}_feat_in", columns)
        out.u32(f"{name}_feat_out", rows)
    return out.found


def _is_qwen3_reranker(folder: Path) -> bool:
    """Whether a checkpoint of Qwen 3 is a reranker, which its configuration does not say: its name or its card does."""
    card = folder / "README.md"
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    return "qwen3-reranker" in folder.resolve().name.lower() or "# qwen3-reranker" in text.lower()


def _as_ranker(tensors: Sequence[ExportTensor], arch: str, folder: Path) -> tuple[list[ExportTensor], Metadata]:
    """A decoder that answers yes or no as a classifier: of its head the rows of these two tokens, and the template."""
    ids = list(answer_ids(load_tokenizer(folder / "tokenizer.json")))
    names = {tensor.name: tensor for tensor in tensors}
    head = names.get("output.weight", names["token_embd.weight"])
    rows = ExportTensor(_CLASSES, (2, head.shape[1]), head.dtype, lambda: head.values()[ids], None)
    out = Writer(arch)
    out.u32("pooling_type", RANK)
    out.found[f"{arch}.{_LABELS}"] = list(ANSWERS), (GgufType.ARRAY, GgufType.STRING)
    template = QWEN3.replace("{instruction}", INSTRUCTION)
    out.found["tokenizer.chat_template.rerank"] = template, GgufType.STRING
    out.found["tokenizer.chat_templates"] = ["rerank"], (GgufType.ARRAY, GgufType.STRING)
    return [rows, *(tensor for tensor in tensors if tensor.name != "output.weight")], out.found


def _number(pooling: str) -> int:
    for number, name in GGUF_POOLINGS.items():
        if name == pooling:
            return number
    raise UnsupportedModelError(f"GGUF has no number for the pooling {pooling!r}")
