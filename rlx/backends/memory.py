"""Memory of a device: buffers, which only the device's own folder can look into, and what is done with them.

Backends: weights, states, and the arena of a program are buffers. Whoever holds one copies bytes in, out, and from one
buffer to another. Where the host sees the memory, `Buffer.view` gives an array over it, which saves the copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Shape = int | Sequence[int]

_SLAB = 64 << 20  # bytes per slab; the unused part takes no memory where memory is lazy
_LARGE = 16 << 20  # bytes of a block that has a buffer of its own where it is not
_BLOCK = 4096  # alignment of a slab's blocks: different blocks share no page


class Memory(ABC):
    """The memory of a device. Callers use the methods of `Buffer`, a device implements these.

    Attributes:
        lazy: whether a buffer takes memory only where it was written, and gives it back where it is discarded.
    """

    lazy = True

    @abstractmethod
    def allocate(self, nbytes: int, huge: bool = False) -> Buffer:
        """A new buffer of zeros.

        Args:
            huge: it is read from end to end, so large memory pages pay.

        Raises:
            ArgumentError: `nbytes` is negative.
            ResourceError: there is not enough.
        """

    def allocate_cache(self, slots: int, heads: int, nbytes: int) -> Buffer:
        """As `allocate`, for a cache [slots, heads, nbytes], whose heads a device may keep in different places."""
        return self.allocate(slots * heads * nbytes)

    @abstractmethod
    def release(self, buffer: Buffer) -> None:
        """Frees the whole block that a buffer is a part of. Can be called more than once."""

    @abstractmethod
    def read(self, source: Buffer) -> Bytes:
        """The bytes of a buffer: a new array."""

    @abstractmethod
    def write(self, target: Buffer, values: Bytes) -> None:
        """Copies bytes into a buffer of the same size."""

    @abstractmethod
    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copies between two buffers of this memory, of the same size."""

    def copy_rows(self, source: Buffer, target: Buffer, rows: int, stride: int) -> None:
        """Copies pieces of the size of `source`, of which each lies `stride` bytes after the one before.

        Args:
            source, target: the first piece, and where it goes.
        """
        for row in range(rows):
            old, new = (replace(each, start=each.start + row * stride) for each in (source, target))
            self.copy(old, new)

    @abstractmethod
    def zero(self, target: Buffer) -> None:
        """Sets a buffer to zeros."""

    @abstractmethod
    def available(self) -> float:
        """How many bytes can still be allocated; infinite if nobody knows."""

    def discard(self, target: Buffer) -> None:
        """As `zero`, for a buffer that is not needed soon: a device may give its memory to others until then."""
        self.zero(target)

    def adopt(self, values: Bytes) -> Buffer:
        """A buffer with these bytes, uint8 [n]: a copy, unless the device can use the memory of a read-only array."""
        buffer = self.allocate(values.nbytes)
        buffer.write(values)
        return buffer

    def host_view(self, buffer: Buffer) -> Bytes | None:
        """The memory of a buffer as an array; None if the host does not see it."""
        return None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A handle on memory of a device. Equal handles stand for the same memory.

    Attributes:
        memory: whose memory it is.
        block: by which the device finds the block that it is a part of; it means nothing to others.
        start: its first byte in the block.
        nbytes: its size.
    """

    memory: Memory
    block: Any
    start: int
    nbytes: int

    def part(self, start: int, nbytes: int | None = None) -> Buffer:
        """The part from a byte on, by default to the end.

        Raises:
            ArgumentError: it does not lie within the buffer.
        """
        count = self.nbytes - start if nbytes is None else nbytes
        if start < 0 or count < 0 or start + count > self.nbytes:
            raise ArgumentError(f"{count} bytes at byte {start} of a buffer of {self.nbytes}", where="Buffer.part")
        return Buffer(self.memory, self.block, self.start + start, count)

    def view(self, dtype: npt.DTypeLike = np.uint8, shape: Shape = -1) -> Array | None:
        """The memory as an array of this type and shape; None if the host does not see it.

        It is valid until the block is released.
        """
        found = self.memory.host_view(self)
        return None if found is None else found.view(dtype).reshape(shape)

    def read(self, dtype: npt.DTypeLike = np.uint8, shape: Shape = -1) -> Array:
        """A copy of the contents, as an array of this type and shape."""
        return self.memory.read(self).view(dtype).reshape(shape)

    def contents(self, dtype: npt.DTypeLike = np.uint8, shape: Shape = -1) -> Array:
        """The contents for reading: the memory itself where the host sees it, otherwise a copy."""
        found = self.view(dtype, shape)
        return self.read(dtype, shape) if found is None else found

    def write(self, values: Array) -> None:
        """Copies an array of the buffer's size into it."""
        self.memory.write(self, np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def copy_to(self, target: Buffer) -> None:
        """Copies the contents to another buffer of the same memory and size."""
        self.memory.copy(self, target)

    def zero(self) -> None:
        """Sets it to zeros."""
        self.memory.zero(self)

    def discard(self) -> None:
        """Sets it to zeros, which may take no memory until it is used again."""
        self.memory.discard(self)

    def close(self) -> None:
        """Frees the whole block that it is a part of. Can be called more than once."""
        self.memory.release(self)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """Numbers in memory that the host does not see. `numpy.asarray` copies them to the host.

    Attributes:
        buffer: the memory that holds them, and nothing else.
        dtype: their type.
        shape: of the array.
    """

    buffer: Buffer
    dtype: npt.DTypeLike
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> DeviceArray:
        """A row, or rows that follow each other."""
        nbytes, found = self.buffer.nbytes // len(self), range(len(self))[index]
        start, shape = (found, ()) if isinstance(found, int) else (found.start, (len(found),))
        part = self.buffer.part(start * nbytes, nbytes * prod(shape))
        return DeviceArray(part, self.dtype, (*shape, *self.shape[1:]))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        found = self.buffer.read(self.dtype, self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)


#: Numbers where they lie.
Values = Array | DeviceArray


class Grid:
    """A buffer as blocks [rows, count, nbytes]: the block of a number is its `nbytes` bytes of every row.

    Pages of caches lie so, where a row is a head of a cache.
    """

    def __init__(self, buffer: Buffer, rows: int, count: int, nbytes: int) -> None:
        self.buffer, self.rows, self.count, self.nbytes = buffer, rows, count, nbytes
        self._view = buffer.view(np.uint8, (rows, count, nbytes))

    def take(self, numbers: Sequence[int] | Array) -> Bytes:
        """A copy of some blocks: uint8 [rows, numbers, nbytes]."""
        if self._view is not None:
            return self._view[:, numbers]
        out = np.empty((self.rows, len(numbers), self.nbytes), np.uint8)
        for at, first, count in runs(numbers):
            for row, part in enumerate(self._parts(first, count)):
                out[row, at : at + count] = part.read(np.uint8, (count, self.nbytes))
        return out

    def put(self, numbers: Sequence[int] | Array, values: Bytes) -> None:
        """The inverse of `take`."""
        if self._view is not None:
            self._view[:, numbers] = values
            return
        for at, first, count in runs(numbers):
            for row, part in enumerate(self._parts(first, count)):
                part.write(values[row, at : at + count])

    def copy(self, source: int, target: int) -> None:
        """Copies a block to another one."""
        if self._view is not None:
            self._view[:, target] = self._view[:, source]
            return
        old, new = (self.buffer.part(number * self.nbytes, self.nbytes) for number in (source, target))
        self.buffer.memory.copy_rows(old, new, self.rows, self.count * self.nbytes)

    def discard(self, numbers: Sequence[int]) -> None:
        """Sets blocks to zeros, as `Buffer.discard`."""
        for _, first, count in runs(sorted(numbers)):
            for part in self._parts(first, count):
                part.discard()

    def _parts(self, first: int, count: int) -> Iterator[Buffer]:
        """The memory of some consecutive blocks, of each row."""
        for row in range(self.rows):
            yield self.buffer.part((row * self.count + first) * self.nbytes, count * self.nbytes)


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive numbers, in order: index of the first, the first, and how many."""
    at = first = count = 0
    for index, number in enumerate(map(int, numbers)):
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield at, first, count
        at, first, count = index, number, 1
    if count:
        yield at, first, count


class Slabs:
    """Many blocks in few buffers, so that small blocks get huge pages, too.

    A separate buffer gets huge pages only for whole huge pages: a matrix of 2 MiB could need 512 TLB entries.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: list[Buffer] = []
        self._end = 0  # end of the used part of the last buffer

    def take(self, nbytes: int) -> Buffer:
        """The next block, zeroed, at a multiple of 4096 bytes.

        Raises:
            ResourceError: there is not enough memory.
        """
        if nbytes >= _LARGE and not self._memory.lazy:
            self._buffers.insert(0, self._memory.allocate(nbytes, True))
            return self._buffers[0]
        if not self._end or self._end + nbytes > self._buffers[-1].nbytes:
            self._buffers.append(self._memory.allocate(max(nbytes, _SLAB), True))
            self._end = 0
        block = self._buffers[-1].part(self._end, nbytes)
        self._end += -(-nbytes // _BLOCK) * _BLOCK
        return block

    def close(self) -> None:
        """Releases all blocks."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._end = [], 0
