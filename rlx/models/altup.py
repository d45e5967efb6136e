"""AltUp: several residual streams, of which a layer computes one and predicts the others (arXiv 2301.13310).

Part of the models stage, a block of Gemma 3n. Streams are f32 [SEQ, hidden] each; the first is computed.
"""

from __future__ import annotations

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.node import Node
from rlx.models.blocks import linear, norm
from rlx.models.builder import Model

_LEAST = 1e-5  # lower bound of the mean square when a stream is scaled


def predict(layer: Model, streams: list[Node]) -> list[Node]:
    """Each stream plus a mixture of all, whose coefficients depend on the first."""
    n, width = len(streams), layer.config.hidden
    mixing = ops.reshape(_coefficients(layer, streams[0], "altup_predict_coef", n * n), [SEQ, n, n])
    mixed = ops.mix(ops.concat(*(ops.reshape(stream, [SEQ, 1, width]) for stream in streams)), mixing)
    return [x + ops.reshape(ops.slice(mixed, i, i + 1), [SEQ, width]) for i, x in enumerate(streams)]


def correct(layer: Model, predicted: list[Node], computed: Node) -> list[Node]:
    """Adds to each prediction a share of the difference between the computed stream and its prediction."""
    shares = _coefficients(layer, computed, "altup_correct_coef", len(predicted))
    shares = shares + layer.graph.constant("one", np.ones(1, np.float32))
    news = computed - predicted[0]
    return [x + news * ops.slice(shares, i, i + 1) for i, x in enumerate(predicted)]


def _coefficients(layer: Model, x: Node, name: str, count: int) -> Node:
    """Coefficients [SEQ, count] by a small router over x."""
    routed = ops.scale(norm(layer, x, "altup_router_norm"), 1 / layer.config.hidden)
    return linear(layer, ops.tanh(linear(layer, routed, "altup_router", layer.config.streams)), name, count)


def like(y: Node, x: Node) -> Node:
    """y, scaled to the mean square of x, row by row."""
    target, own = (ops.reduce_mean(part * part) for part in (x, y))
    return y * (ops.sqrt(target) / ops.sqrt(ops.clamp(own, _LEAST)))
