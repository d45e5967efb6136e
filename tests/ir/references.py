"""Every op once more, as scalar loops over Python floats, `math` and `cmath`: no code shared with the meanings.

A reference takes the operands (float64 arrays) and the attributes; symbols have the values of `ENV`. Of an op that
updates a state it gives the result and the new state.
"""

from __future__ import annotations

import cmath
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.ir.dims import value

Array = np.ndarray
Reference = Callable[[list[Array], dict[str, Any]], Array | tuple[Array, Array]]
ENV = {"SEQ": 3, "PAST_SEQ": 2, "CTX": 16}


def pointwise(f: Callable[..., float]) -> Reference:
    def apply(x: list[Array], a: dict[str, Any]) -> Array:
        wide = np.broadcast_arrays(*x)
        values = [f(*map(float, v)) for v in zip(*(w.ravel() for w in wide), strict=True)]
        return np.array(values).reshape(wide[0].shape)

    return apply


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def gelu_tanh(x: float) -> float:
    """0.5 (1 + tanh z) is logistic(2 z)."""
    return x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def gelu_erf(x: float) -> float:
    """x times the normal distribution's cumulative probability."""
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


SCALAR: dict[str, Callable[..., float]] = {
    "silu": lambda x: x * logistic(x),
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "sigmoid": logistic,
    "tanh": lambda x: 2 * logistic(2 * x) - 1,
    "exp": math.exp,
    "neg": lambda x: 0 - x,
    "softplus": lambda x: math.log1p(math.exp(x)) if x < 0 else x + math.log1p(math.exp(-x)),
    "relu": lambda x: x if x > 0 else 0.0,
    "sqrt": lambda x: x**0.5,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "maximum": lambda x, y: x if x > y else y,
}


def each_row(f: Callable[..., list[float]]) -> Callable[..., Array]:
    """Lifts a function of rows to every row along the last axis."""

    def apply(x: Array, *rest: Any) -> Array:
        flat = x.reshape(-1, x.shape[-1])
        return np.array([f([float(v) for v in row], *rest) for row in flat]).reshape(*x.shape[:-1], -1)

    return apply


@each_row
def norm_rows(row: list[float], eps: float, weight: Any) -> list[float]:
    size = math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
    return [v / size * (1 if weight is None else float(weight[i])) for i, v in enumerate(row)]


@each_row
def softmax_rows(row: list[float]) -> list[float]:
    return [1 / math.fsum(math.exp(w - v) for w in row) for v in row]


@each_row
def quantize_rows(row: list[float]) -> list[float]:
    out = []
    for at in range(0, len(row), 32):
        block = [np.float32(v) for v in row[at : at + 32]]
        step = max(map(abs, block)) / np.float32(127)
        out += [float(np.float32(round(float(v / step))) * step) if step else 0.0 for v in block]
    return out


@each_row
def bf16_rows(row: list[float]) -> list[float]:
    """Eight bits of mantissa, halves to even."""
    parts = (math.frexp(float(np.float32(v))) for v in row)
    return [math.ldexp(round(mantissa * 256), exponent - 8) for mantissa, exponent in parts]


PREPARE = {"f32": lambda y: y, "q8a": quantize_rows, "bf16": bf16_rows}


@each_row
def centred_rows(row: list[float]) -> list[float]:
    mean = math.fsum(row) / len(row)
    return [v - mean for v in row]


def layer_norm(x: list[Array], a: dict[str, Any]) -> Array:
    """The root-mean-square norm of what is left without the mean."""
    y = norm_rows(centred_rows(x[0]), a["eps"], x[1] if len(x) > 1 else None)
    return PREPARE[a["out"]](y + x[2] if len(x) > 2 else y)


def rms_norm(x: list[Array], a: dict[str, Any]) -> Array:
    y = norm_rows(x[0], a["eps"], x[1] if len(x) > 1 else None)
    return PREPARE[a["out"]](y)


def product(x: Array, w: Array) -> Array:
    return np.array([[math.fsum(float(p) * float(q) for p, q in zip(r, c, strict=True)) for c in w] for r in x])


def linear(x: list[Array], a: dict[str, Any]) -> Array:
    if x[1].ndim == 3:
        return np.stack([product(x[0][:, head], matrix) for head, matrix in enumerate(x[1])], axis=1)
    x = list(x)
    rows, residual = x.pop(0), x.pop() if a["residual"] else 0
    parts = [product(rows, x.pop(0)) for _ in range(2 if a["gated"] else 1)]
    parts = [p + x.pop(0) if a["bias"] else p for p in parts]
    gate = pointwise(SCALAR[a["gated"]])([parts[0]], {}) * parts[1] if a["gated"] else parts[0]
    return written(gate + residual, a)


def written(result: Array, a: dict[str, Any]) -> Array:
    """As `out` says."""
    if a["out"] == "f32":
        return result
    return np.array([nearest(float(e), a["out"]) for e in result.flat]).reshape(result.shape)


def rope_angles(x: list[Array], a: dict[str, Any]) -> Array:
    def position(row: Any, i: int) -> Any:
        """The first pairs of three components take turns in time, row, column, time, ..., or lie in sections."""
        if a["sections"] is None:
            return row
        sections = list(a["sections"])
        owners = [c for c, size in enumerate(sections) for _ in range(size)]
        if a["interleaved"]:
            owners = [0] * len(owners)
            for c in range(1, len(sections)):
                for turn in range(sections[c]):
                    if (at := turn * len(sections) + c) < len(owners):
                        owners[at] = c
        return row[owners[i]]

    turns = [
        [cmath.exp(1j * float(np.float32(position(p, i)) * np.float32(f))) * a["scale"] for i, f in enumerate(x[1])]
        for p in x[0]
    ]
    return np.array([[t.real for t in row] + [t.imag for t in row] for row in turns])


def rope(x: list[Array], a: dict[str, Any]) -> Array:
    """A pair is a complex number, a rotation a product with cos + i sin."""
    angles, half = x[-1], x[-1].shape[1] // 2
    out = x[0].copy() if a["norm_eps"] is None else norm_rows(x[0], a["norm_eps"], x[1])
    for r, h, i in np.ndindex(*out.shape[:2], half):
        p, q = (2 * i, 2 * i + 1) if a["style"] == "interleaved" else (i, i + half)
        turned = complex(out[r, h, p], out[r, h, q]) * complex(angles[r, i], angles[r, half + i])
        out[r, h, p], out[r, h, q] = turned.real, turned.imag
    return out


def nearest(x: float, dtype: str) -> float:
    """The value of this type that is nearest to x, ties to even: f16 and f32 by `struct`, bf16 by comparing."""
    if dtype in ("f16", "f32"):
        code = {"f16": "e", "f32": "f"}[dtype]
        return float(struct.unpack(code, struct.pack(code, x))[0])
    (bits,) = struct.unpack("I", struct.pack("f", x))
    down, up = (struct.unpack("f", struct.pack("I", b))[0] for b in (bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000))
    x = nearest(x, "f32")
    if abs(x - down) == abs(up - x):
        return down if not bits >> 16 & 1 else up
    return down if abs(x - down) < abs(up - x) else up


def kv_write(x: list[Array], a: dict[str, Any]) -> Array:
    cache, rows = x[0].copy(), x[1]
    for t, h, d in np.ndindex(*rows.shape):
        at = value(a["at"], ENV) + t
        while a["wrap"] and at >= cache.shape[1]:
            at -= cache.shape[1]
        cache[h, at, d] = nearest(float(rows[t, h, d]), a["dtype"])
    return cache


def attention(x: list[Array], a: dict[str, Any]) -> Array:
    """Of keys at the same place of a cache that wraps only the newest is visible; the mask may show later keys."""
    (q, k, v), extras, length = x[:3], x[3 + a["sinks"] :], value(a["length"], ENV)
    bias = extras if a["mask"] == "bias" else []
    if a["bf16"]:
        q, k, v = (np.array([nearest(float(e), "bf16") for e in y.flat]).reshape(y.shape) for y in (q, k, v))
    place = [t % k.shape[1] for t in range(length)]
    rows, heads, width = q.shape
    out = np.zeros((rows, heads, width))
    for r, h in np.ndindex(rows, heads):
        at, g = length - rows + r, h * k.shape[0] // heads
        last = {"causal": at, "visible": extras[0][r] if extras else at}.get(a["mask"], length - 1)
        if a["mask"] == "around":
            last = at + a["window"] - 1
        visible = [t for t in range(length) if t <= last and (a["window"] is None or t > at - a["window"])]
        scores = [a["scale"] * math.fsum(float(q[r, h, d] * k[g, place[t], d]) for d in range(width)) for t in visible]
        if a["softcap"]:
            scores = [a["softcap"] * math.tanh(s / a["softcap"]) for s in scores]
        for extra in bias:
            scores = [s + float(extra[r, h % extra.shape[1], t]) for s, t in zip(scores, visible, strict=True)]
        all_scores = [*scores, float(x[3][h])] if a["sinks"] else scores
        shares = [math.exp(s) / math.fsum(map(math.exp, all_scores)) for s in scores]
        for d in range(width):
            out[r, h, d] = math.fsum(p * v[g, place[t], d] for p, t in zip(shares, visible, strict=True))
    return written(out.reshape(rows, -1), a)


def expert_linear(x: list[Array], a: dict[str, Any]) -> Array:
    rows, ids, *weights = x
    out = np.zeros((*ids.shape, weights[0].shape[1]))
    for r, s in np.ndindex(*ids.shape):
        one = rows[r : r + 1] if rows.ndim == 2 else rows[r, s : s + 1]
        first, *second = (product(one, w[int(ids[r, s])]) for w in weights)
        out[r, s] = pointwise(SCALAR[a["gated"]])([first], {}) * second[0] if a["gated"] else first
    return out


def mix(x: list[Array], a: dict[str, Any]) -> Array:
    values, coefficients = x
    out = np.zeros((*coefficients.shape[:2], values.shape[2]))
    for r, m, c in np.ndindex(*out.shape):
        out[r, m, c] = math.fsum(float(p) * float(q) for p, q in zip(coefficients[r, m], values[r, :, c], strict=True))
    return out


def cut(x: list[Array], a: dict[str, Any]) -> Array:
    """The places of an axis one by one."""
    return np.stack([x[0].take(i, a["axis"]) for i in range(a["start"], a["stop"])], a["axis"])


def joined(x: list[Array], a: dict[str, Any]) -> Array:
    return np.stack([part.take(i, a["axis"]) for part in x for i in range(part.shape[a["axis"]])], a["axis"])


def causal_conv(x: list[Array], a: dict[str, Any]) -> tuple[Array, Array]:
    """The tap i from the end looks i rows back, at first into the state."""
    state, rows, weight = x[:3]
    before, out, after = len(state), np.zeros_like(rows), np.zeros_like(state)

    def row(r: int, c: int) -> float:
        return float(rows[r, c] if r >= 0 else state[before + r, c])

    for r, c in np.ndindex(*rows.shape):
        out[r, c] = math.fsum(float(weight[c, before - back]) * row(r - back, c) for back in range(before + 1))
    for i, c in np.ndindex(*state.shape):
        after[i, c] = row(len(rows) - before + i, c)
    return out, after


def gated_delta(x: list[Array], a: dict[str, Any]) -> tuple[Array, Array]:
    """As one matrix a token: S becomes exp(g) (1 - beta k k^T) S + beta k v^T, and the result is scale S^T q. Without
    correction the matrix is exp(g).
    """
    state, q, k, v, g, beta = x[:6]
    out, after = np.zeros_like(v), np.zeros_like(state)
    for h in range(v.shape[1]):
        key_head = h % q.shape[1] if a["heads"] == "tiled" else h * q.shape[1] // v.shape[1]
        s = state[h]
        for t in range(len(v)):
            key, b = k[t, key_head], float(beta[t, h])
            change = math.exp(g[t, h]) * (np.eye(len(key)) - b * a["corrects"] * np.outer(key, key))
            s = product(change, s.T) + b * np.outer(key, v[t, h])
            out[t, h] = a["scale"] * product(q[t, key_head][None], s.T)[0]
        after[h] = s
    return out, after


def reduced(x: Array, axis: int, f: Callable[[list[float]], list[float]]) -> Array:
    """A function of the elements along an axis."""
    return np.moveaxis(each_row(f)(np.moveaxis(x, axis, -1)), -1, axis)


def as_cache(x: list[Array], a: dict[str, Any]) -> Array:
    """Head after head; behind the last position there is room that holds zeros."""
    y = x[0] if a["order"] == "heads" else np.array([x[0][:, h] for h in range(x[0].shape[1])])
    out = np.zeros((y.shape[0], y.shape[1] + a["room"], y.shape[2]))
    for h, t, d in np.ndindex(*y.shape):
        out[h, t, d] = nearest(float(y[h, t, d]), a["dtype"])
    return out


def bounded(x: float, low: float | None, high: float | None) -> float:
    x = low if low is not None and x < low else x
    return high if high is not None and x > high else x


def elementwise(x: list[Array], a: dict[str, Any]) -> Array:
    def scalar(expr: Any, values: tuple[float, ...]) -> float:
        match expr:
            case int():
                return values[expr]
            case ("const", c):
                return c
            case ("scale", inner, by):
                return scalar(inner, values) * by
            case ("softcap", inner, cap):
                return cap * math.tanh(scalar(inner, values) / cap)
            case ("clamp", inner, low, high):
                return bounded(scalar(inner, values), low, high)
            case (name, *inner):
                return SCALAR[name](*(scalar(i, values) for i in inner))
        raise AssertionError(expr)

    return written(pointwise(lambda *values: scalar(a["expr"], values))(x, a), a)


def largest(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def top_k(x: list[Array], a: dict[str, Any]) -> Array:
    size, found = x[0].shape[1] // a["groups"], []
    for row in x[0].tolist():
        groups = [sum(sorted(row[at : at + size])[-2:]) for at in range(0, len(row), size)]
        kept = largest(groups, a["kept"])
        found.append(largest([value if i // size in kept else -math.inf for i, value in enumerate(row)], a["k"]))
    return np.array(found)


def linear_pick(x: list[Array], a: dict[str, Any]) -> Array:
    """Without a look at what is not finite, of which there is none."""
    sums = [math.fsum(p * q for p, q in zip(x[0][0], row, strict=True)) for row in x[1]]
    capped = [s if a["cap"] is None else a["cap"] * math.tanh(s / a["cap"]) for s in sums]
    return np.array([largest(capped, 1)[0]])


REFERENCES: dict[str, Reference] = {
    **{name: pointwise(f) for name, f in SCALAR.items()},
    "scale": lambda x, a: pointwise(lambda v: v * a["by"])(x, a),
    "softcap": lambda x, a: pointwise(lambda v: a["cap"] * math.tanh(v / a["cap"]))(x, a),
    "clamp": lambda x, a: pointwise(lambda v: bounded(v, a["low"], a["high"]))(x, a),
    "overlay_rows": lambda x, a: np.array([x[0][r] if i < 0 else x[1][i] for r, i in enumerate(x[2])]),
    "embedding": lambda x, a: np.stack([x[0][i.astype(int)] * a["scale"] for i in x[1]]),
    "linear": linear,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "quantize": lambda x, a: PREPARE[a["out"]](x[0]),
    "rope_angles": rope_angles,
    "rope": rope,
    "kv_write": kv_write,
    "rope_kv_write": lambda x, a: kv_write([x[0], rope(x[1:], a)], a),
    "attention": attention,
    "softmax": lambda x, a: softmax_rows(x[0]),
    "argmax": lambda x, a: np.array([largest(list(row), 1)[0] for row in x[0]]),
    "pick": lambda x, a: np.array([largest(list(row), 1)[0] for row in x[0]]),
    "linear_pick": linear_pick,
    "top_k": top_k,
    "expert_linear": expert_linear,
    "call": lambda x, a: linear([x[0] + x[1], x[2]], {"gated": None, "bias": False, "residual": False, "out": "f32"}),
    "causal_conv": causal_conv,
    "gated_delta": gated_delta,
    "mix": mix,
    "relabel": lambda x, a: np.array([i if i < 0 else int(x[1][i]) for i in x[0].astype(int)]),
    "take": lambda x, a: np.array(
        [[(x[0] if x[0].ndim == 1 else x[0][r])[i] for i in some] for r, some in enumerate(x[1])]
    ),
    "reduce_mean": lambda x, a: reduced(x[0], a["axis"], lambda row: [math.fsum(v / len(row) for v in row)]),
    "reduce_sum": lambda x, a: reduced(x[0], a["axis"], lambda row: [math.fsum(row)]),
    "as_cache": as_cache,
    "slice": cut,
    "concat": joined,
    "take_rows": lambda x, a: np.stack([x[0][row] for row in x[1]]),
    "last_row": lambda x, a: x[0][len(x[0]) - 1 :],
    "reshape": lambda x, a: np.array(list(x[0].flat)).reshape([value(d, ENV) for d in a["shape"]]),
    "pack": lambda x, a: x[0],
    "elementwise": elementwise,
}
