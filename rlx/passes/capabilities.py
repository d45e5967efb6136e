"""Capabilities: what passes may ask of the machine that a program is for, so that no pass knows a machine's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.ir.dtypes import DTYPES, DType

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layouts:
    """How values lie in the memory of a device. The defaults are plain: one row after the other, as in files.

    A device with other layouts has a class over this one. Only its own folder knows what the names mean.

    Attributes:
        matrices: name of the layout of matrices that linears multiply, into which the device's packer brings them.
        matrices_meaning: what that is, for people.
        tables: name of the layout of tables of which rows are only looked up.
        keys: name of the layout of key caches, and of plain keys; values lie in "rows".
        keys_meaning: what that is, for people.
        tile: capacities of key caches are multiples of so many positions.
        room: places after the last position of plain keys and values, which may be read and count for nothing.
        page: positions of a page of a full cache; capacities of rings are multiples of it.
        align: alignment of values in bytes.
    """

    matrices: str = "blocks"
    matrices_meaning: str = "row by row, as in the file"
    tables: str = "file"
    keys: str = "rows"
    keys_meaning: str = "keys row by row"
    tile: int = 1
    room: int = 0
    page: int = 32
    align: int = 8

    @property
    def matrix_types(self) -> tuple[DType, ...]:
        """The types of the matrices that kernels multiply."""
        return tuple(dtype for dtype in DTYPES.values() if dtype.is_float or dtype.is_quantized)

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        """Bytes of a matrix [n, k] in memory; `ShapeError` if no kernel reads it."""
        return dtype.size((n, k))

    def own_heads(self, heads: int) -> int:
        """Of the heads of a cache those that one memory of the device has, if it has several."""
        return heads

    def size(self, dtype: DType, shape: Sequence[int]) -> int:
        """Bytes of a value that a step computes."""
        return dtype.size(shape)

    def rows_of(self, stored: Array, dtype: DType) -> Array:
        """Keys as they lie, [heads, tiles, tile * width], row by row: [heads, positions, width], or bytes of blocks."""
        return stored.reshape(stored.shape[0], -1, stored.shape[2] // self.tile)

    def stored_of(self, rows: Array, dtype: DType) -> Array:
        """The inverse of `rows_of`."""
        return rows.reshape(rows.shape[0], -1, rows.shape[2] * self.tile)


@dataclass(frozen=True)
class Capabilities:
    """The answers of one target of a backend. The defaults are those of a CPU with every instruction.

    Costs are floating-point operations plus bytes moved, as `rlx.ir.costs.cost` counts them.

    Attributes:
        bf16_dots: whether it multiplies pairs of bf16 numbers in one instruction.
        bf16_tiles: whether it multiplies whole tiles of bf16 numbers in one instruction.
        bf16_depth: number of inputs of a bf16 product: heads are not shorter, and experts have multiples of it.
        bf16_rows: fewest rows of a call that pay for the conversion to bf16 of what they share: keys, values, weights.
        expert_rows: the same for one expert with quantized weights, whose rows must also be gathered.
        expert_rows_bf16: the same for one expert with bf16 weights.
        own_cost: highest cost of a node that every worker may compute for itself instead of waiting for another one.
        own_cost_rows: the same in programs of several rows, whose rows the workers could share.
        own_writes: whether every worker that reads a cache may write the one row of a step into it.
        own_tables: whether every worker reads all rows of a table, so that it may look them up for itself.
        own_seen: whether the host sees what a worker computes for itself; if not, `RLX_VERIFY` does without.
        many_differ: whether kernels for many rows round otherwise than those for few, unless `deterministic` is chosen.
        layouts: how values lie in its memory.
    """

    bf16_dots: bool = True
    bf16_tiles: bool = True
    bf16_depth: int = 32
    bf16_rows: int = 16
    expert_rows: int = 32
    expert_rows_bf16: int = 8
    own_cost: int = 1 << 18
    own_cost_rows: int = 1 << 16
    own_writes: bool = False
    own_tables: bool = True
    own_seen: bool = True
    many_differ: bool = False
    layouts: Layouts = field(default_factory=Layouts)
