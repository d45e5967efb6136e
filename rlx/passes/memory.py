"""Memory: turns the lifetimes of values into offsets in one arena.

Values are placed in the order in which they are computed, each at the lowest offset that is free during its lifetime
(first fit). Inputs and outputs live for the whole step. Weights and states lie outside, and are bound by name.

The values of a prologue lie in private memory of each worker. They live for one region, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlx.errors import GraphError
from rlx.ir.node import Node
from rlx.passes.capabilities import Layouts
from rlx.passes.program import Buffer, Program, Region, nbytes, root
from rlx.passes.report import SILENT, Log
from rlx.passes.schedule import last_use


@dataclass(frozen=True)
class _Span:
    """The range [offset, end) of the arena, in bytes, that is taken up to and including a region."""

    offset: int
    end: int
    until: int


def memory(program: Program, layouts: Layouts, log: Log = SILENT, *, reuse: bool = True) -> Program:
    """The program with a buffer for every value, except views, which share their operand's.

    Args:
        layouts: those of the device: sizes and alignment.
        reuse: whether values that do not live at the same time may share bytes.
    """
    last = last_use(program)
    buffers = {n: _bound(n, program, layouts) for n in program.graph.nodes() if n.op in ("weight", "state", "pack")}
    taken: list[_Span] = []
    for node, made in _order(program):
        size = nbytes(node, program.graph, layouts)
        taken = [s for s in taken if s.until >= made or not reuse]
        offset = _first_fit(taken, size, layouts.align)
        taken.append(_Span(offset, offset + size, last[node]))
        buffers[node] = Buffer("arena", offset=offset, nbytes=size)
    replicated: dict[Node, Buffer] = {}
    for prologue in program.prologues:
        start = 0 if reuse else max((b.offset + b.nbytes for b in replicated.values()), default=0)
        replicated |= _replicated(prologue, program, start, layouts)
    arena, private = (
        max((b.offset + b.nbytes for b in some.values() if b.kind == kind), default=0)
        for some, kind in ((buffers, "arena"), (replicated, "private"))
    )
    if not reuse:
        log.remark("values share no memory: left out by the options")
    log.fact("values", sum(b.kind == "arena" for b in buffers.values()))
    log.fact("bytes of values", sum(b.nbytes for b in buffers.values() if b.kind == "arena"))
    arena, private = _align(arena, layouts.align), _align(private, layouts.align)
    log.fact("bytes of the arena", arena)
    log.fact("bytes of each worker", private)
    return replace(program, buffers=buffers, arena=arena, replicated=replicated, private=private)


def _replicated(prologue: Region, program: Program, end: int, layouts: Layouts) -> Iterator[tuple[Node, Buffer]]:
    """The values of a prologue with their places, one after the other from `end` on."""
    for node in (node for node in prologue if root(node) is node):  # a cache is written where it is
        buffer = Buffer("private", offset=_align(end, layouts.align), nbytes=nbytes(node, program.graph, layouts))
        end = buffer.offset + buffer.nbytes
        yield node, buffer


def _bound(node: Node, program: Program, layouts: Layouts) -> Buffer:
    source = node.inputs[0] if node.op == "pack" else node
    size = 0 if node.op == "state" else nbytes(source, program.graph, layouts)
    return Buffer("state" if node.op == "state" else "weight", source.name, 0, size)


def _order(program: Program) -> list[tuple[Node, int]]:
    """(value, region that computes it). The region of an input is -1; callers write it before the step."""
    inputs = [(n, -1) for n in program.graph.nodes() if n.op == "input"]
    made = [(n, i) for i, region in enumerate(program.regions) for n in region if root(n) is n]
    return inputs + made


def lifetimes(program: Program) -> Iterator[tuple[Node, int, int]]:
    """Each value of the arena with the region that computes it, -1 for an input, and the last region that needs it."""
    last = last_use(program)
    yield from ((node, made, last[node]) for node, made in _order(program))


def _first_fit(taken: list[_Span], size: int, align: int) -> int:
    offset = 0
    for span in sorted(taken, key=lambda s: s.offset):
        if offset + size <= span.offset:
            break
        offset = max(offset, _align(span.end, align))
    return offset


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


def check_memory(program: Program) -> None:
    """Checks that no two values overlap that live at the same time. Raises `GraphError`."""
    values = [(program.buffer(n), made, until, n) for n, made, until in lifetimes(program)]
    for region in range(-1, len(program.regions)):
        live = sorted(((b, n) for b, made, until, n in values if made <= region <= until), key=lambda v: v[0].offset)
        _check_apart(live, f"in the arena of region {region}")
    for region, prologue in enumerate(program.prologues):
        own = [((program.replicated or {})[n], n) for n in prologue if root(n) is n]
        _check_apart(own, f"before the units of region {region}")


def _check_apart(live: Sequence[tuple[Buffer, Node]], where: str) -> None:
    """Raises `GraphError` if two of the buffers overlap, which are sorted by offset."""
    for (a, first), (b, second) in itertools.pairwise(live):
        if a.offset + a.nbytes > b.offset:
            raise GraphError(f"overlaps {second!r} {where}", where=repr(first))
