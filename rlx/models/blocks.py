"""Blocks that families share: short functions over a `Model`; arguments express the differences between families.

Part of the models stage, called by the family files. Shapes: x is f32 [SEQ, hidden]; SEQ, PAST_SEQ, CTX and WINDOW_CTX
are the symbols of `rlx.ir.dims`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import numpy as np

from rlx.errors import ConfigError
from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ, WINDOW_CTX, Shape
from rlx.ir.dtypes import F16, I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.builder import Model
from rlx.models.rope import Rope, inv_freq

Angles = Mapping[Rope, Node]

ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "silu": ops.silu,
    "gelu_tanh": ops.gelu_tanh,
    "relu2": lambda x: ops.power(ops.relu(x), 2),
}


def embedding(model: Model) -> Node:
    """Input "tokens" i32 [SEQ] -> their embeddings."""
    config = model.config
    table = model.weight("token_embd.weight", config.vocab_size, config.hidden)
    return ops.embedding(table, tokens(model), scale=config.embedding_scale)


def tokens(model: Model) -> Node:
    """Input "tokens" i32 [SEQ]."""
    return model.graph.input("tokens", [SEQ], I32)


def rope_angles(model: Model) -> Angles:
    """Input "positions" i32 [SEQ] -> cosines and sines f32 [SEQ, rope.dims] for each rope of the model."""
    positions = model.graph.input("positions", [SEQ], I32)
    config = model.config
    ropes = {config.rope_of(i) for i, layer in enumerate(config.each) if layer.has_rope and not layer.recurrent}
    kinds = {"global": config.rope, "local": config.local_rope}
    return {
        r: model.named(f"rope.{kind}", ops.rope_angles(positions, _inv_freq(model, r, kind), scale=r.scale))
        for kind, r in kinds.items()
        if r in ropes
    }


def _inv_freq(model: Model, rope: Rope, kind: str) -> Node:
    divisors = rope.divisors
    values = (
        model.values(divisors, rope.dims // 2) if isinstance(divisors, str) else np.array(divisors or 1, np.float32)
    )
    return model.graph.constant(f"rope.{kind}.inv_freq", inv_freq(rope, values))


def norm(model: Model, x: Node, name: str, eps: float | None = None) -> Node:
    """Norm over the last axis of x [..., width], with the weight `name` [width]; `eps` is usually the model's."""
    weight, eps = model.weight(f"{name}.weight", width(x)), eps or model.config.eps
    if model.config.norm == "rms":
        return ops.rms_norm(x, weight, eps=eps)
    bias = model.weight(f"{name}.bias", width(x)) if _is_biased(model, name) else None
    return ops.layer_norm(x, weight, bias, eps=eps)


def width(x: Node) -> int:
    """Size of the last axis."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return size


def _bf16(model: Model, weight: Node) -> bool:
    """Whether a product may round to bf16.

    Not over f16 weights: who chooses such a file wants its precision, and with bf16 the golden logits of Gemma 2 and 3
    err 22 and 12 times as much. Vision towers, with ten times the arithmetic of a prompt, take that.
    """
    return model.config.bf16 and weight.dtype is not F16


def linear(model: Model, x: Node, name: str, size: int) -> Node:
    """x [SEQ, k] -> [SEQ, size] by the weight `name` [size, k].

    Multiplies by the weight's scale [1] if it has one, and adds its bias if it has one or must have one.
    """
    weight = model.weight(f"{name}.weight", size, width(x))
    y = ops.linear(x, weight, bf16=_bf16(model, weight))
    if model.has(f"{name}.scale"):
        y = y * model.weight(f"{name}.scale", 1)
    return y + model.weight(f"{name}.bias", size) if _is_biased(model, name) else y


def linear_of_heads(model: Model, x: Node, name: str, size: int) -> Node:
    """x [SEQ, heads, k] -> [SEQ, heads, size], each head by its matrix of the weight `name` [heads, size, k]."""
    return ops.linear(x, model.weight(f"{name}.weight", model.config.heads, size, width(x)))


def cached(model: Model, name: str, x: Node) -> Node:
    """A cache after writing x [SEQ, kv_heads, head_dim]; for a layer with a window it is a ring."""
    slides = model.here.window is not None
    shape: Shape = (model.here.kv_heads, WINDOW_CTX if slides else CTX, model.here.head_dim)
    return ops.kv_write(model.graph.state(f"{name}.{model.layer}", shape, model.kv_dtype), x, wrap=slides)


def _is_biased(model: Model, name: str) -> bool:
    return name in model.config.biases or model.has(f"{name}.bias")


# -- attention --------------------------------------------------------------------------------------------------------


def attention(
    model: Model,
    x: Node,
    angles: Angles,
    *,
    norms: str = "",
    value_norms: bool = False,
    gated: bool = False,
    query_scale: Node | None = None,
    sinks: bool = False,
) -> Node:
    """Causal attention of one layer over its KV cache, states "k.{layer}" and "v.{layer}" [kv_heads, CTX, head_dim], or
    over that of an earlier layer.

    Args:
        norms: of q and k before the rotation: "heads" for one of each head, "optional" if the file has them, "whole"
            for one over all heads together; "after_rope" for one of each head after the rotation.
        value_norms: normalizes v per head, without a weight.
        gated: multiplies the result by the sigmoid of a projection of x.
        query_scale: factor of each token's queries, [SEQ, 1].
        sinks: the softmax of each head has one more score, which the file has.
    """
    config, here = model.config, model.here
    rope = angles[config.rope_of(model.layer)] if here.has_rope else None
    if norms == "optional":
        norms = "heads" if model.has("attn_q_norm.weight") else ""
    q = _heads(model, x, "attn_query" if gated else "attn_q", config.heads, norms, query_scale)
    if here.source == model.layer:
        model.caches[model.layer] = _keys_values(model, x, rope, norms, value_norms)
    y = ops.attention(
        _rotated(model, q, "attn_q", rope, norms),
        *model.caches[here.source],
        scale=config.attention_scale,
        window=here.window,
        softcap=config.attention_softcap,
        sinks=model.weight("attn_sinks.weight", config.heads) if sinks else None,
    )
    y = model.named("attn", y)
    if gated:
        y = y * ops.sigmoid(linear(model, x, "attn_query_gate", width(y)))
    return linear(model, y, "attn_output", config.hidden)


def _keys_values(model: Model, x: Node, rope: Node | None, norms: str, value_norms: bool) -> tuple[Node, Node]:
    """The layer's caches after writing the keys and values of x."""
    k = _heads(model, x, "attn_k", model.here.kv_heads, "" if model.here.keys_as_values else norms)
    v = k if model.here.keys_as_values else _heads(model, x, "attn_v", model.here.kv_heads)
    if model.here.keys_as_values and norms:
        k = norm(model, k, "attn_k_norm")
    if value_norms:
        v = ops.rms_norm(v, eps=model.config.eps)
    return cached(model, "k", _rotated(model, k, "attn_k", rope, norms)), cached(model, "v", v)


def _heads(model: Model, x: Node, name: str, heads: int, norms: str = "", scale: Node | None = None) -> Node:
    """x [SEQ, hidden] -> [SEQ, heads, head_dim].

    Args:
        norms: as in `attention`.
        scale: factor of each row [SEQ, 1], for heads that are not normalized.
    """
    size = model.here.head_dim
    y, weight = linear(model, x, name, heads * size), f"{name.replace('query', 'q')}_norm"
    if scale is not None:
        y = y * scale
    if norms == "whole":
        y = norm(model, y, weight)
    y = ops.reshape(y, [SEQ, heads, size])
    return norm(model, y, weight) if norms == "heads" else y


def _rotated(model: Model, x: Node, name: str, rope: Node | None, norms: str) -> Node:
    """Queries or keys with rope, if the layer has it, and with norms behind it."""
    y = x if rope is None else ops.rope(x, rope, style=model.config.rope_style)
    return norm(model, y, f"{name}_norm") if norms == "after_rope" else y


# -- feed-forward -----------------------------------------------------------------------------------------------------


def mlp(model: Model, x: Node, *, suffix: str = "", ffn: int | None = None) -> Node:
    """down(activation(gate(x)) * up(x)) of one layer (arXiv 2002.05202); without a gate down(activation(up(x))).

    Args:
        suffix: appended to the names of its weights.
        ffn: its width; by default the layer's.
    """
    config, here = model.config, model.here
    names = [f"ffn_gate{suffix}", f"ffn_up{suffix}"][not config.gated_ffn :]
    if config.fused_ffn and not suffix:
        names = ["ffn_up_gate", "ffn_up_value"]
    first, *rest = (linear(model, x, name, ffn or here.ffn) for name in names)
    if here.sparsity is not None:
        first = _outliers(first, here.sparsity)
    y = model.named(f"ffn_act{suffix}", activated(model, first, *rest))
    return linear(model, y, f"ffn_down{suffix}", model.config.hidden)


def activated(model: Model, first: Node, *rest: Node) -> Node:
    """The activation of the first projection, times the second if there is one."""
    y = ACTIVATIONS[model.config.activation](first)
    return y * rest[0] if rest else y


def _outliers(x: Node, deviations: float) -> Node:
    """max(0, x - (mean + deviations * standard deviation)), row by row."""
    above = x - ops.reduce_mean(x)
    spread = ops.sqrt(ops.reduce_mean(above * above))
    return ops.relu(above - ops.scale(spread, deviations))


def feed_forward(model: Model, x: Node) -> Node:
    """The layer's dense feed-forward block, or its experts and the one that every token uses (arXiv 2401.06066)."""
    if not model.here.sparse:
        return mlp(model, x)
    y, experts = mixture(model, x), model.config.experts
    assert experts is not None
    if not experts.shared:
        return y
    shared = mlp(model, x, suffix="_shexp", ffn=experts.shared)
    return y + (shared * ops.sigmoid(linear(model, x, "ffn_gate_inp_shexp", 1)) if experts.shared_gate else shared)


def mixture(model: Model, x: Node, routed: Node | None = None, *, gate_by: Callable[..., Node] = activated) -> Node:
    """Mixture of experts (arXiv 2401.04088): a weighted sum of the feed-forward blocks of a few experts.

    The experts with the largest scores are used; a softmax over all experts, or the sigmoid of each, gives the scores,
    which are also the weights. A bias may be added only to choose, which may be from the best groups only.

    Args:
        routed: the router's input, x by default.
        gate_by: what an expert computes from the model and gate and up, or up only, [SEQ, used, width].
    """
    config, experts = model.config, model.config.experts
    assert experts is not None
    router = model.weight("ffn_gate_inp.weight", experts.count, config.hidden)
    logits = ops.linear(x if routed is None else routed, router)
    if _is_biased(model, "ffn_gate_inp"):
        logits = logits + model.weight("ffn_gate_inp.bias", experts.count)
    scores = ops.softmax(logits) if experts.router == "softmax" else ops.sigmoid(logits)
    biased = _is_biased(model, "exp_probs_b")
    ranked = scores + model.weight("exp_probs_b.bias", experts.count) if biased else scores
    ids = ops.top_k(ranked, experts.used, groups=experts.groups, kept=experts.kept)
    chosen = ops.take(scores, ids)
    if experts.normalize:
        chosen = chosen / ops.reduce_sum(chosen)
    if experts.scale != 1:
        chosen = ops.scale(chosen, experts.scale)
    names = ["ffn_gate_exps", "ffn_up_exps"][not config.gated_ffn :]
    projected = (_expert_linear(model, x, name, ids, experts.ffn) for name in names)
    y = model.named("ffn_act_exps", gate_by(model, *projected))
    y = _expert_linear(model, y, "ffn_down_exps", ids, config.hidden)
    return ops.reshape(ops.mix(y, ops.reshape(chosen, [SEQ, 1, experts.used])), [SEQ, config.hidden])


def _expert_linear(model: Model, x: Node, name: str, ids: Node, size: int) -> Node:
    """x [SEQ, k] or [SEQ, used, k] -> [SEQ, used, size] by the experts `ids`, with their scales and biases, if any."""
    experts = model.config.experts
    assert experts is not None
    weight = model.weight(f"{name}.weight", experts.count, size, width(x))
    y = ops.expert_linear(x, ids, weight, bf16=_bf16(model, weight))
    if model.has(f"{name}.scale"):
        scales = ops.take(model.weight(f"{name}.scale", experts.count), ids)
        y = y * ops.reshape(scales, [SEQ, experts.used, 1])
    if _is_biased(model, name):
        y = y + ops.embedding(model.weight(f"{name}.bias", experts.count, size), ids)
    return y


# -- per-layer embeddings ---------------------------------------------------------------------------------------------


def per_layer_inputs(model: Model, x: Node) -> Node | None:
    """The additional input of each layer for each token, f32 [SEQ, layers, per_layer]; None for models without it.

    It is the token's embedding for the layer plus a projection of x, the token's main embedding.

    Raises:
        ConfigError: the file has per-layer embeddings, but its configuration does not give their width.
    """
    config, size = model.config, model.config.per_layer
    if not size:
        if model.has("per_layer_token_embd.weight"):
            raise ConfigError("the per-layer embeddings have no width", where="per_layer_token_embd.weight")
        return None
    whole = config.layers * size
    table = model.weight("per_layer_token_embd.weight", model.rows("per_layer_token_embd.weight"), whole)
    own = ops.embedding(table, tokens(model), scale=sqrt(size))
    projected = ops.scale(linear(model, x, "per_layer_model_proj", whole), config.hidden**-0.5)
    projected = norm(model, ops.reshape(projected, [SEQ, config.layers, size]), "per_layer_proj_norm")
    return ops.scale(projected + ops.reshape(own, [SEQ, config.layers, size]), 2**-0.5)


def per_layer_input(model: Model, x: Node, inputs: Node) -> Node:
    """The layer's function of its slice of `inputs` and of x: norm(proj(activation(gate(x)) * slice))."""
    size = model.config.per_layer
    part = ops.reshape(ops.slice(inputs, model.layer, model.layer + 1), [SEQ, size])
    y = ACTIVATIONS[model.config.activation](linear(model, x, "inp_gate", size)) * part
    return norm(model, linear(model, y, "proj", model.config.hidden), "post_norm")


def head(model: Model, x: Node, *, scale: float = 1.0, last_norm: str = "output_norm") -> Graph:
    """The finished graph. Adds the last norm and the head, whose result is multiplied by `scale`.

    Outputs: "hidden" f32 [SEQ, hidden], the result of the norm, and "logits" f32 [SEQ, vocab_size].
    """
    config = model.config
    x = model.graph.output("hidden", norm(model, x, last_norm))
    logits = linear(model, x, "token_embd" if config.tied else "output", config.vocab_size)
    if scale != 1:
        logits = ops.scale(logits, scale)
    if config.logit_softcap is not None:
        logits = ops.softcap(logits, config.logit_softcap)
    model.graph.output("logits", logits)
    return model.graph
