"""A program: a graph in its final order, with a place in memory for every value. Codegen makes machine code of it."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.ir import printer
from rlx.ir.dims import bounds
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.ir.verify import WRITES

Region = tuple[Node, ...]


@dataclass(frozen=True)
class Buffer:
    """Where a value lives.

    Attributes:
        kind: "arena" (offset into the program's arena), or "weight" and "state" (bound by name).
        name: the weight's or state's name; empty in the arena.
        offset, nbytes: bytes, at the upper bounds of the symbols; offsets are multiples of 64.
    """

    kind: str
    name: str = ""
    offset: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"arena+{self.offset}" if self.kind == "arena" else f"{self.kind} {self.name!r}"


@dataclass(frozen=True)
class Program:
    """A scheduled graph.

    Attributes:
        regions: parallel regions in order; the nodes of one region do not depend on each other, a barrier follows each.
        load: pack nodes, run once when weights are bound.
        buffers: a place for every node that holds a value of its own; views resolve through `root`.
        arena: bytes of the arena.
    """

    graph: Graph
    regions: tuple[Region, ...]
    load: tuple[Node, ...] = ()
    buffers: dict[Node, Buffer] | None = None
    arena: int = 0

    def buffer(self, node: Node) -> Buffer:
        assert self.buffers is not None
        return self.buffers[root(node)]

    def __str__(self) -> str:
        number = {n: i for i, n in enumerate(self.graph.nodes())}
        lines = [f'program "{self.graph.name}" {self.graph.phase} arena={self.arena} {{']
        lines += [f"  load {printer.line(n, number)}" for n in self.load]
        for i, region in enumerate(self.regions):
            lines.append(f"  region {i} {{")
            lines += [f"    {printer.line(n, number)}{self._place(n)}" for n in region]
            lines.append("  }")
        lines += [f"  output {name!r} %{number[n]}{self._place(n)}" for name, n in self.graph.outputs.items()]
        return "\n".join([*lines, "}"]) + "\n"

    def _place(self, node: Node) -> str:
        return f"  @ {self.buffer(node)}" if self.buffers else ""


def root(node: Node) -> Node:
    """The node whose buffer holds this value: views and in-place updates share their operand's."""
    while node.op in ("reshape", *WRITES):
        node = node.inputs[0]
    return node


def is_work(node: Node) -> bool:
    """True if a step must do something for this node."""
    return node.op not in LEAVES and node.op not in ("reshape", "pack")


def nbytes(node: Node, graph: Graph) -> int:
    """Bytes of a value at the upper bounds of its symbols."""
    return node.dtype.size([bounds(d, graph.bounds)[1] for d in node.shape])
