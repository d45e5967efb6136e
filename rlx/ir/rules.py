"""Rewrite rules: a rule is two graphs, before and after, written with the op builders.

The leaves of the two graphs are the rule's variables: a symbol in a leaf's shape stands for any dim, an `AttrVar` for
any attribute value. Shapes are checked when the module is imported, and one parametrized test evaluates both sides of
every rule on random data. A value inside the matched pattern must have no other reader, or the work would be doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.errors import GraphError
from rlx.ir import dims, ops
from rlx.ir.dims import DimLike, Shape
from rlx.ir.dtypes import F32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node


@dataclass(frozen=True)
class AttrVar:
    """Stands for any attribute value; the test uses the example."""

    name: str
    example: Any


@dataclass(frozen=True)
class Computed:
    """An attribute of the after-graph computed from matched ones."""

    fn: Callable[..., Any]
    args: tuple[AttrVar, ...]


@dataclass
class Match:
    """What the variables of a rule stand for."""

    nodes: dict[str, Node] = field(default_factory=dict)
    dims: dict[str, DimLike] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    inner: list[Node] = field(default_factory=list)

    def copy(self) -> Match:
        return Match(dict(self.nodes), dict(self.dims), dict(self.attrs), list(self.inner))


@dataclass(frozen=True)
class Rule:
    """`before` becomes `after`.

    Attributes:
        any_dtype: variables that match values of every dtype (weights, prepared activations); the rest must be equal.
    """

    name: str
    before: Node
    after: Node
    any_dtype: frozenset[str] = frozenset()

    def match(self, node: Node) -> Match | None:
        return _match(self.before, node, Match(), self.any_dtype)

    def apply(self, match: Match) -> Node:
        return instantiate(self.after, match)


def var(name: str, shape: Sequence[DimLike | str], dtype: DType = F32) -> Node:
    """A variable of a rule; strings in the shape are dim variables."""
    return ops.leaf("input", name, _shape(shape), dtype)


def state_var(name: str, shape: Sequence[DimLike | str], dtype: DType = F32) -> Node:
    """A variable that only a state matches."""
    return ops.leaf("state", name, _shape(shape), dtype)


def _shape(shape: Sequence[DimLike | str]) -> Shape:
    return tuple(dims.symbol(d) if isinstance(d, str) else d for d in shape)


_COMMUTATIVE = ("add", "mul")


def _match(pattern: Node, node: Node, found: Match, free: frozenset[str]) -> Match | None:
    if pattern.op in LEAVES:
        return _bind(pattern, node, found, free)
    if pattern.op != node.op or len(pattern.inputs) != len(node.inputs):
        return None
    result = _attrs(pattern, node, found.copy())
    if result is None:
        return None
    result.inner.append(node)
    orders: list[tuple[Node, ...]] = [node.inputs]
    if node.op in _COMMUTATIVE and node.inputs[0].shape == node.inputs[1].shape:
        orders.append(node.inputs[::-1])
    return next((m for m in (_operands(pattern, o, result, free) for o in orders) if m is not None), None)


def _operands(pattern: Node, operands: Iterable[Node], found: Match, free: frozenset[str]) -> Match | None:
    result: Match | None = found
    for p, n in zip(pattern.inputs, operands, strict=True):
        result = result and _match(p, n, result, free)
    return result


def _bind(pattern: Node, node: Node, found: Match, free: frozenset[str]) -> Match | None:
    if pattern.name in found.nodes:
        return found if found.nodes[pattern.name] is node else None
    if (pattern.op == "state") != (node.op == "state") or len(pattern.shape) != len(node.shape):
        return None
    if pattern.name not in free and pattern.dtype is not node.dtype:
        return None
    result = found.copy()
    for p, n in zip(pattern.shape, node.shape, strict=True):
        want = result.dims.setdefault(str(p), n) if isinstance(p, dims.Dim) else p
        if want != n:
            return None
    result.nodes[pattern.name] = node
    return result


def _attrs(pattern: Node, node: Node, found: Match) -> Match | None:
    for (_, want), (_, have) in zip(pattern.attrs, node.attrs, strict=True):
        if isinstance(want, AttrVar):
            want = found.attrs.setdefault(want.name, have)
        if want != have:
            return None
    return found


def instantiate(pattern: Node, match: Match) -> Node:
    """The pattern with its variables replaced."""
    if pattern.op in LEAVES:
        return match.nodes[pattern.name]
    attrs = {name: _resolve(v, match) for name, v in pattern.attrs}
    return ops.make(pattern.op, *(instantiate(i, match) for i in pattern.inputs), **attrs)


def _resolve(v: Any, match: Match) -> Any:
    if isinstance(v, Computed):
        return v.fn(*(match.attrs[a.name] for a in v.args))
    return match.attrs[v.name] if isinstance(v, AttrVar) else v


def rewrite(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """Applies the rules bottom-up until none matches."""
    by_op: dict[str, list[Rule]] = {}
    for rule in rules:
        by_op.setdefault(rule.before.op, []).append(rule)
    while (after := _sweep(graph, by_op)).outputs != graph.outputs:
        graph = after
    return after


def _sweep(graph: Graph, by_op: Mapping[str, Sequence[Rule]]) -> Graph:
    """Visits each node once; the rules see operands that are rewritten already, so a chain folds in one sweep."""
    before = graph.readers()
    readers: dict[Node, int] = {}  # of the new nodes

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        new = _first_match(ops.rebuild(old, inputs), by_op.get(old.op, ()), readers)
        readers[new] = readers.get(new, 0) + before[old]
        return new

    return graph.map(visit)


def _first_match(node: Node, rules: Iterable[Rule], readers: Mapping[Node, int]) -> Node:
    for rule in rules:
        match = rule.match(node)
        if match and all(readers.get(n) == 1 for n in match.inner[1:]):
            result = rule.apply(match)
            if (result.shape, result.dtype) != (node.shape, node.dtype):
                raise GraphError(f"rule changes {node!r} to {result!r}", where=rule.name)
            return result
    return node
