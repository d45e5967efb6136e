"""The vision towers of families: their graphs, over the blocks of `vision.py`, and which a family has.

Part of the models stage. Patches come block by block, those of a block that becomes one row after another. Sources: the
classes of transformers 5 that each section names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.vision import (
    TowerModel,
    angles,
    attention,
    heads,
    layer_norm,
    linear,
    mlp,
    result,
    rms_norm,
    write,
)

TAPS = 4  # rows of the position table that are interpolated for a patch of Qwen's towers
_UNIFIED_EPS = 1e-5  # of the layer norms of Gemma 4's unified model


# -- layers with norms before each half: Qwen's and Gemma 3's ---------------------------------------------------------


def _keys(tower: TowerModel, *, rotates: bool) -> Graph:
    """Input "x" and, where queries and keys are rotated, "positions"."""
    x = layer_norm(tower, tower.rows(), "ln1")
    k = _rotated(tower, heads(tower, x, "attn_k")) if rotates else heads(tower, x, "attn_k")
    return write(tower, k, heads(tower, x, "attn_v"))


def _layer(tower: TowerModel, *, rotates: bool) -> Graph:
    """Inputs as of `_keys`."""
    x = tower.rows()
    q = heads(tower, layer_norm(tower, x, "ln1"), "attn_q")
    x = x + attention(tower, _rotated(tower, q) if rotates else q, scale=tower.config.head_dim**-0.5)
    return result(tower, x + mlp(tower, layer_norm(tower, x, "ln2")))


def _rotated(tower: TowerModel, x: Node) -> Node:
    return ops.rope(x, angles(tower), style="neox")


# -- Qwen 3 VL and Qwen 3.5 -------------------------------------------------------------------------------------------

# Patches of two frames, an interpolated position table, 2-D rope, 2 x 2 patches a row; in Qwen 3 VL also rows of inner
# layers (DeepStack, arXiv 2406.04334). Source: `Qwen3VLVision*`.


def _qwen_embedding(tower: TowerModel) -> Graph:
    """Inputs "patches"; "taps" i32 [4 * SEQ], four rows of the position table for each patch, and their "shares" f32
    [SEQ, 1, 4].
    """
    config = tower.config
    x = linear(tower, tower.patches(), "v.patch_embd", config.hidden)
    table = tower.weight("v.position_embd.weight", config.positions, config.hidden)
    taps = ops.reshape(ops.embedding(table, tower.numbers("taps", TAPS)), [SEQ, TAPS, config.hidden])
    position = ops.mix(taps, tower.graph.input("shares", [SEQ, 1, TAPS]))
    return result(tower, x + ops.reshape(position, [SEQ, config.hidden]))


def _qwen_head(tower: TowerModel) -> Graph:
    """The merger: the norm of each patch, then the patches of a block side by side."""
    x = layer_norm(tower, tower.rows(tower.config.patches_per_row), "v.post_ln")
    return _merged(tower, _blocks(tower, x), "mm.0", "mm.2")


def _qwen_deepstack(tower: TowerModel) -> Graph:
    """The merger of an inner layer: the patches of a block side by side, then one norm of all of them."""
    x = _blocks(tower, tower.rows(tower.config.patches_per_row))
    return _merged(tower, layer_norm(tower, x, "norm"), "fc1", "fc2")


def _blocks(tower: TowerModel, x: Node) -> Node:
    return ops.reshape(x, [SEQ, tower.config.hidden * tower.config.patches_per_row])


def _merged(tower: TowerModel, x: Node, first: str, second: str) -> Graph:
    width = tower.config.hidden * tower.config.patches_per_row
    x = ops.gelu_erf(linear(tower, x, first, width))
    return result(tower, linear(tower, x, second, tower.config.out_hidden))


# -- Gemma 3 ----------------------------------------------------------------------------------------------------------

# SigLIP (arXiv 2303.15343), then an average over 4 x 4 patches and a projection. Sources: `Siglip*` and
# `Gemma3MultiModalProjector`.


def _gemma3_embedding(tower: TowerModel) -> Graph:
    """Inputs "patches" and "places" i32 [SEQ], the row of the position table for each patch."""
    config = tower.config
    x = linear(tower, tower.patches(), "v.patch_embd", config.hidden)
    table = tower.weight("v.position_embd.weight", config.positions, config.hidden)
    return result(tower, x + ops.embedding(table, tower.numbers("places")))


def _gemma3_head(tower: TowerModel) -> Graph:
    """The mean of each block of patches, a norm and the projection."""
    config, block = tower.config, tower.config.patches_per_row
    x = layer_norm(tower, tower.rows(block), "v.post_ln")
    x = ops.mean(ops.reshape(x, [SEQ, block, config.hidden]), axis=1)
    x = rms_norm(tower, x, "mm.soft_emb_norm")
    return result(tower, linear(tower, x, "mm.input_projection", config.out_hidden))


# -- Gemma 4 ----------------------------------------------------------------------------------------------------------

# 2-D rope and norms before and after each half, then an average over 3 x 3 patches and a projection; and the unified
# model, which has no layers. The rows of q and k, and their norms, are reordered at load, so that the rope is that of
# `angles`. Sources: `Gemma4Vision*` and `Gemma4UnifiedVision*`.


def _gemma4_embedding(tower: TowerModel) -> Graph:
    """Inputs "patches", values from 0 to 1; "columns" and "rows" i32 [SEQ], the place of each patch."""
    x = ops.scale(tower.patches(), 2.0) - 1.0
    x = linear(tower, x, "v.patch_embd", tower.config.hidden)
    return result(tower, x + _gemma4_position(tower))


def _gemma4_keys(tower: TowerModel) -> Graph:
    """Inputs "x" and "positions"."""
    x = rms_norm(tower, tower.rows(), "ln1")
    v = ops.rms_norm(heads(tower, x, "attn_v"), eps=tower.config.eps)
    return write(tower, _normed_and_rotated(tower, x, "attn_k"), v)


def _gemma4_layer(tower: TowerModel) -> Graph:
    """Inputs "x" and "positions"."""
    x = tower.rows()
    q = _normed_and_rotated(tower, rms_norm(tower, x, "ln1"), "attn_q")
    x = x + rms_norm(tower, attention(tower, q, scale=1.0), "attn_post_norm")
    y = _gated_mlp(tower, rms_norm(tower, x, "ln2"))
    return result(tower, x + rms_norm(tower, y, "ffn_post_norm"))


def _gemma4_head(tower: TowerModel) -> Graph:
    """The mean of each block of patches, scaled and standardized, a norm without weight and the projection."""
    config, block = tower.config, tower.config.patches_per_row
    x = ops.reshape(tower.rows(block), [SEQ, block, config.hidden])
    x = ops.scale(ops.mean(x, axis=1), config.hidden**0.5)
    if config.standardize:
        bias, scale = (tower.weight(name, config.hidden) for name in ("v.std_bias", "v.std_scale"))
        x = (x - bias) * scale
    return _projected(tower, x)


def _unified_embedding(tower: TowerModel) -> Graph:
    """Inputs as of `_gemma4_embedding`; a patch is as large as a row."""
    config = tower.config
    x = layer_norm(tower, tower.patches(), "v.patch_norm.1", _UNIFIED_EPS)
    x = linear(tower, x, "v.patch_embd", config.hidden)
    x = layer_norm(tower, x, "v.patch_norm.2", _UNIFIED_EPS)
    x = layer_norm(tower, x + _gemma4_position(tower), "v.patch_norm.3", _UNIFIED_EPS)
    return result(tower, x)


def _unified_head(tower: TowerModel) -> Graph:
    """A norm without weight and the projection."""
    return _projected(tower, tower.rows())


def _gemma4_position(tower: TowerModel) -> Node:
    """A row of each of two tables, by the patch's column and by its row."""
    config = tower.config
    by_column, by_row = (
        ops.embedding(tower.weight(f"v.position_embd.{axis}", config.positions, config.hidden), tower.numbers(axis))
        for axis in ("columns", "rows")
    )
    return by_column + by_row


def _normed_and_rotated(tower: TowerModel, x: Node, name: str) -> Node:
    return _rotated(tower, rms_norm(tower, heads(tower, x, name), f"{name}_norm"))


def _gated_mlp(tower: TowerModel, x: Node) -> Node:
    """down(gelu(gate(x)) * up(x))."""
    config = tower.config
    gate, up = (linear(tower, x, name, config.ffn) for name in ("ffn_gate", "ffn_up"))
    return linear(tower, ops.gelu_tanh(gate) * up, "ffn_down", config.hidden)


def _projected(tower: TowerModel, x: Node) -> Graph:
    x = ops.rms_norm(x, eps=tower.config.eps)
    return result(tower, linear(tower, x, "mm.input_projection", tower.config.out_hidden))


# -- which graphs a family has ----------------------------------------------------------------------------------------

Build = Callable[[TowerModel], Graph]


class TowerGraphs(NamedTuple):
    """The builders of a family's graphs, see `rlx.models.vision`."""

    embedding: Build
    keys: Build
    layer: Build
    head: Build
    deepstack: Build | None = None


TOWERS = {
    "qwen35": TowerGraphs(
        _qwen_embedding, partial(_keys, rotates=True), partial(_layer, rotates=True), _qwen_head, _qwen_deepstack
    ),
    "gemma3": TowerGraphs(
        _gemma3_embedding, partial(_keys, rotates=False), partial(_layer, rotates=False), _gemma3_head
    ),
    "gemma4": TowerGraphs(_gemma4_embedding, _gemma4_keys, _gemma4_layer, _gemma4_head),
    "gemma4_unified": TowerGraphs(_unified_embedding, _gemma4_keys, _gemma4_layer, _unified_head),
}
