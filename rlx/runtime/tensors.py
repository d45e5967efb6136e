"""Weights in memory: matrices packed once for their kernels, small tensors as float32, one copy for every program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from rlx.codegen.layouts import packed_bytes, row_blocks
from rlx.codegen.link import CHUNKS
from rlx.errors import ShapeError
from rlx.ir.dtypes import DTYPES, DType
from rlx.runtime.compile import Compiler
from rlx.runtime.memory import AlignedBuffer
from rlx.runtime.threads import WorkerPool

Progress = Callable[[str, int, int], None]  # (what, done, total), in bytes or pieces


class Source(Protocol):
    """Where weights come from: an open model file."""

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes]."""
        ...

    def array(self, name: str) -> np.ndarray:
        """A small tensor as float32."""
        ...

    def release(self, name: str) -> None:
        """The tensor's file pages are no longer needed."""
        ...


class Tensors:
    """Name -> address of every weight, packed on arrival.

    Args:
        compiler: makes the packing kernels.
        pool: the workers that pack.
    """

    def __init__(self, compiler: Compiler, pool: WorkerPool) -> None:
        self.compiler, self.pool = compiler, pool
        self.addresses: dict[str, int] = {}
        self._buffers: dict[str, AlignedBuffer] = {}

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())

    def add_array(self, name: str, value: np.ndarray) -> None:
        """A small float32 tensor, as it is."""
        buffer = AlignedBuffer(value.size * 4)
        buffer.view(np.float32, value.shape)[...] = value
        self._keep(name, buffer)

    def add_matrix(self, name: str, raw: np.ndarray, dtype: DType, n: int, k: int) -> None:
        """Packs the rows of a matrix [n, k], given as its bytes in the file, with all workers."""
        size = dtype.size((n, k))
        if raw.nbytes != size:
            raise ShapeError(f"expected {size} bytes of {dtype}[{n}, {k}], found {raw.nbytes}", where=name)
        code = self.compiler.packer(dtype)
        buffer = AlignedBuffer(packed_bytes(dtype, n, k), huge=True)
        units = row_blocks(n)
        context = np.array([raw.ctypes.data, buffer.address, n, k, units, max(1, units // CHUNKS), 0], np.int64)
        (step,) = code.addresses.values()
        self.pool.share(step, context.ctypes.data)
        self._keep(name, buffer)

    def load(self, weights: Mapping[str, Any], source: Source, progress: Progress | None = None) -> None:
        """Loads every weight of a manifest's table that is not here yet, reporting bytes done."""
        wanted = {name: row for name, row in weights.items() if name not in self.addresses}
        total = sum(_nbytes(row) for row in wanted.values())
        done = 0
        for name, row in wanted.items():
            self._load_one(name, row, source)
            done += _nbytes(row)
            if progress:
                progress("packing weights", done, total)

    def _load_one(self, name: str, row: Mapping[str, Any], source: Source) -> None:
        if row["layout"] == "rows":
            self.add_array(name, source.array(name))
        else:
            n, k = map(int, row["shape"])
            self.add_matrix(name, source.raw(name), DTYPES[row["dtype"]], n, k)
        source.release(name)

    def _keep(self, name: str, buffer: AlignedBuffer) -> None:
        self._buffers[name] = buffer
        self.addresses[name] = buffer.address

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
        self.addresses.clear()


def _nbytes(row: Mapping[str, Any]) -> int:
    return DTYPES[row["dtype"]].size(tuple(map(int, row["shape"])))
