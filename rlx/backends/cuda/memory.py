"""Memory of cards. The host sees none of it: it copies in and out.

A buffer of several cards lies in the memory of each, as a whole: what is written is written on all, and read from the
first. But of a cache each card may have its own heads, and of a packed matrix its own rows (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import c_uint8
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from rlx.backends.cuda.driver import Card
from rlx.backends.cuda.layouts import own_heads
from rlx.backends.memory import Buffer, Bytes, Memory
from rlx.errors import ArgumentError, BusyError


@dataclass(eq=False)
class Block:
    """Memory that was allocated at once.

    Attributes:
        addresses: on each card; none once it is released.
        share: bytes that one card has, then the next one has as many, and so on; 0 if each has all bytes.
        differs: whether each card has something else in the same place.
    """

    addresses: tuple[int, ...]
    share: int = 0
    differs: bool = False

    def slot(self, start: int, number: int) -> int:
        """Where a slot that begins at a byte of the whole cache would begin on a card if this had all of its heads."""
        slot, within = divmod(start, self.share * len(self.addresses))
        assert not within, "a place in a cache is that of a slot"
        return (slot - number) * self.share


class CardMemory(Memory):
    """The memory of some cards.

    Args:
        cards: gives them; they are opened at first use.
    """

    lazy = False

    def __init__(self, cards: Callable[[], Sequence[Card]]) -> None:
        self._cards = cards

    def allocate(self, nbytes: int, huge: bool = False) -> Buffer:
        if nbytes < 0:
            raise ArgumentError(f"a buffer of {nbytes} bytes", hint="give a size of 0 or more")
        return Buffer(self, Block(self._allocated(nbytes)), 0, nbytes)

    def allocate_cache(self, slots: int, heads: int, nbytes: int) -> Buffer:
        cards, whole = len(self._cards()), slots * heads * nbytes
        if own_heads(heads, cards) == heads:
            return self.allocate(whole)
        return Buffer(self, Block(self._allocated(whole // cards), heads // cards * nbytes), 0, whole)

    def _allocated(self, nbytes: int) -> tuple[int, ...]:
        """Addresses of new memory of each card."""
        found = list[int]()
        try:
            for card in self._cards():
                found.append(card.allocate(nbytes))
        except BaseException:
            self._free(found)
            raise
        return tuple(found)

    def _free(self, addresses: Sequence[int]) -> None:
        for card, each in zip(self._cards(), addresses, strict=False):
            card.free(each)

    def release(self, buffer: Buffer) -> None:
        block: Block = buffer.block
        released, block.addresses = block.addresses, ()
        self._free(released)

    def read(self, source: Buffer) -> Bytes:
        if source.block.differs:
            hint = "Leave keep_packed and RLX_VERIFY out, or choose one card."
            raise ArgumentError("packed weights of several cards cannot be read", where="Buffer.read", hint=hint)
        found, done = np.empty(source.nbytes, np.uint8), 0
        for places, nbytes in self._pieces(source):
            card, start = places[0]
            card.fetch(found.ctypes.data + done, start, nbytes)
            done += nbytes
        return found

    def write(self, target: Buffer, values: Bytes) -> None:
        if target.nbytes != values.nbytes:
            raise ArgumentError(f"{values.nbytes} bytes for a buffer of {target.nbytes}", where="Buffer.write")
        done = 0
        for places, nbytes in self._pieces(target):
            for card, start in places:
                card.write(start, values.ctypes.data + done, nbytes)
            done += nbytes

    def copy(self, source: Buffer, target: Buffer) -> None:
        for (old, nbytes), (new, _) in zip(self._pieces(source), self._pieces(target), strict=True):
            for (card, first), (_, second) in zip(old, new, strict=True):
                card.copy(second, first, nbytes)

    def copy_rows(self, source: Buffer, target: Buffer, rows: int, stride: int) -> None:
        own = rows
        if share := source.block.share:  # the heads of each card
            own = share // stride
            assert share == target.block.share == own * stride, "rows are the heads of a cache"
        slots = [0 if not share else buffer.start // (rows * stride) for buffer in (source, target)]
        for number, card in enumerate(self._cards()):
            old, new = (
                _addresses(buffer)[number] + buffer.start - slot * (rows - own) * stride
                for buffer, slot in zip((source, target), slots, strict=True)
            )
            card.copy_rows(new, old, source.nbytes, own, stride)

    def zero(self, target: Buffer) -> None:
        for places, nbytes in self._pieces(target):
            for card, start in places:
                card.zero(start, nbytes)

    def _pieces(self, buffer: Buffer) -> Iterator[tuple[Sequence[tuple[Card, int]], int]]:
        """The bytes of a buffer in order: where a piece begins on each card that has it, and its size."""
        every, share = list(zip(self._cards(), _addresses(buffer), strict=True)), buffer.block.share
        if not share:
            if buffer.nbytes:
                yield [(card, start + buffer.start) for card, start in every], buffer.nbytes
            return
        at, end = buffer.start, buffer.start + buffer.nbytes
        while at < end:
            number, within = divmod(at, share)
            slot, owner = divmod(number, len(every))
            card, start = every[owner]
            nbytes = min(end - at, share - within)
            yield [(card, start + slot * share + within)], nbytes
            at += nbytes

    def available(self) -> float:
        cards = self._cards()
        return min(card.memory()[0] // sum(other.same(card) for other in cards) for card in cards)


#: The open cards by number, and how often it came before among those of a device: what uses a card shares its stream.
_open = dict[tuple[int, int], Card]()
_opening = Lock()


def opened(numbers: Sequence[int]) -> Sequence[Card]:
    """Cards by their numbers, each of which reaches the memory of the others.

    Args:
        numbers: one that comes twice is taken as two cards.
    """
    found = list[Card]()
    with _opening:
        for i, number in enumerate(numbers):
            key = number, numbers[:i].count(number)
            if key not in _open:
                _open[key] = Card(number)
            found.append(_open[key])
        for card in found:
            for other in found:
                card.reach(other)
    return found


def _addresses(buffer: Buffer) -> Sequence[int]:
    """Where the block of a buffer lies on each card.

    Raises:
        BusyError: it was released.
    """
    block: Block = buffer.block
    if not block.addresses:
        raise BusyError("this buffer is closed", where="Buffer")
    return block.addresses


def address(buffer: Buffer, number: int = 0) -> int:
    """The address of a buffer on a card. Of a cache of which it has some heads, these lie where they would among all.

    Raises:
        BusyError: it was released.
    """
    block: Block = buffer.block
    if block.addresses and not block.share:
        return block.addresses[number] + buffer.start
    return _addresses(buffer)[number] + block.slot(buffer.start, number)


def pinned_bytes(place: int, nbytes: int) -> NDArray[np.uint8]:
    """Pinned memory of the host as an array."""
    return np.frombuffer(memoryview((c_uint8 * nbytes).from_address(place)), np.uint8)
