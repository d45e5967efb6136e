"""The meaning of every op in NumPy: the definition that the interpreter, the rule tests and the kernel tests use.

Each function takes the operands as arrays (quantized weights as their dequantized values), the attributes as a dict and
the values of the symbols, and returns the result. They follow the operands' float type, so float64 operands give a
float64 reference.
"""

# NumPy types its ufuncs as returning Any, so every formula here would need a cast.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import erf, sqrt
from typing import Any

import numpy as np

from rlx import ir
from rlx.errors import GraphError
from rlx.ir import dims
from rlx.ir.stored import BLOCKS, round_blocks, round_to

Array = np.ndarray[Any, Any]
Attrs = Mapping[str, Any]
Env = Mapping[str, int]
Meaning = Callable[[list[Array], Attrs, Env], Array]
Effect = Callable[[list[Array], Attrs, Env], tuple[Array, Array]]  # -> the result, the new value of the first operand


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow and without cancellation."""
    return np.exp(-np.logaddexp(0, -x))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    """GELU's tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    """GELU's exact form: 0.5 x (1 + erf(x / sqrt 2))."""
    return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)).astype(x.dtype))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    return np.logaddexp(0, x)


def relu(x: Array) -> Array:
    """The positive part."""
    return np.maximum(x, 0)


UNARY: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "exp": np.exp,
    "neg": np.negative,
    "softplus": softplus,
    "relu": relu,
    "sqrt": np.sqrt,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
}


def unary(name: str) -> Meaning:
    return lambda x, a, env: UNARY[name](x[0])


def binary(name: str) -> Meaning:
    return lambda x, a, env: BINARY[name](x[0], x[1])


def scale(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0] * x[0].dtype.type(a["by"])


def softcap(x: list[Array], a: Attrs, env: Env) -> Array:
    """cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118)."""
    return a["cap"] * np.tanh(x[0] / a["cap"])


def clamp(x: list[Array], a: Attrs, env: Env) -> Array:
    """min(max(x, low), high); a bound of None does not bound."""
    low, high = (None if a[name] is None else x[0].dtype.type(a[name]) for name in ("low", "high"))
    return np.clip(x[0], low, high)


def reduce_mean(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0].mean(a["axis"], keepdims=True)


def reduce_sum(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0].sum(a["axis"], keepdims=True)


# Elementwise ops with numeric attributes: name -> (meaning, names of the attributes).
WITH_NUMBERS: dict[str, tuple[Meaning, tuple[str, ...]]] = {
    "scale": (scale, ("by",)),
    "softcap": (softcap, ("cap",)),
    "clamp": (clamp, ("low", "high")),
}


def evaluate(expr: Any, operands: list[Array]) -> Array:
    """The value of an elementwise expression: an operand's number, or (op, argument...)."""
    if isinstance(expr, int):
        return operands[expr]
    name, *arguments = expr
    if name == "const":
        return np.asarray(arguments[0], operands[0].dtype)
    first = evaluate(arguments[0], operands)
    if name in UNARY:
        return UNARY[name](first)
    if name in BINARY:
        return BINARY[name](first, evaluate(arguments[1], operands))
    fn, attributes = WITH_NUMBERS[name]
    return fn([first], dict(zip(attributes, arguments[1:], strict=True)), {})


def elementwise(x: list[Array], a: Attrs, env: Env) -> Array:
    y = np.broadcast_to(evaluate(a["expr"], x), np.broadcast_shapes(*(v.shape for v in x)))
    return round_to(y, "bf16") if a["out"] == "bf16" else y


def embedding(x: list[Array], a: Attrs, env: Env) -> Array:
    table, ids = x
    if ids.size and not 0 <= ids.min() <= ids.max() < len(table):
        raise GraphError(f"ids {ids.min()}..{ids.max()} are not all rows of a table of {len(table)}")
    return table[ids] * table.dtype.type(a["scale"])


def overlay_rows(x: list[Array], a: Attrs, env: Env) -> Array:
    """Row r is rows[index[r]], or x[r] where index[r] is negative."""
    own, rows, index = x
    if index.size and index.max() >= len(rows):
        raise GraphError(f"index {index.max()} is no row of {len(rows)}")
    return np.where(index[:, None] < 0, own, rows[np.maximum(index, 0)])


def linear(x: list[Array], a: Attrs, env: Env) -> Array:
    """x W^T [+ b], gated: act(x W^T [+ b]) * (x U^T [+ c]); [+ residual]; `out` bf16 rounds that.

    Of x [rows, heads, k] and W [heads, n, k] each head has its own matrix.
    """
    if x[1].ndim == 3:
        return np.einsum("rhk,hnk->rhn", x[0], x[1])
    operands = iter(x)
    value = next(operands)
    weights = [next(operands) for _ in range(2 if a["gated"] else 1)]
    parts = [value @ w.T for w in weights]
    if a["bias"]:
        parts = [p + next(operands) for p in parts]
    result = UNARY[a["gated"]](parts[0]) * parts[1] if a["gated"] else parts[0]
    result = result + next(operands) if a["residual"] else result
    return round_to(result, "bf16") if a["out"] == "bf16" else result


def expert_linear(x: list[Array], a: Attrs, env: Env) -> Array:
    """For each row r and slot s the linear layer of expert ids[r, s]: x W^T, or gated act(x W^T) * (x U^T).

    x [rows, k], the same for every slot, or [rows, slots, k]; weights [experts, n, k]; the result is [rows, slots, n].
    """
    value, ids, *weights = x
    value = np.broadcast_to(value if value.ndim == 3 else value[:, None], (*ids.shape, value.shape[-1]))
    parts = [np.einsum("rsk,rsnk->rsn", value, w[ids]) for w in weights]
    return UNARY[a["gated"]](parts[0]) * parts[1] if a["gated"] else parts[0]


def call(x: list[Array], a: Attrs, env: Env) -> Array:
    """The output of another graph, `body` as IR text: operand i is its leaf "in{i}", and SEQ the number of rows.

    Operands are values with as many rows, then weights; the result has as many rows of the shape `width`.
    """
    feeds = {f"in{i}": value for i, value in enumerate(x)}
    outputs, _ = ir.interp.run(ir.text.body(a["body"]), feeds, {"SEQ": len(x[0])}, dtype=x[0].dtype)
    return outputs["out"]


def mix(x: list[Array], a: Attrs, env: Env) -> Array:
    """Row by row a small matrix product: coefficients [rows, m, n] times values [rows, n, width]."""
    return x[1] @ x[0]


def take(x: list[Array], a: Attrs, env: Env) -> Array:
    """Elements ids [rows, k] of each row of x [rows, n], or of the one row x [n]."""
    values, ids = x
    return np.take_along_axis(values, ids, -1) if values.ndim == 2 else values[ids]


def relabel(x: list[Array], a: Attrs, env: Env) -> Array:
    """Label ids[r] of each row, a whole number; a negative id stays."""
    ids, labels = x
    return np.where(ids < 0, ids, labels[np.maximum(ids, 0)]).astype(np.int32)


def slice_(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0][(slice(None),) * a["axis"] + (slice(a["start"], a["stop"]),)]


def concat(x: list[Array], a: Attrs, env: Env) -> Array:
    return np.concatenate(x, a["axis"])


def causal_conv(x: list[Array], a: Attrs, env: Env) -> tuple[Array, Array]:
    """Depthwise convolution over rows: y[r, c] = sum_i w[c, i] u[r + i, c], where u is the state [taps - 1, channels]
    (the rows before) followed by x [rows, channels]. The state becomes the last rows of u.
    """
    state, rows, weight = x[:3]
    taps = weight.shape[1]
    u = np.concatenate([state, rows])
    y = np.zeros_like(rows)
    for i in range(taps):
        y = y + weight[:, i] * u[i : i + len(rows)]
    return y, u[len(u) - (taps - 1) :]


def gated_delta(x: list[Array], a: Attrs, env: Env) -> tuple[Array, Array]:
    """The gated delta rule (arXiv 2412.06464), token by token: of every value head h with state S [key_dim, value_dim]

        S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  o = scale S^T q

    Without `corrects` d is beta v: the state-space recurrence of Mamba-2 (arXiv 2405.21060), with C for q, B for k, x
    for v, the time step for beta, and its product with A for g.

    state [heads, key_dim, value_dim]; q, k [rows, key_heads, key_dim]; v [rows, heads, value_dim]; g, beta [rows,
    heads]. Head h uses key head h % key_heads ("tiled") or h // (heads / key_heads) ("grouped").
    """
    state, q, k, v, g, beta = x[:6]
    heads = np.arange(v.shape[1])
    key_head = heads % q.shape[1] if a["heads"] == "tiled" else heads // (len(heads) // q.shape[1])
    q, k = q[:, key_head], k[:, key_head]
    s, out = state.copy(), np.zeros_like(v)
    for t in range(len(v)):
        s = np.exp(g[t])[:, None, None] * s
        known = np.einsum("hkv,hk->hv", s, k[t]) if a["corrects"] else 0
        delta = beta[t][:, None] * (v[t] - known)
        s = s + k[t][:, :, None] * delta[:, None, :]
        out[t] = a["scale"] * np.einsum("hkv,hk->hv", s, q[t])
    return out, s


def rms_norm(x: list[Array], a: Attrs, env: Env) -> Array:
    """x / sqrt(mean(x^2) + eps) [* w] over the last axis (arXiv 1910.07467); an `out` but f32 rounds as `quantize`."""
    y = x[0] / np.sqrt((x[0] ** 2).mean(-1, keepdims=True) + a["eps"])
    y = y * x[1] if len(x) > 1 else y
    return y if a.get("out", "f32") == "f32" else quantize([y], a, env)


def layer_norm(x: list[Array], a: Attrs, env: Env) -> Array:
    """(x - mean) / sqrt(variance + eps) [* w [+ b]] over the last axis (arXiv 1607.06450); `out` as in `rms_norm`."""
    y = x[0] - x[0].mean(-1, keepdims=True)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + a["eps"])
    y = y * x[1] if len(x) > 1 else y
    y = y + x[2] if len(x) > 2 else y
    return y if a["out"] == "f32" else quantize([y], a, env)


def quantize(x: list[Array], a: Attrs, env: Env) -> Array:
    """The values that quantized activations represent.

    bf16: rounded to nearest even. q8a: each block of 32 elements rounded to 127 steps of its largest magnitude.
    """
    if a["out"] == "bf16":
        return round_to(x[0], "bf16")
    blocks = x[0].astype(np.float32).reshape(*x[0].shape[:-1], -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return (codes * step).reshape(x[0].shape).astype(x[0].dtype)


def rope_angles(x: list[Array], a: Attrs, env: Env) -> Array:
    """cos then sin of position * inv_freq, the product rounded to float32 as every reference does; times `scale`.

    With `sections` a position has several components, [rows, components], and frequency i turns by component
    `component(i, sections, interleaved)`.
    """
    positions, inv_freq = x
    if a["sections"] is None:
        positions = positions[:, None]
    else:
        positions = positions[:, [component(i, a["sections"], a["interleaved"]) for i in range(len(inv_freq))]]
    angle = positions.astype(np.float32) * inv_freq.astype(np.float32)
    wide = angle.astype(np.float64)
    return (np.concatenate([np.cos(wide), np.sin(wide)], -1) * a["scale"]).astype(inv_freq.dtype)


def component(i: int, sections: Sequence[int], interleaved: bool) -> int:
    """The component of a position that frequency i turns by.

    Otherwise than interleaved, the frequencies lie in sections, one after the other: the first `sections[0]` belong to
    component 0. Interleaved, the components take turns, each until it has as many as its section says, and component 0
    takes what is left.
    """
    if interleaved:
        turn, which = divmod(i, len(sections))
        return which if turn < sections[which] else 0
    return int(np.searchsorted(np.cumsum(sections), i, side="right"))


def rope(x: list[Array], a: Attrs, env: Env) -> Array:
    """Rotates pairs of head elements (arXiv 2104.09864): (2i, 2i+1) interleaved, (i, i + n/2) neox; the rest pass.

    With `norm_eps` each head is RMS-normalized with the weight first.
    """
    value, angles = x[0], x[-1]
    if a["norm_eps"] is not None:
        value = rms_norm([value, x[1]], {"eps": a["norm_eps"]}, env)
    half = angles.shape[-1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if a["style"] == "interleaved"
        else (slice(half), slice(half, 2 * half))
    )
    out = value.copy()
    first, second = value[..., pairs[0]], value[..., pairs[1]]
    out[..., pairs[0]] = first * cos - second * sin
    out[..., pairs[1]] = first * sin + second * cos
    return out


def kv_write(x: list[Array], a: Attrs, env: Env) -> Array:
    """The cache [heads, capacity, head_dim] with rows x [SEQ, heads, head_dim] stored at positions PAST_SEQ onwards.

    With `wrap` position p is stored at p modulo the capacity, and the oldest positions are lost.
    """
    cache, rows = x
    out, at, capacity = cache.copy(), dims.value(a["at"], env), cache.shape[1]
    if len(rows) > capacity or (not a["wrap"] and at + len(rows) > capacity):
        raise GraphError(f"{len(rows)} rows at position {at} do not fit the cache's {capacity} positions")
    places = (at + np.arange(len(rows))) % capacity
    rounded = round_blocks(rows, a["dtype"]) if a["dtype"] in BLOCKS else round_to(rows, a["dtype"])
    out[:, places] = rounded.swapaxes(0, 1)
    return out


def rope_kv_write(x: list[Array], a: Attrs, env: Env) -> Array:
    return kv_write([x[0], rope(x[1:], a, env)], a, env)


def as_cache(x: list[Array], a: Attrs, env: Env) -> Array:
    """x [positions, heads, head_dim], or [heads, positions, head_dim] with `order` "heads", as a cache holds it:
    [heads, positions + room, head_dim], rounded to `dtype`. The places after the last position are zeros here; nothing
    reads them.
    """
    y = x[0] if a["order"] == "heads" else x[0].swapaxes(0, 1)
    return np.pad(round_to(y, a["dtype"]), ((0, 0), (0, dims.value(a["room"], env)), (0, 0)))


def attention(x: list[Array], a: Attrs, env: Env) -> Array:
    """softmax(scale q k^T, masked) v with grouped heads; the queries are the last rows of `length` positions.

    q [rows, heads, head_dim], k and v [kv_heads, capacity, head_dim]. The `mask` says which keys t the query of row r,
    at position p, sees: "causal" t <= p, "none" all, "around" t - p < w, "visible" t <= visible[r], an operand
    i32[rows]; "bias" all, and an operand [rows, 1 or heads, length] is added to the scores. With a window w it sees
    only those with p - t < w, and position t is at t modulo the capacity. `softcap` bounds the scores before the mask.
    With `sinks`, an operand [heads] before that of the mask, the softmax of a head has one more score, whose weight
    counts for no value. With bf16, q, k and v are rounded first; `out` bf16 rounds the result.
    """
    q, k, v, *operand = [*(round_to(y, "bf16") for y in x[:3]), *x[3:]] if a["bf16"] else x
    rows, heads, _ = q.shape
    length = dims.value(a["length"], env)
    sinks = operand.pop(0) if a["sinks"] else None
    group, capacity = heads // k.shape[0], k.shape[1]
    if length > capacity and (a["window"] is None or rows + a["window"] - 1 > capacity):
        raise GraphError(f"{length} positions, {rows} of them new, do not fit a cache of {capacity}")
    places = np.arange(length) % capacity  # the window masks positions that were overwritten
    k, v = np.repeat(k[:, places], group, 0), np.repeat(v[:, places], group, 0)
    scores = np.einsum("rhd,htd->hrt", q, k) * a["scale"]
    if a["softcap"] is not None:
        scores = softcap([scores], {"cap": a["softcap"]}, env)
    own, keys = length - rows + np.arange(rows), np.arange(length)
    if a["mask"] == "bias":
        scores = scores + operand[0].swapaxes(0, 1)
    last = {"causal": own, "visible": operand[0] if operand else own}.get(a["mask"], np.full(rows, length))
    if a["mask"] == "around":
        last = own + a["window"] - 1
    hidden = keys > last[:, None]
    if a["window"] is not None:
        hidden = hidden | (own[:, None] - keys >= a["window"])
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (heads, rows, 1))], -1)
    weights = softmax([scores], {}, env)[..., :length]
    mixed = np.einsum("hrt,htd->rhd", weights, v).reshape(rows, -1)
    return round_to(mixed, "bf16") if a["out"] == "bf16" else mixed


def softmax(x: list[Array], a: Attrs, env: Env) -> Array:
    e = np.exp(x[0] - x[0].max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def argmax(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0].argmax(-1).astype(np.int32)


def pick(x: list[Array], a: Attrs, env: Env) -> Array:
    """Index of the largest of each row, the first of equals; -1 if the row holds a NaN or an infinity."""
    return np.where(np.isfinite(x[0]).all(-1), x[0].argmax(-1), -1).astype(np.int32)


def linear_pick(x: list[Array], a: Attrs, env: Env) -> Array:
    """pick(x W^T), or of cap * tanh(x W^T / cap)."""
    values = x[0] @ x[1].T
    return pick([values if a["cap"] is None else softcap([values], a, env)], a, env)


def top_k(x: list[Array], a: Attrs, env: Env) -> Array:
    """Indices of the k largest, descending; of equals the lower index first.

    With `groups` those of the `kept` groups of neighbours whose two largest have the largest sums.
    """
    values = x[0]
    if a["groups"] > 1:
        grouped = values.reshape(*values.shape[:-1], a["groups"], -1)
        sums = np.sort(grouped, -1)[..., -2:].sum(-1)
        rank = np.argsort(np.argsort(-sums, -1, kind="stable"), -1)
        values = np.where(rank[..., None] < a["kept"], grouped, -np.inf).reshape(values.shape)
    return np.argsort(-values, -1, kind="stable")[..., : a["k"]].astype(np.int32)


def last_row(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0][-1:]


def take_rows(x: list[Array], a: Attrs, env: Env) -> Array:
    values, rows = x
    if rows.size and not 0 <= rows.min() <= rows.max() < len(values):
        raise GraphError(f"rows {rows.min()}..{rows.max()} are not all of {len(values)}")
    return values[rows]


def reshape(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0].reshape([dims.value(d, env) for d in a["shape"]])


def identity(x: list[Array], a: Attrs, env: Env) -> Array:
    return x[0]
