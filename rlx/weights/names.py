"""Names of tensors: one canonical name each, whatever the file calls it.

Part of the weights stage, between the readers and the model builders. Canonical names are those of GGUF
(`blk.3.attn_q.weight`). A GGUF file uses them as they are; a Hugging Face checkpoint uses a module path
(`model.layers.3.self_attn.q_proj.weight`) that the tables below translate. A name that no row knows is no weight of the
language model (rotary buffers, vision towers, layers that predict further tokens) and is left out;
`ModelWeights.unused` lists those.

Names only: that GGUF permutes the rows of llama's q and k, stores 1 + w for some norms and -exp(A_log) for a decay, is
for others to know. What a family's tensors look like where the formats disagree is in `RANKS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from rlx.errors import UnsupportedModelError, WeightError
from rlx.weights.loader import WeightLoader


class Row(NamedTuple):
    """A tensor in both vocabularies, without layer prefix and suffix. Several rows may say the same canonical name.

    Attributes:
        canonical: GGUF name.
        hf: path inside the decoder (or the layer), or None where only GGUF has such a tensor. `{}` stands for the
            numbers 0, 1, ... of tensors that are matrices of one stack.
        suffixes: `weight`; `bias` where a linear layer may have one; `scale`, a factor of the product that GGUF files
            in NVFP4 carry; "" where both names are whole as they stand.
    """

    canonical: str
    hf: str | None
    suffixes: tuple[str, ...] = ("weight",)


@dataclass(frozen=True)
class Table:
    """The tensors of one family: of the whole decoder, of the head, of each layer."""

    decoder: tuple[Row, ...]
    head: tuple[Row, ...]
    layer: tuple[Row, ...]


class FileNames(NamedTuple):
    """What the file calls one canonical tensor: one name, or with `stacked` one a matrix of the stack, in order."""

    names: tuple[str, ...]
    stacked: bool


_LINEAR, _SCALED, _WHOLE = ("weight", "bias", "scale"), ("weight", "scale"), ("",)

_DECODER = (
    Row("token_embd", "embed_tokens"),
    Row("output_norm", "norm"),
    Row("rope_freqs", None),
    Row("rope_factors_long", None),
    Row("rope_factors_short", None),
)
_HEAD = (Row("output", "lm_head", _LINEAR),)
_ATTENTION = (
    Row("attn_norm", "input_layernorm"),
    Row("attn_q", "self_attn.q_proj", _LINEAR),
    Row("attn_k", "self_attn.k_proj", _LINEAR),
    Row("attn_v", "self_attn.v_proj", _LINEAR),
    Row("attn_output", "self_attn.o_proj", _LINEAR),
)
_FUSED_QKV = (Row("attn_qkv", None, _LINEAR),)
_MLP = (
    Row("ffn_gate", "mlp.gate_proj", _LINEAR),
    Row("ffn_up", "mlp.up_proj", _LINEAR),
    Row("ffn_down", "mlp.down_proj", _LINEAR),
)
_LAYER = (*_ATTENTION, *_FUSED_QKV, *_MLP)
_HEAD_NORMS = (Row("attn_q_norm", "self_attn.q_norm"), Row("attn_k_norm", "self_attn.k_norm"))
_PRE_NORM = (Row("ffn_norm", "post_attention_layernorm"),)
# The same Hugging Face name means another tensor here: gemma 2 and later normalize before and after each half.
_SANDWICH_NORMS = (
    Row("post_attention_norm", "post_attention_layernorm"),
    Row("ffn_norm", "pre_feedforward_layernorm"),
    Row("post_ffw_norm", "post_feedforward_layernorm"),
)
# Experts one by one, as checkpoints have them on disk, and fused, as newer transformers holds them.
_MOE = (
    Row("ffn_gate_inp", "mlp.gate"),
    Row("ffn_gate_exps", "mlp.experts.{}.gate_proj", _SCALED),
    Row("ffn_up_exps", "mlp.experts.{}.up_proj", _SCALED),
    Row("ffn_down_exps", "mlp.experts.{}.down_proj", _SCALED),
    Row("ffn_gate_up_exps", None, _SCALED),
    Row("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", _WHOLE),
    Row("ffn_down_exps.weight", "mlp.experts.down_proj", _WHOLE),
)
_MIXTRAL = (
    Row("ffn_gate_inp", "block_sparse_moe.gate"),
    Row("ffn_gate_exps", "block_sparse_moe.experts.{}.w1", _SCALED),
    Row("ffn_up_exps", "block_sparse_moe.experts.{}.w3", _SCALED),
    Row("ffn_down_exps", "block_sparse_moe.experts.{}.w2", _SCALED),
)
_SHARED_EXPERT = (
    Row("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    Row("ffn_gate_shexp", "mlp.shared_expert.gate_proj", _SCALED),
    Row("ffn_up_shexp", "mlp.shared_expert.up_proj", _SCALED),
    Row("ffn_down_shexp", "mlp.shared_expert.down_proj", _SCALED),
)
_DELTA_RULE = (
    Row("attn_qkv", "linear_attn.in_proj_qkv", _LINEAR),
    Row("attn_gate", "linear_attn.in_proj_z", _LINEAR),
    Row("ssm_conv1d", "linear_attn.conv1d"),
    Row("ssm_a", "linear_attn.A_log", _WHOLE),
    Row("ssm_dt.bias", "linear_attn.dt_bias", _WHOLE),
    Row("ssm_alpha", "linear_attn.in_proj_a", _SCALED),
    Row("ssm_beta", "linear_attn.in_proj_b", _SCALED),
    Row("ssm_norm", "linear_attn.norm"),
    Row("ssm_out", "linear_attn.out_proj", _SCALED),
)
_POST_NORM = (Row("post_attention_norm", "post_attention_layernorm"),)
_PER_LAYER_DECODER = (
    Row("per_layer_token_embd", "embed_tokens_per_layer"),
    Row("per_layer_model_proj", "per_layer_model_projection", _SCALED),
    Row("per_layer_proj_norm", "per_layer_projection_norm"),
)
_PER_LAYER = (
    Row("inp_gate", "per_layer_input_gate", _SCALED),
    Row("proj", "per_layer_projection", _SCALED),
    Row("post_norm", "post_per_layer_input_norm"),
)
_ALTUP_DECODER = (Row("altup_proj", "altup_projections.{}"), Row("altup_unembd_proj", "altup_unembed_projections.{}"))
_ALTUP = (
    Row("altup_correct_coef", "altup.correction_coefs"),
    Row("altup_correct_scale.weight", "altup.correct_output_scale", _WHOLE),
    Row("altup_predict_coef", "altup.prediction_coefs"),
    Row("altup_router", "altup.modality_router"),
    Row("altup_router_norm", "altup.router_norm"),
    Row("laurel_l", "laurel.linear_left"),
    Row("laurel_r", "laurel.linear_right"),
    Row("laurel_post_norm", "laurel.post_laurel_norm"),
)
_GEMMA4_MOE = (
    Row("ffn_gate_inp", "router.proj"),
    Row("ffn_gate_inp.scale", "router.scale", _WHOLE),
    Row("ffn_gate_exps", None, _SCALED),
    Row("ffn_up_exps", None, _SCALED),
    Row("ffn_gate_up_exps", None, _SCALED),
    Row("ffn_gate_up_exps.weight", "experts.gate_up_proj", _WHOLE),
    Row("ffn_down_exps.weight", "experts.down_proj", _WHOLE),
    Row("ffn_down_exps.scale", "router.per_expert_scale", _WHOLE),
    Row("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    Row("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    Row("post_ffw_norm_2", "post_feedforward_layernorm_2"),
)
_GEMMA3 = (*_LAYER, *_HEAD_NORMS, *_SANDWICH_NORMS)
# Of the block behind the last layer, which predicts a further token.
_PREDICTION = (
    Row("nextn.eh_proj", None, _SCALED),
    Row("nextn.enorm", None),
    Row("nextn.hnorm", None),
    Row("nextn.shared_head_norm", None),
)
_QWEN35 = (*_ATTENTION, *_HEAD_NORMS, *_POST_NORM, *_DELTA_RULE, *_PREDICTION)

FAMILIES: dict[str, Table] = {
    "llama": Table(_DECODER, _HEAD, (*_LAYER, *_PRE_NORM, *_MIXTRAL, *_MOE)),
    "qwen2": Table(_DECODER, _HEAD, (*_LAYER, *_PRE_NORM)),
    "qwen3": Table(_DECODER, _HEAD, (*_LAYER, *_HEAD_NORMS, *_PRE_NORM)),
    "qwen3moe": Table(_DECODER, _HEAD, (*_LAYER, *_HEAD_NORMS, *_PRE_NORM, *_MOE)),
    "qwen35": Table(_DECODER, _HEAD, (*_QWEN35, *_MLP)),
    "qwen35moe": Table(_DECODER, _HEAD, (*_QWEN35, *_MOE, *_SHARED_EXPERT)),
    "gemma": Table(_DECODER, _HEAD, (*_LAYER, *_PRE_NORM)),
    "gemma2": Table(_DECODER, _HEAD, (*_LAYER, *_SANDWICH_NORMS)),
    "gemma3": Table(_DECODER, _HEAD, _GEMMA3),
    "gemma3n": Table((*_DECODER, *_PER_LAYER_DECODER, *_ALTUP_DECODER), _HEAD, (*_GEMMA3, *_PER_LAYER, *_ALTUP)),
    "gemma4": Table(
        (*_DECODER, *_PER_LAYER_DECODER),
        _HEAD,
        (*_GEMMA3, *_PER_LAYER, *_GEMMA4_MOE, Row("layer_output_scale.weight", "layer_scalar", _WHOLE)),
    ),
}

# Tensors whose files disagree about dimensions of 1: checkpoints store a convolution over channels as [C, 1, width],
# and quantizing a GGUF file drops a leading 1. Name in the layer -> how many dimensions it has for the model.
RANKS = {"ssm_conv1d.weight": 2, "ffn_gate_inp_shexp.weight": 2}

# Where checkpoints keep the decoder: text models; the two places that image-and-text models have used.
DECODER_PREFIXES: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.")
HEAD_PREFIXES: tuple[str, ...] = ("", "language_model.", "model.", "model.language_model.")

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")
_HF_LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(.+)")
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]*)(?=\.)")


def canonical_names(loader: WeightLoader, family: str) -> dict[str, FileNames]:
    """Canonical name -> the file's, for every tensor in the file that the family knows, in file order.

    Raises:
        UnsupportedModelError: no table for the family.
        WeightError: two tensors of the file mean the same, or a matrix of a stack is missing.
    """
    found: dict[str, dict[int | None, str]] = {}
    for name in loader.tensors:
        place = _find(name, family)
        if place is None:
            continue
        canonical, index = place
        others = found.setdefault(canonical, {})
        rival = others.get(index, others.get(None)) if index is not None else next(iter(others.values()), None)
        if rival is not None:
            raise WeightError(f"{rival!r} and {name!r} are both {canonical}", where=loader.path)
        others[index] = name
    return {canonical: _in_order(canonical, names, loader) for canonical, names in found.items()}


def canonical_name(name: str, family: str) -> str | None:
    """The canonical form of a file's name, GGUF or Hugging Face; None if the family has no such tensor."""
    found = _find(name, family)
    return found[0] if found else None


def file_names(canonical: str, family: str) -> list[str]:
    """Every name that a file may use for a canonical one, the canonical name first; of a stack its first matrix."""
    table = _table(family)
    prefixes, paths = DECODER_PREFIXES, _to_hf(table.decoder).get(canonical, ())
    if layer := _GGUF_LAYER.fullmatch(canonical):
        paths = tuple(f"layers.{layer[1]}.{inner}" for inner in _to_hf(table.layer).get(layer[2], ()))
    elif canonical in _to_hf(table.head):
        prefixes, paths = HEAD_PREFIXES, _to_hf(table.head)[canonical]
    return [canonical, *(prefix + path.replace("{}", "0") for path in paths for prefix in prefixes)]


def rank(canonical: str) -> int | None:
    """How many dimensions the tensor has for the model, where files disagree."""
    layer = _GGUF_LAYER.fullmatch(canonical)
    return RANKS.get(layer[2]) if layer else None


def stack_name(names: tuple[str, ...]) -> str:
    """One text for the names of a stack: the number in which they differ becomes `*`."""
    name = names[0]
    last = [*_NUMBER.finditer(name)][-1]
    return f"{name[: last.start()]}*{name[last.end() :]}"


def _in_order(canonical: str, names: dict[int | None, str], loader: WeightLoader) -> FileNames:
    if None in names:
        return FileNames((names[None],), False)
    numbered = {index: name for index, name in names.items() if index is not None}
    missing = next((i for i in range(len(numbered)) if i not in numbered), None)
    if missing is not None:
        there = stack_name(tuple(numbered.values())).replace("*", str(missing))
        raise WeightError(f"{canonical} lacks {there!r}, number {missing} of {max(numbered) + 1}", where=loader.path)
    return FileNames(tuple(numbered[i] for i in range(len(numbered))), True)


def _find(name: str, family: str) -> tuple[str, int | None] | None:
    """Canonical name, and which matrix of a stack it is."""
    table = _table(family)
    if layer := _GGUF_LAYER.fullmatch(name):
        return (name, None) if layer[2] in _to_hf(table.layer) else None
    if name in _to_hf(table.decoder) or name in _to_hf(table.head):
        return name, None
    for prefix in HEAD_PREFIXES:
        if name.startswith(prefix) and (head := _from_hf(table.head).get(name.removeprefix(prefix))):
            return head, None
    for prefix in DECODER_PREFIXES:
        if name.startswith(prefix) and (found := _in_decoder(name.removeprefix(prefix), table)):
            return found
    return None


def _in_decoder(path: str, table: Table) -> tuple[str, int | None] | None:
    if layer := _HF_LAYER.fullmatch(path):
        found = _translated(layer[2], table.layer)
        return (f"blk.{layer[1]}.{found[0]}", found[1]) if found else None
    return _translated(path, table.decoder)


def _translated(path: str, rows: tuple[Row, ...]) -> tuple[str, int | None] | None:
    if canonical := _from_hf(rows).get(path):
        return canonical, None
    number = _NUMBER.search(path)
    if number and (canonical := _from_hf(rows).get(f"{path[: number.start()]}{{}}{path[number.end() :]}")):
        return canonical, int(number[0])
    return None


def _table(family: str) -> Table:
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"no tensor names are known for the family {family!r}, only for {known}")
    return FAMILIES[family]


def _pairs(rows: tuple[Row, ...]) -> Iterator[tuple[str, str | None]]:
    for row in rows:
        for suffix in row.suffixes:
            end = f".{suffix}" if suffix else ""
            yield row.canonical + end, None if row.hf is None or suffix == "scale" else row.hf + end


@cache
def _to_hf(rows: tuple[Row, ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for canonical, hf in _pairs(rows):
        found[canonical] = found.get(canonical, ()) + ((hf,) if hf else ())
    return found


@cache
def _from_hf(rows: tuple[Row, ...]) -> dict[str, str]:
    return {hf: canonical for canonical, hf in _pairs(rows) if hf}
