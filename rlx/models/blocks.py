"""The blocks that families share: short functions over a `Model`; what differs between families is an argument.

Part of the models stage, called by the family files. Shapes: x is f32 [SEQ, hidden]; SEQ, PAST_SEQ and CTX are the
symbols of `rlx.ir.dims`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlx.ir import ops
from rlx.ir.dims import CTX, SEQ, Shape
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
    return ops.embedding(table, model.graph.input("tokens", [SEQ], I32), scale=config.embedding_scale)


def rope_angles(model: Model) -> Angles:
    """Input "positions" i32 [SEQ] -> for each rope of the model its cosines and sines f32 [SEQ, rope.dims]."""
    positions = model.graph.input("positions", [SEQ], I32)
    config = model.config
    ropes = {config.rope_of(layer) for layer in range(config.layers)}
    kinds = {"global": config.rope, "local": config.local_rope}
    return {r: ops.rope_angles(positions, _inv_freq(model, r, kind)) for kind, r in kinds.items() if r in ropes}


def _inv_freq(model: Model, rope: Rope, kind: str) -> Node:
    divisors = model.values(rope.divisors, rope.dims // 2) if rope.divisors else None
    return model.graph.constant(f"rope.{kind}.inv_freq", inv_freq(rope, divisors))


def norm(model: Model, x: Node, name: str) -> Node:
    """RMS norm over the last axis of x [..., width], with the weight `name` [width]."""
    width = x.shape[-1]
    assert isinstance(width, int)
    return ops.rms_norm(x, model.weight(f"{name}.weight", width), eps=model.config.eps)


def linear(model: Model, x: Node, name: str, width: int) -> Node:
    """x [SEQ, k] -> [SEQ, width] by the weight `name` [width, k], plus its bias where it has one or must."""
    k = x.shape[-1]
    assert isinstance(k, int)
    biased = name in model.config.biases or model.has(f"{name}.bias")
    bias = model.weight(f"{name}.bias", width) if biased else None
    return ops.linear(x, model.weight(f"{name}.weight", width, k), bias)


def attention(model: Model, x: Node, angles: Angles, *, head_norms: bool = False) -> Node:
    """Causal attention of one layer over its KV cache, states "k.{layer}" and "v.{layer}" [kv_heads, CTX, head_dim].

    Args:
        head_norms: q and k are normalized head by head before the rotation.
    """
    config = model.config
    q = _heads(model, x, "attn_q", config.heads)
    k, v = (_heads(model, x, name, config.kv_heads) for name in ("attn_k", "attn_v"))
    if head_norms:
        q, k = norm(model, q, "attn_q_norm"), norm(model, k, "attn_k_norm")
    turn = angles[config.rope_of(model.layer)]
    q, k = (ops.rope(part, turn, style=config.rope_style) for part in (q, k))
    y = ops.attention(
        q,
        _cached(model, "k", k),
        _cached(model, "v", v),
        scale=config.attention_scale,
        window=config.windows[model.layer],
        softcap=config.attention_softcap,
    )
    return linear(model, y, "attn_output", config.hidden)


def _heads(model: Model, x: Node, name: str, heads: int) -> Node:
    """x [SEQ, hidden] -> [SEQ, heads, head_dim]."""
    size = model.config.head_dim
    return ops.reshape(linear(model, x, name, heads * size), [SEQ, heads, size])


def _cached(model: Model, name: str, x: Node) -> Node:
    """The layer's cache after x [SEQ, kv_heads, head_dim] was written behind the positions it holds."""
    shape: Shape = (model.config.kv_heads, CTX, model.config.head_dim)
    return ops.kv_write(model.graph.state(f"{name}.{model.layer}", shape, model.kv_dtype), x)


def gated_mlp(model: Model, x: Node) -> Node:
    """down(activation(gate(x)) * up(x)) of one layer (arXiv 2002.05202)."""
    config = model.config
    gate, up = (linear(model, x, name, config.ffn) for name in ("ffn_gate", "ffn_up"))
    return linear(model, ACTIVATIONS[config.activation](gate) * up, "ffn_down", config.hidden)


def head(model: Model, x: Node) -> Graph:
    """The finished graph: the last norm, and the output "logits" f32 [SEQ, vocab_size]."""
    config = model.config
    x = norm(model, x, "output_norm")
    logits = linear(model, x, "token_embd" if config.tied else "output", config.vocab_size)
    if config.logit_softcap is not None:
        logits = ops.softcap(logits, config.logit_softcap)
    model.graph.output("logits", logits)
    return model.graph
