"""A device whose memory the host does not see: it holds backends to the interface of `rlx.backends.device`.

It is written by the recipe "Add a backend" of CONTRIBUTING.md alone. Its buffers are keys into a store of its own, its
matrices, its key caches and its pages have layouts of its own, and each op is computed by its meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx import backends
from rlx.backends.device import Backend, Builder, Built, Code, Loadable, Lowered, OnKernel, Packer, manifest_of
from rlx.backends.memory import Array, Buffer, Bytes, Memory
from rlx.backends.program import Manifest
from rlx.backends.reference.backend import Alone, ReferenceProgram
from rlx.backends.reference.evaluate import Weights
from rlx.backends.reference.formats import Formats, Shape
from rlx.errors import ArgumentError, ResourceError
from rlx.ir.dtypes import DType
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities, Layouts


class FarMemory(Memory):
    """Memory that only its own object sees. It counts what is copied in and out.

    Attributes:
        copied_in, copied_out: bytes.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Bytes] = {}
        self._keys = itertools.count(1)
        self.copied_in = self.copied_out = 0

    def see(self, buffer: Buffer) -> Bytes:
        """The bytes of a buffer, for programs of this device."""
        assert buffer.memory is self
        if buffer.block not in self._blocks:
            raise ArgumentError("this memory was released", where="far")
        return self._blocks[buffer.block][buffer.start : buffer.start + buffer.nbytes]

    def allocate(self, nbytes: int, huge: bool = False) -> Buffer:
        if nbytes < 0:
            raise ArgumentError(f"a buffer of {nbytes} bytes")
        key = next(self._keys)
        try:
            self._blocks[key] = np.zeros(nbytes, np.uint8)
        except (MemoryError, ValueError) as error:
            raise ResourceError(f"there are no {nbytes} bytes", where="far") from error
        return Buffer(self, key, 0, nbytes)

    def release(self, buffer: Buffer) -> None:
        self._blocks.pop(buffer.block, None)

    def read(self, source: Buffer) -> Bytes:
        self.copied_out += source.nbytes
        return self.see(source).copy()

    def write(self, target: Buffer, values: Bytes) -> None:
        self.copied_in += values.nbytes
        assert target.nbytes == values.nbytes
        self.see(target)[...] = values

    def copy(self, source: Buffer, target: Buffer) -> None:
        assert source.nbytes == target.nbytes
        self.see(target)[...] = self.see(source)

    def zero(self, target: Buffer) -> None:
        self.see(target)[...] = 0

    def available(self) -> float:
        return inf

    @property
    def blocks(self) -> int:
        """How many blocks are allocated."""
        return len(self._blocks)


_HEAD = 64  # bytes before a matrix
_TILE = 4  # positions of a tile of keys


@dataclass(frozen=True)
class FarLayouts(Layouts):
    """Matrices lie column by column of blocks, behind a head; keys in tiles, from the last position to the first."""

    matrices: str = "columns"
    matrices_meaning: str = "column by column"
    keys: str = "turned"
    keys_meaning: str = "keys in turned tiles"
    tile: int = _TILE
    page: int = 16
    align: int = 16

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        return _HEAD + dtype.size((n, k))

    def rows_of(self, stored: Array, dtype: DType) -> Array:
        heads, tiles, size = stored.shape
        return turned(stored, (heads, tiles, size // _TILE)).reshape(heads, tiles * _TILE, size // _TILE)

    def stored_of(self, rows: Array, dtype: DType) -> Array:
        heads, positions, width = rows.shape
        return turned(rows, (heads, positions // _TILE, width)).reshape(heads, -1, _TILE * width)


def turned(values: Array, sizes: tuple[int, int, int]) -> Array:
    """Values of tiles [heads, tiles, _TILE, width], with the positions of each tile in the other order."""
    heads, tiles, width = sizes
    return np.ascontiguousarray(values).reshape(heads, tiles, _TILE, width)[:, :, ::-1]


def packed(dtype: DType, raw: Bytes, n: int) -> Bytes:
    """The bytes of a matrix of `n` rows, as this device has them."""
    columns = raw.reshape(n, -1, dtype.nbytes).swapaxes(0, 1)
    return np.concatenate([np.full(_HEAD, 0xA5, np.uint8), columns.reshape(-1)])


class FarFormats(Formats):
    """Reads and writes values as they lie in this memory."""

    def state_rows(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Bytes:
        rows = super().state_rows(dtype, raw, shape, layout)
        return self._turned(rows) if layout == self.layouts.keys else rows

    def put_state_rows(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, rows: Bytes) -> None:
        super().put_state_rows(dtype, raw, shape, layout, self._turned(rows) if layout == self.layouts.keys else rows)

    def _turned(self, rows: Bytes) -> Bytes:
        return turned(rows, (1, len(rows) // _TILE, rows.shape[1])).reshape(rows.shape)

    def read_weight(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
        if layout == self.layouts.matrices:
            *stack, n, _ = shape
            matrices = raw.reshape(int(np.prod(stack)), -1)
            assert (matrices[:, :_HEAD] == 0xA5).all()
            columns = matrices[:, _HEAD:].reshape(len(matrices), -1, n, dtype.nbytes).swapaxes(1, 2)
            raw = np.ascontiguousarray(columns).reshape(-1)
        return super().read_weight(dtype, raw, shape, layout)

    def read_table(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, ids: Array) -> Array:
        if layout == self.layouts.matrices:
            return self.read_weight(dtype, raw, shape, layout)[ids]
        return super().read_table(dtype, raw, shape, layout, ids)


@dataclass(frozen=True)
class FarTarget:
    """The machine that this device is."""

    level: str = "far"
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(bf16_dots=False, bf16_tiles=False, layouts=FarLayouts())
    )

    @property
    def backend(self) -> Backend:
        return BACKEND

    @property
    def tuning(self) -> dict[str, int]:
        return {}

    def describe(self) -> dict[str, str]:
        return {"level": self.level}


class FarProgram(ReferenceProgram):
    """Computes each op by its meaning, over its own view of the memory."""

    def bytes_of(self, buffer: Buffer) -> Bytes:
        return BACKEND.memory.see(buffer)


class Far(Backend):
    """The device "far"."""

    name, memory = "far", FarMemory()

    def target(self, level: str | None = None) -> FarTarget:
        return FarTarget()

    def build(self, program: Lowered, target: FarTarget, on_kernel: OnKernel) -> Built:
        return Built({}, manifest_of(program, lambda node: node.op), 0)

    def load(self, stored: Loadable) -> Code:
        lowered = pipeline.place(stored.graph(), stored.options)
        return Code(partial(FarProgram, lowered, stored.manifest, self.memory), 0)

    def workers(self, count: int, builder: Builder) -> Alone:
        return Alone(Weights(FarFormats(FarLayouts())))

    def formats(self, manifest: Manifest) -> Formats:
        return FarFormats(FarLayouts())

    def packer(self, dtype: DType, workers: Any, builder: Builder) -> Packer:
        def pack(raw: NDArray[np.uint8], target: Buffer, n: int, k: int) -> None:
            target.write(packed(dtype, raw.reshape(-1), n))

        return Packer(partial(FarLayouts().matrix_bytes, dtype), pack)


BACKEND = Far()


@contextmanager
def registered() -> Iterator[Far]:
    """The device is there, in a `with` block."""
    backends.register("far", __name__)
    try:
        yield BACKEND
    finally:
        del backends.MODULES["far"]
