"""The vision tower of Qwen 3 VL and Qwen 3.5: patches of two frames, an interpolated position table, 2-D rope, 2 x 2
patches a row; in Qwen 3 VL also rows of inner layers (DeepStack, arXiv 2406.04334).

Source: the classes `Qwen3VLVision*` of transformers 5. Patches come block by block, the four of a block after another.
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
    x = vision.layer_norm(tower, tower.rows(tower.config.patches_per_row), "v.post_ln")
    return _merged(tower, _blocks(tower, x), "mm.0", "mm.2")


def deepstack(tower: TowerModel) -> Graph:
    """The merger of an inner layer: the patches of a block side by side, then one norm of all of them."""
    x = _blocks(tower, tower.rows(tower.config.patches_per_row))
    return _merged(tower, vision.layer_norm(tower, x, "norm"), "fc1", "fc2")


def _blocks(tower: TowerModel, x: Node) -> Node:
    return ops.reshape(x, [SEQ, tower.config.hidden * tower.config.patches_per_row])


def _merged(tower: TowerModel, x: Node, first: str, second: str) -> Graph:
    width = tower.config.hidden * tower.config.patches_per_row
    x = ops.gelu_erf(vision.linear(tower, x, first, width))
    return vision.result(tower, vision.linear(tower, x, second, tower.config.out_hidden))


def _turned(tower: TowerModel, x: Node, name: str) -> Node:
    return ops.rope(vision.heads(tower, x, name), vision.angles(tower), style="neox")
