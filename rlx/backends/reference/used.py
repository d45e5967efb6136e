"""The parts of the states that a step uses: the pages and the slots of its sequences.

Reference backend. A pool of caches may be much larger than what one step reads, so states are evaluated without the
pages and slots that the step does not use. Page tables and segments then have the numbers of those that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.ir import dims, segments
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.op_table import roles as op_roles
from rlx.passes.program import root

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Env = Mapping[str, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Used:
    """The parts that one step uses.

    Attributes:
        states: the states that have parts, with the numbers of those that are used, ascending, and the positions
            of a page, 0 for slots. All others are used as a whole.
        tables: page tables and segments, which are inputs, as the numbers of what remains.
        rows: numbers of the rows that belong to a segment; None without segments.
        segments: the values of that input.
    """

    states: Mapping[Node, tuple[Array, int]]
    tables: Mapping[Node, Array]
    rows: Array | None = None
    segments: Array | None = None

    @staticmethod
    def of(graph: Graph, read: Callable[[Node], Array], env: Env) -> Used:
        """The rows and positions that a step uses.

        Args:
            read: the values of an input.
            env: the values of the symbols.
        """
        ops = [node for node in graph.nodes() if OPS[node.op].roles]
        paged = [node for node in ops if dict(node.attrs).get("page")]
        slotted = [node for node in ops if segments.is_segmented(node)]
        rows = read(slotted[0].inputs[-1]) if slotted else None
        states: dict[Node, tuple[Array, int]] = {}
        tables: dict[Node, Array] = {}
        if paged:
            table = paged[0].inputs[-2 if slotted else -1]
            numbers = read(table)
            pages = _numbers(entry for node in paged for entry in _pages(node, numbers, rows, env))
            tables[table] = _renumbered(numbers, pages)
            states |= {root(i): (pages, node["page"]) for node in paged for i in _states(node, "c")}
        if rows is not None:
            covered = np.concatenate([np.arange(first, first + count) for first, count, *_ in rows.tolist()])
            if not any(any(_states(node, "sa")) for node in slotted):
                return Used(states, tables, covered, rows)
            filled, columns = rows[:, segments.ROWS] > 0, slice(segments.SLOT, None)
            slots = _numbers(iter(rows[filled, columns].reshape(-1)))
            tables[slotted[0].inputs[-1]] = after = rows.copy()
            after[:, columns] = np.where(filled[:, None], _renumbered(rows[:, columns], slots), 0)
            states |= {root(i): (slots, 0) for node in slotted for i in _states(node, "sa")}
            return Used(states, tables, covered, rows)
        return Used(states, tables)

    def computed(self, node: Node, value: Array) -> Array:
        """The rows of a node's value that are computed: ops over states leave out those of no segment."""
        if node.op == "as_cache" and self.segments is not None:
            places = [np.arange(at, at + count) for _, count, _, at, *_ in self.segments.tolist()]
            return value[:, np.concatenate(places)]
        has_rows = self.rows is not None and segments.is_segmented(node) and not OPS[node.op].writes
        return value[self.rows] if has_rows else value

    def shape(self, state: Node, shape: Shape) -> Shape:
        """The shape of the used parts of a state of this shape."""
        if state not in self.states:
            return shape
        numbers, page = self.states[state]
        return (shape[0], len(numbers) * page, *shape[2:]) if page else (len(numbers), *shape[1:])

    def taken(self, state: Node, raw: Bytes, shape: Shape) -> Bytes:
        """The bytes of the used parts: a copy, or `raw` itself if the state is used as a whole."""
        if state not in self.states:
            return raw
        numbers, page = self.states[state]
        parts = raw.reshape(shape[0], shape[1] // page, -1)[:, numbers] if page else raw.reshape(shape[0], -1)[numbers]
        return np.ascontiguousarray(parts).reshape(-1)

    def put(self, state: Node, raw: Bytes, shape: Shape, parts: Bytes) -> None:
        """The inverse of `taken`: writes the used parts to the bytes of the state."""
        if state not in self.states:
            return
        numbers, page = self.states[state]
        if page:
            raw.reshape(shape[0], shape[1] // page, -1)[:, numbers] = parts.reshape(shape[0], len(numbers), -1)
        else:
            raw.reshape(shape[0], -1)[numbers] = parts.reshape(len(numbers), -1)


def _states(node: Node, roles: str) -> Iterator[Node]:
    """The operands of a node with one of these roles, see `rlx.ir.segments`."""
    letters, _ = op_roles(node)
    return (operand for operand, role in zip(node.inputs, letters, strict=False) if role in roles)


def _pages(node: Node, table: Array, rows: Array | None, env: Env) -> Iterator[int]:
    """The pages that a node uses."""
    end = node["length"] if node.op == "attention" else node["at"] + node.inputs[1].shape[0]
    if rows is None:
        yield from table[: -(-dims.value(end, env) // node["page"])].tolist()
        return
    for own, (_, count, past, *_) in zip(table.tolist(), rows.tolist(), strict=True):
        if count:
            yield from own[: -(-dims.value(end, {**env, "SEQ": count, "PAST_SEQ": past}) // node["page"])]


def _numbers(found: Iterator[int]) -> Array:
    """The different numbers of parts, ascending. Others than those of parts are refused by the meaning of the op."""
    return np.array(sorted({int(number) for number in found if number >= 0}), np.int64)


def _renumbered(values: Array, numbers: Array) -> Array:
    """The place of each value in `numbers`, or -1."""
    places = np.searchsorted(numbers, values)
    known = places < len(numbers)
    known[known] = numbers[places[known]] == values[known]
    return np.where(known, places, -1).astype(values.dtype)
