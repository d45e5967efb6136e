"""The vision tower of Qwen 3.5: patches of two frames, an interpolated position table, 2-D rope, 2 x 2 patches a row.

Source: the classes `Qwen3_5Vision*` of transformers 5. Patches come block by block, the four of a block after another.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models import vision
from rlx.models.vision import TowerModel

TAPS = 4  # rows of the position table that are interpolated for a patch


def embedding(tower: TowerModel) -> Graph:
    """Inputs "patches"; "taps" i32 [4 * SEQ], four rows of the position table for each patch, and their "shares" f32
    [SEQ, 1, 4].
    """
    config = tower.config
    x = vision.linear(tower, tower.patches(), "v.patch_embd", config.hidden)
    table = tower.weight("v.position_embd.weight", config.positions, config.hidden)
    taps = ops.reshape(ops.embedding(table, tower.numbers("taps", TAPS)), [SEQ, TAPS, config.hidden])
    position = ops.mix(taps, tower.graph.input("shares", [SEQ, 1, TAPS]))
    return vision.result(tower, x + ops.reshape(position, [SEQ, config.hidden]))


def keys(tower: TowerModel) -> Graph:
    """Inputs "x" and "positions"."""
    x = vision.layer_norm(tower, tower.rows(), "ln1")
    return vision.write(tower, _turned(tower, x, "attn_k"), vision.heads(tower, x, "attn_v"))


def layer(tower: TowerModel) -> Graph:
    """Inputs "x" and "positions"."""
    x = tower.rows()
    q = _turned(tower, vision.layer_norm(tower, x, "ln1"), "attn_q")
    x = x + vision.attention(tower, q, scale=tower.config.head_dim**-0.5)
    return vision.result(tower, x + vision.mlp(tower, vision.layer_norm(tower, x, "ln2")))


def head(tower: TowerModel) -> Graph:
    """The merger: the norm of each patch, then the patches of a block side by side."""
    config = tower.config
    width = config.hidden * config.patches_per_row
    x = vision.layer_norm(tower, tower.rows(config.patches_per_row), "v.post_ln")
    x = ops.gelu_erf(vision.linear(tower, ops.reshape(x, [SEQ, width]), "mm.0", width))
    return vision.result(tower, vision.linear(tower, x, "mm.2", config.out_hidden))


def _turned(tower: TowerModel, x: Node, name: str) -> Node:
    return ops.rope(vision.heads(tower, x, name), vision.angles(tower), style="neox")
