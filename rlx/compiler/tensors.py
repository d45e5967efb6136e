"""Weights in memory: matrices packed once for their kernels, small tensors as float32, one copy for every program.

Runtime, between an open file and the programs. The "layout" in a weight's row of a program's manifest: "rows" is plain
float32. "r16k4" is packed (the layout of the device); a stack [E, n, k] is packed matrix by matrix, the rows of each
padded to a multiple of 16. "file" is the mapped file itself: a table of which few rows are read needs no further
memory. Packed matrices may also be mapped from a file, which this or an earlier process has written
(`packed_cache.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlx.backends.device import Packer, Workers
from rlx.backends.memory import Buffer, Slabs
from rlx.compiler.compile import Compiler, Progress
from rlx.errors import ResourceError, ShapeError
from rlx.ir.dtypes import DTYPES, DType
from rlx.passes.layout import FILE_LAYOUT, ROWS_LAYOUT, packed_rows
from rlx.tracing import span

if TYPE_CHECKING:
    from rlx.compiler.packed_cache import MappedWeights, PackedWeightCache

GIB = 1 << 30


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
    """The weights in memory of the device, packed on arrival.

    Args:
        compiler: makes the packing kernels.
        workers: those that pack.

    Attributes:
        buffers: name -> memory of every weight.
    """

    def __init__(self, compiler: Compiler, workers: Workers) -> None:
        self.compiler, self.workers = compiler, workers
        self._memory = compiler.backend.memory
        self.buffers: dict[str, Buffer] = {}
        self._slabs, self._blocks = Slabs(self._memory), dict[str, Buffer]()
        self._tables: list[Buffer] = []  # may be the mapped file
        self._kept: MappedWeights | None = None
        self._packers: dict[DType, Packer] = {}

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
        self._keep(name, self._slabs.take(value.size * 4), np.asarray(value, np.float32))

    def add_table(self, name: str, raw: np.ndarray) -> None:
        """Adds a tensor as its bytes in the file; uses a read-only `raw` in place, otherwise copies it."""
        if not raw.flags.writeable:
            self.buffers[name] = table = self._memory.adopt(raw)
            self._tables.append(table)
            return
        self._keep(name, self._slabs.take(raw.nbytes), raw)

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
        block = self._slabs.take(self._packed_bytes(dtype, shape))
        self._pack(name, pieces, dtype, shape, block)
        self._keep(name, block)

    def _packed_bytes(self, dtype: DType, shape: tuple[int, ...]) -> int:
        """Size of a packed matrix or stack."""
        return prod(shape[:-2]) * self._packer(dtype).nbytes(*shape[-2:])

    def _packer(self, dtype: DType) -> Packer:
        if dtype not in self._packers:
            self._packers[dtype] = self.compiler.packer(dtype, self.workers)
        return self._packers[dtype]

    def _pack(
        self, name: str, pieces: Iterable[np.ndarray], dtype: DType, shape: tuple[int, ...], target: Buffer
    ) -> None:
        """Packs a stack into a buffer."""
        count, (n, k) = prod(shape[:-2]), shape[-2:]
        packer, size, done = self._packer(dtype), dtype.size((n, k)), 0
        packed = packer.nbytes(n, k)
        for piece in pieces:
            if piece.nbytes != size or done == count:
                what = f"expected {count} times {size} bytes of {dtype}[{n}, {k}], found {piece.nbytes}"
                raise ShapeError(f"{what} as number {done}", where=name)
            packer.pack(piece, target.part(done * packed, packed), n, k)
            done += 1
        if done != count:
            raise ShapeError(f"expected {count} matrices of {dtype}[{n}, {k}], found {done}", where=name)

    def load(
        self,
        weights: Mapping[str, Any],
        source: Source,
        progress: Progress | None = None,
        kept: PackedWeightCache | None = None,
    ) -> None:
        """Loads every weight of a manifest's table that is not loaded yet, reporting the bytes done.

        Args:
            kept: the packed-weight cache: packed matrices are mapped from it. It is written first if it does not exist.

        Raises:
            ResourceError: the packed weights do not fit into memory; none was packed.
        """
        mapped = kept.find() if kept else None
        known = self.buffers.keys() | (mapped.buffers.keys() if mapped else set())
        missing = {name: row for name, row in weights.items() if name not in known}
        sizes, done = {name: _nbytes(row) for name, row in missing.items()}, 0
        total = sum(sizes.values())

        def report(name: str) -> None:
            nonlocal done
            done = min(total, done + sizes.get(name, 0))
            if progress:
                progress("packing weights", done, total)

        if kept and not mapped:
            mapped = self._write(kept, packed_rows(weights), source, report)
        if mapped:
            self._kept = mapped
            self.buffers |= mapped.buffers
        rest = {name: row for name, row in missing.items() if name not in self.buffers}
        self._check_memory(rest, kept is not None)
        for name, row in rest.items():
            with span(name, "weight", dtype=row["dtype"], layout=row["layout"]):
                self._load_one(name, row, source)
            report(name)

    def _write(
        self, kept: PackedWeightCache, rows: Mapping[str, Any], source: Source, report: Callable[[str], None]
    ) -> MappedWeights | None:
        """Writes the packed-weight cache, one matrix after the other through memory for the largest one."""
        sizes = {name: self._packed_bytes(*_type(row)) for name, row in rows.items()}
        with closing(self._memory.allocate(max(sizes.values(), default=0), True)) as buffer:

            def pack(name: str) -> memoryview:
                (dtype, shape), packed = _type(rows[name]), buffer.part(0, sizes[name])
                with span(name, "weight", dtype=dtype.name, layout=rows[name]["layout"]):
                    self._pack(name, _pieces(source, name, shape), dtype, shape, packed)
                source.release(name)
                report(name)
                return packed.contents().data

            return kept.make(sizes, pack)

    def _check_memory(self, rows: Mapping[str, Any], was_kept: bool) -> None:
        """Checks that packed weights fit into memory, before any is packed: else the system ends the process later."""
        needed = sum(self._packed_bytes(*_type(row)) for row in packed_rows(rows).values())
        available = self._memory.available()
        if needed <= available:
            return
        limit = f"RLX_CACHE_LIMIT above {math.ceil(needed / GIB)}G"
        hint = f"Set {limit}, so that the file is stored" if was_kept else f"Give keep_packed=True, with {limit}"
        hint = f"{hint}: the weights are then mapped from the disk. Or use a smaller file (rlx quantize)."
        if not self._memory.lazy:  # nothing is mapped
            hint = "Use a smaller file (rlx quantize), or end other programs that use the device."
        raise ResourceError(
            f"the packed weights need {needed / GIB:.1f} GiB of memory, {available / GIB:.1f} GiB are available",
            hint=hint,
        )

    def _load_one(self, name: str, row: Mapping[str, Any], source: Source) -> None:
        dtype, shape = _type(row)
        if row["layout"] == FILE_LAYOUT:
            self.add_table(name, source.raw(name))
            return
        if row["layout"] == ROWS_LAYOUT:
            self.add_array(name, source.array(name))
        else:
            self.add_pieces(name, _pieces(source, name, shape), dtype, *shape)
        source.release(name)

    def _keep(self, name: str, block: Buffer, values: np.ndarray | None = None) -> None:
        if values is not None:
            block.write(values)
        self._blocks[name] = self.buffers[name] = block

    def close(self) -> None:
        self._slabs.close()
        if self._kept:
            self._kept.close()
            self._kept = None
        for table in self._tables:
            table.close()
        self._blocks.clear()
        self._tables.clear()
        self.buffers.clear()


def _type(row: Mapping[str, Any]) -> tuple[DType, tuple[int, ...]]:
    """Dtype and shape of a weight in a manifest's table."""
    return DTYPES[row["dtype"]], tuple(map(int, row["shape"]))


def _pieces(source: Source, name: str, shape: tuple[int, ...]) -> Iterable[np.ndarray]:
    """The bytes of a matrix or a stack in the file, matrix by matrix."""
    return source.pieces(name) if len(shape) > 2 else [source.raw(name)]


def _nbytes(row: Mapping[str, Any]) -> int:
    """Bytes of the file that are read now; 0 for a table that is used in place."""
    dtype, shape = _type(row)
    return 0 if row["layout"] == FILE_LAYOUT else dtype.size(shape)
