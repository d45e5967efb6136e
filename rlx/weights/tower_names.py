"""Names of a vision tower's tensors: one canonical name each, whatever the file calls it.

Part of the weights stage, beside `names.py`. Canonical names are those of an mmproj GGUF (`v.blk.3.attn_q.weight`); a
safetensors checkpoint uses module paths (`model.visual.blocks.3.attn.qkv.weight`), which the tables below translate.
Sources: the modules of transformers, and the names that llama.cpp's converter writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from rlx.errors import WeightError

_LINEAR, _WEIGHT, _WHOLE = ("weight", "bias"), ("weight",), ("",)
# Gemma 4 keeps a linear layer in a module of its own, with the bounds of its input and output beside it.
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Row(NamedTuple):
    """A tensor in both vocabularies; `{}` stands for the number of a layer.

    Attributes:
        canonical: name in an mmproj, without suffix.
        path: module path below a prefix of the family.
        suffixes: endings that both have; "" where both names are whole as they stand.
    """

    canonical: str
    path: str
    suffixes: tuple[str, ...] = _LINEAR


class Table(NamedTuple):
    """The tensors of one family.

    Attributes:
        prefixes: where checkpoints keep the tower; all tensors under these names belong to it.
        rows: paths below any of the prefixes.
    """

    prefixes: tuple[str, ...]
    rows: tuple[Row, ...]


def _bounded(canonical: str, path: str) -> tuple[Row, Row]:
    return Row(f"{canonical}.weight", f"{path}.linear.weight", _WHOLE), Row(canonical, path, _BOUNDS)


_QWEN35 = (
    Row("v.patch_embd", "patch_embed.proj"),
    Row("v.position_embd", "pos_embed", _WEIGHT),
    Row("v.blk.{}.ln1", "blocks.{}.norm1"),
    Row("v.blk.{}.ln2", "blocks.{}.norm2"),
    Row("v.blk.{}.attn_qkv", "blocks.{}.attn.qkv"),
    Row("v.blk.{}.attn_out", "blocks.{}.attn.proj"),
    Row("v.blk.{}.ffn_up", "blocks.{}.mlp.linear_fc1"),
    Row("v.blk.{}.ffn_down", "blocks.{}.mlp.linear_fc2"),
    Row("v.post_ln", "merger.norm"),
    Row("mm.0", "merger.linear_fc1"),
    Row("mm.2", "merger.linear_fc2"),
    Row("v.deepstack.{}.norm", "deepstack_merger_list.{}.norm"),
    Row("v.deepstack.{}.fc1", "deepstack_merger_list.{}.linear_fc1"),
    Row("v.deepstack.{}.fc2", "deepstack_merger_list.{}.linear_fc2"),
)
_GEMMA3 = (
    Row("v.patch_embd", "embeddings.patch_embedding"),
    Row("v.position_embd", "embeddings.position_embedding", _WEIGHT),
    Row("v.blk.{}.ln1", "encoder.layers.{}.layer_norm1"),
    Row("v.blk.{}.ln2", "encoder.layers.{}.layer_norm2"),
    *(Row(f"v.blk.{{}}.attn_{x}", f"encoder.layers.{{}}.self_attn.{x}_proj") for x in ("q", "k", "v", "out")),
    Row("v.blk.{}.ffn_up", "encoder.layers.{}.mlp.fc1"),
    Row("v.blk.{}.ffn_down", "encoder.layers.{}.mlp.fc2"),
    Row("v.post_ln", "post_layernorm"),
    Row("mm.soft_emb_norm", "mm_soft_emb_norm", _WEIGHT),
    Row("mm.input_projection.weight", "mm_input_projection_weight", _WHOLE),
)
_GEMMA4_LINEARS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA4_NORMS = {
    "ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_GEMMA4 = (
    Row("v.patch_embd", "vision_tower.patch_embedder.input_proj", _WEIGHT),
    Row("v.position_embd.weight", "vision_tower.patch_embedder.position_embedding_table", _WHOLE),
    *(
        row
        for name, path in _GEMMA4_LINEARS.items()
        for row in _bounded(f"v.blk.{{}}.{name}", f"vision_tower.encoder.layers.{{}}.{path}")
    ),
    *(
        Row(f"v.blk.{{}}.{name}", f"vision_tower.encoder.layers.{{}}.{path}", _WEIGHT)
        for name, path in _GEMMA4_NORMS.items()
    ),
    Row("v.std_bias", "vision_tower.std_bias", _WHOLE),
    Row("v.std_scale", "vision_tower.std_scale", _WHOLE),
    Row("mm.input_projection", "embed_vision.embedding_projection", _WEIGHT),
)
_GEMMA4_UNIFIED = (
    Row("v.patch_norm.1", "vision_embedder.patch_ln1"),
    Row("v.patch_embd", "vision_embedder.patch_dense"),
    Row("v.patch_norm.2", "vision_embedder.patch_ln2"),
    Row("v.position_embd.weight", "vision_embedder.pos_embedding", _WHOLE),
    Row("v.patch_norm.3", "vision_embedder.pos_norm"),
    Row("mm.input_projection", "embed_vision.embedding_projection", _WEIGHT),
)
_SIGLIP = tuple(f"{outer}vision_tower.{inner}" for outer in ("", "model.") for inner in ("vision_model.", ""))
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")

TABLES: dict[str, Table] = {
    "qwen35": Table(("model.visual.", "visual."), _QWEN35),
    "gemma3": Table((*_SIGLIP, *_PROJECTOR), _GEMMA3),
    "gemma4": Table(("model.", ""), _GEMMA4),
    "gemma4_unified": Table(("model.", ""), _GEMMA4_UNIFIED),
}

_LAYER = re.compile(r"(?:(?<=blocks\.)|(?<=layers\.)|(?<=_list\.))(?:0|[1-9][0-9]*)(?=\.)")
_GGUF_LAYER = re.compile(r"(?:(?<=^v\.blk\.)|(?<=^v\.deepstack\.))[0-9]+(?=\.)")
_DEEPSTACK = "v.deepstack."


def tower_names(names: Iterable[str], family: str, where: object, deepstack: Sequence[int] = ()) -> dict[str, str]:
    """Canonical name -> the file's, for every tensor of the family's tower, in file order.

    Args:
        names: those of all tensors in a safetensors checkpoint.
        family: a key of `TABLES`.
        deepstack: the layers whose results are merged, too: an mmproj names these mergers by the layer, a checkpoint
            counts them.
        where: the file, for messages.

    Raises:
        WeightError: two tensors of the file mean the same.
    """
    found: dict[str, str] = {}
    for name in names:
        canonical = tower_name(name, family, deepstack)
        if canonical is None:
            continue
        if canonical in found:
            raise WeightError(f"{found[canonical]!r} and {name!r} are both {canonical}", where=where)
        found[canonical] = name
    return found


def tower_name(name: str, family: str, deepstack: Sequence[int] = ()) -> str | None:
    """The canonical form of a checkpoint's name; None if the family's tower has no such tensor."""
    table = TABLES[family]
    for prefix in table.prefixes:
        if name.startswith(prefix):
            path, layer = _numberless(name.removeprefix(prefix), _LAYER)
            canonical = _by_path(table.rows).get(path, "")
            if canonical.startswith(_DEEPSTACK):
                return canonical.format(deepstack[int(layer)]) if int(layer) < len(deepstack) else None
            if canonical:
                return canonical.format(layer)
    return None


def checkpoint_names(canonical: str, family: str, deepstack: Sequence[int] = ()) -> list[str]:
    """Every name that a checkpoint may use for a canonical one."""
    table = TABLES[family]
    form, layer = _numberless(canonical, _GGUF_LAYER)
    if form.startswith(_DEEPSTACK):
        layer = str(deepstack.index(int(layer)))
    paths = [path.format(layer) for path, name in _by_path(table.rows).items() if name == form]
    return [prefix + path for path in paths for prefix in table.prefixes]


def _numberless(name: str, layer: re.Pattern[str]) -> tuple[str, str]:
    """The name with `{}` for the number of its layer, and the number; "" if it has none."""
    found = layer.search(name)
    return (name, "") if found is None else (f"{name[: found.start()]}{{}}{name[found.end() :]}", found[0])


def _pairs(rows: tuple[Row, ...]) -> Iterator[tuple[str, str]]:
    for row in rows:
        for suffix in row.suffixes:
            end = f".{suffix}" if suffix else ""
            yield row.path + end, row.canonical + end


@cache
def _by_path(rows: tuple[Row, ...]) -> dict[str, str]:
    return dict(_pairs(rows))
