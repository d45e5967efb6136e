"""A program: the nodes of a graph in parallel regions, with a place in memory for every value. Codegen compiles it."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir import printer
from rlx.ir.dims import bounds, symbols
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.ir.op_table import OPS
from rlx.ir.segments import is_segmented
from rlx.passes.capabilities import Layouts

Region = tuple[Node, ...]


@dataclass(frozen=True)
class Buffer:
    """Where a value lives.

    Attributes:
        kind: "arena" (offset into the program's arena), "private" (offset into each worker's own memory), or "weight"
            and "state" (bound by name).
        name: the weight's or state's name; empty in the arena and in private memory.
        offset, nbytes: bytes, at the upper bounds of the symbols; offsets are multiples of `Layouts.align`.
    """

    kind: str
    name: str = ""
    offset: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else f"{self.kind}+{self.offset}"


@dataclass(frozen=True)
class Program:
    """A scheduled graph.

    Attributes:
        regions: parallel regions in order. The nodes of a region do not depend on each other; a barrier follows each.
        prologues: for each region the nodes that every worker computes for itself, in order, before its first units.
        load: pack nodes, which run once when weights are bound.
        buffers: a place for every node but views, which share that of their `root`.
        arena: bytes of the arena.
        replicated: the places of the nodes of prologues, in private memory of a worker. Their region reads them there.
        private: bytes of that memory.
        deterministic: whether the arithmetic of a row must not depend on the number of rows of a call.
        exact: whether the precision is "exact".
    """

    graph: Graph
    regions: tuple[Region, ...]
    prologues: tuple[Region, ...]
    load: tuple[Node, ...] = ()
    buffers: dict[Node, Buffer] | None = None
    arena: int = 0
    replicated: dict[Node, Buffer] | None = None
    private: int = 0
    deterministic: bool = False
    exact: bool = False

    @property
    def symbols(self) -> list[str]:
        """Names of the symbols that a step takes values for, sorted. In a batch PAST_SEQ is a value of each segment."""
        nodes = self.graph.nodes()
        values = [dim for node in nodes for dim in node.shape]
        values += [value for node in nodes if not is_segmented(node) for _, value in node.attrs]
        return sorted(set().union(*map(symbols, values)))

    def buffer(self, node: Node) -> Buffer:
        """Where all workers find a value."""
        assert self.buffers is not None
        return self.buffers[root(node)]

    def operand(self, node: Node, region: int) -> Buffer:
        """Where the nodes of a region and of its prologue read a value."""
        assert self.replicated is not None
        return self.replicated[root(node)] if root(node) in self.prologues[region] else self.buffer(node)

    def __str__(self) -> str:
        """The leaves and the nodes of each region, line by line as in the graph's text, with their places."""
        names = self.graph.names()
        sizes = f"arena={self.arena} private={self.private}"
        lines = [f'program "{self.graph.name}" {self.graph.phase} {sizes} {{']
        leaves, _, _ = printer.parts(self.graph.nodes())
        lines += [f"  {printer.line(n, names)}{self._place(n)}" for n in leaves]
        lines += ["load:", *(f"  {printer.line(n, names)}" for n in self.load)] if self.load else []
        views = [n for n in self.graph.nodes() if n.op == "reshape"]
        lines += ["views:", *(f"  {printer.line(n, names)}" for n in views)] if views else []
        for i, (prologue, region) in enumerate(zip(self.prologues, self.regions, strict=True)):
            if prologue:
                lines += [f"region {i}, each worker:"]
                lines += [f"  {printer.line(n, names)}{self._own_place(n)}" for n in prologue]
            lines += [f"region {i}:", *(f"  {printer.line(n, names)}{self._place(n)}" for n in region)]
        lines += [
            f"  output {printer.quote(name)} %{names[n]}{self._place(n)}" for name, n in self.graph.outputs.items()
        ]
        return "\n".join([*lines, "}"]) + "\n"

    def _place(self, node: Node) -> str:
        placed = self.buffers is not None and node.op not in ("weight", "state")  # those are bound by name
        return f"  @ {self.buffer(node)}" if placed else ""

    def _own_place(self, node: Node) -> str:
        return f"  @ {self.replicated.get(node) or self.buffer(node)}" if self.replicated else ""


def root(node: Node) -> Node:
    """The node whose buffer holds this value. Views and in-place updates share the buffer of their operand."""
    while node.op == "reshape" or OPS[node.op].writes:
        node = node.inputs[0]
    return node


def maker(node: Node) -> Node:
    """The node that computes this value: that of which it is a view."""
    return node if node.op != "reshape" else maker(node.inputs[0])


def is_work(node: Node) -> bool:
    """Whether a step computes this node: it is no leaf, view or packed weight."""
    return node.op not in LEAVES and node.op not in ("reshape", "pack")


def nbytes(node: Node, graph: Graph, layouts: Layouts) -> int:
    """Bytes of a value at the upper bounds of its symbols."""
    return layouts.size(node.dtype, [bounds(d, graph.bounds)[1] for d in node.shape])
