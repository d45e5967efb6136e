"""Describes the checkpoint of a text encoder in GGUF's terms: BERT, XLM-RoBERTa, Nomic BERT, ModernBERT.

Export stage, read by `hf.py`. Keys and names follow the reference converter of the format. The encoder's own equations
say which tensors there must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlx.errors import UnsupportedModelError
from rlx.export.hf_config import GgufType, Metadata, Writer
from rlx.export.hf_tensors import Change, export_tensor
from rlx.export.model import ExportTensor
from rlx.models.encoder import EncoderConfig, classifier, encoder_views
from rlx.models.keys import Keys
from rlx.models.registry import ENCODERS
from rlx.text import load_tokenizer
from rlx.text.rerank import ANSWERS, INSTRUCTION, QWEN3, answer_ids
from rlx.weights import ModelWeights, WeightLoader
from rlx.weights.sentence_modules import GGUF_POOLINGS, RANK, SentenceModules

_LABELS, _CLASSES = "classifier.output_labels", "cls.output.weight"
_PERIOD = 3  # of the layers of ModernBERT that see the whole text: its GGUF files have one number for all
_TYPES = "tokenizer.ggml.token_type_count"


def encoder_metadata(config: EncoderConfig, keys: Keys, weights: ModelWeights) -> Metadata:
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


def encoder_tensors(config: EncoderConfig, weights: ModelWeights) -> list[ExportTensor]:
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


def pooling_metadata(arch: str, modules: SentenceModules, source: WeightLoader) -> Metadata:
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


def is_qwen3_reranker(folder: Path) -> bool:
    """Whether a checkpoint of Qwen 3 is a reranker, which its configuration does not say: its name or its card does."""
    card = folder / "README.md"
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    return "qwen3-reranker" in folder.resolve().name.lower() or "# qwen3-reranker" in text.lower()


def as_ranker(tensors: Sequence[ExportTensor], arch: str, folder: Path) -> tuple[list[ExportTensor], Metadata]:
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
