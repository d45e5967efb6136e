"""The op table: name, attributes, shape rule, NumPy meaning, cost. One row per op; the builders below make the nodes.

The meaning lives in `rlx.ir.meaning`. Floating-point values are float32 unless a row says otherwise; weights may have
any dtype of the table in `rlx.ir.dtypes`.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any, TypeAlias

from rlx.errors import ShapeError
from rlx.ir import flops, infer, meaning, sequences
from rlx.ir.dims import PAST_SEQ, SEQ, DimLike, Shape, parse_dim
from rlx.ir.dtypes import F32, DType
from rlx.ir.node import LEAVES, OPERATORS, Node, intern


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
        attrs: attribute names in printing order, with their defaults (`REQUIRED` where there is none).
        infer: (operands, attributes) -> (shape, dtype); raises `ShapeError`.
        meaning: the NumPy definition.
        flops: (operand sizes, result size, attributes) -> floating-point operations.
        elementwise: True if it may join an elementwise region.
        rowwise: True if row r of the result depends only on row r of the operands that have as many rows.
        effect: True if the op also updates its first operand, a state, in place; its meaning is (result, new state).
            With the attribute `aside` that state is unchanged, and the last operand, an equal state, is updated.
    """

    name: str
    attrs: Mapping[str, Any]
    infer: infer.Rule
    meaning: meaning.Meaning | meaning.Effect
    flops: flops.Flops
    elementwise: bool = False
    rowwise: bool = True
    effect: bool = False


REQUIRED = object()

#: An operand of arithmetic.
Operand: TypeAlias = Node | float

_TRANSPOSED = ".T"  # suffix of the name of a transposed weight

_LINEAR = {"gated": None, "bias": False, "residual": False, "bf16": False, "out": "f32"}
_ROPE = {"style": REQUIRED, "norm_eps": None}
_WRITE = {"at": PAST_SEQ, "dtype": "f32", "wrap": False}
_LEAF = {"name": REQUIRED}
_ASIDE = {"aside": False}


def _by_sequence(row: Op) -> Op:
    """The row of an op over a state, extended by the attribute `sequences`: see `rlx.ir.sequences`."""
    rule, meant = sequences.rule(row.name, row.infer), sequences.meaning(row.name, row.meaning)
    return replace(row, attrs={**row.attrs, "sequences": False}, infer=rule, meaning=meant)


OPS: dict[str, Op] = {
    row.name: _by_sequence(row) if row.name in sequences.OPS else row
    for row in (
        Op("input", _LEAF, infer.leaf, meaning.identity, flops.each(0), rowwise=False),
        Op("weight", _LEAF, infer.leaf, meaning.identity, flops.each(0), rowwise=False),
        Op("state", {**_LEAF, "layout": "rows"}, infer.leaf, meaning.identity, flops.each(0), rowwise=False),
        Op("embedding", {"scale": 1.0}, infer.embedding, meaning.embedding, flops.each(1)),
        Op("linear", _LINEAR, infer.linear, meaning.linear, flops.linear),
        Op(
            "expert_linear",
            {"gated": None, "bf16": False, "tiles": False},
            infer.expert_linear,
            meaning.expert_linear,
            flops.expert_linear,
        ),
        Op("rms_norm", {"eps": REQUIRED, "out": "f32"}, infer.rms_norm, meaning.rms_norm, flops.each(4)),
        Op("quantize", {"out": "q8a"}, infer.quantize, meaning.quantize, flops.each(3)),
        Op("rope_angles", {"scale": 1.0}, infer.rope_angles, meaning.rope_angles, flops.each(40)),
        Op("rope", _ROPE, infer.rope, meaning.rope, flops.each(6)),
        Op("kv_write", _WRITE, infer.kv_write, meaning.kv_write, flops.each(0), rowwise=False),
        Op(
            "rope_kv_write",
            {**_ROPE, **_WRITE},
            infer.rope_kv_write,
            meaning.rope_kv_write,
            lambda ins, out, attrs: 6 * prod(ins[1]),
            rowwise=False,
        ),
        Op(
            "attention",
            {"scale": REQUIRED, "window": None, "softcap": None, "length": PAST_SEQ + SEQ, "bf16": False, "out": "f32"},
            infer.attention,
            meaning.attention,
            flops.attention,
        ),
        Op(
            "causal_conv",
            _ASIDE,
            infer.causal_conv,
            meaning.causal_conv,
            flops.causal_conv,
            rowwise=False,
            effect=True,
        ),
        Op(
            "gated_delta",
            {"scale": REQUIRED, "heads": "tiled", **_ASIDE},
            infer.gated_delta,
            meaning.gated_delta,
            flops.gated_delta,
            rowwise=False,
            effect=True,
        ),
        Op("softmax", {}, infer.softmax, meaning.softmax, flops.each(8)),
        Op("argmax", {}, infer.one_index("argmax"), meaning.argmax, flops.scan),
        Op("pick", {}, infer.one_index("pick"), meaning.pick, flops.scan),
        Op("linear_pick", {"cap": None}, infer.linear_pick, meaning.linear_pick, flops.linear_pick),
        Op("top_k", {"k": REQUIRED}, infer.top_k, meaning.top_k, flops.scan),
        Op("take", {}, infer.take, meaning.take, flops.each(0)),
        Op("mix", {}, infer.mix, meaning.mix, flops.mix),
        Op("reduce_mean", {}, infer.reduce("reduce_mean"), meaning.reduce_mean, flops.scan),
        Op("reduce_sum", {}, infer.reduce("reduce_sum"), meaning.reduce_sum, flops.scan),
        Op("slice", {"axis": 1, "start": REQUIRED, "stop": REQUIRED}, infer.slice_, meaning.slice_, flops.each(0)),
        Op("concat", {"axis": 1}, infer.concat, meaning.concat, flops.each(0)),
        Op("last_row", {}, infer.last_row, meaning.last_row, flops.each(0), rowwise=False),
        Op("reshape", {"shape": REQUIRED}, infer.reshape, meaning.reshape, flops.each(0), rowwise=False),
        Op("pack", {"layout": REQUIRED}, infer.pack, meaning.identity, flops.each(0), rowwise=False),
        Op("elementwise", {"expr": REQUIRED}, infer.elementwise, meaning.elementwise, flops.each(4), True),
        *(Op(name, {}, infer.binary(name), meaning.binary(name), flops.each(1), True) for name in meaning.BINARY),
        *(Op(name, {}, infer.unary(name), meaning.unary(name), flops.each(8), True) for name in meaning.UNARY),
        Op("scale", {"by": REQUIRED}, infer.unary("scale"), meaning.scale, flops.each(1), True),
        Op("softcap", {"cap": REQUIRED}, infer.unary("softcap"), meaning.softcap, flops.each(12), True),
        Op("clamp_min", {"low": REQUIRED}, infer.unary("clamp_min"), meaning.clamp_min, flops.each(1), True),
    )
}


EFFECTS = frozenset(name for name, row in OPS.items() if row.effect)


def make(op: str, *inputs: Node, **attrs: Any) -> Node:
    """The node of any op in the table: checks the attributes, applies the shape rule, interns.

    Raises:
        ShapeError: the operands do not fit or are not nodes, or an attribute is missing or unknown.
    """
    row = OPS.get(op)
    if row is None:
        raise ShapeError(f"no op is called {op!r}", hint=f"Ops: {', '.join(OPS)}.")
    full = {name: attrs.pop(name, default) for name, default in row.attrs.items()}
    missing = [name for name, v in full.items() if v is REQUIRED]
    if attrs or missing:
        problem = f"unknown attribute {', '.join(attrs)}" if attrs else f"attribute {', '.join(missing)} is missing"
        raise ShapeError(problem, where=op, hint=f"Its attributes: {', '.join(row.attrs) or 'none'}.")
    infer.check_nodes(op, inputs)
    shape, dtype = row.infer(inputs, full)
    return intern(op, inputs, tuple(full.items()), shape, dtype)


def leaf(op: str, name: str, shape: Shape, dtype: DType, **attrs: Any) -> Node:
    """An input, weight or state node."""
    if op not in LEAVES or any(isinstance(d, int) and d <= 0 for d in shape):
        raise ShapeError(f"dims must be positive, found {list(shape)}", where=f"{op} {name!r}")
    if shape and isinstance(shape[-1], int):
        dtype.row_bytes(shape[-1])
    full = {**OPS[op].attrs, "name": name, **attrs}
    return intern(op, (), tuple(full.items()), shape, dtype)


def rebuild(node: Node, inputs: Sequence[Node], **changes: Any) -> Node:
    """The same op over other operands, with some attributes changed; the shape is recomputed."""
    if not changes and tuple(inputs) == node.inputs:
        return node
    if node.op in LEAVES:
        fields = {k: v for k, v in node.attrs if k != "name"} | changes
        return leaf(node.op, node.name, fields.pop("shape", node.shape), fields.pop("dtype", node.dtype), **fields)
    return make(node.op, *inputs, **{**dict(node.attrs), **changes})


def derive(node: Node) -> Node:
    """Recomputes a node from its operands and attributes: the node itself, unless it was built by other means."""
    attrs = dict(node.attrs)
    if node.op in LEAVES:
        return leaf(node.op, attrs.pop("name"), node.shape, node.dtype, **attrs)
    return make(node.op, *node.inputs, **attrs)


def updated(node: Node) -> Node:
    """The state that an op with an effect writes."""
    return node.inputs[-1 if node["aside"] else 0]


def one_row(node: Node) -> Node:
    """For a node with `sequences`: the node for a single row, over leaves of that size."""
    operands = sequences.one_row(node.inputs, dict(node.attrs), node.op)
    return make(node.op, *operands, **{**dict(node.attrs), "sequences": False})


# -- builders: models and rules are written with these ----------------------------------------------------------------


def embedding(table: Node, ids: Node, *, scale: float = 1.0) -> Node:
    """Rows `ids` (i32 [rows]) of table [vocab, width], times `scale` -> f32 [rows, width]."""
    return make("embedding", table, ids, scale=float(scale))


def linear(x: Node, weight: Node, bias: Node | None = None, *, bf16: bool = False) -> Node:
    """x [rows, k] times the transpose of weight [n, k] (any dtype), plus bias [n] -> f32 [rows, n].

    Args:
        bf16: whether precision "auto" may round x to bf16 if the weight is bf16 (see `rlx.passes.quantize`). Not
            for results that are ranked, such as those of a router.
    """
    y = make("linear", x, weight, bf16=bf16)
    return y if bias is None else add(y, bias)


def expert_linear(
    x: Node, ids: Node, weight: Node, up: Node | None = None, *, gated: str | None = None, bf16: bool = False
) -> Node:
    """For every row and slot the linear layer of one expert, ids i32[rows, slots] -> f32 [rows, slots, n].

    x [rows, k], the same for every slot, or [rows, slots, k]; weight [experts, n, k] (any dtype). `gated` is the name
    of an activation; the result is then gated(x weight^T) * (x up^T). `bf16` as in `linear`. The attribute `tiles`, set
    by the pass `quantize`, multiplies bf16 rows in tile registers.
    """
    return make("expert_linear", *filter(None, (x, ids, weight, up)), gated=gated, bf16=bf16)


def causal_conv(state: Node, x: Node, weight: Node) -> Node:
    """Depthwise causal convolution of x [rows, channels] with weight [channels, taps].

    The state f32 [taps - 1, channels] holds the previous rows and is updated in place. With the attribute `aside` it is
    unchanged, and one more operand, an equal state, receives the new value.
    """
    return make("causal_conv", state, x, weight)


def gated_delta(
    state: Node, q: Node, k: Node, v: Node, g: Node, beta: Node, *, scale: float, heads: str = "tiled"
) -> Node:
    """The gated delta rule over rows -> f32 [rows, heads, value_dim]; the state f32 [heads, key_dim, value_dim] is
    updated in place, or with `aside` as in `causal_conv`.

    q, k [rows, key_heads, key_dim]; v [rows, heads, value_dim]; g (log of the decay, at most 0) and beta [rows, heads].
    Value head h belongs to key head h % key_heads ("tiled") or h // (heads / key_heads) ("grouped").
    """
    return make("gated_delta", state, q, k, v, g, beta, scale=float(scale), heads=heads)


def rms_norm(x: Node, weight: Node | None = None, *, eps: float) -> Node:
    """Root-mean-square norm over the last axis, times weight [width] where given."""
    return make("rms_norm", *filter(None, (x, weight)), eps=float(eps))


def quantize(x: Node, out: str = "q8a") -> Node:
    """x [rows, k] quantized for a linear: "q8a", int8 with a scale per 32 elements, or "bf16"."""
    return make("quantize", x, out=out)


def rope_angles(positions: Node, inv_freq: Node, *, scale: float = 1.0) -> Node:
    """cos and sin of positions (i32 [rows]) times inv_freq [n/2] -> f32 [rows, n], cosines first."""
    return make("rope_angles", positions, inv_freq, scale=float(scale))


def rope(x: Node, angles: Node, *, style: str) -> Node:
    """Rotary embedding of x [rows, heads, head_dim], "interleaved" or "neox"; elements beyond angles' width pass."""
    return make("rope", x, angles, style=style)


def kv_write(cache: Node, x: Node, *, at: DimLike = PAST_SEQ, wrap: bool = False) -> Node:
    """Stores x [rows, heads, head_dim] in the state cache [heads, CTX, head_dim] from position `at` on, in place.

    With `wrap` position p is stored at p modulo the capacity, so the cache holds only the newest positions.
    """
    return make("kv_write", cache, x, at=at, dtype=cache.dtype.name, wrap=wrap)


def attention(
    q: Node,
    k: Node,
    v: Node,
    bias: Node | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    length: DimLike = PAST_SEQ + SEQ,
) -> Node:
    """Causal attention of q [rows, heads, head_dim] over caches [kv_heads, CTX, head_dim] -> [rows, heads * head_dim].

    The queries are the last rows of `length` positions; a window w admits keys with query - key < w. With a window the
    caches may wrap (see `kv_write`): they need room for rows + w - 1 positions. The attribute `bf16`, set by the pass
    `quantize`, rounds q, k and v to bf16 first; `out`, set by `fuse`, rounds the result.

    Args:
        bias: f32 [rows, 1 or heads, length], added to the scores after scaling and capping; replaces the causal mask:
            0 opens a key, -inf masks it, including keys after the query. The window still applies.
    """
    operands = filter(None, (q, k, v, bias))
    return make("attention", *operands, scale=float(scale), window=window, softcap=softcap, length=length)


def last_row(x: Node) -> Node:
    """The last row of x [rows, width] -> [1, width]."""
    return make("last_row", x)


def reshape(x: Node, shape: Sequence[DimLike | str]) -> Node:
    """The same elements in another shape; one dim may be -1 and is inferred.

    A reshape of a reshape becomes one reshape; a reshape to the operand's own shape becomes the operand.
    """
    source = x.inputs[0] if x.op == "reshape" else x
    to = tuple(parse_dim(dim) if isinstance(dim, str) else dim for dim in shape)
    if -1 in to:
        at = to.index(-1)
        to = (*to[:at], infer.rest(source, (*to[:at], *to[at + 1 :])), *to[at + 1 :])
    return source if source.shape == to else make("reshape", source, shape=to)


def softmax(x: Node, axis: int = -1) -> Node:
    """exp(x) / sum(exp(x)) over the last axis."""
    _check_last(x, axis, "softmax")
    return make("softmax", x)


def argmax(x: Node) -> Node:
    """Index of the first largest element of each row -> i32 [rows]."""
    return make("argmax", x)


def pick(x: Node) -> Node:
    """As `argmax`, but -1 for a row that holds a NaN or an infinity: greedy sampling from logits."""
    return make("pick", x)


def top_k(x: Node, k: int) -> Node:
    """Indices of the k largest elements of each row, descending -> i32 [rows, k]."""
    return make("top_k", x, k=k)


def take(x: Node, ids: Node) -> Node:
    """Elements ids i32[rows, k] of each row of x [rows, n], or of the one row x [n] -> f32 [rows, k]."""
    return make("take", x, ids)


def mix(values: Node, coefficients: Node) -> Node:
    """Row by row coefficients [rows, m, n] times values [rows, n, width] -> [rows, m, width]."""
    return make("mix", values, coefficients)


def reduce_mean(x: Node) -> Node:
    """The mean over the last axis of x [rows, ..., width] -> [rows, ..., 1]."""
    return make("reduce_mean", x)


def reduce_sum(x: Node) -> Node:
    """The sum over the last axis of x [rows, ..., width] -> [rows, ..., 1]."""
    return make("reduce_sum", x)


def mean(x: Node, axis: int = -1, keepdims: bool = False) -> Node:
    """The mean over the last axis of x [rows, ..., width] -> [rows, ...], or [rows, ..., 1] with `keepdims`."""
    _check_last(x, axis, "mean")
    return reduce_mean(x) if keepdims else reshape(reduce_mean(x), x.shape[:-1])


def sum(x: Node, axis: int = -1, keepdims: bool = False) -> Node:
    """The sum over the last axis of x [rows, ..., width] -> [rows, ...], or [rows, ..., 1] with `keepdims`."""
    _check_last(x, axis, "sum")
    return reduce_sum(x) if keepdims else reshape(reduce_sum(x), x.shape[:-1])


def _check_last(x: Node, axis: int, op: str) -> None:
    infer.check_nodes(op, (x,))
    if axis not in (-1, len(x.shape) - 1):
        hint = "Reduce the last axis: axis=-1. Axis 0 is that of the rows, which are computed independently."
        raise ShapeError(f"axis {axis!r} is not the last one of {x!r}", where=op, hint=hint)


def layer_norm(x: Node, weight: Node | None = None, bias: Node | None = None, *, eps: float = 1e-5) -> Node:
    """(x - mean) / sqrt(variance + eps) over the last axis, times weight [width] and plus bias [width] where given.

    It is the root-mean-square norm of x - mean.
    """
    infer.check_nodes("layer_norm", (x,))
    y = rms_norm(sub(x, reduce_mean(x)), weight, eps=eps)
    return y if bias is None else add(y, bias)


def slice(x: Node, start: int, stop: int, *, axis: int = 1) -> Node:
    """Elements start .. stop of an axis other than the rows; the whole axis returns x itself."""
    return x if (start, stop) == (0, x.shape[axis]) else make("slice", x, axis=axis, start=start, stop=stop)


def concat(*parts: Node, axis: int = 1) -> Node:
    """Joins values along an axis other than the rows."""
    return parts[0] if len(parts) == 1 else make("concat", *parts, axis=axis)


def scale(x: Node, by: float) -> Node:
    """x * by."""
    return make("scale", x, by=float(by))


def softcap(x: Node, cap: float) -> Node:
    """cap * tanh(x / cap)."""
    return make("softcap", x, cap=float(cap))


def clamp_min(x: Node, low: float) -> Node:
    """max(x, low)."""
    return make("clamp_min", x, low=float(low))


def add(x: Operand, y: Operand) -> Node:
    """x + y. One of them may be smaller: a number, a row [width] that applies to every row, a column [..., 1] that
    applies to every element of its row, or a scalar [1].
    """
    return _binary("add", x, y)


def sub(x: Operand, y: Operand) -> Node:
    """x - y; operands as in `add`."""
    return _binary("sub", x, y)


def mul(x: Operand, y: Operand) -> Node:
    """x * y; operands as in `add`."""
    for value, number in ((x, y), (y, x)):
        if isinstance(value, Node) and _is_number(number):
            return scale(value, _number(number, "mul"))
    return _binary("mul", x, y)


def div(x: Operand, y: Operand) -> Node:
    """x / y; operands as in `add`."""
    return _binary("div", x, y)


def maximum(x: Operand, y: Operand) -> Node:
    """The larger of x and y, NaN where either is NaN; operands as in `add`."""
    return _binary("maximum", x, y)


def minimum(x: Operand, y: Operand) -> Node:
    """The smaller of x and y, NaN where either is NaN; operands as in `add`."""
    infer.check_nodes("minimum", [v for v in (x, y) if not _is_number(v)] or (x,))
    return neg(maximum(*(neg(v) if isinstance(v, Node) else -v for v in (x, y))))


def power(x: Node, exponent: float) -> Node:
    """x to a power: a whole number from -8 to 8, 0.5 or -0.5.

    Raises:
        ShapeError: another exponent.
    """
    if exponent in (0.5, -0.5):
        return sqrt(x) if exponent > 0 else div(1.0, sqrt(x))
    if not _is_number(exponent) or exponent != int(exponent) or not 1 <= abs(exponent) <= 8:
        hint = "Give a whole number from 1 to 8, 0.5, or the negative of one of them."
        raise ShapeError(f"no op computes the power {exponent!r}", where="power", hint=hint)
    result = x
    for bit in f"{abs(int(exponent)):b}"[1:]:
        result = mul(result, result)
        result = mul(result, x) if bit == "1" else result
    return result if exponent > 0 else div(1.0, result)


def _binary(op: str, x: Any, y: Any) -> Node:
    """An op of two operands, either of which may be a number or be broadcast to the shape of the other."""
    numbers = [_number(v, op) if _is_number(v) else None for v in (x, y)]
    if numbers == [None, None]:
        infer.check_nodes(op, (x, y))
        if infer.repeats(x.shape, y.shape) and x.dtype is y.dtype is F32:
            return make("elementwise", y, x, expr=(op, 1, 0))
        return make(op, x, y)
    operand = y if _is_number(x) else x
    infer.check_nodes(op, (operand,))
    return make("elementwise", operand, expr=(op, *(0 if n is None else ("const", n) for n in numbers)))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(value: Any, op: str) -> float:
    number = float(value)
    if not isfinite(number):
        raise ShapeError(f"{number} is no finite number", where=op, hint="Give a number that float32 can hold.")
    return number


def matmul(x: Node, y: Node) -> Node:
    """The product of matrices, as `x @ y`.

    x [rows, k] times a weight y [k, n] -> [rows, n]; `x @ w.T` takes a weight w [n, k], as `linear` does. Two values
    with a matrix in each row, [rows, m, k] and [rows, k, n], are multiplied row by row -> [rows, m, n].

    Raises:
        ShapeError: other operands, or sizes that do not fit.
    """
    infer.check_nodes("matmul", (x, y))
    if len(x.shape) == len(y.shape) == 3 and y.op != "weight":
        return make("mix", y, x)
    if y.op != "weight" or len(y.shape) != 2 or len(x.shape) != 2:
        hint = "It multiplies x [rows, k] by a weight [k, n], or matrix by matrix x [rows, m, k] by y [rows, k, n]."
        raise ShapeError(f"found {x!r} and {y!r}", where="matmul", hint=hint)
    if x.shape[1] != y.shape[0]:
        advice = "Write x @ w.T for a weight w [n, k]." if x.shape[1] == y.shape[1] else None
        raise ShapeError(f"{x!r} and {y!r}: {x.shape[1]} and {y.shape[0]} differ", where="matmul", hint=advice)
    if y.dtype.is_quantized and not y.name.endswith(_TRANSPOSED):
        hint = "Its blocks lie along its rows: declare it as [n, k] and write x @ w.T."
        raise ShapeError(f"{y!r} cannot be transposed", where="matmul", hint=hint)
    return linear(x, transpose(y))


def transpose(weight: Node) -> Node:
    """The transpose of a weight [n, k], as `w.T`: the weight `w.T` [k, n], which takes its values from `w`.

    Raises:
        ShapeError: the node is not a weight matrix.
    """
    infer.check_nodes("transpose", (weight,))
    if weight.op != "weight" or len(weight.shape) != 2:
        hint = "Only weights [n, k] can be transposed: the first axis of any other value is that of its rows."
        raise ShapeError(f"found {weight!r}", where="transpose", hint=hint)
    # Skips the checks of `leaf`: a transposed block format is not a valid weight, but `x @ w.T` undoes the transpose.
    name = {**dict(weight.attrs), "name": transposed(weight.name)}
    return intern("weight", (), tuple(name.items()), weight.shape[::-1], weight.dtype)


def transposed(name: str) -> str:
    """The name of a weight's transpose: `w` -> `w.T` and back."""
    return name.removesuffix(_TRANSPOSED) if name.endswith(_TRANSPOSED) else name + _TRANSPOSED


def declared(name: str) -> str:
    """The name that a weight was declared with: `w` of `w` and of its transpose."""
    return name.removesuffix(_TRANSPOSED)


def index(x: Node, key: Any) -> Node:
    """Part of a value, as `x[key]`: numbers and slices for axes from 1 on, -1 for the last row, ids for rows of a
    table.

    Raises:
        ShapeError: another kind of key, or an index that is out of range or not known at compile time.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and isinstance(keys[0], Node):
        return embedding(x, keys[0])
    if Ellipsis in [k for k in keys if not isinstance(k, Node)]:
        at = keys.index(Ellipsis)
        keys = (*keys[:at], *[builtins.slice(None)] * (len(x.shape) - len(keys) + 1), *keys[at + 1 :])
    if len(keys) > len(x.shape):
        raise ShapeError(f"{len(keys)} indices for {x!r}", where="index")
    part, gone = x, list[int]()
    for axis, chosen in enumerate(keys):
        part = _rows(part, chosen) if axis == 0 else _cut(part, axis, chosen)
        gone += [axis] * isinstance(chosen, Integral)
    return reshape(part, [d for axis, d in enumerate(part.shape) if axis not in gone]) if gone else part


def _rows(x: Node, key: Any) -> Node:
    if key == builtins.slice(None):
        return x
    if key in (-1, builtins.slice(-1, None)):
        return last_row(x)
    what = f"rows cannot be chosen by {key!r}: how many there are is known at run time"
    raise ShapeError(what, where="index", hint="x[-1:] is the last row; the axes after the first can be cut.")


def _cut(x: Node, axis: int, key: Any) -> Node:
    size = x.shape[axis]
    if not isinstance(size, int) or not isinstance(key, Integral | builtins.slice):
        hint = "Cut axes of a fixed size, by numbers and slices."
        raise ShapeError(f"axis {axis} of {x!r} cannot be cut by {key!r}", where="index", hint=hint)
    if isinstance(key, Integral):
        start, stop, step = int(key) + size * (key < 0), int(key) + size * (key < 0) + 1, 1
    else:
        start, stop, step = key.indices(size)
    if step != 1 or not 0 <= start < stop <= size:
        hint = "Slices have a step of 1 and at least one element."
        raise ShapeError(f"{key!r} is no part of axis {axis} of {x!r}", where="index", hint=hint)
    return slice(x, start, stop, axis=axis)


def silu(x: Node) -> Node:
    """x * sigmoid(x)."""
    return make("silu", x)


def gelu_tanh(x: Node) -> Node:
    """GELU, tanh form."""
    return make("gelu_tanh", x)


def gelu_erf(x: Node) -> Node:
    """GELU, exact form."""
    return make("gelu_erf", x)


def sigmoid(x: Node) -> Node:
    """1 / (1 + exp(-x))."""
    return make("sigmoid", x)


def tanh(x: Node) -> Node:
    """Hyperbolic tangent."""
    return make("tanh", x)


def exp(x: Node) -> Node:
    """e to the x."""
    return make("exp", x)


def softplus(x: Node) -> Node:
    """log(1 + exp(x))."""
    return make("softplus", x)


def relu(x: Node) -> Node:
    """The positive part."""
    return make("relu", x)


def sqrt(x: Node) -> Node:
    """Square root."""
    return make("sqrt", x)


def neg(x: Node) -> Node:
    """-x."""
    return make("neg", x)


# Defined here because node.py cannot import the ops.
OPERATORS.update(
    add=add, sub=sub, mul=mul, div=div, neg=neg, power=power, matmul=matmul, transpose=transpose, index=index,
    reshape=reshape, sum=sum, mean=mean,
)  # fmt: skip

#: The public API: the builders, without the table and the compiler's functions.
__all__ = [
    "add", "argmax", "attention", "causal_conv", "clamp_min", "concat", "div", "embedding", "exp", "expert_linear",
    "gated_delta", "gelu_erf", "gelu_tanh", "index", "kv_write", "last_row", "layer_norm", "linear", "matmul",
    "maximum", "mean", "minimum", "mix", "mul", "neg", "pick", "power", "quantize", "reduce_mean", "reduce_sum", "relu",
    "reshape", "rms_norm", "rope", "rope_angles", "scale", "sigmoid", "silu", "slice", "softcap", "softmax", "softplus",
    "sqrt", "sub", "sum", "take", "tanh", "top_k", "transpose",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
