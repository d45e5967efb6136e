"""The op table: name, attributes, shape rule, NumPy meaning, cost. One row per op; `rlx.ir.ops` has the builders.

The meaning lives in `rlx.ir.meaning`. Floating-point values are float32 unless a row says otherwise; weights may have
any dtype of the table in `rlx.ir.dtypes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from rlx.errors import ShapeError
from rlx.ir import flops, infer, meaning, segments
from rlx.ir.dims import PAST_SEQ, SEQ, DimLike, Shape
from rlx.ir.dtypes import DType
from rlx.ir.node import LEAVES, Node, intern

if TYPE_CHECKING:
    from rlx.ir.custom import CustomOp


@dataclass(frozen=True)
class RowNumbers:
    """An operand that holds numbers of rows, elements or experts.

    Attributes:
        operand: which operand it is.
        table, axis: operand and axis of what is numbered.
        negative: whether a negative number is allowed, for none.
    """

    operand: int
    table: int
    axis: int
    negative: bool = False


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
        writes: True if the result is the first operand, a cache, with rows written in place.
        multiplies: True if its weights with two or more axes are matrices, which the pass `layout` packs.
        in_prologue: True if every worker may compute it for itself, see the pass `schedule`: it has no effect, and with
            one row it is a single unit of work or a few small ones.
        elsewhere: True if another device computes it, which sees no memory of workers.
        numbers: the operand with row numbers, which are checked before a run; None if there is none.
        roles: for ops over states the roles of the operands and of the result, see `rlx.ir.segments`. The op then has
            the attribute `segments`, and `page` if one of them is a cache.
        custom: for an op that a user added, see `rlx.ir.custom`: what it was made of.
    """

    name: str
    attrs: Mapping[str, Any]
    infer: infer.Rule
    meaning: meaning.Meaning | meaning.Effect
    flops: flops.Flops
    elementwise: bool = False
    rowwise: bool = True
    effect: bool = False
    writes: bool = False
    multiplies: bool = False
    in_prologue: bool = False
    elsewhere: bool = False
    numbers: RowNumbers | None = None
    roles: segments.Roles | None = None
    custom: CustomOp | None = None


REQUIRED = object()

_LINEAR = {"gated": None, "bias": False, "residual": False, "bf16": False, "out": "f32"}
_EXPERTS = {"gated": None, "bf16": False, "tiles": False}
_NORM = {"eps": REQUIRED, "out": "f32"}
_ANGLES = {"scale": 1.0, "sections": None, "interleaved": False}
_ROPE = {"style": REQUIRED, "norm_eps": None}
_WRITE = {"at": PAST_SEQ, "dtype": "f32", "wrap": False}
_AS_CACHE = {"order": "rows", "dtype": "f32", "layout": "rows", "room": 0}
_ATTENTION = {
    "scale": REQUIRED,
    "window": None,
    "softcap": None,
    "length": PAST_SEQ + SEQ,
    "mask": "causal",
    "sinks": False,
    "any_scale": False,
    "bf16": False,
    "out": "f32",
}
_LEAF = {"name": REQUIRED}
_ASIDE = {"aside": False}


def _extended(row: Op) -> Op:
    """The row of an op over a state, extended by the attributes `page` and `segments`, see `rlx.ir.segments`."""
    if row.roles is None:
        return row
    rule, meant, attrs = row.infer, row.meaning, dict(row.attrs)
    if "c" in row.roles[0]:
        rule, meant, attrs["page"] = segments.paged_rule(row.name, rule), segments.paged_meaning(row.name, meant), 0
    rule, meant = segments.rule(row.name, row.roles, rule), segments.meaning(row.roles, meant)
    return replace(row, attrs={**attrs, "segments": False}, infer=rule, meaning=meant)


#: The rows that users added, by name in the order of their definition; see `rlx.ir.custom`.
CUSTOM: dict[str, CustomOp] = {}

OPS: dict[str, Op] = {
    row.name: _extended(row)
    for row in (
        Op("input", _LEAF, infer.leaf, meaning.identity, flops.each(0), rowwise=False),
        Op("weight", _LEAF, infer.leaf, meaning.identity, flops.each(0), rowwise=False),
        Op("state", {**_LEAF, "layout": "rows"}, infer.leaf, meaning.identity, flops.each(0), rowwise=False),
        Op(
            "embedding", {"scale": 1.0}, infer.embedding, meaning.embedding, flops.each(1),
            in_prologue=True, numbers=RowNumbers(1, table=0, axis=0),
        ),
        Op("linear", _LINEAR, infer.linear, meaning.linear, flops.linear, multiplies=True),
        Op(
            "expert_linear", _EXPERTS, infer.expert_linear, meaning.expert_linear, flops.expert_linear,
            multiplies=True, numbers=RowNumbers(1, table=2, axis=0),
        ),
        Op(
            "overlay_rows", {}, infer.overlay_rows, meaning.overlay_rows, flops.each(0),
            in_prologue=True, numbers=RowNumbers(2, table=1, axis=0, negative=True),
        ),
        Op("rms_norm", _NORM, infer.rms_norm, meaning.rms_norm, flops.each(4), in_prologue=True),
        Op("layer_norm", _NORM, infer.layer_norm, meaning.layer_norm, flops.each(7), in_prologue=True),
        Op("quantize", {"out": "q8a"}, infer.quantize, meaning.quantize, flops.each(3), in_prologue=True),
        Op("rope_angles", _ANGLES, infer.rope_angles, meaning.rope_angles, flops.each(40)),
        Op("rope", _ROPE, infer.rope, meaning.rope, flops.each(6), in_prologue=True),
        Op(
            "kv_write", _WRITE, infer.kv_write, meaning.kv_write, flops.each(0),
            rowwise=False, writes=True, roles=("cr", "c"),
        ),
        Op(
            "rope_kv_write", {**_ROPE, **_WRITE}, infer.rope_kv_write, meaning.rope_kv_write,
            lambda ins, out, attrs: 6 * prod(ins[1]), rowwise=False, writes=True, roles=("crr", "c"),
        ),
        Op("as_cache", _AS_CACHE, infer.as_cache, meaning.as_cache, flops.each(0), rowwise=False, roles=("r", "k")),
        Op("attention", _ATTENTION, infer.attention, meaning.attention, flops.attention, roles=("rcc", "r")),
        Op(
            "causal_conv", _ASIDE, infer.causal_conv, meaning.causal_conv, flops.causal_conv,
            rowwise=False, effect=True, roles=("srw", "r"),
        ),
        Op(
            "gated_delta", {"scale": REQUIRED, "heads": "tiled", "corrects": True, **_ASIDE}, infer.gated_delta,
            meaning.gated_delta, flops.gated_delta, rowwise=False, effect=True, roles=("srrrrr", "r"),
        ),
        Op("softmax", {}, infer.softmax, meaning.softmax, flops.each(8), in_prologue=True),
        Op("argmax", {}, infer.argmax, meaning.argmax, flops.scan),
        Op("pick", {}, infer.pick, meaning.pick, flops.scan),
        Op("linear_pick", {"cap": None}, infer.linear_pick, meaning.linear_pick, flops.linear_pick, multiplies=True),
        Op("top_k", {"k": REQUIRED, "groups": 1, "kept": 1}, infer.top_k, meaning.top_k, flops.scan, in_prologue=True),
        Op(
            "take", {}, infer.take, meaning.take, flops.each(0),
            in_prologue=True, numbers=RowNumbers(1, table=0, axis=-1),
        ),
        Op(
            "relabel", {}, infer.relabel, meaning.relabel, flops.each(0),
            numbers=RowNumbers(0, table=1, axis=0, negative=True),
        ),
        Op("mix", {}, infer.mix, meaning.mix, flops.mix, in_prologue=True),
        *(
            Op(name, {"axis": -1}, infer.reduce(name), meant, flops.scan, in_prologue=True)
            for name, meant in (("reduce_mean", meaning.reduce_mean), ("reduce_sum", meaning.reduce_sum))
        ),
        Op(
            "slice", {"axis": 1, "start": REQUIRED, "stop": REQUIRED}, infer.slice_, meaning.slice_, flops.each(0),
            in_prologue=True,
        ),
        Op("concat", {"axis": 1}, infer.concat, meaning.concat, flops.each(0), in_prologue=True),
        Op("last_row", {}, infer.last_row, meaning.last_row, flops.each(0), rowwise=False),
        Op(
            "take_rows", {}, infer.take_rows, meaning.take_rows, flops.each(0),
            rowwise=False, numbers=RowNumbers(1, table=0, axis=0),
        ),
        Op("reshape", {"shape": REQUIRED}, infer.reshape, meaning.reshape, flops.each(0), rowwise=False),
        # Its cost is that of the nodes of its body, which `rlx.ir.costs` counts.
        Op("call", {"body": REQUIRED, "width": REQUIRED}, infer.call, meaning.call, flops.each(0), elsewhere=True),
        Op("pack", {"layout": REQUIRED}, infer.pack, meaning.identity, flops.each(0), rowwise=False),
        Op(
            "elementwise", {"expr": REQUIRED, "out": "f32"}, infer.elementwise, meaning.elementwise, flops.each(4),
            elementwise=True, in_prologue=True,
        ),
        *(Op(name, {}, infer.binary(name), meaning.binary(name), flops.each(1), True) for name in meaning.BINARY),
        *(Op(name, {}, infer.unary(name), meaning.unary(name), flops.each(8), True) for name in meaning.UNARY),
        Op("scale", {"by": REQUIRED}, infer.unary("scale"), meaning.scale, flops.each(1), True),
        Op("softcap", {"cap": REQUIRED}, infer.unary("softcap"), meaning.softcap, flops.each(12), True),
        Op("clamp", {"low": None, "high": None}, infer.clamp, meaning.clamp, flops.each(2), True),
    )
}  # fmt: skip


def make(op: str, *inputs: Node, **attrs: Any) -> Node:
    """The node of any op in the table: checks the attributes, applies the shape rule, interns.

    Raises:
        ShapeError: the operands do not fit or are not nodes, or an attribute is missing or unknown.
    """
    row = OPS.get(op)
    if row is None:
        hint = f"A custom op is known once the module that defines it is imported. Ops: {', '.join(OPS)}."
        raise ShapeError(f"no op is called {op!r}", hint=hint)
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
        dtype.size((shape[-1],))
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
    last = -2 if node["segments"] else -1
    return node.inputs[last if node["aside"] else 0]


def roles(node: Node) -> segments.Roles:
    """For an op over states: the roles of its operands, without `segments`, and of its result."""
    plain = OPS[node.op].roles
    assert plain is not None
    return segments.roles(plain, dict(node.attrs))


def of_segment(node: Node, rows: DimLike) -> Node:
    """For a node with `segments`: the node for one segment of `rows` rows, over leaves of that size."""
    own_roles = OPS[node.op].roles
    assert own_roles is not None
    operands, attrs = segments.of_one(own_roles, node.inputs, dict(node.attrs), rows)
    return make(node.op, *operands, **attrs)
