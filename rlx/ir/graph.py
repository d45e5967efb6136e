"""Graphs: nodes under named outputs.

A `Graph` names the outputs, holds the values of constants, and records what the passes determine (phase and bounds of
the symbols). Graphs share their nodes (`rlx.ir.node`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

from rlx.errors import GraphError, IrSyntaxError, ShapeError
from rlx.ir import dims, dtypes, ops, printer
from rlx.ir.dims import Dim, DimLike
from rlx.ir.dtypes import F32, DTypeLike
from rlx.ir.node import Node, topological
from rlx.notebook import card

T = TypeVar("T")

_DIMS = 'give a whole number, a symbol such as rlx.SEQ or "N", or a form such as 2 * SEQ'


class Graph:
    """A computation: named outputs over ops, inputs, weights and states.

    Args:
        name: shown in dumps and cache listings.
        outputs: name -> node; more can be added with `output`.
        constants: values of weights that the graph itself supplies (rope frequencies and the like).
        phase: "graph" as built; the pipeline sets "prefill", "decode" or "batch".
        bounds: symbol -> (lowest, highest) value, set by the specialize pass.

    Attributes:
        inputs: names of the inputs in the order in which they were declared.
    """

    def __init__(
        self,
        name: str = "graph",
        outputs: Mapping[str, Node] | None = None,
        *,
        constants: Mapping[str, np.ndarray] | None = None,
        phase: str = "graph",
        bounds: dims.Bounds | None = None,
    ) -> None:
        self.name, self.phase = name, phase
        self.outputs: dict[str, Node] = dict(outputs or {})
        self.constants: dict[str, np.ndarray] = dict(constants or {})
        self.bounds: dict[str, tuple[int, int]] = dict(bounds or {})
        self.inputs: list[str] = []
        self._named: dict[Node, str] = {}
        self._origin: tuple[Graph, Mapping[Node, Node] | None] | None = None  # the graph before, new node -> old node
        self._made: tuple[Any, dict[str, Any]] = (None, {})  # of `_once`: what the graph was, what was made of it

    def input(self, name: str, shape: Sequence[DimLike | str], dtype: DTypeLike = F32) -> Node:
        """A value that every call supplies.

        Args:
            shape: numbers, and symbols for sizes that are known when the program runs: `rlx.SEQ`, `rlx.Dim("N")` or
                "N", or a form such as "2*N+1". `rlx.compile` needs a range for every other symbol than rlx's own.
            dtype: one of `rlx.dtypes`, its name ("f32", "float32"), or a type of NumPy or PyTorch.
        """
        return self._leaf("input", name, shape, dtype)

    def weight(self, name: str, shape: Sequence[DimLike | str], dtype: DTypeLike = F32) -> Node:
        """A value bound once, packed for its kernels at load; any dtype of the table, block formats included."""
        return self._leaf("weight", name, shape, dtype)

    def constant(self, name: str, value: np.ndarray) -> Node:
        """A weight whose float32 value the graph supplies."""
        array = np.ascontiguousarray(value, np.float32)
        if name in self.constants and not np.array_equal(self.constants[name], array):
            raise GraphError("two different constants have this name", where=f"constant {name!r}")
        self.constants[name] = array
        return self.weight(name, array.shape, F32)

    def state(self, name: str, shape: Sequence[DimLike | str], dtype: DTypeLike = F32) -> Node:
        """A value that lives between calls and is updated in place (a KV cache)."""
        return self._leaf("state", name, shape, dtype)

    def output(self, name: str, node: Node) -> Node:
        """Names a result; `GraphError` if the name is taken or `node` is not a node."""
        if not isinstance(node, Node):
            raise GraphError(f"expected a node, found {type(node).__name__}", where=f"output {name!r}")
        if name in self.outputs:
            raise GraphError("an output of this name exists", where=f"output {name!r}", hint="Choose another name.")
        self.outputs[name] = node
        return node

    def named(self, name: str, node: Node) -> Node:
        """Names a value in IR text and returns it. Names do not affect the code or the compile key.

        A name that is taken gets a number appended. Characters other than letters, digits, `_` and `.` are replaced
        by `_`.
        Example: `scores = graph.named("scores", q @ k)`.
        """
        self._named.setdefault(node, printer.sanitize(name))
        self._made = (None, {})
        return node

    def names(self) -> dict[Node, str]:
        """The name in IR text of each node that an output reaches: see `rlx.ir.printer`."""
        return self._once("names", lambda: printer.value_names(self.outputs, self._known()))

    def _once(self, what: str, make: Callable[[], T]) -> T:
        """`make()`, called once until the graph changes: an opening asks for the same things many times."""
        state = (self.name, self.phase, dict(self.bounds), list(self.outputs.items()))
        if self._made[0] != state:
            self._made = state, {}
        found: dict[str, T] = self._made[1]
        return found[what] if what in found else found.setdefault(what, make())

    def _known(self) -> dict[Node, str]:
        """Names that are set already: in this graph, or in the one that it was derived from."""
        if self._origin is None:
            return self._named
        source, back = self._origin
        before = source.names()
        known = before if back is None else {new: before[old] for new, old in back.items()}
        return {**known, **self._named}

    def _leaf(self, op: str, name: str, shape: Sequence[DimLike | str], dtype: DTypeLike) -> Node:
        where = f"{op} {name!r}"
        try:
            kind = dtypes.dtype(dtype)
        except ShapeError as error:
            raise ShapeError(f"{dtype!r} is not a dtype", where=where, hint=error.hint) from error
        if isinstance(shape, str | Integral | Dim):
            raise ShapeError(f"{shape!r} is no shape", where=where, hint="give a list, such as [rlx.SEQ, 64]")
        if op == "input" and name not in self.inputs:
            self.inputs.append(name)
        return ops.leaf(op, name, tuple(_dim(d, where) for d in shape), kind)

    def nodes(self) -> list[Node]:
        """Every node that an output reaches, operands before users."""
        return [*self._once("nodes", lambda: topological(self.outputs.values()))]

    def leaves(self, op: str) -> dict[str, Node]:
        """name -> node of all inputs, weights or states in order of first use."""
        return {n.name: n for n in self.nodes() if n.op == op}

    @property
    def symbols(self) -> list[str]:
        """Names of the symbols in any shape or attribute, sorted."""
        found: set[str] = set()
        for node in self.nodes():
            for dim in (*node.shape, *(v for _, v in node.attrs)):
                found |= dims.symbols(dim)
        return sorted(found)

    def map(self, rebuild: Callable[[Node, tuple[Node, ...]], Node], **changes: Any) -> Graph:
        """A graph whose nodes are rebuilt bottom-up: `rebuild(old, new_inputs) -> new`.

        A new node keeps the name of the old one.
        """
        new: dict[Node, Node] = {}
        for node in self.nodes():
            new[node] = rebuild(node, tuple(new[i] for i in node.inputs))
        after = self.replace(outputs={name: new[n] for name, n in self.outputs.items()}, **changes)
        back: dict[Node, Node] = {}
        for node, result in new.items():
            back.setdefault(result, node)
        after._origin = self, back
        return after

    def replace(self, **changes: Any) -> Graph:
        """A copy with other outputs, phase, bounds or constants. Values keep their names."""
        fields = {"outputs": self.outputs, "constants": self.constants, "phase": self.phase, "bounds": self.bounds}
        copy = Graph(self.name, **{**fields, **changes})
        copy._origin = self, None
        return copy

    def users(self) -> dict[Node, list[Node]]:
        """node -> the nodes that read it, one entry per operand position."""
        table: dict[Node, list[Node]] = {n: [] for n in self.nodes()}
        for node in table:
            for operand in node.inputs:
                table[operand].append(node)
        return table

    def readers(self) -> dict[Node, int]:
        """node -> how many operand positions and outputs read it."""
        count = dict.fromkeys(self.nodes(), 0)
        for operand in chain(self.outputs.values(), *(n.inputs for n in count)):
            count[operand] += 1
        return count

    def __str__(self) -> str:
        return printer.dumps(self.name, self.phase, self.bounds, self.outputs, self.names())

    def canonical(self) -> str:
        """The IR text with numbers as names: equal for equal graphs, independent of their names."""

        def text() -> str:
            return printer.dumps(self.name, self.phase, self.bounds, self.outputs, printer.numbered(self.outputs))

        return self._once("canonical", text)

    def _repr_html_(self) -> str:
        nodes = self.nodes()
        counts = Counter(node.op for node in nodes)
        rows: list[tuple[str, object]] = [("phase", self.phase), ("values", len(nodes))]
        rows += [("ops", ", ".join(f"{op} {count}" for op, count in counts.most_common()))]
        rows += [("outputs", ", ".join(self.outputs) or "none")]
        return card(f"graph {self.name}", rows, [("IR", str(self))])

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {self.phase}, outputs {', '.join(self.outputs) or 'none'}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and (self.name, self.phase, self.outputs, self.bounds) == (
            other.name,
            other.phase,
            other.outputs,
            other.bounds,
        )

    __hash__ = None  # type: ignore[assignment]


def _dim(value: Any, where: str) -> DimLike:
    """Converts a caller's dim: NumPy integers become Python's, strings are parsed."""
    if isinstance(value, Dim):
        return value
    if isinstance(value, str):
        try:
            return dims.parse_dim(value)
        except IrSyntaxError as error:
            raise ShapeError(f"{value!r} is not a dim", where=where, hint=_DIMS) from error
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ShapeError(f"{value!r} is not a dim", where=where, hint=_DIMS)
    return int(value)
