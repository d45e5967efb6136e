"""THE op table: name, attributes, shape rule, NumPy meaning, cost. One row an op; the builders below make the nodes.

The meaning lives in `rlx.ir.meaning`. Floating-point values are float32 unless a row says otherwise; weights may have
any dtype of the table in `rlx.ir.dtypes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from rlx.errors import ShapeError
from rlx.ir import infer, meaning
from rlx.ir.dims import PAST_SEQ, SEQ, Dim, DimLike, Shape, value
from rlx.ir.dtypes import DType
from rlx.ir.node import LEAVES, OPERATORS, Node, intern

Sizes = Sequence[tuple[int, ...]]
Flops = Callable[[Sizes, tuple[int, ...], Mapping[str, Any]], int]


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
    """

    name: str
    attrs: Mapping[str, Any]
    infer: infer.Rule
    meaning: meaning.Meaning
    flops: Flops
    elementwise: bool = False
    rowwise: bool = True


REQUIRED = object()


def _each(count: int) -> Flops:
    return lambda ins, out, attrs: count * prod(out)


def _scan(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return prod(ins[0])


def _linear_flops(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    return (2 if attrs["gated"] else 1) * 2 * ins[0][0] * prod(ins[1])


def _attention_flops(ins: Sizes, out: tuple[int, ...], attrs: Mapping[str, Any]) -> int:
    """Two products of head_dim for each query head and visible key."""
    rows, heads, head_dim = ins[0]
    ends = range(attrs["length"] - rows + 1, attrs["length"] + 1)
    visible = sum(min(end, attrs["window"] or end) for end in ends)
    return 4 * heads * head_dim * visible


_ROPE = {"style": REQUIRED, "norm_eps": None}
_WRITE = {"at": PAST_SEQ, "dtype": "f32"}
_LEAF = {"name": REQUIRED}

OPS: dict[str, Op] = {
    row.name: row
    for row in (
        Op("input", _LEAF, infer.leaf, meaning.identity, _each(0), rowwise=False),
        Op("weight", _LEAF, infer.leaf, meaning.identity, _each(0), rowwise=False),
        Op("state", {**_LEAF, "layout": "rows"}, infer.leaf, meaning.identity, _each(0), rowwise=False),
        Op("embedding", {"scale": 1.0}, infer.embedding, meaning.embedding, _each(1)),
        Op("linear", {"gated": None, "bias": False, "residual": False}, infer.linear, meaning.linear, _linear_flops),
        Op("rms_norm", {"eps": REQUIRED, "out": "f32"}, infer.rms_norm, meaning.rms_norm, _each(4)),
        Op("quantize", {}, infer.quantize, meaning.quantize, _each(3)),
        Op("rope_angles", {"scale": 1.0}, infer.rope_angles, meaning.rope_angles, _each(40)),
        Op("rope", _ROPE, infer.rope, meaning.rope, _each(6)),
        Op("kv_write", _WRITE, infer.kv_write, meaning.kv_write, _each(0), rowwise=False),
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
            {"scale": REQUIRED, "window": None, "softcap": None, "length": PAST_SEQ + SEQ},
            infer.attention,
            meaning.attention,
            _attention_flops,
        ),
        Op("softmax", {}, infer.softmax, meaning.softmax, _each(8)),
        Op("argmax", {}, infer.argmax, meaning.argmax, _scan),
        Op("top_k", {"k": REQUIRED}, infer.top_k, meaning.top_k, _scan),
        Op("last_row", {}, infer.last_row, meaning.last_row, _each(0), rowwise=False),
        Op("reshape", {"shape": REQUIRED}, infer.reshape, meaning.reshape, _each(0), rowwise=False),
        Op("pack", {"layout": REQUIRED}, infer.pack, meaning.identity, _each(0), rowwise=False),
        Op("elementwise", {"expr": REQUIRED}, infer.elementwise, meaning.elementwise, _each(4)),
        *(Op(name, {}, infer.binary(name), meaning.binary(name), _each(1), True) for name in meaning.BINARY),
        *(Op(name, {}, infer.unary(name), meaning.unary(name), _each(8), True) for name in meaning.UNARY),
        Op("scale", {"by": REQUIRED}, infer.unary("scale"), meaning.scale, _each(1), True),
        Op("softcap", {"cap": REQUIRED}, infer.unary("softcap"), meaning.softcap, _each(12), True),
    )
}


def make(op: str, *inputs: Node, **attrs: Any) -> Node:
    """The node of any op in the table: checks the attributes, applies the shape rule, interns.

    Raises:
        ShapeError: the operands do not fit, an attribute is missing or unknown.
    """
    row = OPS.get(op)
    if row is None:
        raise ShapeError(f"no op is called {op!r}", hint=f"Ops: {', '.join(OPS)}.")
    full = {name: attrs.pop(name, default) for name, default in row.attrs.items()}
    missing = [name for name, v in full.items() if v is REQUIRED]
    if attrs or missing:
        problem = f"unknown attribute {', '.join(attrs)}" if attrs else f"attribute {', '.join(missing)} is missing"
        raise ShapeError(problem, where=op, hint=f"Its attributes: {', '.join(row.attrs) or 'none'}.")
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
    """The same op over other operands, with some attributes changed; shapes are derived anew."""
    if not changes and tuple(inputs) == node.inputs:
        return node
    if node.op in LEAVES:
        fields = {k: v for k, v in node.attrs if k != "name"} | changes
        return leaf(node.op, node.name, fields.pop("shape", node.shape), fields.pop("dtype", node.dtype), **fields)
    return make(node.op, *inputs, **{**dict(node.attrs), **changes})


def derive(node: Node) -> Node:
    """What the op table makes of a node's operands and attributes: the node itself, unless it was forged."""
    attrs = dict(node.attrs)
    if node.op in LEAVES:
        return leaf(node.op, attrs.pop("name"), node.shape, node.dtype, **attrs)
    return make(node.op, *node.inputs, **attrs)


def cost(node: Node, env: Mapping[str, int]) -> tuple[int, int]:
    """(floating-point operations, bytes read and written) of one node when the symbols have these values."""
    if node.op in LEAVES or node.op in ("reshape", "pack"):
        return 0, 0
    attrs = {k: value(v, env) if isinstance(v, Dim) else v for k, v in node.attrs}
    sizes, result = [_size(i, env) for i in node.inputs], _size(node, env)
    read, written = _touched(node, sizes, result, attrs)
    moved = sum(i.dtype.size(s) for i, s in zip(node.inputs, read, strict=True)) + node.dtype.size(written)
    return OPS[node.op].flops(sizes, result, attrs), moved


def _size(node: Node, env: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(value(d, env) for d in node.shape)


def _touched(
    node: Node, sizes: list[tuple[int, ...]], result: tuple[int, ...], attrs: Mapping[str, Any]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The part of each operand that is read, and of the result that is written."""
    if node.op == "embedding":
        return [result, sizes[1]], result
    if node.op == "last_row":
        return [result], result
    if node.op in ("kv_write", "rope_kv_write"):
        rows, heads, head_dim = sizes[1]
        return [(0, 0), *sizes[1:]], (heads, rows, head_dim)
    if node.op == "attention":
        oldest = (attrs["window"] or attrs["length"]) + result[0] - 1
        caches = [(s[0], min(attrs["length"], oldest), s[2]) for s in sizes[1:]]
        return [sizes[0], *caches], result
    return sizes, result


# -- builders: the vocabulary in which models and rules are written ---------------------------------------------------


def embedding(table: Node, ids: Node, *, scale: float = 1.0) -> Node:
    """Rows `ids` (i32 [rows]) of table [vocab, width], times `scale` -> f32 [rows, width]."""
    return make("embedding", table, ids, scale=float(scale))


def linear(x: Node, weight: Node, bias: Node | None = None) -> Node:
    """x [rows, k] times the transpose of weight [n, k] (any dtype), plus bias [n] -> f32 [rows, n]."""
    y = make("linear", x, weight)
    return y if bias is None else add(y, bias)


def rms_norm(x: Node, weight: Node | None = None, *, eps: float) -> Node:
    """Root-mean-square norm over the last axis, times weight [width] where given."""
    return make("rms_norm", *filter(None, (x, weight)), eps=float(eps))


def quantize(x: Node) -> Node:
    """x [rows, k] as int8 activation rows (dtype q8a): 32-element blocks, each with its own scale."""
    return make("quantize", x)


def rope_angles(positions: Node, inv_freq: Node, *, scale: float = 1.0) -> Node:
    """cos and sin of positions (i32 [rows]) times inv_freq [n/2] -> f32 [rows, n], cosines first."""
    return make("rope_angles", positions, inv_freq, scale=float(scale))


def rope(x: Node, angles: Node, *, style: str) -> Node:
    """Rotary embedding of x [rows, heads, head_dim], "interleaved" or "neox"; elements beyond angles' width pass."""
    return make("rope", x, angles, style=style)


def kv_write(cache: Node, x: Node, *, at: DimLike = PAST_SEQ) -> Node:
    """Stores x [rows, heads, head_dim] in the state cache [heads, CTX, head_dim] from position `at` on, in place."""
    return make("kv_write", cache, x, at=at, dtype=cache.dtype.name)


def attention(
    q: Node,
    k: Node,
    v: Node,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    length: DimLike = PAST_SEQ + SEQ,
) -> Node:
    """Causal attention of q [rows, heads, head_dim] over caches [kv_heads, CTX, head_dim] -> [rows, heads * head_dim].

    The queries are the last rows of `length` positions; a window w admits keys with query - key < w.
    """
    return make("attention", q, k, v, scale=float(scale), window=window, softcap=softcap, length=length)


def last_row(x: Node) -> Node:
    """The last row of x [rows, width] -> [1, width]."""
    return make("last_row", x)


def reshape(x: Node, shape: Sequence[DimLike]) -> Node:
    """The same elements in another shape; a reshape of a reshape is one reshape, to its own shape none."""
    source = x.inputs[0] if x.op == "reshape" else x
    return source if source.shape == tuple(shape) else make("reshape", source, shape=tuple(shape))


def softmax(x: Node) -> Node:
    """exp(x) / sum(exp(x)) over the last axis."""
    return make("softmax", x)


def argmax(x: Node) -> Node:
    """Index of the first largest element of each row -> i32 [rows]."""
    return make("argmax", x)


def top_k(x: Node, k: int) -> Node:
    """Indices of the k largest elements of each row, descending -> i32 [rows, k]."""
    return make("top_k", x, k=k)


def scale(x: Node, by: float) -> Node:
    """x * by."""
    return make("scale", x, by=float(by))


def softcap(x: Node, cap: float) -> Node:
    """cap * tanh(x / cap)."""
    return make("softcap", x, cap=float(cap))


def add(x: Node, y: Node) -> Node:
    """x + y; y may be one row [width], added to every row."""
    return make("add", x, y)


def sub(x: Node, y: Node) -> Node:
    """x - y."""
    return make("sub", x, y)


def mul(x: Node, y: Node) -> Node:
    """x * y; y may be one row [width]."""
    return make("mul", x, y)


def div(x: Node, y: Node) -> Node:
    """x / y."""
    return make("div", x, y)


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


def neg(x: Node) -> Node:
    """-x."""
    return make("neg", x)


# Here and not in node.py, which cannot know the ops.
OPERATORS.update(add=add, sub=sub, mul=mul)
