"""EAGLE-3 heads: one or a few decoder layers that draft for another model, from the values inside of it.

A family file, of heads and not of models: the configuration of a head, its equations, the names of its tensors.
Sources: EAGLE-3 (arXiv 2503.01840); the published layouts of its authors (`midlayer`) and of vLLM's speculators
(`layers.0`, `transformer_layer_config`, the norms of `norm_before_fc`, `fc_norm`, `norm_before_residual`,
`norm_output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import models
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.blocks import Angles, attention, embedding, mlp, norm, rope_angles
from rlx.models.builder import Model, Weights, start
from rlx.models.config import ModelConfig
from rlx.models.keys import WIDTH, Keys
from rlx.models.names import DECODER, HEAD_NORMS, LAYER, PRE_NORMS, Row, Table

MOST_LAYERS = 8  # of the model, that a head reads

NAMES = {
    "eagle3": Table(
        (*LAYER, *HEAD_NORMS, *PRE_NORMS, Row("attn_norm_2", "hidden_norm")),
        (
            *DECODER,
            Row("fc", "fc"),
            Row("input_norm", "input_norm"),
            *(Row(f"fc_norm.{number}", f"fc_norm.{number}") for number in range(MOST_LAYERS)),
        ),
    )
}


@dataclass(frozen=True)
class Eagle3:
    """The configuration of a head.

    Attributes:
        config: of its layers; `vocab_size` is the model's.
        drafted: number of tokens that it can draft.
        model_width: width of the model's hidden states.
        layers: the layers of the model whose inputs it reads; () for the usual three.
        norms: as in `Features`.
        norm_first: the residual stream begins with the normalized state.
        norm_last: the state for the next draft is the one after the last norm.
    """

    config: ModelConfig
    drafted: int
    model_width: int
    layers: tuple[int, ...]
    norms: str
    norm_first: bool
    norm_last: bool

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers that it reads of a model with so many; by default a low one, the middle one and a high one."""
        return self.layers or (2, count // 2, count - 3)


def read_config(metadata: Mapping[str, Any], where: object) -> Eagle3:
    """The configuration of a head from its `config.json`, in either layout.

    Raises:
        ConfigError, UnsupportedModelError: as `rlx.models.from_hf`.
    """
    keys = Keys(metadata, where)
    keys.nested(_LAYER_CONFIG, optional=True)
    config = models.from_hf(metadata.get(_LAYER_CONFIG) or metadata, where=where)
    # The layouts count differently: the number of a layer stands for its input, or, in `eagle_config`, for its output.
    older = keys.nested("eagle_config", optional=True)
    layers = _numbers(keys) or tuple(number + 1 for number in _numbers(older))
    switches = {name: keys.flag(name, older.flag(name, False)) for name in _SWITCHES}
    norms = "whole" if switches["norm_before_fc"] else "each" if switches["fc_norm"] else ""
    return Eagle3(
        config,
        keys.integer("draft_vocab_size", WIDTH, config.vocab_size),
        keys.integer("target_hidden_size", WIDTH, config.hidden),
        layers,
        norms,
        switches["norm_before_residual"],
        switches["norm_output"],
    )


_SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_LAYER_CONFIG = "transformer_layer_config"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def _numbers(keys: Keys) -> tuple[int, ...]:
    if _LAYERS not in keys:
        return ()
    return tuple(keys.elements(_LAYERS, lambda each: each.integer(_LAYERS, (0, 1 << 16))))


def build(head: Eagle3, weights: Weights, kv_dtype: DType, tokens: npt.NDArray[np.int64] | None) -> Graph:
    """The graph of a head.

    Inputs "tokens" and "positions" i32 [SEQ], and "hidden" f32 [SEQ, hidden]: for each token what `Features` gives of
    the row before it or, after the first draft, this graph's "next_hidden". States "k.{layer}" and "v.{layer}". Outputs
    "next_hidden" f32 [SEQ, hidden], and "token" i32 [SEQ], the likeliest next one, -1 if a logit is NaN or infinite.

    Args:
        tokens: the id of each token that the head drafts, int64 [drafted]; None where they are those of the model.

    Raises:
        WeightError: a tensor is missing, or has another shape or dtype than the configuration says.
    """
    model, config = start(head.config, weights, kv_dtype), head.config
    x, embedded = model.graph.input("hidden", [SEQ, config.hidden]), embedding(model)
    angles = rope_angles(model)
    for layer in model.layers():
        x = _layer(head, layer, x, embedded if layer.layer == 0 else None, angles)
    normed = norm(model, x, "output_norm")
    model.graph.output("next_hidden", normed if head.norm_last else x)
    logits = ops.linear(normed, model.weight("output.weight", head.drafted, config.hidden), bf16=config.bf16)
    token = ops.pick(logits)
    if tokens is not None:
        token = ops.relabel(token, model.graph.constant("draft_tokens", tokens.astype(np.float32)))
    model.graph.output("token", token)
    return model.graph


def _layer(head: Eagle3, layer: Model, x: Node, embedded: Node | None, angles: Angles) -> Node:
    """One layer: x f32 [SEQ, hidden] -> the same; attention of the first one also sees the embeddings of the tokens."""
    residual = x
    if embedded is None:
        y = norm(layer, x, "attn_norm")
    else:
        y = norm(layer, x, "attn_norm_2")
        residual = y if head.norm_first else x
        y = ops.concat(norm(layer, embedded, "attn_norm"), y)
    x = residual + attention(layer, y, angles, norms="optional")
    return x + mlp(layer, norm(layer, x, "ffn_norm"))
