"""Vision towers: the graphs of a tower, over blocks that families share.

Part of the models stage; `towers.py` has those of the families. A tower runs by layers, and a layer by chunks of rows
(`rlx.vision.tower`). So a tower is not one graph but four kinds of them, over SEQ, the rows of a chunk:

- `embedding`: patches -> rows of the first layer.
- `keys`: rows of a layer -> their keys and values, written into the states "k" and "v" behind PAST_SEQ others.
- `layer`: rows of a layer -> rows of the next one. Attention reads the first PAST_SEQ + SEQ keys, which are all of the
  image's, and nothing is masked.
- `head`: rows of the last layer, `patches_per_row` for each row of the result -> rows of the text model.
- `deepstack`: the same for rows of an inner layer, of towers that have such rows.

Weights of a layer have names without its number, so layers of equal formats have equal graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import CTX, PAST_SEQ, SEQ
from rlx.ir.dtypes import F32, I32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.builder import Weights, checked
from rlx.models.rope import Rope, inv_freq
from rlx.models.vision_config import VisionConfig


@dataclass(frozen=True)
class TowerModel:
    """A graph of a tower under construction.

    Attributes:
        cache: type of the keys and values.
        place: what canonical names begin with: that of a layer, such as "v.blk.3.", or "" outside.
    """

    graph: Graph
    config: VisionConfig
    weights: Weights
    cache: DType
    place: str = ""

    def file_name(self, name: str) -> str:
        """The canonical name of a tensor of the layer."""
        return self.place + name

    def has(self, name: str) -> bool:
        """Whether the file has this tensor of the layer."""
        return self.weights.has(self.file_name(name))

    def weight(self, name: str, *shape: int) -> Node:
        """A tensor of the layer: matrices in the file's dtype, a vector in float32.

        Raises:
            WeightError: it is missing, or its shape or dtype is not what the configuration says.
        """
        found = checked(self.weights, self.file_name(name), shape)
        return self.graph.weight(name, shape, found.dtype if len(shape) > 1 else F32)

    def patches(self) -> Node:
        """Input "patches" f32 [SEQ, patch_values]."""
        return self.graph.input("patches", [SEQ, self.config.patch_values])

    def numbers(self, name: str, count: int = 1) -> Node:
        """An input i32 [count * SEQ]: `count` row numbers of a table for each patch."""
        return self.graph.input(name, [count * SEQ], I32)

    def rows(self, per_row: int = 1) -> Node:
        """Input "x" f32 [per_row * SEQ, hidden]."""
        return self.graph.input("x", [per_row * SEQ, self.config.hidden])


# -- layers -----------------------------------------------------------------------------------------------------------


def linear(tower: TowerModel, x: Node, name: str, size: int) -> Node:
    """x [rows, k] -> [rows, size] by the weight `name` [size, k], plus its bias if it has one.

    All linear layers of a family have one, or none; the projection of Gemma's towers never has. Inputs and outputs are
    clamped to the layer's bounds in towers that have them (Gemma 4 E2B and E4B).
    """
    width = x.shape[-1]
    assert isinstance(width, int)
    y = ops.linear(_clamped(tower, x, f"{name}.input"), tower.weight(f"{name}.weight", size, width), bf16=True)
    if tower.has(f"{name}.bias") or (tower.config.has_biases and name != "mm.input_projection"):
        y = y + tower.weight(f"{name}.bias", size)
    return _clamped(tower, y, f"{name}.output")


def _clamped(tower: TowerModel, x: Node, name: str) -> Node:
    """min(max(x, low), high): the bounds are weights, because each layer has its own."""
    must = tower.config.clipped and bool(tower.place)
    if must or tower.has(f"{name}_min"):
        x = ops.maximum(x, tower.weight(f"{name}_min", 1))
    return ops.minimum(x, tower.weight(f"{name}_max", 1)) if must or tower.has(f"{name}_max") else x


def layer_norm(tower: TowerModel, x: Node, name: str, eps: float | None = None) -> Node:
    """Layer norm over the last axis of x [..., width], with weight and bias `name`."""
    width = x.shape[-1]
    assert isinstance(width, int)
    weight, bias = (tower.weight(f"{name}.{part}", width) for part in ("weight", "bias"))
    return ops.layer_norm(x, weight, bias, eps=tower.config.eps if eps is None else eps)


def rms_norm(tower: TowerModel, x: Node, name: str) -> Node:
    """RMS norm over the last axis of x [..., width], with the weight `name`."""
    width = x.shape[-1]
    assert isinstance(width, int)
    return ops.rms_norm(x, tower.weight(f"{name}.weight", width), eps=tower.config.eps)


def angles(tower: TowerModel) -> Node:
    """Input "positions" i32 [SEQ, 2], row and column of each patch -> cosines and sines f32 [SEQ, head_dim].

    The first half of a head's frequencies turns by the row, the second half, the same ones, by the column. Pairs are
    (i, i + head_dim / 2).
    """
    size = tower.config.head_dim // 2
    frequencies = inv_freq(Rope(base=tower.config.rope_base, dims=size))
    both = tower.graph.constant("rope.inv_freq", np.tile(frequencies, 2))
    positions = tower.graph.input("positions", [SEQ, 2], I32)
    return ops.rope_angles(positions, both, sections=(size // 2, size // 2))


def heads(tower: TowerModel, x: Node, name: str) -> Node:
    """x [SEQ, hidden] -> its queries, keys or values [SEQ, heads, head_dim]."""
    config = tower.config
    y = linear(tower, x, name, config.heads * config.head_dim)
    return ops.reshape(y, [SEQ, config.heads, config.head_dim])


def cache(tower: TowerModel, name: str) -> Node:
    """The state "k" or "v" [heads, CTX, head_dim] of all keys or values. Keys lie as attention reads them."""
    config = tower.config
    layout = {"layout": "keys"} if name == "k" else {}
    return ops.leaf("state", name, (config.heads, CTX, config.head_dim), tower.cache, **layout)


def write(tower: TowerModel, k: Node, v: Node) -> Graph:
    """The finished graph of keys and values."""
    for name, x in (("k", k), ("v", v)):
        tower.graph.output(name, ops.kv_write(cache(tower, name), x, at=PAST_SEQ))
    return tower.graph


def attention(tower: TowerModel, q: Node, *, scale: float) -> Node:
    """Attention of q over all keys of the image -> [SEQ, hidden]."""
    y = ops.attention(q, cache(tower, "k"), cache(tower, "v"), scale=scale, causal=False, any_scale=True)
    return linear(tower, y, "attn_out", tower.config.hidden)


def mlp(tower: TowerModel, x: Node) -> Node:
    """down(gelu(up(x)))."""
    y = ops.gelu_tanh(linear(tower, x, "ffn_up", tower.config.ffn))
    return linear(tower, y, "ffn_down", tower.config.hidden)


def result(tower: TowerModel, y: Node) -> Graph:
    """The finished graph of rows: output "y"."""
    tower.graph.output("y", y)
    return tower.graph
