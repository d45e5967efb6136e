"""Weights in memory: matrices packed once for their kernels, small tensors as float32, one copy for every program.

Runtime, between an open file and the programs. The "layout" in a weight's row of a program's manifest: "rows" is plain
float32. "r16k4" is packed (`rlx.backends.cpu.layouts`); a stack [E, n, k] is packed matrix by matrix, the rows of each
padded to a multiple of 16. "file" is the mapped file itself: a table of which few rows are read needs no further
memory. Packed matrices may also be mapped from the packed-weight cache of an earlier process (`packed_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Protocol

import numpy as np

from rlx.backends.base import Workers
from rlx.backends.memory import Block, Slabs
from rlx.errors import ShapeError
from rlx.ir.dtypes import DTYPES, DType
from rlx.passes.layout import FILE_LAYOUT, ROWS_LAYOUT
from rlx.runtime.compile import Compiler, Progress
from rlx.runtime.packed_cache import MappedWeights, PackedWeightCache, packed_rows


class Source(Protocol):
    """Where weights come from: an open model file."""

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes]: read-only if they are the mapped file, else a copy."""
        ...

    def pieces(self, name: str) -> Iterable[np.ndarray]:
        """The bytes of a stack [E, n, k], uint8, matrix by matrix."""
        ...

    def array(self, name: str) -> np.ndarray:
        """A small tensor as float32."""
        ...

    def release(self, name: str) -> None:
        """Releases the tensor's file pages."""
        ...


class Tensors:
    """Name -> address of every weight, packed on arrival.

    Args:
        compiler: makes the packing kernels.
        workers: those that pack.
    """

    def __init__(self, compiler: Compiler, workers: Workers) -> None:
        self.compiler, self.workers = compiler, workers
        self.addresses: dict[str, int] = {}
        self._slabs, self._blocks = Slabs(compiler.backend.allocate), dict[str, Block]()
        self._tables: dict[str, np.ndarray] = {}  # keeps the mappings alive
        self._kept: MappedWeights | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without mapped files."""
        return sum(block.nbytes for block in self._blocks.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of packed weights that are mapped from the packed-weight cache."""
        return self._kept.nbytes if self._kept else 0

    def add_array(self, name: str, value: np.ndarray) -> None:
        """Adds a small float32 tensor unchanged."""
        block = self._slabs.take(value.size * 4)
        block.view(np.float32, value.shape)[...] = value
        self._keep(name, block)

    def add_table(self, name: str, raw: np.ndarray) -> None:
        """Adds a tensor as its bytes in the file; uses a read-only `raw` in place, otherwise copies it."""
        if not raw.flags.writeable:
            self._tables[name] = raw
            self.addresses[name] = raw.ctypes.data
            return
        block = self._slabs.take(raw.nbytes)
        block.view(np.uint8, raw.nbytes)[...] = raw
        self._keep(name, block)

    def add_matrix(self, name: str, raw: np.ndarray, dtype: DType, *shape: int) -> None:
        """Packs a matrix [n, k] or a stack [E, n, k], given as its bytes in the file.

        Raises:
            ShapeError: the number of bytes is wrong, or the type cannot be packed.
        """
        size = dtype.size(shape)
        if raw.nbytes != size:
            raise ShapeError(f"expected {size} bytes of {dtype}{list(shape)}, found {raw.nbytes}", where=name)
        self.add_pieces(name, raw.reshape(prod(shape[:-2]), -1), dtype, *shape)

    def add_pieces(self, name: str, pieces: Iterable[np.ndarray], dtype: DType, *shape: int) -> None:
        """Packs a stack [E, n, k] (or a matrix: a stack of one), given matrix by matrix, with all workers.

        Raises:
            ShapeError: a piece is not a matrix of this type and shape, or there are more or fewer than E.
        """
        count, (n, k) = prod(shape[:-2]), shape[-2:]
        packer, size, done = self.compiler.packer(dtype, self.workers), dtype.size((n, k)), 0
        packed = packer.nbytes(n, k)
        block = self._slabs.take(count * packed)
        for piece in pieces:
            if piece.nbytes != size or done == count:
                what = f"expected {count} times {size} bytes of {dtype}[{n}, {k}], found {piece.nbytes}"
                raise ShapeError(f"{what} as number {done}", where=name)
            packer.pack(piece, block.address + done * packed, n, k)
            done += 1
        if done != count:
            raise ShapeError(f"expected {count} matrices of {dtype}[{n}, {k}], found {done}", where=name)
        self._keep(name, block)

    def load(
        self,
        weights: Mapping[str, Any],
        source: Source,
        progress: Progress | None = None,
        kept: PackedWeightCache | None = None,
    ) -> None:
        """Loads every weight of a manifest's table that is not loaded yet, reporting the bytes done.

        Args:
            kept: the packed-weight cache: packed matrices are mapped from it if it exists; otherwise it is written.
        """
        copy = kept.find() if kept else None
        if copy:
            self._kept = copy
            self.addresses |= copy.addresses
        wanted = {name: row for name, row in weights.items() if name not in self.addresses}
        total = sum(_nbytes(row) for row in wanted.values())
        done = 0
        for name, row in wanted.items():
            self._load_one(name, row, source)
            done += _nbytes(row)
            if progress:
                progress("packing weights", done, total)
        if kept and not copy:
            kept.keep({name: self._packed(name) for name in packed_rows(weights)})

    def _packed(self, name: str) -> memoryview:
        block = self._blocks[name]
        return block.view(np.uint8, block.nbytes).data

    def _load_one(self, name: str, row: Mapping[str, Any], source: Source) -> None:
        shape, dtype = tuple(map(int, row["shape"])), DTYPES[row["dtype"]]
        if row["layout"] == FILE_LAYOUT:
            self.add_table(name, source.raw(name))
            return
        if row["layout"] == ROWS_LAYOUT:
            self.add_array(name, source.array(name))
        elif len(shape) == 2:
            self.add_matrix(name, source.raw(name), dtype, *shape)
        else:
            self.add_pieces(name, source.pieces(name), dtype, *shape)
        source.release(name)

    def _keep(self, name: str, block: Block) -> None:
        self._blocks[name] = block
        self.addresses[name] = block.address

    def close(self) -> None:
        self._slabs.close()
        if self._kept:
            self._kept.close()
            self._kept = None
        self._blocks.clear()
        self._tables.clear()
        self.addresses.clear()


def _nbytes(row: Mapping[str, Any]) -> int:
    """Bytes of the file that are read now; 0 for a table that is used in place."""
    if row["layout"] == FILE_LAYOUT:
        return 0
    return DTYPES[row["dtype"]].size(tuple(map(int, row["shape"])))
