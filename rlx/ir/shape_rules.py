"""Shape rules as text: `x[..., n], weight[n] -> [..., n]`. Custom ops have such rules, and some ops of rlx.

Each operand has its name, a type if it is not f32, and its axes: names of sizes, numbers, or formulas such as `2*n`.
`...` stands for the same leading axes everywhere, at least one. Axes of the result are formulas over these sizes and
over attributes that are whole numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from rlx.errors import CustomOpError, ShapeError
from rlx.ir.dims import Dim, DimLike, Shape
from rlx.ir.dtypes import DTYPES, F32, I32, DType
from rlx.ir.node import Node

#: What an axis is: a name, a number or a formula, as Python parses it.
Axis = ast.expr

TYPES = (F32, I32)  # of operands and results
LEADING = "..."
_OPERAND = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*:?\s*)??(?P<dtype>[a-z]\w*)?\s*\[(?P<axes>[^\]]*)\]\s*", re.ASCII
)
_FORMULAS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)
_HINT = 'Write it as "x[..., n], weight[n] -> [..., n]", or "ids i32[rows, k]" for whole numbers.'


@dataclass(frozen=True)
class Value:
    """An operand or the result in a rule.

    Attributes:
        name: of the operand; empty for the result.
        leading: whether its first axes are those of `...`.
        axes: the other axes.
        text: as it was written.
    """

    name: str
    dtype: DType
    leading: bool
    axes: tuple[Axis, ...]
    text: str


@dataclass(frozen=True)
class ShapeRule:
    """A parsed rule.

    Attributes:
        op: name of the op, for errors.
        text: as it was written.
    """

    op: str
    text: str
    operands: tuple[Value, ...]
    result: Value

    @staticmethod
    def parse(op: str, text: str, attributes: Sequence[str]) -> ShapeRule:
        """The rule of a text.

        Args:
            attributes: names that may stand in the result.

        Raises:
            CustomOpError: the text is no rule, or the result has a size that no operand has.
        """
        operands, arrow, result = text.partition("->")
        if not arrow:
            raise CustomOpError(f"{text!r} has no result", where=f"shape rule of {op}", hint=_HINT)
        values = tuple(_values(op, operands, named=True))
        results = tuple(_values(op, result, named=False))
        if not values or len(results) != 1:
            raise CustomOpError(f"{text!r} needs operands and one result", where=f"shape rule of {op}", hint=_HINT)
        rule = ShapeRule(op, " ".join(text.split()), values, results[0])
        unknown = names(rule.result.axes) - rule.names - set(attributes)
        if unknown or (rule.result.leading and not any(value.leading for value in values)):
            what = f"the result has {', '.join(sorted(unknown)) or LEADING}, which no operand has"
            raise CustomOpError(what, where=f"shape rule of {op}", hint=f"It is {rule.text!r}.")
        return rule

    @property
    def names(self) -> set[str]:
        """The names of sizes in the operands."""
        return set().union(*(names(value.axes) for value in self.operands))

    def sizes(self, inputs: Sequence[Node]) -> dict[str, Any]:
        """The sizes of a node's operands by name, and the leading axes as a tuple under `...`.

        Raises:
            ShapeError: the operands do not fit.
        """
        self._check(len(inputs) == len(self.operands), inputs)
        found: dict[str, Any] = {}
        formulas: list[tuple[Axis, DimLike]] = []
        for value, node in zip(self.operands, inputs, strict=True):
            self._check(node.dtype is value.dtype, inputs)
            count = len(node.shape) - len(value.axes)
            self._check(count >= 1 if value.leading else count == 0, inputs)
            self._check(
                not value.leading or found.setdefault(LEADING, node.shape[:count]) == node.shape[:count], inputs
            )
            for axis, size in zip(value.axes, node.shape[count:], strict=True):
                if isinstance(axis, ast.Name):
                    self._check(found.setdefault(axis.id, size) == size, inputs)
                else:
                    formulas.append((axis, size))
        for axis, size in formulas:
            self._check(_solve(axis, size, found), inputs)
        return found

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Shape, DType]:
        """Shape and type of the result; `ShapeError` if the operands do not fit."""
        sizes = {**{name: v for name, v in attrs.items() if _is_size(v)}, **self.sizes(inputs)}
        missing = names(self.result.axes) - sizes.keys()
        if missing:
            raise ShapeError(f"attribute {', '.join(sorted(missing))} is no whole number", where=self.op)
        try:
            own = tuple(_evaluate(axis, sizes) for axis in self.result.axes)
        except (ArithmeticError, TypeError) as error:
            raise ShapeError(f"{self.result.text} has no value here: {error}", where=self.op) from error
        shape = (*(sizes[LEADING] if self.result.leading else ()), *own)
        if any(isinstance(d, int) and d <= 0 for d in shape):
            raise ShapeError(f"the result would be {list(shape)}", where=self.op, hint=f"Its rule is {self.text!r}.")
        return shape, self.result.dtype

    def units(self, inputs: Sequence[Node], shape: Shape) -> tuple[DimLike, ...]:
        """The axes that work units count: those of `...`, or else the first axis of the result."""
        leading = self.sizes(inputs).get(LEADING)
        return leading if leading else shape[:1]

    def _check(self, ok: bool, inputs: Sequence[Node]) -> None:
        if not ok:
            fail(self.op, inputs, ", ".join(value.text for value in self.operands))


def fail(op: str, inputs: Sequence[Node], expected: str) -> NoReturn:
    """Raises a `ShapeError` that shows the operands and what was expected."""
    raise ShapeError(f"found operands {types(inputs)}", where=op, hint=f"Expected {expected}.")


def types(inputs: Sequence[Node]) -> str:
    """The types and shapes of operands."""
    return ", ".join(f"{n.dtype}[{', '.join(map(str, n.shape))}]" for n in inputs) or "none"


def _values(op: str, text: str, *, named: bool) -> Iterator[Value]:
    at = 0
    while at < len(text.rstrip()):
        match = _OPERAND.match(text, at)
        if match is None or (named and not (match["name"] or match["dtype"])) or (not named and match["name"]):
            raise CustomOpError(
                f"{text[at:].strip()!r} is no operand or result", where=f"shape rule of {op}", hint=_HINT
            )
        name, kind = (match["name"], match["dtype"]) if match["name"] or not named else (match["dtype"], None)
        dtype = DTYPES.get(kind or "f32")
        if dtype not in TYPES:
            what = f"{kind!r} is no type of an operand or result"
            raise CustomOpError(what, where=f"shape rule of {op}", hint="Types are f32, the default, and i32.")
        axes = [part.strip() for part in match["axes"].split(",")] if match["axes"].strip() else []
        leading = axes[:1] == [LEADING]
        parsed = tuple(_axis(op, part) for part in axes[leading:])
        yield Value(name or "", dtype, leading, parsed, " ".join(match[0].split()))
        at = match.end()
        if text[at : at + 1] == ",":
            at += 1


def _axis(op: str, text: str) -> Axis:
    """An axis: names, whole numbers, + - * // and parentheses."""
    try:
        axis = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        axis = ast.Constant(None)
    for part in ast.walk(axis):
        number = isinstance(part, ast.Constant) and type(part.value) is int
        formula = isinstance(part, ast.BinOp) and isinstance(part.op, _FORMULAS)
        if not (number or formula or isinstance(part, ast.Name | ast.operator | ast.Load)):
            hint = "An axis is a name, a whole number, or a formula with + - * //; `...` comes first."
            raise CustomOpError(f"{text!r} is no axis", where=f"shape rule of {op}", hint=hint)
    return axis


def names(axes: Sequence[Axis]) -> set[str]:
    """The names in some axes."""
    return {part.id for axis in axes for part in ast.walk(axis) if isinstance(part, ast.Name)}


def _evaluate(axis: Axis, sizes: Mapping[str, Any]) -> DimLike:
    if isinstance(axis, ast.Name):
        found: DimLike = sizes[axis.id]
        return found
    if isinstance(axis, ast.Constant):
        assert isinstance(axis.value, int)
        return axis.value
    assert isinstance(axis, ast.BinOp)
    a, b = _evaluate(axis.left, sizes), _evaluate(axis.right, sizes)
    if isinstance(axis.op, ast.Add):
        return a + b
    if isinstance(axis.op, ast.Sub):
        return a - b
    if isinstance(axis.op, ast.FloorDiv):
        if isinstance(a, Dim) or isinstance(b, Dim):
            raise TypeError(f"{a} // {b} is known at run time only")
        return a // b
    if isinstance(a, Dim) and isinstance(b, Dim):
        raise TypeError(f"{a} * {b} is no sum of sizes")
    return a * b if isinstance(a, Dim) else b * a  # type: ignore[operator]


def _solve(axis: Axis, size: DimLike, found: dict[str, Any]) -> bool:
    """Whether a formula has this size; finds the one name in it that is not known yet."""
    open_names = names((axis,)) - found.keys()
    if len(open_names) > 1:
        return False
    try:
        if not open_names:
            return _evaluate(axis, found) == size
        (name,) = open_names
        zero, one, two = (_evaluate(axis, {**found, name: value}) for value in (0, 1, 2))
        step = one - zero
        if not isinstance(step, int) or step == 0 or two - one != step:
            return False
        rest = size - zero
        value = _quotient(rest, step)
    except (ArithmeticError, TypeError):
        return False
    if value is None:
        return False
    found[name] = value
    return True


def _quotient(dim: DimLike, step: int) -> DimLike | None:
    if isinstance(dim, Dim):
        if dim.const % step or any(c % step for _, c in dim.terms):
            return None
        return Dim({name: c // step for name, c in dim.terms}, dim.const // step)
    return None if dim % step else dim // step


def _is_size(value: Any) -> bool:
    return type(value) is int


def product(axes: Sequence[DimLike]) -> DimLike | None:
    """The product of some axes; None if two of them are symbolic."""
    symbolic = [d for d in axes if isinstance(d, Dim)]
    static = prod(d for d in axes if isinstance(d, int))
    if len(symbolic) > 1:
        return None
    return symbolic[0] * static if symbolic else static
