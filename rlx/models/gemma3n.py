"""Gemma 3n: several residual streams of which one is computed (AltUp), low-rank residuals (LAuReL), per-layer
embeddings, sparse gates, and keys and values shared by the last layers.

A family file: the equations of one decoder, top to bottom. Sources: AltUp (arXiv 2301.13310), LAuReL (arXiv
2411.07501), the published implementation in transformers. Streams are f32 [SEQ, hidden] each; the first is computed.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models import blocks
from rlx.models.blocks import linear, norm
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig

_LEAST = 1e-5  # lower bound of the mean square when a stream is scaled


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Gemma 3n model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = blocks.embedding(model)
    angles, inputs = blocks.rope_angles(model), blocks.per_layer_inputs(model, x)
    others = range(config.streams - 1)
    streams = [x, *(_like(linear(model, x, f"altup_proj.{i}", config.hidden), x) for i in others)]
    for layer in model.layers():
        predicted = predict(layer, streams)
        streams = correct(layer, predicted, compute(layer, predicted[0], angles))
        if inputs is not None:
            first = streams[0]
            if config.stream_scale:
                first = first * layer.weight("altup_correct_scale.weight", config.hidden)
            extra = blocks.per_layer_input(layer, first, inputs)
            streams = [streams[0], *(stream + extra for stream in streams[1:])]
    x, *rest = streams
    rest = [_like(linear(model, y, f"altup_unembd_proj.{i}", config.hidden), x) for i, y in enumerate(rest)]
    return blocks.head(model, ops.scale(reduce(add, rest, x), 1 / config.streams))


def compute(layer: Model, x: Node, angles: blocks.Angles) -> Node:
    """An ordinary decoder layer with a low-rank residual beside attention."""
    y = norm(layer, x, "attn_norm")
    rank = layer.rows("laurel_l.weight")
    low = linear(layer, linear(layer, y, "laurel_l", rank), "laurel_r", layer.config.hidden)
    low = y + norm(layer, low, "laurel_post_norm")
    y = blocks.attention(layer, y, angles, head_norms=True, value_norms=True)
    x = ops.scale(x + norm(layer, y, "post_attention_norm") + low, 2**-0.5)
    return x + norm(layer, blocks.gated_mlp(layer, norm(layer, x, "ffn_norm")), "post_ffw_norm")


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


def _like(y: Node, x: Node) -> Node:
    """y, scaled to the mean square of x, row by row."""
    target, own = (ops.reduce_mean(part * part) for part in (x, y))
    return y * (ops.sqrt(target) / ops.sqrt(ops.clamp(own, _LEAST)))
