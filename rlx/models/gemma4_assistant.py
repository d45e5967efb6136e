"""Gemma 4's drafters: a few layers without keys and values of their own, which read the caches of a Gemma 4.

A family file, of heads and not of models. Source: the published implementation in transformers (`gemma4_assistant`).
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
from rlx.models.blocks import attention, linear, mlp, norm, rope_angles, tokens
from rlx.models.builder import Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import WIDTH, Keys
from rlx.models.names import DECODER, HEAD_NORMS, LAYER, SANDWICH_NORMS, WHOLE, Row, Table

TABLE = "model_embd.weight"  # the embeddings of the model that it drafts for
NAMES = {
    "gemma4_assistant": Table(
        (*LAYER, *HEAD_NORMS, *SANDWICH_NORMS, Row("layer_output_scale.weight", "layer_scalar", WHOLE)),
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


def read_config(metadata: Mapping[str, Any], where: object) -> Assistant:
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


def sources(model: ModelConfig) -> dict[bool, int]:
    """Whether a layer has a window -> the last layer of the model of that kind with keys and values of its own."""
    return {layer.window is not None: layer.source for layer in model.each}


def build(head: Assistant, weights: Weights, kv_dtype: DType, model: ModelConfig, target: Graph, table: DType) -> Graph:
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
    found, states = sources(model), target.leaves("state")
    each = tuple(
        replace(layer, source=-1 - found[layer.window is not None], window=layer.window and layer.window + 1)
        for layer in head.config.each
    )  # the published mask shows one key more than windows of models
    config = replace(head.config, each=each)
    m = start(config, weights, kv_dtype)
    m.caches.update({-1 - n: (states[f"k.{n}"], states[f"v.{n}"]) for n in found.values()})
    embeddings = m.graph.weight(TABLE, (model.vocab_size, model.hidden), table)
    embedded = ops.embedding(embeddings, tokens(m), scale=model.embedding_scale)
    hidden = m.graph.input("hidden", [SEQ, head.model_width])
    x, angles = linear(m, ops.concat(embedded, hidden), "pre_projection", config.hidden), rope_angles(m)
    for layer in m.layers():
        x = x + norm(layer, attention(layer, norm(layer, x, "attn_norm"), angles, norms="heads"), "post_attention_norm")
        x = x + norm(layer, mlp(layer, norm(layer, x, "ffn_norm")), "post_ffw_norm")
        x = x * layer.weight("layer_output_scale.weight", 1)
    x = norm(m, x, "output_norm")
    m.graph.output("next_hidden", linear(m, x, "post_projection", head.model_width))
    if not head.clusters:
        logits = ops.linear(x, m.weight("token_embd.weight", config.vocab_size, config.hidden))
    else:
        size = config.vocab_size // head.clusters
        ids = ops.top_k(linear(m, x, "centroids", head.clusters), head.used)
        m.graph.output("clusters", ids)
        logits = ops.expert_linear(x, ids, m.weight("ordered_embd.weight", head.clusters, size, config.hidden))
        logits = ops.reshape(logits, [SEQ, head.used * size])
    m.graph.output("token", ops.pick(logits))
    return m.graph
