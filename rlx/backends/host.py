"""Memory that this process can address: for devices that share it with the host.

Backends: code of such devices takes raw addresses (`address`), and everybody else NumPy views. Pages are zeroed and
become resident at the first access.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import platform
from rlx.backends.memory import Buffer, Bytes, Memory
from rlx.closing import Closing
from rlx.errors import ArgumentError, BusyError, ResourceError

HUGE_PAGE = 2 << 20


class AlignedBuffer(Closing):
    """Zeroed private memory whose address is a multiple of the page size.

    Args:
        nbytes: size in bytes; 0 gives an empty buffer with a valid address.
        huge: align to 2 MiB and request huge pages from the kernel (fewer TLB misses in long reads).

    Raises:
        ArgumentError: `nbytes` is negative.
        ResourceError: the system refuses the memory.
    """

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        if nbytes < 0:
            raise ArgumentError(f"a buffer of {nbytes} bytes", hint="give a size of 0 or more")
        self.nbytes = nbytes
        self.huge = huge and nbytes >= HUGE_PAGE
        self._map: mmap.mmap | None = _reserve(max(nbytes, 1) + (HUGE_PAGE if self.huge else 0))
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        start = int(self._bytes.ctypes.data)
        self._skip = -start % HUGE_PAGE if self.huge else 0
        self.address = start + self._skip
        if self.huge:
            platform.current().advise_huge(self._map, self._skip, nbytes)

    def view(self, dtype: npt.DTypeLike, shape: int | Sequence[int], offset: int = 0) -> npt.NDArray[Any]:
        """A NumPy array over the buffer's bytes from `offset` on: shape `shape`, dtype `dtype`, no copy.

        The memory lives as long as the last view, even after `close`.

        Raises:
            ArgumentError: the array does not fit, or `offset` breaks the dtype's alignment.
            BusyError: the buffer is closed.
        """
        if self._map is None:
            raise BusyError("this buffer is closed", where="AlignedBuffer")
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        need = prod(dims) * kind.itemsize
        if offset < 0 or min(dims, default=0) < 0 or offset + need > self.nbytes:
            found = f"{dims} of {kind} at byte {offset}"
            raise ArgumentError(f"{found} needs {offset + need} bytes, there are {self.nbytes}", where="AlignedBuffer")
        if offset % kind.alignment:
            raise ArgumentError(f"byte {offset} is not aligned for {kind}")
        at = self._skip + offset
        return self._bytes[at : at + need].view(kind).reshape(dims)

    def discard(self, offset: int, nbytes: int) -> None:
        """Sets a range to zeros. Whole memory pages inside it go back to the system."""
        start = self._skip + offset
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is None or last <= first or not platform.current().zero(self._map, first, last - first):
            self.view(np.uint8, nbytes, offset)[...] = 0
            return
        self._bytes[start:first] = 0
        self._bytes[last : start + nbytes] = 0

    def close(self) -> None:
        """Releases the memory. Existing views keep it alive until they are deleted."""
        if self._map is None:
            return
        memory, self._map = self._map, None
        del self._bytes
        with contextlib.suppress(BufferError):  # views exist; the pages are released with the last one
            memory.close()


class _Adopted:
    """Memory of an array that somebody else has allocated, such as a mapped file."""

    def __init__(self, values: Bytes) -> None:
        self._values: Bytes | None = values
        self.address = int(values.ctypes.data)

    def view(self, dtype: npt.DTypeLike, shape: int, offset: int) -> Bytes:
        if self._values is None:
            raise BusyError("this buffer is closed", where="Buffer")
        return self._values[offset : offset + shape].view(dtype)

    def discard(self, offset: int, nbytes: int) -> None:
        self.view(np.uint8, nbytes, offset)[...] = 0

    def close(self) -> None:
        self._values = None


class HostMemory(Memory):
    """The memory of this process."""

    def allocate(self, nbytes: int, huge: bool = False) -> Buffer:
        return Buffer(self, AlignedBuffer(nbytes, huge), 0, nbytes)

    def release(self, buffer: Buffer) -> None:
        buffer.block.close()

    def host_view(self, buffer: Buffer) -> Bytes:
        found: Bytes = buffer.block.view(np.uint8, buffer.nbytes, buffer.start)
        return found

    def read(self, source: Buffer) -> Bytes:
        return self.host_view(source).copy()

    def write(self, target: Buffer, values: Bytes) -> None:
        self.host_view(target)[...] = values

    def copy(self, source: Buffer, target: Buffer) -> None:
        self.host_view(target)[...] = self.host_view(source)

    def zero(self, target: Buffer) -> None:
        self.host_view(target)[...] = 0

    def discard(self, target: Buffer) -> None:
        target.block.discard(target.start, target.nbytes)

    def adopt(self, values: Bytes) -> Buffer:
        """The array itself if it is read-only, otherwise a copy."""
        return super().adopt(values) if values.flags.writeable else Buffer(self, _Adopted(values), 0, values.nbytes)

    def available(self) -> float:
        return platform.current().available_memory()


#: The one memory of all devices that share it with the host.
HOST = HostMemory()


def address(buffer: Buffer) -> int:
    """The address of a buffer of `HOST`."""
    return int(buffer.block.address) + buffer.start


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        return platform.current().reserve(nbytes)
    except (OSError, OverflowError) as error:
        hint = "use a shorter context or a smaller model, or raise the memory limit of this process"
        raise ResourceError(f"the system refuses {nbytes / 2**20:.0f} MiB of memory: {error}", hint=hint) from error
