"""Memory of a card. The host sees none of it: it copies in and out."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import numpy as np

from rlx.backends.cuda.driver import Card
from rlx.backends.memory import Buffer, Bytes, Memory
from rlx.errors import ArgumentError, BusyError


@dataclass(eq=False)
class Block:
    """Memory that was allocated at once.

    Attributes:
        address: on the card; 0 once it is released.
    """

    address: int


class CardMemory(Memory):
    """The memory of one card.

    Args:
        card: gives the card, which is opened at first use.
    """

    lazy = False

    def __init__(self, card: CardSource) -> None:
        self._card = card

    def allocate(self, nbytes: int, huge: bool = False) -> Buffer:
        if nbytes < 0:
            raise ArgumentError(f"a buffer of {nbytes} bytes", hint="give a size of 0 or more")
        return Buffer(self, Block(self._card().allocate(nbytes)), 0, nbytes)

    def release(self, buffer: Buffer) -> None:
        block: Block = buffer.block
        released, block.address = block.address, 0
        if released:
            self._card().free(released)

    def read(self, source: Buffer) -> Bytes:
        found = np.empty(source.nbytes, np.uint8)
        if source.nbytes:
            self._card().fetch(found.ctypes.data, address(source), source.nbytes)
        return found

    def write(self, target: Buffer, values: Bytes) -> None:
        if target.nbytes != values.nbytes:
            raise ArgumentError(f"{values.nbytes} bytes for a buffer of {target.nbytes}", where="Buffer.write")
        if values.nbytes:
            self._card().write(address(target), values.ctypes.data, values.nbytes)

    def copy(self, source: Buffer, target: Buffer) -> None:
        if source.nbytes:
            self._card().copy(address(target), address(source), source.nbytes)

    def copy_rows(self, source: Buffer, target: Buffer, rows: int, stride: int) -> None:
        self._card().copy_rows(address(target), address(source), source.nbytes, rows, stride)

    def zero(self, target: Buffer) -> None:
        if target.nbytes:
            self._card().zero(address(target), target.nbytes)

    def available(self) -> float:
        return self._card().memory()[0]


class CardSource:
    """Opens the first card when it is asked for."""

    def __init__(self) -> None:
        self._card: Card | None = None
        self._lock = Lock()

    def __call__(self) -> Card:
        with self._lock:
            if self._card is None:
                self._card = Card()
            return self._card


def address(buffer: Buffer) -> int:
    """The address of a buffer of a card.

    Raises:
        BusyError: it was released.
    """
    block: Block = buffer.block
    if not block.address:
        raise BusyError("this buffer is closed", where="Buffer")
    return block.address + buffer.start
