"""A device whose memory the host does not see: it holds backends to the interface of `rlx.backends.device`.

It is written by the recipe "Add a backend" of CONTRIBUTING.md alone. Its buffers are keys into a store of its own, its
matrices lie column by column of blocks, and each op is computed by its meaning.
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
from rlx.backends.memory import Buffer, Bytes, Memory
from rlx.backends.reference.program import Alone, ReferenceProgram
from rlx.errors import ArgumentError, ResourceError
from rlx.ir.dtypes import DTYPES, DType
from rlx.passes import pipeline
from rlx.passes.capabilities import Capabilities, Layouts
from rlx.passes.program import Buffer as Placed


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


@dataclass(frozen=True)
class FarLayouts(Layouts):
    """Matrices lie column by column of blocks, behind a head of 64 bytes."""

    matrices: str = "columns"
    matrices_meaning: str = "column by column"

    def matrix_bytes(self, dtype: DType, n: int, k: int) -> int:
        return _HEAD + dtype.size((n, k))


_HEAD = 64


def packed(dtype: DType, raw: Bytes, n: int) -> Bytes:
    """The bytes of a matrix of `n` rows, as this device has them."""
    columns = raw.reshape(n, -1, dtype.nbytes).swapaxes(0, 1)
    return np.concatenate([np.full(_HEAD, 0xA5, np.uint8), columns.reshape(-1)])


def unpacked(dtype: DType, raw: Bytes, n: int) -> Bytes:
    """The inverse of `packed`."""
    assert (raw[:_HEAD] == 0xA5).all()
    return np.ascontiguousarray(raw[_HEAD:].reshape(-1, n, dtype.nbytes).swapaxes(0, 1)).reshape(-1)


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

    def __init__(self, lowered: Lowered, manifest: Any, memory: FarMemory, workers: Alone) -> None:
        super().__init__(lowered, manifest, memory, workers)
        self._memory = memory
        self._matrices: dict[Buffer, Bytes] = {}

    def bytes_of(self, buffer: Buffer) -> Bytes:
        return self._memory.see(buffer)

    def weight_bytes(self, name: str) -> Bytes:
        """A packed matrix, or a stack of them, as the reference reads it: row by row."""
        row, buffer = self.manifest["weights"][name], self.bound(name)
        if buffer not in self._matrices:
            dtype, (*stack, n, k) = DTYPES[row["dtype"]], map(int, row["shape"])
            size, count = FarLayouts().matrix_bytes(dtype, n, k), int(np.prod(stack))
            raw = self._memory.see(buffer.part(0, count * size)).reshape(count, size)
            self._matrices[buffer] = np.concatenate([unpacked(dtype, each, n) for each in raw])
        return self._matrices[buffer]

    def _operand(self, region: int, node: Any, nbytes: int) -> Bytes:
        placed: Placed = self._lowered.operand(node, region)
        if placed.kind == "weight" and self.manifest["weights"][placed.name]["layout"] == FarLayouts.matrices:
            return self.weight_bytes(placed.name)
        return super()._operand(region, node, nbytes)

    def close(self) -> None:
        super().close()
        self._matrices.clear()


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
        return Alone()

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
