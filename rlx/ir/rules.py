"""Rewrite rules: a rule is a pair of graphs, before and after, written with the op builders.

The leaves of the two graphs are the rule's variables: a symbol in a leaf's shape matches any dim, an `AttrVar` any
attribute value. Shapes are checked on import. A parametrized test evaluates both sides of every rule on random data.
Values inside a match must have no other readers; otherwise the rewrite would duplicate their work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlx.errors import GraphError
from rlx.ir import dims, ops
from rlx.ir.dims import DimLike, Shape
from rlx.ir.dtypes import F32, DType
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node, topological

#: Receives why a pattern does not match: (a node, the reason).
Why = list[tuple[Node, str]]
#: Called for each rewrite: the rule, and the name of the value that it rewrote.
OnRewrite = Callable[["Rule", str], None]


@dataclass(frozen=True)
class AttrVar:
    """Matches any attribute value; the test uses the example."""

    name: str
    example: Any


@dataclass(frozen=True)
class Computed:
    """An attribute of the after-graph that is computed from matched attributes."""

    fn: Callable[..., Any]
    args: tuple[AttrVar, ...]


@dataclass
class Match:
    """The values of a rule's variables."""

    nodes: dict[str, Node] = field(default_factory=dict)
    dims: dict[str, DimLike] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    inner: list[Node] = field(default_factory=list)

    def copy(self) -> Match:
        return Match(dict(self.nodes), dict(self.dims), dict(self.attrs), list(self.inner))


@dataclass(frozen=True)
class Rule:
    """Replaces `before` by `after`.

    Attributes:
        any_dtype: variables that match values of every dtype (weights, quantized activations); others must be equal.
    """

    name: str
    before: Node
    after: Node
    any_dtype: frozenset[str] = frozenset()

    @cached_property
    def needs(self) -> frozenset[str]:
        """The ops of its pattern, without variables: a graph that lacks one of them has no match."""
        return frozenset(node.op for node in topological([self.before]) if node.op not in LEAVES)

    def match(self, node: Node, why: Why | None = None) -> Match | None:
        """The match if the node has the pattern; otherwise None, and `why` receives the reasons."""
        return _match(self.before, node, Match(), self.any_dtype, why)

    def apply(self, match: Match) -> Node:
        return instantiate(self.after, match)


def var(name: str, shape: Sequence[DimLike | str], dtype: DType = F32) -> Node:
    """A variable of a rule; strings in the shape are dim variables."""
    return ops.leaf("input", name, _shape(shape), dtype)


def state_var(name: str, shape: Sequence[DimLike | str]) -> Node:
    """A variable that matches only a state."""
    return ops.leaf("state", name, _shape(shape), F32)


def _shape(shape: Sequence[DimLike | str]) -> Shape:
    return tuple(dims.symbol(d) if isinstance(d, str) else d for d in shape)


_COMMUTATIVE = ("add", "mul")


def _match(pattern: Node, node: Node, found: Match, free: frozenset[str], why: Why | None) -> Match | None:
    if pattern.op in LEAVES:
        return _bind(pattern, node, found, free, why)
    if pattern.op != node.op or len(pattern.inputs) != len(node.inputs):
        return None
    result = _attrs(pattern, node, found.copy(), why)
    if result is None:
        return None
    result.inner.append(node)
    matches = (_operands(pattern, order, result, free, why) for order in _orders(node))
    return next((m for m in matches if m is not None), None)


def _orders(node: Node) -> list[tuple[Node, ...]]:
    """The orders of operands to try."""
    swaps = node.op in _COMMUTATIVE and node.inputs[0].shape == node.inputs[1].shape
    return [node.inputs, node.inputs[::-1]] if swaps else [node.inputs]


def _operands(
    pattern: Node, operands: Iterable[Node], found: Match, free: frozenset[str], why: Why | None
) -> Match | None:
    result: Match | None = found
    for p, n in zip(pattern.inputs, operands, strict=True):
        result = result and _match(p, n, result, free, why)
    return result


def _bind(pattern: Node, node: Node, found: Match, free: frozenset[str], why: Why | None) -> Match | None:
    if pattern.name in found.nodes:
        same = found.nodes[pattern.name] is node
        return found if same else _refuse(why, node, "the rule needs the same value in two places")
    if (pattern.op == "state") != (node.op == "state"):
        return _refuse(why, node, "is a state" if node.op == "state" else "is no state")
    if len(pattern.shape) != len(node.shape):
        return _refuse(why, node, f"has {len(node.shape)} axes, the rule needs {len(pattern.shape)}")
    if pattern.name not in free and pattern.dtype is not node.dtype:
        return _refuse(why, node, f"is {node.dtype}, the rule needs {pattern.dtype}")
    result = found.copy()
    for p, n in zip(pattern.shape, node.shape, strict=True):
        want = result.dims.setdefault(str(p), n) if isinstance(p, dims.Dim) else p
        if want != n:
            return _refuse(why, node, f"has a dim of {n}, the rule needs {want}")
    result.nodes[pattern.name] = node
    return result


def _attrs(pattern: Node, node: Node, found: Match, why: Why | None) -> Match | None:
    for (name, want), (_, have) in zip(pattern.attrs, node.attrs, strict=True):
        if isinstance(want, AttrVar):
            want = found.attrs.setdefault(want.name, have)
        if want != have:
            return _refuse(why, node, f"has {name}={have}, the rule needs {name}={want}")
    return found


def _refuse(why: Why | None, node: Node, reason: str) -> Match | None:
    """Reports a reason and returns no match."""
    if why is not None:
        why.append((node, reason))
    return None


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


def rewrite(graph: Graph, rules: Sequence[Rule], on_rewrite: OnRewrite | None = None) -> Graph:
    """Applies the rules bottom-up until none matches."""
    by_op = _by_op(rules)
    while (after := _sweep(graph, by_op, on_rewrite)).outputs != graph.outputs:
        graph = after
    return after


def _by_op(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    table: dict[str, list[Rule]] = {}
    for rule in rules:
        table.setdefault(rule.before.op, []).append(rule)
    return table


def _sweep(graph: Graph, by_op: Mapping[str, Sequence[Rule]], on_rewrite: OnRewrite | None) -> Graph:
    """Visits each node once; rules see rewritten operands, so one sweep folds a chain."""
    before = graph.readers()
    readers: dict[Node, int] = {}  # number of readers of each new node

    def visit(old: Node, inputs: tuple[Node, ...]) -> Node:
        new = ops.rebuild(old, inputs)
        rule, match = _first_match(new, by_op.get(old.op, ()), readers)
        if rule and match:
            result = rule.apply(match)
            if (result.shape, result.dtype) != (new.shape, new.dtype):
                raise GraphError(f"rule changes {new!r} to {result!r}", where=rule.name)
            if on_rewrite:
                on_rewrite(rule, graph.names()[old])
            new = result
        readers[new] = readers.get(new, 0) + before[old]
        return new

    return graph.map(visit)


def _first_match(
    node: Node, rules: Iterable[Rule], readers: Mapping[Node, int]
) -> tuple[Rule, Match] | tuple[None, None]:
    for rule in rules:
        match = rule.match(node)
        if match and all(readers.get(n) == 1 for n in match.inner[1:]):
            return rule, match
    return None, None


#: The reason reported for a rule that matches, but that the caller disabled.
OFF = "the rule is off"

# -- misses -----------------------------------------------------------------------------------------------------------


def misses(graph: Graph, rules: Iterable[Rule]) -> Iterator[tuple[Rule, Node, str]]:
    """Near misses: places that have the ops of a rule's pattern, but where it does not apply: (rule, node, reason).

    Rules of a single op are skipped: an op with other attributes is not a near miss.
    """
    readers, names, by_op = graph.readers(), graph.names(), _by_op(rules)
    for node in readers:
        for rule in by_op.get(node.op, ()):
            if _has_ops(rule.before, node) and any(i.op not in LEAVES for i in rule.before.inputs):
                reason = _reason(rule, node, readers, names)
                if reason:
                    yield rule, node, reason


def _has_ops(pattern: Node, node: Node) -> bool:
    """Whether the ops of a pattern match, regardless of attributes and shapes."""
    if pattern.op in LEAVES:
        return True
    if pattern.op != node.op or len(pattern.inputs) != len(node.inputs):
        return False
    return any(all(map(_has_ops, pattern.inputs, order)) for order in _orders(node))


def _reason(rule: Rule, node: Node, readers: Mapping[Node, int], names: Mapping[Node, str]) -> str | None:
    """Why a rule with matching ops does not apply; None if only the attributes of the root differ."""
    if _attrs(rule.before, node, Match(), None) is None:
        return None
    why: Why = []
    match = rule.match(node, why)
    if match is None:
        return f"%{names[why[0][0]]} {why[0][1]}" if why else None
    shared = next((n for n in match.inner[1:] if readers[n] != 1), None)
    return f"%{names[shared]} is read {readers[shared]} times, by ops or as an output" if shared else OFF
