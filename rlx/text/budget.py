"""What rendering a chat template may cost, counted in steps so that the same template always fits or never does.

Text stage, used by `sandbox.py`. A template comes with a downloaded model and its input from a stranger: either may ask
for endless loops or gigabytes of text. A step is about a microsecond of work: one operation, one item of a loop, or 64
characters of text that is read or made.
"""

from __future__ import annotations

import re
from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, Sized, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from string import Formatter
from typing import Any

from rlx.errors import ChatTemplateError


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one template and one rendering; those of a rendering grow with the messages.

    Attributes:
        template_chars: longest template.
        template_tokens: most words and signs in it (published templates have up to 4,000).
        steps: work that a rendering may do (200,000 are about 0.2 s).
        chars: longest text it may make, the result included.
    """

    template_chars: int = 131_072
    template_tokens: int = 16_384
    steps: int = 200_000
    chars: int = 1_048_576


_WHERE = "chat template"
_HINT = "the model's template is broken or hostile"
_CHARS_A_STEP, _ITEMS_A_STEP = 64, 8
_STEPS_A_NODE, _STEPS_A_CHAR, _RESULT_A_CHAR = 256, 4, 4  # a value, a character of the messages adds to the limits
_NUMBER_CHARS, _MAX_WIDTH = 24, 99
_MAX_BITS = 256
_VIEWS = (KeysView, ValuesView, ItemsView)
_PRINTABLE = (str, int, float, list, tuple, dict, range, type(None), *_VIEWS)


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of a value as a tree: values in it, characters of its strings, nesting."""

    nodes: int
    chars: int
    depth: int

    @property
    def printed(self) -> int:
        """About the characters that `str` makes of it."""
        return self.chars + _NUMBER_CHARS * self.nodes


class Budget:
    """Steps and characters left in one rendering; every method raises `ChatTemplateError` where they run out."""

    def __init__(self, limits: RenderLimits) -> None:
        self._steps, self._chars, self._written = limits.steps, limits.chars, 0

    def admit(self, value: Any) -> None:
        """Make room for an input: long conversations may take longer."""
        extent = extent_of(value)
        self._steps += _STEPS_A_NODE * extent.nodes + _STEPS_A_CHAR * extent.chars
        self._chars += _RESULT_A_CHAR * extent.chars

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise ChatTemplateError("rendering takes too many steps", where=_WHERE, hint=_HINT)

    def text(self, chars: int) -> None:
        """A text of `chars` characters is read or made."""
        if chars > self._chars:
            raise ChatTemplateError(
                f"rendering makes a text of {chars} characters, more than {self._chars}", where=_WHERE,
                hint=_HINT,
            )  # fmt: skip
        self.spend(1 + chars // _CHARS_A_STEP)

    def output(self, chars: int) -> None:
        """The result grows by `chars` characters."""
        self._written += chars
        self.spend(1)
        if self._written > self._chars:
            raise ChatTemplateError(f"the result has more than {self._chars} characters", where=_WHERE, hint=_HINT)

    def items(self, count: int) -> None:
        """A list of `count` items is copied or made."""
        if count > self._chars // _ITEMS_A_STEP:
            raise ChatTemplateError(f"rendering makes a list of {count} items", where=_WHERE, hint=_HINT)
        self.spend(1 + count // _ITEMS_A_STEP)

    def shallow(self, value: Any) -> None:
        """A value is read without what is nested in it."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
        else:
            self.spend(1)

    def deep(self, value: Any, *, printing: bool = False) -> Extent:
        """A value is compared or, where `printing`, turned into text, with all that is nested in it.

        Lists may share parts, so that a few lines of template make a tree of 2**40 values: count before touching.
        """
        extent = extent_of(value, self, printing=printing)
        if printing:
            self.text(extent.printed)
        else:
            self.spend(extent.chars // _CHARS_A_STEP)
        return extent

    def compare(self, left: Any, right: Any) -> None:
        """`left` and `right` are compared, or `left` is looked for in `right`."""
        self.deep(left)
        if isinstance(right, range):
            self.items(len(right))
        else:
            self.deep(right)

    def counted(self, values: Iterable[Any]) -> Counted:
        return Counted(values, self)

    def collect(self, values: Iterable[Any]) -> list[Any]:
        """The items of anything that can be looped over."""
        return list(self.counted(values))


BUDGET: ContextVar[Budget] = ContextVar("rlx_template_budget")


class Counted:
    """An iterable that charges two steps for each item."""

    def __init__(self, values: Iterable[Any], budget: Budget) -> None:
        self._values, self._budget = values, budget

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.spend(2)
            yield value

    def __len__(self) -> int:
        if not isinstance(self._values, Sized):
            raise TypeError("no length")
        return len(self._values)


def extent_of(value: Any, budget: Budget | None = None, *, printing: bool = False) -> Extent:
    """Size of `value` as a tree, a step a visit."""
    nodes = chars = depth = 0
    stack = [(value, 1)]
    while stack:
        item, level = stack.pop()
        nodes, depth = nodes + 1, max(depth, level)
        if isinstance(item, str):
            chars += len(item)
        if budget is not None:
            budget.spend(1)
        if printing:
            _require_printable(item)
        stack += [(part, level + 1) for part in _parts(item)]
    return Extent(nodes, chars, depth)


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, (list, tuple, *_VIEWS)) else ()


def _require_printable(value: Any) -> None:
    if not isinstance(value, _PRINTABLE) and type(value).__name__ != "Undefined":
        raise ChatTemplateError(f"cannot print a {type(value).__name__}", where=_WHERE)


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> None:
    """Charge `text.replace(old, new, count)`."""
    found = text.count(old) if count < 0 else min(count, text.count(old))
    budget.text(len(text))
    budget.text(max(len(text) + found * (len(new) - len(old)), 0))


def joined(budget: Budget, separator: str, values: list[Any]) -> None:
    """Charge the join of `values` by `separator`."""
    budget.text(extent_of(values, budget, printing=True).chars + len(separator) * len(values))


def indented(budget: Budget, text: str, width: int | str = 4) -> None:
    """Charge the indentation of every line by `width`."""
    size = len(width) if isinstance(width, str) else width
    budget.text(len(text) + (text.count("\n") + 1) * max(size, 0))


def stripped(budget: Budget, text: str, chars: str | None = None) -> None:
    """Charge `text.strip(chars)`, which looks at every character of both for each other."""
    budget.text(len(text))
    _at_most("characters to strip", len(chars or ""), 64)


_PERCENT = re.compile(r"%(?:\([^()%]*\))?[-+ #0]*\d{0,2}(?:\.\d{0,2})?[a-zA-Z%]")
_SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?#?0?\d{0,2}[,_]?(?:\.\d{1,2})?[a-zA-Z%]?")


def percent_formatted(budget: Budget, form: str, values: Any) -> None:
    """Charge `form % values`; widths have at most two digits."""
    if "%" in _PERCENT.sub("", form):
        raise ChatTemplateError(f"the format {form[:80]!r} is not allowed", where=_WHERE)
    _formatted(budget, form, form.count("%"), values)


def brace_formatted(budget: Budget, form: str, values: Any) -> None:
    """Charge `form.format(values)`; widths have at most two digits and are no fields themselves."""
    fields = [spec for _, name, spec, _ in Formatter().parse(form) if name is not None]
    if not all(_SPEC.fullmatch(spec or "") for spec in fields):
        raise ChatTemplateError(f"the format {form[:80]!r} is not allowed", where=_WHERE)
    _formatted(budget, form, len(fields), values)


def _formatted(budget: Budget, form: str, fields: int, values: Any) -> None:
    each = budget.deep(values, printing=True).printed + _MAX_WIDTH  # any field may show any value
    budget.text(len(form) + fields * each)


def serialized(budget: Budget, value: Any, indent: int | str | None, separators: Iterable[str] | None) -> None:
    """Charge the JSON of `value`."""
    extent = budget.deep(value, printing=True)
    width = len(indent) if isinstance(indent, str) else indent or 0
    _at_most("indentation", width, 16)
    _at_most("separators", sum(map(len, separators or ())), 16)
    budget.text(extent.printed + extent.nodes * (width * extent.depth + 16))


def arithmetic(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Charge a binary operator, before it is done."""
    budget.spend(1)
    if isinstance(left, str) and operator == "%":
        percent_formatted(budget, left, right)
    elif isinstance(left, str | list | tuple) and operator == "+":
        _sized(budget, left, len(left) + (len(right) if isinstance(right, Sized) else 0))
    elif isinstance(left, str | list | tuple) and isinstance(right, int) and operator == "*":
        _sized(budget, left, len(left) * right)
    elif isinstance(right, str | list | tuple) and isinstance(left, int) and operator == "*":
        _sized(budget, right, len(right) * left)
    elif isinstance(left, int | float) and isinstance(right, int | float):
        _calculated(operator, left, right)
    else:  # sets of dictionary keys, mistakes
        raise ChatTemplateError(f"cannot do {type(left).__name__} {operator} {type(right).__name__}", where=_WHERE)


def _sized(budget: Budget, kind: str | list[Any] | tuple[Any, ...], size: int) -> None:
    if isinstance(kind, str):
        budget.text(max(size, 0))
    else:
        budget.items(max(size, 0))


def _calculated(operator: str, left: float, right: float) -> None:
    """Whole numbers grow without end; nothing in a template needs long ones."""
    bits = [value.bit_length() if isinstance(value, int) else 64 for value in (left, right)]
    if operator == "**" and isinstance(right, int):
        bits.append(bits[0] * max(right, 0))
    whole_number(max(bits))


def whole_number(bits: int) -> None:
    """Check the length of a whole number."""
    _at_most("bits of a number", bits, _MAX_BITS)


def rounded(precision: object) -> None:
    """Check the precision of a rounding, which becomes a power of ten."""
    _at_most("digits to round to", precision if isinstance(precision, int) else 0, 64)


def parsed_int(value: object) -> None:
    """Check the text of a whole number."""
    _at_most("digits of a number", len(value) if isinstance(value, str) else 0, 64)


def _at_most(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise ChatTemplateError(f"{value} {what}, more than {limit}", where=_WHERE, hint=_HINT)
