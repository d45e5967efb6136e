"""Builders: the functions that models and rules are written with. They make nodes of the ops in `rlx.ir.op_table`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeAlias

from rlx.errors import ShapeError
from rlx.ir import infer
from rlx.ir.dims import PAST_SEQ, SEQ, DimLike, parse_dim
from rlx.ir.dtypes import F32
from rlx.ir.node import Node, intern
from rlx.ir.op_table import OPS as OPS
from rlx.ir.op_table import derive as derive
from rlx.ir.op_table import leaf as leaf
from rlx.ir.op_table import make as make
from rlx.ir.op_table import of_segment as of_segment
from rlx.ir.op_table import rebuild as rebuild
from rlx.ir.op_table import updated as updated

#: An operand of arithmetic.
Operand: TypeAlias = Node | float

_TRANSPOSED = ".T"  # suffix of the name of a transposed weight


def embedding(table: Node, ids: Node, *, scale: float = 1.0) -> Node:
    """Rows `ids` (i32 [rows] or [rows, slots]) of table [vocab, width], times `scale` -> f32 [*ids, width]."""
    return make("embedding", table, ids, scale=float(scale))


def overlay_rows(x: Node, rows: Node, index: Node) -> Node:
    """x [rows, width] with some rows replaced by rows of `rows` f32 [extra, width]: row r is rows[index[r]], or x[r]
    where index[r] (i32 [rows]) is negative.

    A prompt with images: x are the embeddings of its tokens, `rows` the rows of the images.
    """
    return make("overlay_rows", x, rows, index)


def linear(x: Node, weight: Node, bias: Node | None = None, *, bf16: bool = False) -> Node:
    """x [rows, k] times the transpose of weight [n, k] (any dtype), plus bias [n] -> f32 [rows, n].

    Or each head by its own matrix: x [rows, heads, k] and weight [heads, n, k] -> f32 [rows, heads, n].

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
    state: Node,
    q: Node,
    k: Node,
    v: Node,
    g: Node,
    beta: Node,
    *,
    scale: float,
    heads: str = "tiled",
    corrects: bool = True,
) -> Node:
    """The gated delta rule over rows -> f32 [rows, heads, value_dim]; the state f32 [heads, key_dim, value_dim] is
    updated in place, or with `aside` as in `causal_conv`. Without `corrects` it is the recurrence of Mamba-2.

    q, k [rows, key_heads, key_dim]; v [rows, heads, value_dim]; g (log of the decay, at most 0) and beta [rows, heads].
    Value head h belongs to key head h % key_heads ("tiled") or h // (heads / key_heads) ("grouped").
    """
    return make("gated_delta", state, q, k, v, g, beta, scale=float(scale), heads=heads, corrects=corrects)


def rms_norm(x: Node, weight: Node | None = None, *, eps: float) -> Node:
    """Root-mean-square norm over the last axis, times weight [width] where given."""
    return make("rms_norm", *filter(None, (x, weight)), eps=float(eps))


def quantize(x: Node, out: str = "q8a") -> Node:
    """x [rows, k] quantized for a linear: "q8a", int8 with a scale per 32 elements, or "bf16"."""
    return make("quantize", x, out=out)


def rope_angles(
    positions: Node,
    inv_freq: Node,
    *,
    scale: float = 1.0,
    sections: Sequence[int] | None = None,
    interleaved: bool = False,
) -> Node:
    """cos and sin of positions (i32 [rows]) times inv_freq [n/2] -> f32 [rows, n], cosines first.

    Args:
        scale: factor of cosines and sines.
        sections: for positions of several components, i32 [rows, len(sections)], such as time, row and column
            (M-RoPE, arXiv 2409.12191): how many frequencies turn by each component. The sum is n/2. A rotation in two
            dimensions has two sections, and each of its frequencies twice in inv_freq.
        interleaved: whether the components take turns, as in Qwen 3.5: frequency i belongs to component
            c = i % len(sections) if i // len(sections) < sections[c], else to component 0. Otherwise the first
            sections[0] frequencies belong to component 0, the next sections[1] to component 1, and so on.
    """
    sizes = None if sections is None else tuple(sections)
    return make("rope_angles", positions, inv_freq, scale=float(scale), sections=sizes, interleaved=interleaved)


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
    length: DimLike | None = None,
    causal: bool = True,
    around: bool = False,
    visible: Node | None = None,
    sinks: Node | None = None,
    any_scale: bool = False,
) -> Node:
    """Attention of q [rows, heads, head_dim] over keys and values -> f32 [rows, heads * head_dim]; causal by default.

    k and v are caches [kv_heads, CTX, head_dim], or plain f32 values [keys, kv_heads, head_dim] of which all rows are
    keys (`as_cache`; values [kv_heads, keys, head_dim] are taken, too, where they can not be rows). heads is a multiple
    of kv_heads. The queries are the last rows of `length` positions; a window w admits keys with query - key < w. With
    a window the caches may wrap (see `kv_write`): they need room for rows + w - 1 positions. The attribute `bf16`, set
    by the pass `quantize`, rounds q, k and v to bf16 first; `out`, set by `fuse`, rounds the result.

    Args:
        bias: f32 [rows, 1 or heads, length], added to the scores after scaling and capping; replaces the causal mask:
            0 opens a key, -inf masks it, including keys after the query. The window still applies.
        length: number of positions of the sequence, PAST_SEQ + SEQ for caches. All plain keys are positions.
        causal: False admits every key, within the window.
        around: the window is on both sides: it admits keys with |query - key| < w.
        visible: i32 [rows]: row r sees the keys at positions t <= visible[r], within its window, in place of the causal
            mask. Positions count from the start of the row's sequence, and the last one is length - 1. So the rows of a
            image see each other if each has the image's last position here; the same call must bring all of them.
            A row that sees no key is NaN.
        sinks: f32 [heads], a score more in the softmax of each query head, for which there is no value: the weights of
            the keys then sum to less than 1 (arXiv 2309.17453).
        any_scale: whether precision "auto" may round q, k and v to bf16 although `scale` is not that of the head size,
            which magnifies the rounding (see `rlx.passes.quantize`).

    Raises:
        ShapeError: the operands do not fit, or more than one of `bias`, `visible`, `around` and `causal=False` is
            given.
    """
    infer.check_nodes("attention", (q, k, v, *filter(None, (sinks, bias, visible))))
    options = {"bias": bias, "visible": visible, "none": not causal, "around": around}
    masks = [name for name, value in options.items() if value]
    if len(masks) > 1:
        hint = "Give one of bias, visible, around and causal=False: each replaces the causal mask."
        raise ShapeError("more than one mask is given", where="attention", hint=hint)
    k, v = (_cached(q, x) for x in (k, v))
    if length is None:
        length = k.shape[1] - k["room"] if k.op == "as_cache" else PAST_SEQ + SEQ
    operands = filter(None, (q, k, v, sinks, bias, visible))
    attrs = {"scale": float(scale), "window": window, "softcap": softcap, "length": length, "any_scale": any_scale}
    return make("attention", *operands, **attrs, mask=masks[0] if masks else "causal", sinks=sinks is not None)


def as_cache(x: Node, *, order: str = "rows") -> Node:
    """Plain keys or values [positions, heads, head_dim] in the form of a cache: f32 [heads, positions, head_dim].

    `order` "heads" is for x [heads, positions, head_dim]. The attributes `dtype`, set by the pass `quantize`, and
    `layout` and `room`, more places after the last position, set by the pass `layout`, say how the result lies in
    memory.
    """
    return make("as_cache", x, order=order)


def _cached(q: Node, x: Node) -> Node:
    """A cache, or a plain value in the form of one: rows come first, unless only heads can."""
    if infer.is_cache(x) or len(x.shape) != 3 or len(q.shape) != 3:
        return x
    heads, kv_heads = q.shape[1], x.shape[1]
    rows = isinstance(kv_heads, int) and isinstance(heads, int) and heads % kv_heads == 0
    return as_cache(x, order="rows" if rows or not isinstance(x.shape[0], int) else "heads")


def last_row(x: Node) -> Node:
    """The last row of x [rows, width] -> [1, width]."""
    return make("last_row", x)


def take_rows(x: Node, rows: Node) -> Node:
    """The rows of x [n, ...] whose numbers are in `rows` i32 [m], in this order -> [m, ...]."""
    return make("take_rows", x, rows)


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


def top_k(x: Node, k: int, *, groups: int = 1, kept: int = 1) -> Node:
    """Indices of the k largest elements of each row, descending -> i32 [rows, k].

    Args:
        groups: the elements form this many groups of neighbours, of which the `kept` are searched whose two largest
            elements have the largest sums (arXiv 2412.19437).
    """
    return make("top_k", x, k=k, groups=groups, kept=kept)


def take(x: Node, ids: Node) -> Node:
    """Elements ids i32[rows, k] of each row of x [rows, n], or of the one row x [n] -> f32 [rows, k]."""
    return make("take", x, ids)


def relabel(ids: Node, labels: Node) -> Node:
    """labels[id] for each of ids i32[rows], or the id where it is negative -> i32 [rows].

    Args:
        labels: f32 [n], whole numbers below 2**24, which float32 holds exactly.
    """
    return make("relabel", ids, labels)


def mix(values: Node, coefficients: Node) -> Node:
    """Row by row coefficients [rows, m, n] times values [rows, n, width] -> [rows, m, width]."""
    return make("mix", values, coefficients)


def reduce_mean(x: Node, *, axis: int = -1) -> Node:
    """The mean over the last axis of x [rows, ..., width] -> [rows, ..., 1], or over axis 1 of x [rows, n, width] ->
    [rows, 1, width].
    """
    return make("reduce_mean", x, axis=axis)


def reduce_sum(x: Node, *, axis: int = -1) -> Node:
    """The sum over an axis as in `reduce_mean`."""
    return make("reduce_sum", x, axis=axis)


def mean(x: Node, axis: int = -1, keepdims: bool = False) -> Node:
    """The mean over the last axis of x [rows, ..., width], or over axis 1 of x [rows, n, width]; the axis stays, with
    size 1, with `keepdims`.
    """
    return _reduced(reduce_mean, x, axis, keepdims, "mean")


def sum(x: Node, axis: int = -1, keepdims: bool = False) -> Node:
    """The sum over an axis as in `mean`."""
    return _reduced(reduce_sum, x, axis, keepdims, "sum")


def _reduced(reduce: Callable[..., Node], x: Node, axis: int, keepdims: bool, op: str) -> Node:
    infer.check_nodes(op, (x,))
    if len(x.shape) == 3 and axis in (1, -2):
        return reduce(x, axis=1) if keepdims else reshape(reduce(x, axis=1), (x.shape[0], x.shape[2]))
    _check_last(x, axis, op)
    return reduce(x) if keepdims else reshape(reduce(x), x.shape[:-1])


def _check_last(x: Node, axis: int, op: str) -> None:
    infer.check_nodes(op, (x,))
    if axis not in (-1, len(x.shape) - 1):
        hint = "Reduce the last axis, axis=-1. Axis 0 is that of the rows, which are computed independently."
        raise ShapeError(f"axis {axis!r} is not the last one of {x!r}", where=op, hint=hint)


def layer_norm(x: Node, weight: Node | None = None, bias: Node | None = None, *, eps: float = 1e-5) -> Node:
    """(x - mean) / sqrt(variance + eps) over the last axis, times weight [width] and plus bias [width] where given."""
    if weight is None and bias is not None:
        return add(make("layer_norm", x, eps=float(eps)), bias)
    return make("layer_norm", *filter(None, (x, weight, bias)), eps=float(eps))


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


def clamp(x: Node, low: float | None = None, high: float | None = None) -> Node:
    """min(max(x, low), high), with one bound or both; NaN stays NaN."""
    bounds = {"low": low, "high": high}
    return make("clamp", x, **{name: None if v is None else _number(v, "clamp") for name, v in bounds.items()})


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


def gelu_quick(x: Node) -> Node:
    """x * sigmoid(1.702 x), an approximation of GELU that some vision towers were trained with."""
    return mul(x, sigmoid(scale(x, 1.702)))


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


#: The public API: the builders, without the table and the compiler's functions.
__all__ = [
    "add", "argmax", "as_cache", "attention", "causal_conv", "clamp", "concat", "div", "embedding", "exp",
    "expert_linear", "gated_delta", "gelu_erf", "gelu_quick", "gelu_tanh", "index", "kv_write", "last_row",
    "layer_norm", "linear", "matmul", "maximum", "mean", "minimum", "mix", "mul", "neg", "overlay_rows", "pick",
    "power", "quantize", "reduce_mean", "reduce_sum", "relabel", "relu",
    "reshape", "rms_norm", "rope", "rope_angles", "scale", "sigmoid", "silu", "slice", "softcap", "softmax", "softplus",
    "sqrt", "sub", "sum", "take", "take_rows", "tanh", "top_k", "transpose",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
