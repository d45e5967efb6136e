"""Names of tensors: one canonical name each, whatever the file calls it.

Part of the weights stage, between the readers and the model builders. Canonical names are those of GGUF
(`blk.3.attn_q.weight`). A GGUF file uses them as they are; a Hugging Face checkpoint uses a module path
(`model.layers.3.self_attn.q_proj.weight`) that the tables below translate. A name that no row knows is no weight of the
language model (rotary buffers, vision towers) and is left out; `unused_names` lists those.

Names only: that GGUF permutes the rows of llama's q and k, and stores 1 + w for some norms, is for the packer to know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from rlx.errors import UnsupportedModelError, WeightError
from rlx.weights.loader import WeightLoader


class Row(NamedTuple):
    """A tensor in both vocabularies, without layer prefix and suffix.

    Attributes:
        canonical: GGUF name.
        hf: path inside the decoder (or the layer), or None where only GGUF has such a tensor.
        suffixes: `weight`, and `bias` where a linear layer may have one.
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


_LINEAR = ("weight", "bias")

_DECODER = (
    Row("token_embd", "embed_tokens"),
    Row("output_norm", "norm"),
    Row("rope_freqs", None),
    Row("rope_factors_long", None),
    Row("rope_factors_short", None),
)
_HEAD = (Row("output", "lm_head", _LINEAR),)
_LAYER = (
    Row("attn_norm", "input_layernorm"),
    Row("attn_q", "self_attn.q_proj", _LINEAR),
    Row("attn_k", "self_attn.k_proj", _LINEAR),
    Row("attn_v", "self_attn.v_proj", _LINEAR),
    Row("attn_qkv", None, _LINEAR),
    Row("attn_output", "self_attn.o_proj", _LINEAR),
    Row("ffn_gate", "mlp.gate_proj", _LINEAR),
    Row("ffn_up", "mlp.up_proj", _LINEAR),
    Row("ffn_down", "mlp.down_proj", _LINEAR),
)
_HEAD_NORMS = (Row("attn_q_norm", "self_attn.q_norm"), Row("attn_k_norm", "self_attn.k_norm"))
_PRE_NORM = (Row("ffn_norm", "post_attention_layernorm"),)
# The same Hugging Face name means another tensor here: gemma 2 and 3 normalize before and after each half of the layer.
_SANDWICH_NORMS = (
    Row("post_attention_norm", "post_attention_layernorm"),
    Row("ffn_norm", "pre_feedforward_layernorm"),
    Row("post_ffw_norm", "post_feedforward_layernorm"),
)

FAMILIES: dict[str, Table] = {
    "llama": Table(_DECODER, _HEAD, (*_LAYER, *_PRE_NORM)),
    "qwen2": Table(_DECODER, _HEAD, (*_LAYER, *_PRE_NORM)),
    "qwen3": Table(_DECODER, _HEAD, (*_LAYER, *_HEAD_NORMS, *_PRE_NORM)),
    "gemma": Table(_DECODER, _HEAD, (*_LAYER, *_PRE_NORM)),
    "gemma2": Table(_DECODER, _HEAD, (*_LAYER, *_SANDWICH_NORMS)),
    "gemma3": Table(_DECODER, _HEAD, (*_LAYER, *_HEAD_NORMS, *_SANDWICH_NORMS)),
}

# Where checkpoints keep the decoder: text models; the two places that image-and-text models have used.
DECODER_PREFIXES: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.")
HEAD_PREFIXES: tuple[str, ...] = ("", "language_model.", "model.", "model.language_model.")

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")
_HF_LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(.+)")


def canonical_names(loader: WeightLoader, family: str) -> dict[str, str]:
    """Canonical name -> the file's name, for every tensor in the file that the family knows, in file order.

    Raises:
        UnsupportedModelError: no table for the family.
        WeightError: two tensors of the file mean the same.
    """
    found: dict[str, str] = {}
    for name in loader.tensors:
        canonical = canonical_name(name, family)
        if canonical is None:
            continue
        if canonical in found:
            raise WeightError(f"{found[canonical]!r} and {name!r} are both {canonical}", where=loader.path)
        found[canonical] = name
    return found


def unused_names(loader: WeightLoader, family: str) -> list[str]:
    """The file's names that `canonical_names` leaves out."""
    return [name for name in loader.tensors if canonical_name(name, family) is None]


def canonical_name(name: str, family: str) -> str | None:
    """The canonical form of a file's name, GGUF or Hugging Face; None if the family has no such tensor."""
    table = _table(family)
    if layer := _GGUF_LAYER.fullmatch(name):
        return name if layer[2] in _to_hf(table.layer) else None
    if name in _to_hf(table.decoder) or name in _to_hf(table.head):
        return name
    for prefix in HEAD_PREFIXES:
        if name.startswith(prefix) and (head := _from_hf(table.head).get(name.removeprefix(prefix))):
            return head
    for prefix in DECODER_PREFIXES:
        if name.startswith(prefix) and (found := _in_decoder(name.removeprefix(prefix), table)):
            return found
    return None


def file_names(canonical: str, family: str) -> list[str]:
    """Every name that a file may use for a canonical one, the canonical name first."""
    table = _table(family)
    prefixes, path = DECODER_PREFIXES, _to_hf(table.decoder).get(canonical)
    if layer := _GGUF_LAYER.fullmatch(canonical):
        inner = _to_hf(table.layer).get(layer[2])
        path = f"layers.{layer[1]}.{inner}" if inner else None
    elif canonical in _to_hf(table.head):
        prefixes, path = HEAD_PREFIXES, _to_hf(table.head)[canonical]
    return [canonical, *(prefix + path for prefix in prefixes if path)]


def _in_decoder(path: str, table: Table) -> str | None:
    if layer := _HF_LAYER.fullmatch(path):
        inner = _from_hf(table.layer).get(layer[2])
        return f"blk.{layer[1]}.{inner}" if inner else None
    return _from_hf(table.decoder).get(path)


def _table(family: str) -> Table:
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"no tensor names are known for the family {family!r}, only for {known}")
    return FAMILIES[family]


@cache
def _to_hf(rows: tuple[Row, ...]) -> dict[str, str | None]:
    return {f"{row.canonical}.{end}": row.hf and f"{row.hf}.{end}" for row in rows for end in row.suffixes}


@cache
def _from_hf(rows: tuple[Row, ...]) -> dict[str, str]:
    return {hf: canonical for canonical, hf in _to_hf(rows).items() if hf}
