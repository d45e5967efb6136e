"""Packs weights on the card: blocks of the file go as they are through a ring of pinned memory, then a kernel packs.

The host copies into the ring while the card packs what came before. So a file is packed about as fast as it is read.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import PYFUNCTYPE, c_size_t, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cuda import driver, ptx
from rlx.backends.cuda.agreed.steps import THREADS
from rlx.backends.cuda.driver import Card, Loaded
from rlx.backends.cuda.layouts import DEPTH, LAYOUTS, ROWS, CardLayouts, form_of
from rlx.backends.cuda.memory import address, pinned_bytes
from rlx.backends.device import Builder, Files
from rlx.backends.memory import Buffer
from rlx.ir.dtypes import DType
from rlx.platform import cpu_count
from rlx.store.entry import Entry

_PIECE = 16 << 20  # bytes of the file that are copied at a time
_SLOTS = 3  # pieces in the ring
_ALONE = 8 << 20  # bytes that are copied without other threads, which would have to wait for Python's lock
_COPIERS = min(8, cpu_count())  # threads that copy a piece: one alone reads 6 GB/s, eight 20 (an H100's host)
_ENTRY = "pack"


def module_of(dtype: DType) -> str:
    """LLVM assembly of the kernel that packs a type, a thread for each unit."""
    from rlx.backends.cuda.kernels.pack import EXTENTS, pack  # loop kernels: nothing else needs them

    kernel = pack(dtype)
    names = [*kernel.buffers, *EXTENTS, "units"]
    types = ["ptr"] * len(kernel.buffers) + ["i64"] * (len(EXTENTS) + 1)
    given = ", ".join(f"{t} %{name}" for t, name in zip(types[:-1], names[:-1], strict=True))
    parameters = ", ".join(
        f"i64 %p.{name}" if t == "ptr" else f"{t} %{name}" for t, name in zip(types, names, strict=True)
    )
    calls = ("ctaid", "tid")
    return "\n".join([
        'target triple = "nvptx64-nvidia-cuda"',
        _aligned(kernel.llvm),
        *(f"declare i32 @llvm.nvvm.read.ptx.sreg.{name}.x()" for name in calls),
        f'define ptx_kernel void @{_ENTRY}({parameters}) "nvvm.maxntid"="{THREADS}" {{',
        *(f"  %{name} = call i32 @llvm.nvvm.read.ptx.sreg.{name}.x()" for name in calls),
        *(f"  %{name}.wide = zext i32 %{name} to i64" for name in calls),
        f"  %first.unit = mul i64 %ctaid.wide, {THREADS}",
        "  %begin = add i64 %first.unit, %tid.wide",
        "  %inside = icmp ult i64 %begin, %units",
        "  br i1 %inside, label %run, label %done",
        "run:",
        "  %end = add i64 %begin, 1",
        *(f"  %{name} = inttoptr i64 %p.{name} to ptr" for name in kernel.buffers),
        f"  call void @{kernel.symbol}({given}, i64 %begin, i64 %end)",
        "  br label %done",
        "done:",
        "  ret void",
        "}",
        "",
    ])  # fmt: skip


def _aligned(llvm: str) -> str:
    """The text with whole stores: both layouts have words at multiples of their size. What is read may be anywhere.

    Byte by byte the linker also wrote a wrong last byte of a float (driver 580).
    """
    return re.sub(
        r"(store (i16|i32|float) .*), align 1$",
        lambda m: f"{m[1]}, align {2 if m[2] == 'i16' else 4}",
        llvm,
        flags=re.M,
    )


def kernel(builder: Builder, dtype: DType, link: Callable[[str], bytes], cards: Sequence[Card]) -> list[Loaded]:
    """The kernel that packs a type on each card, from the compile cache."""

    def build() -> Files:
        text = module_of(dtype)
        (code,) = ptx.compiled([text], builder.target.level, builder.target.ptx)
        return {f"{_ENTRY}.ll": text, f"{_ENTRY}.ptx": code, f"{_ENTRY}.cubin": link(code)}

    def load(stored: Entry) -> list[Loaded]:
        return [Loaded(card, stored.read(f"{_ENTRY}.cubin"), _ENTRY) for card in cards]

    what = f"the packing of {dtype.name} weights"
    return builder.once(what, build, load, kind="pack", name=dtype.name, options={"layout": LAYOUTS.matrices})


@cache
def _copy() -> Callable[[int, int, int], object]:
    """Copies memory, and keeps Python's lock."""
    return PYFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t)(ctypes.cast(ctypes.memmove, c_void_p).value or 0)


class Ring:
    """Pinned memory through which pieces of a file go to the card, and memory there for pieces.

    It is for one thread at a time.
    """

    def __init__(self, card: Card) -> None:
        self.card, self._pool = card, ThreadPoolExecutor(_COPIERS, "rlx-copy")
        self._slots: list[NDArray[np.uint8]] = []
        self._copied: list[ctypes.c_void_p] = []  # per slot, the event after its last copy to the card
        self._next = self._pinned = 0
        self._places = dict[str, tuple[int, int]]()  # of memory on the card: address and size

    def send(self, piece: NDArray[np.uint8]) -> int:
        """Begins to bring bytes to the card: their address, until the next `send`, for what is begun before it."""
        self._reserve(piece.nbytes)
        number, self._next = self._next, (self._next + 1) % _SLOTS
        self.card.wait_for(self._copied[number])
        slot = self._slots[number][: piece.nbytes]
        self._fill(slot, piece)
        target = self.place("piece", piece.nbytes)
        self.card.send(target, slot.ctypes.data, piece.nbytes)
        self.card.record(self._copied[number])
        return target

    def _fill(self, slot: NDArray[np.uint8], piece: NDArray[np.uint8]) -> None:
        if piece.nbytes <= _ALONE:
            _copy()(slot.ctypes.data, piece.ctypes.data, piece.nbytes)
            return
        step = -(-piece.nbytes // _COPIERS)
        parts = [slice(at, at + step) for at in range(0, piece.nbytes, step)]
        for _ in self._pool.map(lambda part: np.copyto(slot[part], piece[part]), parts):
            pass

    def place(self, name: str, nbytes: int) -> int:
        """The address of memory on the card of at least this size; what is in it is lost when it grows."""
        found, size = self._places.get(name, (0, 0))
        if size < nbytes:
            if found:
                del self._places[name]  # there may be no room for more
                self.card.free(found)
            size = max(nbytes, _PIECE)
            found = self.card.allocate(size)
            self._places[name] = found, size
        return found

    def _reserve(self, nbytes: int) -> None:
        if self._slots and self._slots[0].nbytes >= nbytes:
            return
        self._free_slots()
        size = max(nbytes, _PIECE)
        self._pinned = self.card.pinned(size * _SLOTS)
        self._slots = list(pinned_bytes(self._pinned, size * _SLOTS).reshape(_SLOTS, size))
        self._copied = [self.card.event() for _ in range(_SLOTS)]

    def _free_slots(self) -> None:
        for event in self._copied:
            self.card.forget_event(event)
        if self._pinned:
            self.card.free_pinned(self._pinned)
        self._slots, self._copied, self._pinned = [], [], 0

    def close(self) -> None:
        """Frees its memory; it can be used again."""
        self._free_slots()
        for found, _ in self._places.values():
            self.card.free(found)
        self._places.clear()
        self._pool.shutdown()
        self._pool = ThreadPoolExecutor(_COPIERS, "rlx-copy")  # starts no thread


def packing(dtype: DType, rings: Sequence[Ring], loaded: Callable[[], Sequence[Loaded]],
            layouts: CardLayouts) -> Callable[..., None]:  # fmt: skip
    """A function that packs matrices of a type, see `rlx.backends.device.Packer`; it only begins to.

    Args:
        rings: of each card.
        loaded: the kernel of each card; called when it is needed.
        layouts: which rows each card has.
    """

    def pack(raw: NDArray[np.uint8], target: Buffer, n: int, k: int) -> None:
        own, rows = layouts.own_rows(n), raw.reshape(n, -1)
        target.block.differs |= own != n
        for number, (ring, kernel) in enumerate(zip(rings, loaded(), strict=True)):
            first = number * own % n
            _pack(dtype, ring, kernel, rows[first : first + own], address(target, number), k)

    return pack


def _pack(dtype: DType, ring: Ring, kernel: Loaded, rows: NDArray[np.uint8], target: int, k: int) -> None:
    """Packs a matrix on a card, given as its rows of bytes."""
    card, form, n = ring.card, form_of(dtype), len(rows)
    fields, heads, nbytes = form.places(n, k)
    if k % form.unit:
        card.zero(target, nbytes)  # of the last unit of a row not all is written
    some = max(1, _PIECE // (ROWS * rows.shape[1])) * ROWS  # rows at a time
    function = kernel.function
    for start in range(0, n, some):
        piece = rows[start : start + some]
        count = units(dtype, len(piece), k)
        place = ring.send(piece.reshape(-1))
        scratch = ring.place("scratch", scratch_bytes(dtype, len(piece), k))
        numbers = (len(piece), k, start // ROWS, fields, heads, count)
        given, memory = driver.pointers([place, scratch, target, *numbers])
        card.use()
        card.launch(function, driver.config(-(-count // THREADS), THREADS, 0, card), given)
        del memory  # the driver has copied the arguments


def scratch_bytes(dtype: DType, rows: int, k: int) -> int:
    """Bytes of scratch memory for so many rows."""
    if not dtype.is_quantized:
        return 0
    return -(-rows // ROWS) * (k // PACKINGS[dtype].superblock) * PACKINGS[dtype].nbytes


def units(dtype: DType, rows: int, k: int) -> int:
    """Units of so many rows."""
    tiles = -(-rows // ROWS)
    return tiles * 8 * (k // PACKINGS[dtype].superblock) if dtype.is_quantized else tiles * ROWS * -(-k // DEPTH)


def begun(make: Callable[[], list[Loaded]]) -> Callable[[], list[Loaded]]:
    """Begins to make a kernel in a thread; the result waits for it."""
    future: Future[list[Loaded]] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rlx-pack", daemon=True).start()
    return future.result
