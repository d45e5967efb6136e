"""The blocks that families share: short functions over a `Model`; what differs between families is an argument.

Part of the models stage, called by the family files. Shapes: x is f32 [SEQ, hidden]; SEQ, PAST_SEQ, CTX and WINDOW_CTX
are the symbols of `rlx.ir.dims`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

from rlx.errors import ConfigError
from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ, WINDOW_CTX, Shape
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.builder import Model
from rlx.models.rope import Rope, inv_freq

Angles = Mapping[Rope, Node]

ACTIVATIONS: dict[str, Callable[[Node], Node]] = {"silu": ops.silu, "gelu_tanh": ops.gelu_tanh}


def embedding(model: Model) -> Node:
    """Input "tokens" i32 [SEQ] -> their embeddings."""
    config = model.config
    table = model.weight("token_embd.weight", config.vocab_size, config.hidden)
    return ops.embedding(table, tokens(model), scale=config.embedding_scale)


def tokens(model: Model) -> Node:
    """Input "tokens" i32 [SEQ]."""
    return model.graph.input("tokens", [SEQ], I32)


def rope_angles(model: Model) -> Angles:
    """Input "positions" i32 [SEQ] -> for each rope of the model its cosines and sines f32 [SEQ, rope.dims]."""
    positions = model.graph.input("positions", [SEQ], I32)
    config = model.config
    ropes = {config.rope_of(i) for i, layer in enumerate(config.each) if not layer.recurrent}
    kinds = {"global": config.rope, "local": config.local_rope}
    return {
        r: model.named(f"rope.{kind}", ops.rope_angles(positions, _inv_freq(model, r, kind), scale=r.scale))
        for kind, r in kinds.items()
        if r in ropes
    }


def _inv_freq(model: Model, rope: Rope, kind: str) -> Node:
    divisors = model.values(rope.divisors, rope.dims // 2) if rope.divisors else None
    return model.graph.constant(f"rope.{kind}.inv_freq", inv_freq(rope, divisors))


def norm(model: Model, x: Node, name: str) -> Node:
    """RMS norm over the last axis of x [..., width], with the weight `name` [width]."""
    return ops.rms_norm(x, model.weight(f"{name}.weight", width(x)), eps=model.config.eps)


def width(x: Node) -> int:
    """Size of the last axis."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return size


def linear(model: Model, x: Node, name: str, size: int) -> Node:
    """x [SEQ, k] -> [SEQ, size] by the weight `name` [size, k], times its scale [1] where it has one, plus its bias
    where it has one or must.
    """
    y = ops.linear(x, model.weight(f"{name}.weight", size, width(x)), bf16=model.config.bf16)
    if model.has(f"{name}.scale"):
        y = y * model.weight(f"{name}.scale", 1)
    if name in model.config.biases or model.has(f"{name}.bias"):
        y = y + model.weight(f"{name}.bias", size)
    return y


# -- attention --------------------------------------------------------------------------------------------------------


def attention(
    model: Model,
    x: Node,
    angles: Angles,
    *,
    head_norms: bool = False,
    value_norms: bool = False,
    gated: bool = False,
) -> Node:
    """Causal attention of one layer over its KV cache, states "k.{layer}" and "v.{layer}" [kv_heads, CTX, head_dim], or
    over that of an earlier layer.

    Args:
        head_norms: q and k are normalized head by head before the rotation.
        value_norms: so is v, without a weight.
        gated: the result is multiplied by the sigmoid of a projection of x.
    """
    config, here = model.config, model.here
    turn = angles[config.rope_of(model.layer)]
    q = _heads(model, x, "attn_query" if gated else "attn_q", config.heads)
    if head_norms:
        q = norm(model, q, "attn_q_norm")
    if here.source == model.layer:
        model.caches[model.layer] = _keys_values(model, x, turn, head_norms, value_norms)
    y = ops.attention(
        ops.rope(q, turn, style=config.rope_style),
        *model.caches[here.source],
        scale=config.attention_scale,
        window=here.window,
        softcap=config.attention_softcap,
    )
    y = model.named("attn", y)
    if gated:
        y = y * ops.sigmoid(linear(model, x, "attn_query_gate", width(y)))
    return linear(model, y, "attn_output", config.hidden)


def _keys_values(model: Model, x: Node, turn: Node, head_norms: bool, value_norms: bool) -> tuple[Node, Node]:
    """The layer's caches after the keys and values of x were written behind the positions they hold."""
    k = _heads(model, x, "attn_k", model.here.kv_heads)
    v = k if model.here.keys_as_values else _heads(model, x, "attn_v", model.here.kv_heads)
    if head_norms:
        k = norm(model, k, "attn_k_norm")
    if value_norms:
        v = ops.rms_norm(v, eps=model.config.eps)
    return _cached(model, "k", ops.rope(k, turn, style=model.config.rope_style)), _cached(model, "v", v)


def _heads(model: Model, x: Node, name: str, heads: int) -> Node:
    """x [SEQ, hidden] -> [SEQ, heads, head_dim]."""
    size = model.here.head_dim
    return ops.reshape(linear(model, x, name, heads * size), [SEQ, heads, size])


def _cached(model: Model, name: str, x: Node) -> Node:
    """A cache after x [SEQ, kv_heads, head_dim] was written; that of a layer with a window keeps no more than it."""
    slides = model.here.window is not None
    shape: Shape = (model.here.kv_heads, WINDOW_CTX if slides else CTX, model.here.head_dim)
    return ops.kv_write(model.graph.state(f"{name}.{model.layer}", shape, model.kv_dtype), x, wrap=slides)


# -- feed-forward -----------------------------------------------------------------------------------------------------


def gated_mlp(model: Model, x: Node, *, suffix: str = "", ffn: int | None = None) -> Node:
    """down(activation(gate(x)) * up(x)) of one layer (arXiv 2002.05202).

    Args:
        suffix: of the names of its weights.
        ffn: its width, the layer's by default.
    """
    gate, up = (linear(model, x, f"{name}{suffix}", ffn or model.here.ffn) for name in ("ffn_gate", "ffn_up"))
    if model.here.sparsity is not None:
        gate = _outliers(gate, model.here.sparsity)
    y = model.named(f"ffn_act{suffix}", ACTIVATIONS[model.config.activation](gate) * up)
    return linear(model, y, f"ffn_down{suffix}", model.config.hidden)


def _outliers(x: Node, deviations: float) -> Node:
    """What lies that many standard deviations above the mean of its row, counted from there; 0 elsewhere."""
    above = x - ops.reduce_mean(x)
    spread = ops.sqrt(ops.reduce_mean(above * above))
    return ops.relu(above - ops.scale(spread, deviations))


def feed_forward(model: Model, x: Node) -> Node:
    """The layer's dense feed-forward block, or its experts."""
    return mixture(model, x) if model.here.sparse else gated_mlp(model, x)


def mixture(model: Model, x: Node, routed: Node | None = None) -> Node:
    """A weighted sum of the feed-forward blocks of a few experts (arXiv 2401.04088): those with the largest
    probability by a softmax over all, which is their weight.

    Args:
        routed: what the router sees, x by default.
    """
    config, experts = model.config, model.config.experts
    assert experts is not None
    router = model.weight("ffn_gate_inp.weight", experts.count, config.hidden)
    scores = ops.softmax(ops.linear(x if routed is None else routed, router))
    ids = ops.top_k(scores, experts.used)
    chosen = ops.take(scores, ids)
    if experts.normalize:
        chosen = chosen / ops.reduce_sum(chosen)
    if experts.scale != 1:
        chosen = ops.scale(chosen, experts.scale)
    gate, up = (_expert_linear(model, x, name, ids, experts.ffn) for name in ("ffn_gate_exps", "ffn_up_exps"))
    y = model.named("ffn_act_exps", ACTIVATIONS[config.activation](gate) * up)
    y = _expert_linear(model, y, "ffn_down_exps", ids, config.hidden)
    return ops.reshape(ops.mix(y, ops.reshape(chosen, [SEQ, 1, experts.used])), [SEQ, config.hidden])


def _expert_linear(model: Model, x: Node, name: str, ids: Node, size: int) -> Node:
    """x [SEQ, k] or [SEQ, used, k] -> [SEQ, used, size] by the experts `ids`, times their scales if there are any."""
    experts = model.config.experts
    assert experts is not None
    weight = model.weight(f"{name}.weight", experts.count, size, width(x))
    y = ops.expert_linear(x, ids, weight, bf16=model.config.bf16)
    if model.has(f"{name}.scale"):
        scales = ops.take(model.weight(f"{name}.scale", experts.count), ids)
        y = y * ops.reshape(scales, [SEQ, experts.used, 1])
    return y


# -- embeddings of each layer's own -----------------------------------------------------------------------------------


def per_layer_inputs(model: Model, x: Node) -> Node | None:
    """What each layer gets of every token beside the residual stream, f32 [SEQ, layers, per_layer]: the token's own
    embedding for the layer and a projection of x, its embedding. None for models without.

    Raises:
        ConfigError: the file has such embeddings, but its configuration does not say how wide they are.
    """
    config, size = model.config, model.config.per_layer
    if not size:
        if model.has("per_layer_token_embd.weight"):
            raise ConfigError("the embeddings of each layer's own have no width", where="per_layer_token_embd.weight")
        return None
    whole = config.layers * size
    table = model.weight("per_layer_token_embd.weight", model.rows("per_layer_token_embd.weight"), whole)
    own = ops.embedding(table, tokens(model), scale=sqrt(size))
    projected = ops.scale(linear(model, x, "per_layer_model_proj", whole), config.hidden**-0.5)
    projected = norm(model, ops.reshape(projected, [SEQ, config.layers, size]), "per_layer_proj_norm")
    return ops.scale(projected + ops.reshape(own, [SEQ, config.layers, size]), 2**-0.5)


def per_layer_input(model: Model, x: Node, inputs: Node) -> Node:
    """What the layer makes of its own part of `inputs` and of x: norm(proj(activation(gate(x)) * part))."""
    size = model.config.per_layer
    part = ops.reshape(ops.slice(inputs, model.layer, model.layer + 1), [SEQ, size])
    y = ACTIVATIONS[model.config.activation](linear(model, x, "inp_gate", size)) * part
    return norm(model, linear(model, y, "proj", model.config.hidden), "post_norm")


def head(model: Model, x: Node) -> Graph:
    """The finished graph: the last norm, whose result is the output "hidden" f32 [SEQ, hidden], and the output "logits"
    f32 [SEQ, vocab_size].
    """
    config = model.config
    x = model.graph.output("hidden", norm(model, x, "output_norm"))
    logits = linear(model, x, "token_embd" if config.tied else "output", config.vocab_size)
    if config.logit_softcap is not None:
        logits = ops.softcap(logits, config.logit_softcap)
    model.graph.output("logits", logits)
    return model.graph
