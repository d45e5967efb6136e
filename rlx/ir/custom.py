"""Custom ops: rows of the op table that a user adds, see docs/custom-ops.md.

`custom_op` makes one of Python functions: the meaning in NumPy, a shape rule, a loop kernel, and the formula that the
op replaces. From then on it is an op as any other: it has a builder, passes the verifier, prints and parses, and the
digest of its source is part of the compile keys of the programs that use it.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from rlx import ir
from rlx.errors import CustomOpError, ShapeError
from rlx.ir import flops as costs
from rlx.ir import infer
from rlx.ir.dims import DimLike, Shape
from rlx.ir.dtypes import F32, DType
from rlx.ir.meaning import Array, Env
from rlx.ir.node import Node
from rlx.ir.op_table import CUSTOM, OPS, REQUIRED, Op, make
from rlx.ir.shape_rules import ShapeRule, fail, product
from rlx.ir.sources import source_of

#: Largest error of a kernel, as a share of the largest magnitude in the row: that of our own kernels.
TOLERANCE = 5e-5
#: Operations per element of the result where a user says nothing: those of an activation.
FLOPS = 8
#: Attributes that passes give a meaning to.
_RESERVED = frozenset(
    ("segments", "page", "aside", "out", "layout", "name", "length", "shape", "dtype", "begin", "end")
)
_VALUES = (bool, int, float, str, type(None))
#: Ops that passes before `fuse` may put into a graph that has none.
_MADE = frozenset(("scale", "silu", "last_row", "take_rows"))

_lock = threading.RLock()


class CustomOp:
    """A custom op; calling it makes a node: `gated_norm(x, gate, weight, eps=1e-6)`.

    Attributes:
        name: in graphs, reports and the compile cache.
        meaning: what it computes, a function of NumPy arrays.
        rule: its shape rule; None for an op of elements.
        kernel: a loop kernel; None: it is compiled from its meaning.
        fuses: the formula that it replaces in graphs; None for none.
        tolerance: the largest error of its kernel, as a share of the largest magnitude in the row.
        attributes: their names and defaults.
        source: its functions as text. `digest`, of the source, is part of compile keys.
    """

    def __init__(
        self,
        meaning: Callable[..., Any],
        *,
        name: str,
        shape: str | None,
        kernel: Callable[..., None] | None,
        fuses: Callable[..., Node] | None,
        tolerance: float,
        flops: int,
    ) -> None:
        self.name, self.meaning, self.kernel, self.fuses = name, meaning, kernel, fuses
        self.tolerance, self.flops = tolerance, flops
        self.operands, self.attributes = _parameters(name, meaning)
        self.rule = None if shape is None else ShapeRule.parse(name, shape, list(self.attributes))
        parts = {"meaning": meaning, "kernel": kernel, "fuses": fuses}
        settings = {"shape": shape, "tolerance": tolerance, "flops": flops}
        self._source = source_of(name, {part: fn for part, fn in parts.items() if fn is not None}, settings)
        self._check()
        self.__doc__, self.__name__ = meaning.__doc__, name
        self.__signature__ = inspect.signature(meaning)

    @property
    def source(self) -> str:
        """Its functions as text."""
        return self._source.text

    @property
    def digest(self) -> str:
        """Of everything that its results depend on."""
        return self._source.digest

    def __call__(self, *operands: Node, **attributes: Any) -> Node:
        """A node that computes the op.

        Raises:
            ShapeError: the operands do not fit the shape rule, or an attribute is missing or unknown.
            CustomOpError: another op has taken its name.
        """
        if CUSTOM.get(self.name) is not self:
            raise CustomOpError("it was defined anew", where=f"custom op {self.name}", hint="Use the new one.")
        return make(self.name, *operands, **{name: self._value(name, v) for name, v in attributes.items()})

    def __repr__(self) -> str:
        rule = self.rule.text if self.rule else "element by element"
        return f"<CustomOp {self.name}: {rule}, {'a kernel' if self.kernel else 'no kernel'}>"

    # -- the row of the op table -----------------------------------------------------------------------------------

    def row(self) -> Op:
        """Its row of the op table."""
        return Op(
            self.name,
            self.attributes,
            self.infer,
            self.evaluate,
            costs.each(self.flops),
            in_prologue=True,
            custom=self,
        )

    def infer(self, inputs: tuple[Node, ...], attrs: Mapping[str, Any]) -> tuple[Shape, DType]:
        """The shape rule; `ShapeError` if the operands do not fit."""
        for node in inputs:
            if infer.is_cache(node):
                hint = "States are read by ops that know their pages and segments, such as attention."
                raise ShapeError(f"reads {node!r}, a state", where=self.name, hint=hint)
        if self.rule is not None:
            return self.rule.infer(inputs, attrs)
        full = inputs[0].shape if inputs else ()
        fits = len(inputs) == len(self.operands) and all(n.dtype is F32 for n in inputs)
        if not fits or any(n.shape != full and not infer.repeats(n.shape, full) for n in inputs):
            expected = f"{len(self.operands)} f32 operands of the first one's shape, rows or columns of it, or scalars"
            fail(self.name, inputs, expected)
        return full, F32

    def evaluate(self, operands: list[Array], attrs: Mapping[str, Any], env: Env) -> Array:
        """The meaning of arrays, which it cannot change.

        Raises:
            CustomOpError: it raises an error, or returns no array of numbers.
        """
        views = [x.view() for x in operands]
        for view in views:
            view.flags.writeable = False
        try:
            with np.errstate(all="ignore"):
                found = np.asarray(self.meaning(*views, **attrs))
        except Exception as error:  # whatever a user's function raises
            hint = None
            if "read-only" in str(error):
                hint = "A meaning must not write its operands: a side effect. Copy them, or return a new array"
            what = f"its meaning raised {type(error).__name__}: {error}"
            raise CustomOpError(what, where=f"custom op {self.name}", hint=hint) from error
        if found.dtype.kind not in "fiub":
            raise CustomOpError(f"its meaning returns {found.dtype}, no numbers", where=f"custom op {self.name}")
        return found

    def sizes(self, node: Node) -> dict[str, Any]:
        """The sizes of a node's operands by their names in the shape rule."""
        return self.rule.sizes(node.inputs) if self.rule else {}

    def units(self, node: Node) -> DimLike | None:
        """Number of work units of a kernel; None if it is a product of two symbols."""
        assert self.rule is not None
        return product(self.rule.units(node.inputs, node.shape))

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """The parameters of the kernel after `end`: names of sizes and attributes."""
        assert self.kernel is not None
        return tuple(inspect.signature(self.kernel).parameters)[len(self.operands) + 3 :]

    # -- checks ----------------------------------------------------------------------------------------------------

    def _value(self, name: str, value: Any) -> Any:
        default = self.attributes.get(name)
        if isinstance(default, float) and type(value) is int:
            return float(value)
        if isinstance(value, np.generic):
            value = value.item()
        ok = isinstance(value, _VALUES) or (isinstance(value, tuple) and all(isinstance(v, _VALUES) for v in value))
        if not ok and type(value).__module__ != "rlx.ir.rules":
            hint = "Attributes are numbers, strings, None, or tuples of them. Arrays are operands."
            raise ShapeError(f"attribute {name} is a {type(value).__name__}", where=self.name, hint=hint)
        return value

    def _check(self) -> None:
        where = f"custom op {self.name}"
        if self.rule and [value.name for value in self.rule.operands] != list(self.operands):
            named = ", ".join(value.name for value in self.rule.operands)
            what = f"the shape rule has the operands {named}, the meaning takes {', '.join(self.operands)}"
            raise CustomOpError(what, where=where, hint="Give both the same names in the same order.")
        if self.kernel is not None:
            self._check_kernel(where)
        elif self.fuses is not None:
            raise CustomOpError("fuses needs a kernel", where=where, hint="Without one nothing is gained by fusing.")
        for name, value in self.attributes.items():
            if value is not REQUIRED:
                self._value(name, value)

    def _check_kernel(self, where: str) -> None:
        assert self.kernel is not None
        if self.rule is None:
            hint = 'Give one, such as shape="x[..., n] -> [..., n]".'
            raise CustomOpError("a kernel needs a shape rule, which names its sizes", where=where, hint=hint)
        found = [*inspect.signature(self.kernel).parameters]
        expected = [*self.operands, "out", "begin", "end"]
        known = {*self.rule.names, *self.attributes}
        if found[: len(expected)] != expected or not known.issuperset(found[len(expected) :]):
            what = f"the kernel takes ({', '.join(found)}), expected ({', '.join(expected)}, ...)"
            hint = f"Behind `end` it may take {', '.join(sorted(known)) or 'nothing'}: sizes and attributes by name."
            raise CustomOpError(what, where=where, hint=hint)
        if self.kernel.__code__.co_freevars:
            names = ", ".join(self.kernel.__code__.co_freevars)
            hint = "Define the kernel at the top of a module."
            raise CustomOpError(f"the kernel uses {names} of an enclosing function", where=where, hint=hint)


def _parameters(name: str, meaning: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The operands of a meaning, and its attributes with their defaults."""
    where = f"custom op {name}"
    operands, attributes = [], {}
    for parameter in inspect.signature(meaning).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            attributes[parameter.name] = REQUIRED if parameter.default is parameter.empty else parameter.default
        elif (
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default != parameter.empty
        ):
            hint = "Operands are parameters without a default; attributes stand behind a `*`."
            raise CustomOpError(f"the meaning has the parameter {parameter}", where=where, hint=hint)
        else:
            operands.append(parameter.name)
    if not operands:
        hint = "Its positional parameters are the operands."
        raise CustomOpError("the meaning has no operands", where=where, hint=hint)
    if reserved := _RESERVED.intersection((*operands, *attributes)):
        raise CustomOpError(
            f"{', '.join(sorted(reserved))} is a reserved name", where=where, hint="Choose another one."
        )
    return tuple(operands), attributes


@overload
def custom_op(meaning: Callable[..., Any], /) -> CustomOp: ...


@overload
def custom_op(
    meaning: None = None,
    /,
    *,
    name: str | None = None,
    shape: str | None = None,
    kernel: Callable[..., None] | None = None,
    fuses: Callable[..., Node] | None = None,
    tolerance: float = TOLERANCE,
    flops: int = FLOPS,
    redefine: bool = False,
) -> Callable[[Callable[..., Any]], CustomOp]: ...


def custom_op(
    meaning: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    shape: str | None = None,
    kernel: Callable[..., None] | None = None,
    fuses: Callable[..., Node] | None = None,
    tolerance: float = TOLERANCE,
    flops: int = FLOPS,
    redefine: bool = False,
) -> Any:
    """Makes an op of a function, its NumPy meaning; a decorator, with or without arguments.

    Positional parameters of the function are operands: arrays of floats in float32 or float64, whole numbers in int32.
    Keyword-only parameters are attributes. It returns a new array. The same definition may run again; it gives the same
    op. An op is known in the process that defined it.

    >>> import numpy as np
    >>> @custom_op
    ... def relu2(x):
    ...     return np.maximum(x, 0) ** 2

    Args:
        name: of the op; by default that of the function.
        shape: the shape rule, such as "x[..., n], weight[n] -> [..., n]". Without one the op works element by element:
            the result has the shape of the first operand; others may be rows, columns or scalars.
        kernel: a loop kernel `(operands..., out, begin, end, sizes and attributes by name...)`, which computes the work
            units [begin, end) of flat buffers. A unit is an index of the axes `...`, or else of the first axis of the
            result. Without a kernel the meaning is traced into ops that have kernels.
        fuses: `(operands..., *, attributes) -> node`: the formula in other ops that this op replaces in every graph.
        tolerance: the largest error of the kernel, as a share of the largest magnitude in the row.
        flops: floating-point operations per element of the result, for schedule and reports.
        redefine: whether the definition may replace another one of this name. Graphs that hold the op then mean the
            new definition; compiled programs stay as they are.

    Raises:
        CustomOpError: the name is taken, a source cannot be read, a function has side effects, or shape rule, meaning,
            kernel and `fuses` do not fit each other.
    """

    def define(fn: Callable[..., Any]) -> CustomOp:
        chosen = _checked_name(fn, name, {"meaning": fn, "kernel": kernel, "fuses": fuses})
        if not 0 <= tolerance < 1:
            what = f"tolerance is {tolerance!r}, expected a share such as 1e-4"
            raise CustomOpError(what, where=f"custom op {chosen}")
        op = CustomOp(fn, name=chosen, shape=shape, kernel=kernel, fuses=fuses, tolerance=tolerance, flops=flops)
        return _register(op, redefine)

    return define if meaning is None else define(meaning)


def _checked_name(fn: Callable[..., Any], name: str | None, functions: Mapping[str, object]) -> str:
    """The name of an op, where all of its parts are functions."""
    for part, found in functions.items():
        if found is not None and not inspect.isfunction(found):
            what = f"{part} is a {type(found).__name__}, expected a function"
            raise CustomOpError(what, where=f"custom op {name or ''}".rstrip(), hint="Write it with `def`.")
    chosen = fn.__name__ if name is None else name
    if not re.fullmatch(r"[A-Za-z]\w*", str(chosen), re.ASCII):
        raise CustomOpError(f"{chosen!r} is no name of an op", where="custom_op", hint='Give name="my_op".')
    return chosen


def _register(op: CustomOp, redefine: bool) -> CustomOp:
    where = f"custom op {op.name}"
    with _lock:
        known = CUSTOM.get(op.name)
        if known is None and op.name in OPS:
            raise CustomOpError("an op of rlx has this name", where=where, hint="Choose another one with name=.")
        if known is not None and known.digest == op.digest:
            return known
        if known is not None and not redefine:
            what = f"another definition has this name, in {known.meaning.__module__}"
            hint = "Choose another name, or pass redefine=True to replace it."
            raise CustomOpError(what, where=where, hint=hint)
        CUSTOM[op.name], OPS[op.name] = op, op.row()
        try:
            _ = op.fuses and _rules(op)
        except BaseException:
            CUSTOM.pop(op.name), OPS.pop(op.name)
            if known is not None:
                CUSTOM[op.name], OPS[op.name] = known, known.row()
            raise
    return op


def _rules(op: CustomOp) -> Any:
    return ir.custom_rules.rules_of(op)


def custom_ops() -> dict[str, CustomOp]:
    """The custom ops of this process by name, in the order of their definition."""
    with _lock:
        return dict(CUSTOM)


def used_by(nodes: Sequence[Node], *, fused: bool) -> dict[str, CustomOp]:
    """The custom ops that nodes hold, or that may replace some of them, by name.

    Args:
        fused: whether formulas are replaced.
    """
    present = {node.op for node in nodes} if CUSTOM else set[str]()
    found = {name: op for name, op in custom_ops().items() if name in present}
    return found | (fused_in(nodes) if fused else {})


def fused_in(nodes: Sequence[Node]) -> dict[str, CustomOp]:
    """The custom ops that may replace some of the nodes, by name."""
    present = {node.op for node in nodes} if CUSTOM else set[str]()
    return {name: op for name, op in custom_ops().items() if op.fuses and _may_match(op, present)}


def _may_match(op: CustomOp, present: set[str]) -> bool:
    """Whether the formula that an op replaces can occur in a graph with these ops.

    Custom ops without a kernel can become any op.
    """
    traced = any(name in CUSTOM and CUSTOM[name].kernel is None for name in present)
    return traced or ir.custom_rules.ops_of(op) <= present | _MADE | CUSTOM.keys()
