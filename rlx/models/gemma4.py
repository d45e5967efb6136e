"""Gemma 4: dense, with per-layer embeddings (E2B, E4B), and with experts.

A family file: the equations of one decoder, top to bottom, and those of its drafters, a few layers without keys and
values of their own, which read the caches of a Gemma 4. Source: the published implementation in transformers (drafters:
`gemma4_assistant`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx import models
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.architectures import Architecture, every_nth_is_full
from rlx.models.blocks import (
    attention,
    embedding,
    head,
    linear,
    mixture,
    mlp,
    norm,
    per_layer_input,
    per_layer_inputs,
    rope_angles,
    tokens,
)
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import WIDTH, Keys
from rlx.models.names import DECODER, HEAD_NORMS, LAYER, SANDWICH_NORMS, SCALED, WHOLE, Row, Table, per_layer


def build(config: ModelConfig, weights: Weights, kv_dtype: DType) -> Graph:
    """The graph of a Gemma 4 model; see `rlx.models.build`."""
    model = start(config, weights, kv_dtype)
    x = embedding(model)
    angles, inputs = rope_angles(model), per_layer_inputs(model, x)
    for layer in model.layers():
        y = attention(layer, norm(layer, x, "attn_norm"), angles, head_norms=True, value_norms=True)
        x = x + norm(layer, y, "post_attention_norm")
        x = x + norm(layer, both(layer, x) if layer.here.sparse else dense(layer, x), "post_ffw_norm")
        if inputs is not None:
            x = x + per_layer_input(layer, x, inputs)
        x = x * layer.weight("layer_output_scale.weight", 1)
    return head(model, x)


def dense(layer: Model, x: Node) -> Node:
    """The feed-forward block for every token."""
    return mlp(layer, norm(layer, x, "ffn_norm"))


def both(layer: Model, x: Node) -> Node:
    """The dense block beside the experts; the router has a separate scale for x."""
    width = layer.config.hidden
    routed = ops.scale(ops.rms_norm(x, eps=layer.config.eps), width**-0.5) * layer.weight("ffn_gate_inp.scale", width)
    experts = mixture(layer, norm(layer, x, "pre_ffw_norm_2"), routed)
    return norm(layer, dense(layer, x), "post_ffw_norm_1") + norm(layer, experts, "post_ffw_norm_2")


_EXPERTS = (
    Row("ffn_gate_inp", "router.proj"),
    Row("ffn_gate_inp.scale", "router.scale", WHOLE),
    Row("ffn_gate_exps", None, SCALED),
    Row("ffn_up_exps", None, SCALED),
    Row("ffn_gate_up_exps", None, SCALED),
    Row("ffn_gate_up_exps.weight", "experts.gate_up_proj", WHOLE),
    Row("ffn_down_exps.weight", "experts.down_proj", WHOLE),
    Row("ffn_down_exps.scale", "router.per_expert_scale", WHOLE),
    Row("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    Row("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    Row("post_ffw_norm_2", "post_feedforward_layernorm_2"),
)
_SCALE = Row("layer_output_scale.weight", "layer_scalar", WHOLE)
_ROPES = {
    "sliding_attention": {"rope_type": "default"},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
_DEFAULTS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "rope_parameters": _ROPES,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURES = {
    "gemma4": Architecture(
        build,
        per_layer(*_EXPERTS, _SCALE),
        ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        runner="gemma",
        two_way="sliding",
        gguf_period=6,
        gguf_caps=(0.0, 30.0),
        gguf_local_heads=True,
        shares_kv=True,
        hf_ends_full=True,
        attention_scale=1.0,
        hf_sliding=every_nth_is_full(6),
        local_base=10_000.0,
        hf_base=1_000_000.0,
        hf_keys={"activation": "hidden_activation", "experts": "num_experts", "experts_used": "top_k_experts"},
        activation="gelu_tanh",
        experts="may",
        scales_embedding=True,
        hf_defaults=_DEFAULTS,
    )
}


# -- drafters -------------------------------------------------------------------------------------------------------

DRAFTER_TABLE = "model_embd.weight"  # the embeddings of the model that it drafts for
NAMES = {
    "gemma4_assistant": Table(
        (*LAYER, *HEAD_NORMS, *SANDWICH_NORMS, _SCALE),
        (
            *DECODER,
            Row("pre_projection", "pre_projection"),
            Row("post_projection", "post_projection"),
            Row("centroids", "masked_embedding.centroids"),
            Row("ordered_embd", "ordered_embeddings"),
        ),
    )
}


@dataclass(frozen=True)
class Assistant:
    """The configuration of a drafter.

    Attributes:
        config: of its layers.
        model_width: width of the model's hidden states.
        clusters, used: groups of equally many tokens, and how many of them a draft is searched in; 0 for no groups.
    """

    config: ModelConfig
    model_width: int
    clusters: int
    used: int


def drafter_config(metadata: Mapping[str, Any], where: object) -> Assistant:
    """The configuration of a drafter from its `config.json`.

    Raises:
        ConfigError, UnsupportedModelError: as `rlx.models.from_hf`.
    """
    keys = Keys(metadata, where)
    keys.nested("text_config")
    config = models.from_hf({**metadata["text_config"], "num_kv_shared_layers": 0}, where=where)
    width = keys.integer("backbone_hidden_size", WIDTH, 1536)
    if not keys.flag("use_ordered_embeddings", False):
        return Assistant(config, width, 0, 0)
    clusters = keys.integer("num_centroids", (1, config.vocab_size), 2048)
    if config.vocab_size % clusters:
        keys.wrong("num_centroids", clusters, f"a divisor of the {config.vocab_size} tokens")
    return Assistant(config, width, clusters, keys.integer("centroid_intermediate_top_k", (1, clusters), 32))


def drafter_sources(model: ModelConfig) -> dict[bool, int]:
    """Whether a layer has a window -> the last layer of the model of that kind with keys and values of its own."""
    return {layer.window is not None: layer.source for layer in model.each}


def build_drafter(
    drafter: Assistant, weights: Weights, kv_dtype: DType, model: ModelConfig, target: Graph, table: DType
) -> Graph:
    """The graph of a drafter.

    Inputs "tokens" and "positions" i32 [SEQ], and "hidden" f32 [SEQ, model_width]: the model's output "hidden" of the
    row before the token or, after the first draft, this graph's "next_hidden". All drafts have the position of the
    first token. The states are caches of the model, which it reads. Outputs "next_hidden", "token" i32 [SEQ] and, if
    there are groups, "clusters" i32 [SEQ, used]: "token" then counts the tokens of these groups.

    Args:
        model, target: configuration and graph of the model.
        table: type of its embeddings.

    Raises:
        WeightError: a tensor is missing, or has another shape or dtype than the configuration says.
    """
    found, states = drafter_sources(model), target.leaves("state")
    each = tuple(
        replace(layer, source=-1 - found[layer.window is not None], window=layer.window and layer.window + 1)
        for layer in drafter.config.each
    )  # the published mask shows one key more than windows of models
    config = replace(drafter.config, each=each)
    m = start(config, weights, kv_dtype)
    m.caches.update({-1 - n: (states[f"k.{n}"], states[f"v.{n}"]) for n in found.values()})
    embeddings = m.graph.weight(DRAFTER_TABLE, (model.vocab_size, model.hidden), table)
    embedded = ops.embedding(embeddings, tokens(m), scale=model.embedding_scale)
    hidden = m.graph.input("hidden", [SEQ, drafter.model_width])
    x, angles = linear(m, ops.concat(embedded, hidden), "pre_projection", config.hidden), rope_angles(m)
    for layer in m.layers():
        x = x + norm(
            layer, attention(layer, norm(layer, x, "attn_norm"), angles, head_norms=True), "post_attention_norm"
        )
        x = x + norm(layer, mlp(layer, norm(layer, x, "ffn_norm")), "post_ffw_norm")
        x = x * layer.weight("layer_output_scale.weight", 1)
    x = norm(m, x, "output_norm")
    m.graph.output("next_hidden", linear(m, x, "post_projection", drafter.model_width))
    if not drafter.clusters:
        logits = ops.linear(x, m.weight("token_embd.weight", config.vocab_size, config.hidden))
    else:
        size = config.vocab_size // drafter.clusters
        ids = ops.top_k(linear(m, x, "centroids", drafter.clusters), drafter.used)
        m.graph.output("clusters", ids)
        logits = ops.expert_linear(x, ids, m.weight("ordered_embd.weight", drafter.clusters, size, config.hidden))
        logits = ops.reshape(logits, [SEQ, drafter.used * size])
    m.graph.output("token", ops.pick(logits))
    return m.graph
