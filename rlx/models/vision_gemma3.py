"""The vision tower of Gemma 3: SigLIP (arXiv 2303.15343), then an average over 4 x 4 patches and a projection.

Source: the classes `Siglip*` and `Gemma3MultiModalProjector` of transformers 5. Patches come block by block, those of a
block that is averaged after another.
"""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.models import vision
from rlx.models.vision import TowerModel


def embedding(tower: TowerModel) -> Graph:
    """Inputs "patches" and "places" i32 [SEQ], the row of the position table for each patch."""
    config = tower.config
    x = vision.linear(tower, tower.patches(), "v.patch_embd", config.hidden)
    table = tower.weight("v.position_embd.weight", config.positions, config.hidden)
    return vision.result(tower, x + ops.embedding(table, tower.numbers("places")))


def keys(tower: TowerModel) -> Graph:
    """Input "x"."""
    x = vision.layer_norm(tower, tower.rows(), "ln1")
    return vision.write(tower, vision.heads(tower, x, "attn_k"), vision.heads(tower, x, "attn_v"))


def layer(tower: TowerModel) -> Graph:
    """Input "x"."""
    x = tower.rows()
    q = vision.heads(tower, vision.layer_norm(tower, x, "ln1"), "attn_q")
    x = x + vision.attention(tower, q, scale=tower.config.head_dim**-0.5)
    return vision.result(tower, x + vision.mlp(tower, vision.layer_norm(tower, x, "ln2")))


def head(tower: TowerModel) -> Graph:
    """The mean of each block of patches, a norm and the projection."""
    config, block = tower.config, tower.config.patches_per_row
    x = vision.layer_norm(tower, tower.rows(block), "v.post_ln")
    x = ops.mean(ops.reshape(x, [SEQ, block, config.hidden]), axis=1)
    x = vision.rms_norm(tower, x, "mm.soft_emb_norm")
    return vision.result(tower, vision.linear(tower, x, "mm.input_projection", config.out_hidden))
