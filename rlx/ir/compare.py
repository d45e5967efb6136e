"""Differences between two graphs as text; used by `rlx cache diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlx.ir import printer
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node

_SHOWN = 3  # differing values that are listed


@dataclass(frozen=True)
class Difference:
    """One way in which two graphs differ.

    Attributes:
        what: such as "output token", "state dtype", "op linear"; with a count in brackets if several places differ.
        left, right: in the first and in the second graph; "" if that graph has no counterpart.
    """

    what: str
    left: str
    right: str


def differences(a: Graph, b: Graph) -> list[Difference]:
    """The differences: outputs; shapes and dtypes of inputs, weights and states; counts of ops; the first values.

    Empty if and only if the two graphs compute the same.

    >>> from rlx.ir import ops
    >>> a, b = Graph("a"), Graph("b")
    >>> y = a.output("y", ops.silu(a.input("x", [4])))
    >>> y = b.output("y", ops.sigmoid(b.input("x", [4])))
    >>> [(d.what, d.left, d.right) for d in differences(a, b)][:2]
    [('op silu', '1 time', ''), ('op sigmoid', '', '1 time')]
    """
    if a.canonical().partition("\n")[2] == b.canonical().partition("\n")[2]:  # the first line has the name
        return []
    found = [*_bounds(a, b), *_named("output", a.outputs, b.outputs)]
    for op in LEAVES:
        found += _named(op, a.leaves(op), b.leaves(op))
    return [*found, *_counts(a, b), *_places(a, b)]


def _bounds(a: Graph, b: Graph) -> list[Difference]:
    rows = [(name, a.bounds.get(name), b.bounds.get(name)) for name in sorted({*a.bounds, *b.bounds})]
    return [Difference(f"bound {name}", _range(x), _range(y)) for name, x, y in rows if x != y]


def _range(bound: tuple[int, int] | None) -> str:
    return "" if bound is None else f"{bound[0]}..{bound[1]}"


def _named(kind: str, a: Mapping[str, Node], b: Mapping[str, Node]) -> list[Difference]:
    """Named values: inputs, weights, states, outputs. Equal changes of several of them share one row."""
    only_a, only_b = [name for name in a if name not in b], [name for name in b if name not in a]
    rows = [Difference(f"{kind} {name}", _type(a[name]), "") for name in only_a[:_SHOWN]]
    rows += [Difference(f"{kind} {name}", "", _type(b[name])) for name in only_b[:_SHOWN]]
    more_a, more_b = len(only_a[_SHOWN:]), len(only_b[_SHOWN:])
    if more_a or more_b:
        rows.append(Difference(f"further {kind}s", _times(more_a, kind), _times(more_b, kind)))
    changed: dict[tuple[str, str, str], list[str]] = {}
    for name in a:
        if name in b:
            x, y = a[name], b[name]
            if x.dtype != y.dtype:
                changed.setdefault(("dtype", str(x.dtype), str(y.dtype)), []).append(name)
            if x.shape != y.shape:
                changed.setdefault(("shape", _shape(x), _shape(y)), []).append(name)
    for (what, left, right), names in changed.items():
        rows.append(Difference(f"{kind} {what} of {_list(names)}", left, right))
    return rows


def _counts(a: Graph, b: Graph) -> list[Difference]:
    """How often each op occurs."""
    left, right = (Counter(node.op for node in graph.nodes() if node.op not in LEAVES) for graph in (a, b))
    ops = [*left, *(op for op in right if op not in left)]
    return [Difference(f"op {op}", _times(left[op]), _times(right[op])) for op in ops if left[op] != right[op]]


def _places(a: Graph, b: Graph) -> list[Difference]:
    """The first computed values with equal names that are computed differently, or exist in one graph only."""
    left, right = _lines(a), _lines(b)
    names = [*left, *(name for name in right if name not in left)]
    rows = [(name, left.get(name, ""), right.get(name, "")) for name in names]
    rows = [row for row in rows if row[1] != row[2]]
    shown = [Difference(f"value %{name}", x, y) for name, x, y in rows[:_SHOWN]]
    if more := rows[_SHOWN:]:
        counts = (sum(bool(row[side]) for row in more) for side in (1, 2))
        shown.append(Difference("further values", *(_times(count, "value") for count in counts)))
    return shown


def _lines(graph: Graph) -> dict[str, str]:
    """Name -> IR line of every value except leaves."""
    names = graph.names()
    nodes = (node for node in graph.nodes() if node.op not in LEAVES)
    return {names[node]: printer.line(node, names).partition(" = ")[2] for node in nodes}


def _type(node: Node) -> str:
    return f"{node.dtype}{_shape(node)}"


def _shape(node: Node) -> str:
    return f"[{', '.join(map(str, node.shape))}]"


def _list(names: Iterable[str]) -> str:
    first, *more = names
    return first if not more else f"{first} and {len(more)} more"


def _times(count: int, what: str = "time") -> str:
    return f"{count} {what}{'s' * (count != 1)}" if count else ""
