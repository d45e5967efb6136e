"""The nodes of a lowered program by their NumPy meaning, over the memory that the program gives its values.

Reference backend. Operands are read as the numbers that their bytes stand for, the meaning is evaluated in float64, and
the result is rounded to its dtype when it is written. `rlx.backends.verify` uses the same evaluation on the memory of
another backend's program.

A pool of caches may be much larger than what one step reads, so states are evaluated without the pages and slots that
the step does not use. Page tables and segments then have the numbers of those that remain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.reference.formats import Array, Bytes, Formats
from rlx.ir import dims, segments
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.ir.op_table import roles as op_roles
from rlx.ir.ops import updated
from rlx.passes.layout import ROWS_LAYOUT
from rlx.passes.program import root

Env = Mapping[str, int]

#: Gives the bytes of a value: (the node whose buffer holds it, their number) -> uint8 [number], a view. Of a state it
#: may give the bytes of the parts in use only (`Used.taken`).
Memory = Callable[[Node, int], Bytes]

_KEPT_BYTES = 1 << 28  # of decoded weights; larger models decode them again in each step


class Weights:
    """Decoded weights, the last ones used: a step reads all of them.

    Args:
        formats: those of the device whose weights they are.
    """

    def __init__(self, formats: Formats) -> None:
        self.formats = formats
        # With the bytes of each, which stay where they are meanwhile: their place tells weights of one name apart.
        self._found: OrderedDict[tuple[str, int], tuple[Bytes, Array]] = OrderedDict()
        self._bytes = 0

    def clear(self) -> None:
        """Forgets all of them."""
        self._found.clear()
        self._bytes = 0

    def get(self, node: Node, raw: Bytes, shape: tuple[int, ...], layout: str) -> Array:
        """The values of the weight `node`, float32 of its shape."""
        key = node.name, raw.ctypes.data
        if key not in self._found:
            self._found[key] = raw, self.formats.read_weight(node.dtype, raw, shape, layout)
            self._bytes += self._found[key][1].nbytes
            while self._bytes > _KEPT_BYTES and len(self._found) > 1:
                self._bytes -= self._found.popitem(last=False)[1][1].nbytes
        self._found.move_to_end(key)
        return self._found[key][1]


class Evaluation:
    """Evaluates single nodes of a program for one step.

    Args:
        memory: the bytes of values.
        env: the values of the symbols.
        weights: decoded weights of earlier steps.
        used: the parts of states that the step uses.
    """

    def __init__(self, memory: Memory, env: Env, weights: Weights, used: Used) -> None:
        self.memory, self.env, self._weights, self._used = memory, env, weights, used
        self._formats = weights.formats

    def shape(self, node: Node) -> tuple[int, ...]:
        """The sizes of a value."""
        return tuple(dims.value(d, self.env) for d in node.shape)

    def nbytes(self, node: Node) -> int:
        """Bytes of the buffer that holds a value; of a state all of them."""
        where = root(node)
        if where.op in ("weight", "pack"):
            source, layout = _source(where)
            return self._formats.weight_bytes(source.dtype, self.shape(source), layout)
        return self._formats.layouts.size(where.dtype, self.shape(where))

    def result(self, node: Node, memory: Memory | None = None) -> tuple[Array, Array | None]:
        """(the value of a node by its meaning, the new value of the state that it updates, if it does).

        Values are not rounded to the node's dtype.

        Args:
            memory: where the operands are, if not in that of the evaluation.
        """
        attrs = dict(node.attrs)
        if "out" in attrs:  # writing rounds
            attrs["out"] = "f32"
        operands = self.operands(node, memory or self.memory)
        if node.op == "quantize":
            return operands[0], None
        with np.errstate(all="ignore"):
            found: Any = OPS[node.op].meaning(operands, attrs, self.env)
        return found if OPS[node.op].effect else (found, None)

    def operands(self, node: Node, memory: Memory) -> list[Array]:
        """The operands of a node; of an embedding table the rows in use, with their new numbers."""
        if node.op != "embedding":
            return [self.value(i, memory) for i in node.inputs]
        table, ids = node.inputs[0], self.value(node.inputs[1], memory)
        used, numbers = np.unique(ids, return_inverse=True)
        source, layout = _source(table)
        shape = self.shape(source)
        raw = memory(table, self._formats.weight_bytes(source.dtype, shape, layout))
        if used.size and not 0 <= used[0] <= used[-1] < shape[0]:
            return [np.empty((0, shape[1]), np.float32), ids]  # the meaning says which id is wrong
        table_rows = self._formats.read_table(source.dtype, raw, shape, layout, used)
        return [table_rows, numbers.reshape(ids.shape)]

    def value(self, node: Node, memory: Memory) -> Array:
        """The numbers of a value as they are in memory."""
        where, shape = root(node), self.shape(node)
        if where.op in ("weight", "pack"):
            source, layout = _source(where)
            raw = memory(where, self._formats.weight_bytes(source.dtype, self.shape(source), layout))
            return self._weights.get(source, raw, self.shape(source), layout).reshape(shape)
        if where.op == "state":
            found = self._formats.read_state(where.dtype, *self._state(where, memory), where["layout"])
            return found if node.shape == where.shape else found.reshape(shape)
        if where in self._used.tables:
            return self._used.tables[where].reshape(shape)
        raw = memory(where, self._formats.layouts.size(where.dtype, self.shape(where)))
        if where.op == "as_cache":
            room = 0 if where["segments"] else where["room"]
            return self._formats.read_as_cache(where.dtype, raw, shape, where["layout"], room)
        return self._formats.read(where.dtype, raw, self.shape(where)).reshape(shape)

    def write(self, node: Node, value: Array, state: Array | None, memory: Memory) -> None:
        """Writes the result of a node, and the state that it updates."""
        if OPS[node.op].writes:
            self._write_state(root(node), value, memory)
            return
        raw = memory(node, self._formats.layouts.size(node.dtype, self.shape(node)))
        if node.op == "as_cache":
            self._formats.write_as_cache(node.dtype, raw, node["layout"], value)
        else:
            raw[...] = self._formats.written(node.dtype, value)
        if state is not None:
            self._write_state(root(updated(node)), state, memory)

    def _state(self, state: Node, memory: Memory) -> tuple[Bytes, tuple[int, ...]]:
        """The bytes of a state that the step uses, and their shape."""
        whole = self.shape(state)
        shape = self._used.shape(state, whole)
        raw = memory(state, state.dtype.size(whole))
        return raw if raw.size == state.dtype.size(shape) else self._used.taken(state, raw, whole), shape

    def _write_state(self, state: Node, value: Array, memory: Memory) -> None:
        raw, shape = self._state(state, memory)
        before = self._formats.read_state(state.dtype, raw, shape, state["layout"])
        same = (before == value) | (np.isnan(before) & np.isnan(value))
        self._formats.write_state(state.dtype, raw, shape, state["layout"], value, ~same.all(-1))
        whole = self.shape(state)
        self._used.put(state, memory(state, state.dtype.size(whole)), whole, raw)


def _source(node: Node) -> tuple[Node, str]:
    """The weight that a value is made of, and its layout in memory."""
    return (node.inputs[0], node["layout"]) if node.op == "pack" else (node, ROWS_LAYOUT)


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
