"""Gemma 3n: several residual streams of which one is computed (AltUp), low-rank residuals (LAuReL), per-layer
embeddings, sparse gates, and keys and values shared by the last layers.

A family file: the equations of one decoder, top to bottom. Sources: AltUp (arXiv 2301.13310), LAuReL (arXiv
2411.07501), the published implementation in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np

from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models import blocks
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import linear, norm
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.names import WHOLE, Row, per_layer

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


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Gemma 3n model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = blocks.embedding(model)
    angles, inputs = blocks.rope_angles(model), blocks.per_layer_inputs(model, x)
    others = range(config.streams - 1)
    streams = [x, *(like(linear(model, x, f"altup_proj.{i}", config.hidden), x) for i in others)]
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
    rest = [like(linear(model, y, f"altup_unembd_proj.{i}", config.hidden), x) for i, y in enumerate(rest)]
    return blocks.head(model, ops.scale(reduce(add, rest, x), 1 / config.streams))


def compute(layer: Model, x: Node, angles: blocks.Angles) -> Node:
    """An ordinary decoder layer with a low-rank residual beside attention."""
    y = norm(layer, x, "attn_norm")
    rank = layer.rows("laurel_l.weight")
    low = linear(layer, linear(layer, y, "laurel_l", rank), "laurel_r", layer.config.hidden)
    low = y + norm(layer, low, "laurel_post_norm")
    y = blocks.attention(layer, y, angles, norms="heads", value_norms=True)
    x = ops.scale(x + norm(layer, y, "post_attention_norm") + low, 2**-0.5)
    return x + norm(layer, blocks.mlp(layer, norm(layer, x, "ffn_norm")), "post_ffw_norm")


_DEFAULTS = {
    "vocab_size": 262_400, "hidden_size": 2048, "hidden_size_per_layer_input": 256, "intermediate_size": 16_384,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 15,
    "head_dim": 256, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "sliding_window": 512,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "altup_num_inputs": 4,
    "tie_word_embeddings": True,
}  # fmt: skip
_NAMES = per_layer(
    Row("altup_correct_coef", "altup.correction_coefs"),
    Row("altup_correct_scale.weight", "altup.correct_output_scale", WHOLE),
    Row("altup_predict_coef", "altup.prediction_coefs"),
    Row("altup_router", "altup.modality_router"),
    Row("altup_router_norm", "altup.router_norm"),
    Row("laurel_l", "laurel.linear_left"),
    Row("laurel_r", "laurel.linear_right"),
    Row("laurel_post_norm", "laurel.post_laurel_norm"),
)
_STREAMS = (Row("altup_proj", "altup_projections.{}"), Row("altup_unembd_proj", "altup_unembed_projections.{}"))
ARCHITECTURES = {
    "gemma3n": Architecture(
        build,
        replace(_NAMES, decoder=(*_NAMES.decoder, *_STREAMS)),
        ("gemma3n_text", "gemma3n"),
        runner="gemma",
        gguf_period=5,
        gguf_window=512,
        gguf_caps=(0.0, 30.0),
        shares_kv=True,
        attention_scale=1.0,
        hf_sliding=every_nth_is_full(5),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_keys={"activation": "hidden_activation"},
        activation="gelu_tanh",
        streams=True,
        scales_embedding=True,
        hf_defaults=_DEFAULTS,
    )
}
