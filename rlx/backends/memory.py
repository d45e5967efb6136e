"""Memory for native code: aligned buffers from the kernel.

Backends: activations, KV caches, packed weights and the worker pool are in `AlignedBuffer`s; programs hold their raw
addresses. Pages are zeroed and become resident at the first access.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx import platform
from rlx.errors import ArgumentError, BusyError, ResourceError

HUGE_PAGE = 2 << 20
_SLAB = 64 << 20  # bytes per slab; the unused part takes no memory
_BLOCK = 4096  # alignment of a slab's blocks: different blocks share no page


_LIVE: weakref.WeakSet[AlignedBuffer] = weakref.WeakSet()
_LOCK = threading.Lock()  # of `_LIVE`


class AlignedBuffer:
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
        with _LOCK:
            _LIVE.add(self)

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

    @property
    def closed(self) -> bool:
        """Whether the memory was released."""
        return self._map is None

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

    def __enter__(self) -> AlignedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def at_address(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this process, uint8 [nbytes]: a view.

    It keeps the memory of an `AlignedBuffer` alive; all other memory must outlive it.
    """
    with _LOCK:
        live = list(_LIVE)
    for buffer in live:
        start = address - buffer.address
        if start >= 0 and start + nbytes <= buffer.nbytes and not buffer.closed:
            return buffer.view(np.uint8, nbytes, start)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@dataclass(frozen=True)
class Block:
    """A part of a buffer."""

    buffer: AlignedBuffer
    start: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.buffer.address + self.start

    def view(self, dtype: npt.DTypeLike, shape: int | Sequence[int]) -> npt.NDArray[Any]:
        """A NumPy array over its bytes, as `AlignedBuffer.view`."""
        return self.buffer.view(dtype, shape, self.start)


class Slabs:
    """Many blocks in few buffers, so that small blocks get huge pages, too.

    A separate buffer gets huge pages only for whole huge pages: a matrix of 2 MiB could need 512 TLB entries.

    Args:
        allocate: makes a buffer of a number of bytes, of huge pages if it is told so.
    """

    def __init__(self, allocate: Callable[[int, bool], AlignedBuffer]) -> None:
        self._allocate = allocate
        self._buffers: list[AlignedBuffer] = []
        self._end = 0  # end of the used part of the last buffer

    def take(self, nbytes: int) -> Block:
        """The next block, zeroed, at a multiple of 4096 bytes.

        Raises:
            ResourceError: the system refuses the memory.
        """
        if not self._buffers or self._end + nbytes > self._buffers[-1].nbytes:
            self._buffers.append(self._allocate(max(nbytes, _SLAB), True))
            self._end = 0
        block = Block(self._buffers[-1], self._end, nbytes)
        self._end += -(-nbytes // _BLOCK) * _BLOCK
        return block

    def close(self) -> None:
        """Releases all blocks."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._end = [], 0


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        return platform.current().reserve(nbytes)
    except (OSError, OverflowError) as error:
        hint = "use a shorter context or a smaller model, or raise the memory limit of this process"
        raise ResourceError(f"the system refuses {nbytes / 2**20:.0f} MiB of memory: {error}", hint=hint) from error
