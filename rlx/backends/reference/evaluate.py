"""The nodes of a lowered program by their NumPy meaning, over the memory that the program gives its values.

Reference backend. Operands are read as the numbers that their bytes stand for, the meaning is evaluated in float64, and
the result is rounded to its dtype when it is written. `rlx.backends.verify` uses the same evaluation on the memory of
another backend's program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.backends.reference.formats import Array, Bytes, Formats
from rlx.backends.reference.used import Used
from rlx.ir import dims
from rlx.ir.node import Node
from rlx.ir.ops import OPS, updated
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
