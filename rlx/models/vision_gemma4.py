"""The vision towers of Gemma 4: a transformer with 2-D rope and norms before and after each half, then an average over
3 x 3 patches and a projection; and that of the unified model, which has no layers.

Source: the classes `Gemma4Vision*` and `Gemma4UnifiedVision*` of transformers 5. Patches come block by block, those of
a block that is averaged after another. The rows of q and k, and their norms, are reordered at load, so that the rope is
that of `vision.angles`.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models import vision
from rlx.models.vision import TowerModel

_UNIFIED_EPS = 1e-5  # of the layer norms


def embedding(tower: TowerModel) -> Graph:
    """Inputs "patches", values from 0 to 1; "columns" and "rows" i32 [SEQ], the place of each patch."""
    x = ops.scale(tower.patches(), 2.0) - 1.0
    x = vision.linear(tower, x, "v.patch_embd", tower.config.hidden)
    return vision.result(tower, x + _position(tower))


def keys(tower: TowerModel) -> Graph:
    """Inputs "x" and "positions"."""
    x = vision.rms_norm(tower, tower.rows(), "ln1")
    v = ops.rms_norm(vision.heads(tower, x, "attn_v"), eps=tower.config.eps)
    return vision.write(tower, _turned(tower, x, "attn_k"), v)


def layer(tower: TowerModel) -> Graph:
    """Inputs "x" and "positions"."""
    x = tower.rows()
    q = _turned(tower, vision.rms_norm(tower, x, "ln1"), "attn_q")
    x = x + vision.rms_norm(tower, vision.attention(tower, q, scale=1.0), "attn_post_norm")
    y = _gated_mlp(tower, vision.rms_norm(tower, x, "ln2"))
    return vision.result(tower, x + vision.rms_norm(tower, y, "ffn_post_norm"))


def head(tower: TowerModel) -> Graph:
    """The mean of each block of patches, scaled and standardized, a norm without weight and the projection."""
    config, block = tower.config, tower.config.patches_per_row
    x = ops.reshape(tower.rows(block), [SEQ, block, config.hidden])
    x = ops.scale(ops.mean(x, axis=1), config.hidden**0.5)
    if config.standardize:
        bias, scale = (tower.weight(name, config.hidden) for name in ("v.std_bias", "v.std_scale"))
        x = (x - bias) * scale
    return _projected(tower, x)


def unified_embedding(tower: TowerModel) -> Graph:
    """Inputs as of `embedding`; a patch is as large as a row."""
    config = tower.config
    x = vision.layer_norm(tower, tower.patches(), "v.patch_norm.1", _UNIFIED_EPS)
    x = vision.linear(tower, x, "v.patch_embd", config.hidden)
    x = vision.layer_norm(tower, x, "v.patch_norm.2", _UNIFIED_EPS)
    x = vision.layer_norm(tower, x + _position(tower), "v.patch_norm.3", _UNIFIED_EPS)
    return vision.result(tower, x)


def unified_head(tower: TowerModel) -> Graph:
    """A norm without weight and the projection."""
    return _projected(tower, tower.rows())


def _position(tower: TowerModel) -> Node:
    """A row of each of two tables, by the patch's column and by its row."""
    config = tower.config
    by_column, by_row = (
        ops.embedding(tower.weight(f"v.position_embd.{axis}", config.positions, config.hidden), tower.numbers(axis))
        for axis in ("columns", "rows")
    )
    return by_column + by_row


def _turned(tower: TowerModel, x: Node, name: str) -> Node:
    y = vision.rms_norm(tower, vision.heads(tower, x, name), f"{name}_norm")
    return ops.rope(y, vision.angles(tower), style="neox")


def _gated_mlp(tower: TowerModel, x: Node) -> Node:
    """down(gelu(gate(x)) * up(x))."""
    config = tower.config
    gate, up = (vision.linear(tower, x, name, config.ffn) for name in ("ffn_gate", "ffn_up"))
    return vision.linear(tower, ops.gelu_tanh(gate) * up, "ffn_down", config.hidden)


def _projected(tower: TowerModel, x: Node) -> Graph:
    x = ops.rms_norm(x, eps=tower.config.eps)
    return vision.result(tower, vision.linear(tower, x, "mm.input_projection", tower.config.out_hidden))
