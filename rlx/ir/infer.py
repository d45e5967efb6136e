"""Shape rules: (operands, attributes) -> (shape, dtype) of a result, or a `ShapeError` that names op and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rlx.errors import ShapeError
from rlx.ir.dims import Dim, DimLike, Shape
from rlx.ir.dtypes import F32, I32, Q8A, DType
from rlx.ir.meaning import BINARY, UNARY
from rlx.ir.node import Node

Inputs = tuple[Node, ...]
Attrs = Mapping[str, Any]
Rule = Callable[[Inputs, Attrs], tuple[Shape, DType]]


def _fail(op: str, inputs: Inputs, expected: str) -> NoReturn:
    found = ", ".join(f"{n.dtype}[{', '.join(map(str, n.shape))}]" for n in inputs)
    raise ShapeError(f"found operands {found or 'none'}", where=op, hint=f"Expected {expected}.")


def _check(ok: bool, op: str, inputs: Inputs, expected: str) -> None:
    if not ok:
        _fail(op, inputs, expected)


def leaf(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    raise ShapeError("leaves are made by Graph.input, Graph.weight and Graph.state")


def unary(op: str) -> Rule:
    """One f32 operand, a result of its shape."""

    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
        _check(len(inputs) == 1 and inputs[0].dtype is F32, op, inputs, "one f32 operand")
        return inputs[0].shape, F32

    return rule


def binary(op: str) -> Rule:
    """Two f32 operands; the second may be a row or a scalar."""
    expected = "two f32 operands of one shape, or the second a row [width] or a scalar [1]"

    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
        _check(len(inputs) == 2 and all(n.dtype is F32 for n in inputs), op, inputs, expected)
        x, y = (n.shape for n in inputs)
        _check(y == x or y in (x[-1:], (1,)), op, inputs, expected)
        return x, F32

    return rule


ARITY = {**dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2), "scale": 1, "softcap": 1, "const": 0}


def elementwise(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    full = inputs[0].shape if inputs else ()
    fits = all(n.dtype is F32 and n.shape in (full, full[-1:], (1,)) for n in inputs)
    _check(
        bool(inputs) and fits, "elementwise", inputs, "f32 operands of the first one's shape, rows of it, or scalars"
    )
    _check_expr(attrs["expr"], len(inputs))
    return full, F32


def _check_expr(expr: Any, count: int) -> None:
    """An expression is an operand's number below `count`, or (op, its operands..., its attribute values...)."""
    if isinstance(expr, int) and 0 <= expr < count:
        return
    if not (isinstance(expr, tuple) and expr and expr[0] in ARITY and len(expr) > ARITY[expr[0]]):
        hint = f"Write one of 0..{count - 1} or (op, argument...) with op one of {', '.join(ARITY)}."
        raise ShapeError(f"{expr!r} is no expression over {count} operands", where="elementwise", hint=hint)
    for argument in expr[1 : 1 + ARITY[expr[0]]]:
        _check_expr(argument, count)


def softmax(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = len(inputs) == 1 and inputs[0].dtype is F32 and len(inputs[0].shape) >= 2
    _check(ok, "softmax", inputs, "f32 x [rows, ..., width]")
    return inputs[0].shape, F32


def embedding(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(
        len(inputs) == 2 and len(inputs[0].shape) == 2 and len(inputs[1].shape) == 1 and inputs[1].dtype is I32,
        "embedding", inputs, "table [vocab, width] and ids i32[rows]",
    )  # fmt: skip
    return (inputs[1].shape[0], inputs[0].shape[1]), F32


def linear(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    parts = 2 if attrs["gated"] else 1
    count = 1 + parts * (2 if attrs["bias"] else 1) + bool(attrs["residual"])
    expected = "x [rows, k], weight [n, k]" + ", up [n, k]" * (parts == 2) + ", bias [n]" * bool(attrs["bias"])
    expected += ", residual [rows, n]" * bool(attrs["residual"])
    _check(len(inputs) == count and len(inputs[0].shape) == 2, "linear", inputs, expected)
    rows, k = inputs[0].shape
    n = inputs[1].shape[0] if inputs[1].shape else 0
    weights, rest = inputs[1 : 1 + parts], inputs[1 + parts :]
    fits = all(w.shape == (n, k) for w in weights) and inputs[0].dtype in (F32, Q8A)
    fits = fits and all(r.dtype is F32 for r in rest)
    if attrs["residual"]:
        rest, fits = rest[:-1], fits and rest[-1].shape == (rows, n)
    _check(fits and all(b.shape == (n,) for b in rest), "linear", inputs, expected)
    return (rows, n), F32


def rms_norm(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = (
        len(inputs) in (1, 2)
        and inputs[0].dtype is F32
        and len(inputs[0].shape) >= 2
        and (len(inputs) == 1 or (inputs[1].shape == inputs[0].shape[-1:] and inputs[1].dtype is F32))
    )
    _check(ok, "rms_norm", inputs, "f32 x [rows, ..., width] and optionally f32 weight [width]")
    if attrs["out"] not in ("f32", "q8a"):
        raise ShapeError(f"out must be f32 or q8a, found {attrs['out']!r}", where="rms_norm")
    return (quantize(inputs[:1], {})) if attrs["out"] == "q8a" else (inputs[0].shape, F32)


def quantize(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = len(inputs) == 1 and inputs[0].dtype is F32 and len(inputs[0].shape) == 2
    _check(ok and (not isinstance(inputs[0].shape[-1], int) or inputs[0].shape[-1] % 32 == 0), "quantize", inputs,
           "f32 x [rows, k] with k a multiple of 32")  # fmt: skip
    return inputs[0].shape, Q8A


def rope_angles(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = len(inputs) == 2 and [n.dtype for n in inputs] == [I32, F32] and all(len(n.shape) == 1 for n in inputs)
    _check(ok, "rope_angles", inputs, "positions i32[rows] and inv_freq f32[n/2]")
    return (inputs[0].shape[0], inputs[1].shape[0] * 2), F32


def rope(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    expected = "f32 x [rows, heads, head_dim], weight [head_dim] if norm_eps is given, angles [rows, n <= head_dim]"
    _check(
        len(inputs) == (2 if attrs["norm_eps"] is None else 3) and len(inputs[0].shape) == 3, "rope", inputs, expected
    )
    x, angles = inputs[0], inputs[-1]
    ok = x.dtype is F32 and angles.dtype is F32
    ok = ok and len(angles.shape) == 2 and angles.shape[0] == x.shape[0] and _at_most(angles.shape[1], x.shape[2])
    _check(ok and (len(inputs) == 2 or inputs[1].shape == x.shape[2:]), "rope", inputs, expected)
    if isinstance(attrs["style"], str) and attrs["style"] not in ("interleaved", "neox"):
        raise ShapeError(f"style must be interleaved or neox, found {attrs['style']!r}", where="rope")
    return x.shape, F32


def _at_most(a: DimLike, b: DimLike) -> bool:
    return (
        a == b or (isinstance(a, int) and isinstance(b, int) and a <= b) or (isinstance(a, Dim) and isinstance(b, Dim))
    )


def kv_write(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = len(inputs) == 2 and inputs[0].op == "state" and len(inputs[0].shape) == 3 and len(inputs[1].shape) == 3
    ok = ok and (inputs[0].shape[0], inputs[0].shape[2]) == inputs[1].shape[1:] and inputs[1].dtype is F32
    _check(ok, "kv_write", inputs, "a state [heads, CTX, head_dim] and f32 x [rows, heads, head_dim]")
    if isinstance(attrs["dtype"], str):  # else it is the variable of a rule
        _check(attrs["dtype"] == inputs[0].dtype.name, "kv_write", inputs, f"a cache of dtype {attrs['dtype']}")
    return inputs[0].shape, inputs[0].dtype


def rope_kv_write(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    rope(inputs[1:], attrs)
    return kv_write(inputs[:2], attrs)


def attention(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    expected = "q [rows, heads, head_dim] and caches k, v [kv_heads, CTX, head_dim], heads a multiple of kv_heads"
    _check(len(inputs) == 3 and all(len(n.shape) == 3 for n in inputs), "attention", inputs, expected)
    q, k, v = inputs
    heads, kv_heads = q.shape[1], k.shape[0]
    if not (isinstance(heads, int) and isinstance(kv_heads, int)):  # only in the patterns of rules
        return (q.shape[0], v.shape[2] * heads if isinstance(heads, int) else q.shape[2]), F32
    ok = k.shape == v.shape and q.shape[2] == k.shape[2] and heads % kv_heads == 0
    _check(ok and q.dtype is F32, "attention", inputs, expected)
    if isinstance(attrs["window"], int) and attrs["window"] < 1:
        raise ShapeError(f"window must be at least 1, found {attrs['window']}", where="attention")
    return (q.shape[0], heads * q.shape[2]), F32


def argmax(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(_is_rows(inputs), "argmax", inputs, "f32 x [rows, width]")
    return inputs[0].shape[:1], I32


def _is_rows(inputs: Inputs) -> bool:
    return len(inputs) == 1 and len(inputs[0].shape) == 2 and inputs[0].dtype is F32


def top_k(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(_is_rows(inputs), "top_k", inputs, "f32 x [rows, width]")
    width = inputs[0].shape[1]
    if attrs["k"] < 1 or (isinstance(width, int) and attrs["k"] > width):
        raise ShapeError(f"k must lie in 1..{width}, found {attrs['k']}", where="top_k")
    return (inputs[0].shape[0], attrs["k"]), I32


def last_row(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(len(inputs) == 1 and len(inputs[0].shape) >= 1, "last_row", inputs, "x [rows, ...]")
    return (1, *inputs[0].shape[1:]), inputs[0].dtype


def reshape(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(len(inputs) == 1, "reshape", inputs, "one operand")
    before, after = (_elements(s) for s in (inputs[0].shape, attrs["shape"]))
    _check(before == after, "reshape", inputs, f"the {list(attrs['shape'])} asked for to hold as many elements")
    return tuple(attrs["shape"]), inputs[0].dtype


def _elements(shape: Shape) -> tuple[int, tuple[str, ...]]:
    """The element count as (integer factor, symbolic factors)."""
    factor, symbolic = 1, []
    for dim in shape:
        if isinstance(dim, int):
            factor *= dim
        else:
            symbolic.append(str(dim))
    return factor, tuple(sorted(symbolic))


def pack(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(
        len(inputs) == 1 and inputs[0].op == "weight" and len(inputs[0].shape) == 2, "pack", inputs, "a weight [n, k]"
    )
    return inputs[0].shape, inputs[0].dtype
