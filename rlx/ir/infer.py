"""Shape rules: (operands, attributes) -> (shape, dtype) of a result, or a `ShapeError` that names op and shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import gcd
from typing import Any

from rlx.errors import ShapeError
from rlx.ir.dims import Dim, DimLike, Shape, parse_dim
from rlx.ir.dtypes import ACTIVATIONS, BF16, F16, F32, I32, Q8A, DType
from rlx.ir.meaning import BINARY, UNARY, WITH_NUMBERS
from rlx.ir.node import Node
from rlx.ir.shape_rules import ShapeRule, fail

Inputs = tuple[Node, ...]
Attrs = Mapping[str, Any]
Rule = Callable[[Inputs, Attrs], tuple[Shape, DType]]

MASKS = ("causal", "none", "around", "visible", "bias")  # of attention
MAX_COMPONENTS = 4  # of a position
_CACHED = {"f32": F32, "f16": F16, "bf16": BF16}  # types of `as_cache`


def _check(ok: bool, op: str, inputs: Inputs, expected: str) -> None:
    if not ok:
        fail(op, inputs, expected)


def check_nodes(op: str, inputs: Sequence[Any]) -> None:
    """Raises `ShapeError` for an operand that is not a node, such as a number or an array."""
    for operand in inputs:
        if not isinstance(operand, Node):
            hint = "Graph.weight and Graph.constant make nodes for arrays"
            raise ShapeError(f"expected nodes of a graph, found {type(operand).__name__}", where=op, hint=hint)


def leaf(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    raise ShapeError("leaves are made by Graph.input, Graph.weight and Graph.state")


def unary(op: str) -> Rule:
    """One f32 operand; the result has its shape."""

    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
        _check(len(inputs) == 1 and inputs[0].dtype is F32, op, inputs, "one f32 operand")
        return inputs[0].shape, F32

    return rule


def repeats(small: Shape, full: Shape) -> bool:
    """Whether a row, a column or a scalar can be broadcast to another shape."""
    return small != full and small in (full[-1:], (*full[:-1], 1), (1,))


def binary(op: str) -> Rule:
    """Two f32 operands; the second may be a row or a scalar."""
    expected = "two f32 operands of one shape, or the second a row [width], a column [..., 1] or a scalar [1]"

    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
        _check(len(inputs) == 2 and all(n.dtype is F32 for n in inputs), op, inputs, expected)
        x, y = (n.shape for n in inputs)
        _check(y == x or repeats(y, x), op, inputs, expected)
        return x, F32

    return rule


def clamp(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    low, high = attrs["low"], attrs["high"]
    if low is None and high is None:
        raise ShapeError("neither low nor high is given", where="clamp", hint="Give one bound or both.")
    if low is not None and high is not None and low > high:
        raise ShapeError(f"low is {low}, above high, which is {high}", where="clamp")
    return unary("clamp")(inputs, attrs)


ARITY = {**dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2), **dict.fromkeys(WITH_NUMBERS, 1), "const": 0}
_NUMBERS = {**{name: len(attributes) for name, (_, attributes) in WITH_NUMBERS.items()}, "const": 1}


def elementwise(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    full = inputs[0].shape if inputs else ()
    fits = all(n.dtype is F32 and n.shape in (full, full[-1:], (*full[:-1], 1), (1,)) for n in inputs)
    expected = "f32 operands of the first one's shape, rows or columns of it, or scalars"
    _check(bool(inputs) and fits, "elementwise", inputs, expected)
    _check_expr(attrs["expr"], len(inputs))
    return full, _rounded("elementwise", attrs)


def _check_expr(expr: Any, count: int) -> None:
    """Checks an expression: an operand's number below `count`, or (op, its operands..., its attribute values...)."""
    if isinstance(expr, int) and 0 <= expr < count:
        return
    known = isinstance(expr, tuple) and bool(expr) and expr[0] in ARITY
    if not known or len(expr) != 1 + ARITY[expr[0]] + _NUMBERS.get(expr[0], 0):
        hint = f"Write one of 0..{count - 1} or (op, argument...) with op one of {', '.join(ARITY)}."
        raise ShapeError(f"{expr!r} is no expression over {count} operands", where="elementwise", hint=hint)
    for argument in expr[1 : 1 + ARITY[expr[0]]]:
        _check_expr(argument, count)


def renumber(expr: Any, numbers: Sequence[Any]) -> Any:
    """An expression with its operands replaced by other ones, or by expressions."""
    if isinstance(expr, int):
        return numbers[expr]
    name, *arguments = expr
    arity = ARITY[name]  # what follows the operands are attribute values
    return (name, *(renumber(a, numbers) for a in arguments[:arity]), *arguments[arity:])


def expression_size(expr: Any) -> int:
    """Number of operands and ops in an expression."""
    return 1 if isinstance(expr, int) else 1 + sum(map(expression_size, expr[1 : 1 + ARITY[expr[0]]]))


def by_text(op: str, text: str) -> Rule:
    """A rule in the notation of `shape_rules.py`."""
    return ShapeRule.parse(op, text, ()).infer


softmax = by_text("softmax", "x f32[..., width] -> [..., width]")
overlay_rows = by_text("overlay_rows", "x f32[rows, width], extra f32[extra, width], index i32[rows] -> [rows, width]")
mix = by_text("mix", "values f32[rows, n, width], coefficients f32[rows, m, n] -> [rows, m, width]")
relabel = by_text("relabel", "ids i32[rows], labels f32[n] -> i32[rows]")
argmax = by_text("argmax", "x f32[rows, width] -> i32[rows]")
pick = by_text("pick", "x f32[rows, width] -> i32[rows]")


def embedding(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(
        len(inputs) == 2 and len(inputs[0].shape) == 2 and len(inputs[1].shape) in (1, 2) and inputs[1].dtype is I32,
        "embedding", inputs, "table [vocab, width] and ids i32[rows] or i32[rows, slots]",
    )  # fmt: skip
    return (*inputs[1].shape, inputs[0].shape[1]), F32


def linear(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    if len(inputs) == 2 and len(inputs[1].shape) == 3:
        return _linear_of_heads(*inputs, attrs)
    parts = 2 if attrs["gated"] else 1
    count = 1 + parts * (2 if attrs["bias"] else 1) + bool(attrs["residual"])
    expected = "x [rows, k], weight [n, k]" + ", up [n, k]" * (parts == 2) + ", bias [n]" * bool(attrs["bias"])
    expected += ", residual [rows, n]" * bool(attrs["residual"])
    _check(len(inputs) == count and len(inputs[0].shape) == 2, "linear", inputs, expected)
    rows, k = inputs[0].shape
    n = inputs[1].shape[0] if inputs[1].shape else 0
    weights, rest = inputs[1 : 1 + parts], inputs[1 + parts :]
    fits = all(w.shape == (n, k) for w in weights) and inputs[0].dtype in ACTIVATIONS.values()
    fits = fits and all(r.dtype is F32 for r in rest)
    if attrs["residual"]:
        rest, fits = rest[:-1], fits and rest[-1].shape == (rows, n)
    _check(fits and all(b.shape == (n,) for b in rest), "linear", inputs, expected)
    return (rows, n), _rounded("linear", attrs)


def _linear_of_heads(x: Node, weight: Node, attrs: Attrs) -> tuple[Shape, DType]:
    fits = len(x.shape) == 3 and x.shape[1:] == (weight.shape[0], weight.shape[2]) and x.dtype in ACTIVATIONS.values()
    fits = fits and {attrs[name] for name in ("gated", "bias", "residual", "out")} == {None, False, "f32"}
    _check(fits, "linear", (x, weight), "x [rows, heads, k], weight [heads, n, k], and nothing joined with it")
    return (*x.shape[:2], weight.shape[1]), F32


def norm(op: str, most: int, expected: str) -> Rule:
    """Rows, and optionally up to `most` vectors of a row's width."""

    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
        ok = 1 <= len(inputs) <= 1 + most and all(n.dtype is F32 for n in inputs) and len(inputs[0].shape) >= 2
        ok = ok and all(n.shape == inputs[0].shape[-1:] for n in inputs[1:])
        _check(ok, op, inputs, expected)
        _activations(op, attrs["out"], ACTIVATIONS)
        return (inputs[0].shape, F32) if attrs["out"] == "f32" else quantize(inputs[:1], {"out": attrs["out"]})

    return rule


rms_norm = norm("rms_norm", 1, "f32 x [rows, ..., width] and optionally f32 weight [width]")
layer_norm = norm("layer_norm", 2, "f32 x [rows, ..., width] and optionally f32 weight [width] and bias [width]")


def quantize(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _activations("quantize", attrs["out"], [name for name in ACTIVATIONS if name != "f32"])
    dtype = ACTIVATIONS[attrs["out"]]
    part = 32 if dtype is Q8A else 2
    ok = len(inputs) == 1 and inputs[0].dtype is F32 and len(inputs[0].shape) >= 2
    ok = ok and (not isinstance(inputs[0].shape[-1], int) or inputs[0].shape[-1] % part == 0)
    _check(ok, "quantize", inputs, f"f32 x [rows, ..., k] with k a multiple of {part}")
    return inputs[0].shape, dtype


def _activations(op: str, out: Any, known: Collection[str]) -> None:
    if out not in known:
        raise ShapeError(f"out must be one of {', '.join(known)}, found {out!r}", where=op)


def rope_angles(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    sections = attrs["sections"]
    parts = () if sections is None else (len(sections),)
    ok = len(inputs) == 2 and [n.dtype for n in inputs] == [I32, F32] and len(inputs[1].shape) == 1
    ok = ok and len(inputs[0].shape) == 1 + len(parts) and inputs[0].shape[1:] == parts
    _check(ok, "rope_angles", inputs, f"positions i32[rows{''.join(f', {n}' for n in parts)}] and inv_freq f32[n/2]")
    _check_sections(sections, inputs[1].shape[0])
    return (inputs[0].shape[0], inputs[1].shape[0] * 2), F32


def _check_sections(sections: Any, count: DimLike) -> None:
    """A position's components share `count` frequencies as the sections say."""
    if sections is None:
        return
    sizes = isinstance(sections, tuple) and all(isinstance(size, int) and size >= 0 for size in sections)
    if not sizes or not 1 <= len(sections) <= MAX_COMPONENTS or (isinstance(count, int) and sum(sections) != count):
        hint = f"Give 1 to {MAX_COMPONENTS} sizes, one for each component of a position, whose sum is {count}."
        raise ShapeError(f"sections {sections!r} do not divide {count} frequencies", where="rope_angles", hint=hint)


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
    if isinstance(attrs["dtype"], str):  # otherwise it is a variable of a rewrite rule
        _check(attrs["dtype"] == inputs[0].dtype.name, "kv_write", inputs, f"a cache of dtype {attrs['dtype']}")
    return inputs[0].shape, inputs[0].dtype


def rope_kv_write(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    rope(inputs[1:], attrs)
    return kv_write(inputs[:2], attrs)


def as_cache(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    orders = {"rows": "[positions, heads, head_dim]", "heads": "[heads, positions, head_dim]"}
    for name, known in (("order", orders), ("dtype", _CACHED)):
        if attrs[name] not in known:
            raise ShapeError(f"{name} must be one of {', '.join(known)}, found {attrs[name]!r}", where="as_cache")
    order = attrs["order"]
    ok = len(inputs) == 1 and inputs[0].dtype is F32 and len(inputs[0].shape) == 3
    ok = ok and isinstance(inputs[0].shape[order == "rows"], int) and isinstance(inputs[0].shape[2], int)
    _check(ok, "as_cache", inputs, f"f32 x {orders[order]}")
    first, second, head_dim = inputs[0].shape
    heads, positions = (second, first) if order == "rows" else (first, second)
    return (heads, positions + attrs["room"], head_dim), _CACHED[attrs["dtype"]]


def is_cache(node: Node) -> bool:
    """Whether attention can read a node as keys or values: a cache, or a value in the form of one."""
    while node.op in ("kv_write", "rope_kv_write"):
        node = node.inputs[0]
    return node.op in ("state", "as_cache")


def attention(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    expected = "q [rows, heads, head_dim] and caches k, v [kv_heads, CTX, head_dim], heads a multiple of kv_heads"
    mask = attrs["mask"]
    if isinstance(mask, str) and mask not in MASKS:
        raise ShapeError(f"mask must be one of {', '.join(MASKS)}, found {mask!r}", where="attention")
    count = 3 + attrs["sinks"] + (mask in _MASK_OPERANDS)
    expected += ", sinks f32[heads]" * attrs["sinks"]
    expected += {"bias": ", and a bias", "visible": ", and visible"}.get(mask, "")
    _check(len(inputs) == count and all(len(n.shape) == 3 for n in inputs[:3]), "attention", inputs, expected)
    q, k, v = inputs[:3]
    heads, kv_heads = q.shape[1], k.shape[0]
    if not (isinstance(heads, int) and isinstance(kv_heads, int)):  # only in patterns of rewrite rules
        return (q.shape[0], v.shape[2] * heads if isinstance(heads, int) else q.shape[2]), _rounded("attention", attrs)
    ok = k.shape == v.shape and q.shape[2] == k.shape[2] and heads % kv_heads == 0
    ok = ok and (not attrs["sinks"] or (inputs[3].shape, inputs[3].dtype) == ((heads,), F32))
    _check(ok and q.dtype is F32, "attention", inputs, expected)
    if isinstance(attrs["window"], int) and attrs["window"] < 1:
        raise ShapeError(f"window must be at least 1, found {attrs['window']}", where="attention")
    if mask == "around" and attrs["window"] is None:
        raise ShapeError("the mask around needs a window", where="attention")
    for cache in (k, v):
        if cache.op == "as_cache" and cache.shape[1] - cache["room"] != attrs["length"]:
            what = f"length is {attrs['length']}, but there are {cache.shape[1] - cache['room']} keys"
            raise ShapeError(what, where="attention", hint="Leave it out: plain keys and values are all of them.")
    if mask in _MASK_OPERANDS:
        _MASK_OPERANDS[mask](inputs[0].shape[0], inputs[-1], heads, attrs["length"])
    return (q.shape[0], heads * q.shape[2]), _rounded("attention", attrs)


def _rounded(op: str, attrs: Attrs) -> DType:
    """The dtype of results that may be rounded when they are written."""
    _activations(op, attrs["out"], ("f32", "bf16"))
    return ACTIVATIONS[attrs["out"]]


def _check_bias(rows: DimLike, bias: Node, heads: int, length: DimLike) -> None:
    ok = bias.dtype is F32 and bias.shape in ((rows, 1, length), (rows, heads, length))
    _check(ok, "attention", (bias,), f"a bias f32 [{rows}, 1 or {heads}, {length}]")


def _check_visible(rows: DimLike, visible: Node, heads: int, length: DimLike) -> None:
    _check(visible.dtype is I32 and visible.shape == (rows,), "attention", (visible,), f"visible i32[{rows}]")


_MASK_OPERANDS = {"bias": _check_bias, "visible": _check_visible}


def expert_linear(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    expected = "x [rows, k] or [rows, slots, k], ids i32[rows, slots], weight [experts, n, k]"
    expected += ", up [experts, n, k]" * bool(attrs["gated"])
    _check(len(inputs) == (4 if attrs["gated"] else 3), "expert_linear", inputs, expected)
    x, ids, *weights = inputs
    ok = ids.dtype is I32 and len(ids.shape) == 2 and all(len(w.shape) == 3 for w in weights)
    _check(ok and x.dtype in ACTIVATIONS.values() and len(x.shape) in (2, 3), "expert_linear", inputs, expected)
    k = x.shape[-1]
    fits = x.shape[:-1] in (ids.shape[:1], ids.shape) and all(w.shape == weights[0].shape for w in weights)
    _check(fits and weights[0].shape[2] == k, "expert_linear", inputs, expected)
    return (*ids.shape, weights[0].shape[1]), F32


def take(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    expected = "f32 x [rows, n] or [n], and ids i32[rows, k]"
    ok = len(inputs) == 2 and inputs[0].dtype is F32 and inputs[1].dtype is I32 and len(inputs[1].shape) == 2
    _check(ok and inputs[0].shape[:-1] in ((), inputs[1].shape[:1]), "take", inputs, expected)
    return inputs[1].shape, F32


def reduce(op: str) -> Rule:
    """One number per row, or with axis 1 one row per matrix."""

    def rule(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
        ok = len(inputs) == 1 and inputs[0].dtype is F32 and len(inputs[0].shape) >= 2
        _check(ok, op, inputs, "f32 x [rows, ..., width]")
        if attrs["axis"] == -1:
            return (*inputs[0].shape[:-1], 1), F32
        ok = attrs["axis"] == 1 and len(inputs[0].shape) == 3
        _check(ok, op, inputs, "axis -1, or axis 1 of f32 x [rows, n, width]")
        return (inputs[0].shape[0], 1, inputs[0].shape[2]), F32

    return rule


def slice_(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    axis, start, stop = attrs["axis"], attrs["start"], attrs["stop"]
    ok = len(inputs) == 1 and inputs[0].dtype is F32 and 1 <= axis < len(inputs[0].shape)
    _check(ok, "slice", inputs, f"f32 x with an axis {axis} that is not that of the rows")
    size = inputs[0].shape[axis]
    _check(isinstance(size, int) and 0 <= start < stop <= size, "slice", inputs, f"{start}:{stop} within {size}")
    return (*inputs[0].shape[:axis], stop - start, *inputs[0].shape[axis + 1 :]), F32


def concat(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    axis = attrs["axis"]
    first = inputs[0].shape if inputs else ()
    ok = 1 <= axis < len(first) and all(n.dtype is F32 and len(n.shape) == len(first) for n in inputs)
    ok = ok and all((*n.shape[:axis], *n.shape[axis + 1 :]) == (*first[:axis], *first[axis + 1 :]) for n in inputs)
    expected = f"f32 operands that differ in axis {axis} only, which is not that of the rows"
    _check(ok and all(isinstance(n.shape[axis], int) for n in inputs), "concat", inputs, expected)
    return (*first[:axis], sum(n.shape[axis] for n in inputs), *first[axis + 1 :]), F32


def _without_aside(op: str, inputs: Inputs, attrs: Attrs) -> Inputs:
    """The operands without the last one of an op with `aside`: the state that is written instead of the first."""
    if not attrs["aside"]:
        return inputs
    first, last = inputs[:1], inputs[1:][-1:]
    ok = all(n.op == "state" for n in (*first, *last)) and first != last
    ok = ok and [(n.shape, n.dtype) for n in first] == [(n.shape, n.dtype) for n in last]
    _check(ok, op, inputs, "another state like the first operand as the last one")
    return inputs[:-1]


_causal_conv = by_text(
    "causal_conv",
    "state f32[taps - 1, channels], x f32[rows, channels], weight f32[channels, taps] -> [rows, channels]",
)
_gated_delta = by_text(
    "gated_delta",
    "state f32[heads, key_dim, value_dim], q f32[rows, key_heads, key_dim], k f32[rows, key_heads, key_dim], "
    "v f32[rows, heads, value_dim], g f32[rows, heads], beta f32[rows, heads] -> [rows, heads, value_dim]",
)


def causal_conv(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    inputs = _without_aside("causal_conv", inputs, attrs)
    found = _causal_conv(inputs, {})
    _check(inputs[0].op == "state", "causal_conv", inputs, "a state as the first operand")
    return found


def gated_delta(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    inputs = _without_aside("gated_delta", inputs, attrs)
    found = _gated_delta(inputs, {})
    heads, key_heads = inputs[0].shape[0], inputs[1].shape[1]
    ok = isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads == 0
    expected = "a state as the first operand, and heads a multiple of key_heads"
    _check(ok and inputs[0].op == "state", "gated_delta", inputs, expected)
    if attrs["heads"] not in ("tiled", "grouped"):
        raise ShapeError(f"heads must be tiled or grouped, found {attrs['heads']!r}", where="gated_delta")
    return found


def linear_pick(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    """For one row only: its kernel tracks a single maximum."""
    fits = len(inputs) == 2 and inputs[0].shape[:1] == (1,) and inputs[0].dtype in ACTIVATIONS.values()
    fits = fits and len(inputs[1].shape) == 2 and inputs[0].shape[1:] == inputs[1].shape[1:]
    _check(fits, "linear_pick", inputs, "x [1, k], weight [n, k]")
    return (1,), I32


def _is_rows(inputs: Inputs) -> bool:
    return len(inputs) == 1 and len(inputs[0].shape) == 2 and inputs[0].dtype is F32


def top_k(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(_is_rows(inputs), "top_k", inputs, "f32 x [rows, width]")
    width = inputs[0].shape[1]
    if attrs["k"] < 1 or (isinstance(width, int) and attrs["k"] > width):
        raise ShapeError(f"k must lie in 1..{width}, found {attrs['k']}", where="top_k")
    groups, kept = attrs["groups"], attrs["kept"]
    if groups == 1 or not isinstance(width, int):
        return (inputs[0].shape[0], attrs["k"]), I32
    size = width // groups
    if width % groups or size < 2 or not 1 <= kept <= groups or attrs["k"] > kept * size:
        what = f"{kept} of {groups} groups of {width} elements, of which {attrs['k']} are chosen"
        raise ShapeError(
            what, where="top_k", hint="Groups have the same size, at least 2, and the kept ones k elements."
        )
    return (inputs[0].shape[0], attrs["k"]), I32


def last_row(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(len(inputs) == 1 and len(inputs[0].shape) >= 1, "last_row", inputs, "x [rows, ...]")
    return (1, *inputs[0].shape[1:]), inputs[0].dtype


def take_rows(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = len(inputs) == 2 and len(inputs[0].shape) >= 1 and inputs[1].dtype is I32 and len(inputs[1].shape) == 1
    _check(ok, "take_rows", inputs, "x [n, ...] and row numbers i32[m]")
    return (*inputs[1].shape, *inputs[0].shape[1:]), inputs[0].dtype


def reshape(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    _check(len(inputs) == 1, "reshape", inputs, "one operand")
    before, after = (_elements(s) for s in (inputs[0].shape, attrs["shape"]))
    _check(before == after, "reshape", inputs, f"the shape {list(attrs['shape'])} to have as many elements")
    return tuple(attrs["shape"]), inputs[0].dtype


def rest(x: Node, others: Shape) -> DimLike:
    """The dim for -1 in a reshape of x to the other dims."""
    (whole, symbols), (part, taken) = _elements(x.shape), _elements(others)
    left = [symbol for symbol in symbols if symbol not in taken]
    _check(part > 0 and whole % part == 0 and len(symbols) - len(taken) == len(left), "reshape", (x,),
           f"a shape that {list(others)} and -1 can be")  # fmt: skip
    if not left:
        return whole // part
    _check(len(left) == 1, "reshape", (x,), "-1 to stand for a multiple of one symbol or for a number")
    return parse_dim(left[0]) * (whole // part)


def _elements(shape: Shape) -> tuple[int, tuple[str, ...]]:
    """The element count as (integer factor, symbolic factors); a factor of all terms of a dim counts as an integer."""
    factor, symbolic = 1, []
    for dim in shape:
        if isinstance(dim, int):
            factor *= dim
        else:
            common = gcd(dim.const, *(coefficient for _, coefficient in dim.terms))
            factor *= common
            symbolic.append(str(Dim({s: c // common for s, c in dim.terms}, dim.const // common)))
    return factor, tuple(sorted(symbolic))


def call(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    values = [i for i in inputs if i.op not in ("weight", "pack")]
    rows = {i.shape[:1] for i in values}
    _check(len(rows) == 1 and () not in rows, "call", inputs, "values with as many rows, then weights")
    return (values[0].shape[0], *attrs["width"]), F32


def pack(inputs: Inputs, attrs: Attrs) -> tuple[Shape, DType]:
    ok = len(inputs) == 1 and inputs[0].op == "weight" and (len(inputs[0].shape) in (2, 3) or attrs["layout"] == "host")
    _check(ok, "pack", inputs, "a weight [n, k] or [experts, n, k]")
    return inputs[0].shape, inputs[0].dtype
