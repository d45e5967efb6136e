"""What the host computes in the steps of a card: the nodes `call` of a program.

A step with calls is cut into pieces. What a call reads comes to pinned memory before the kernels of its own region
begin. While they run the host computes it, and the result goes to the card before the next region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlx.backends.cuda.driver import Card
from rlx.backends.cuda.memory import pinned_bytes
from rlx.backends.memory import Array, Buffer
from rlx.backends.program import Called, InArena, Manifest

_ALIGN = 256


@dataclass(frozen=True)
class HostCall:
    """A call.

    Attributes:
        number: of it, among those of the program.
        places: bytes of the pinned memory where each operand begins, then the result.
    """

    number: int
    region: int
    operands: tuple[InArena, ...]
    result: InArena
    weights: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Regions of a step that follow each other.

    Attributes:
        regions: their numbers; -1 is what comes before the first one.
        launches: whether they have kernels.
        calls: what the host computes beside them.
    """

    number: int
    regions: range
    launches: bool = True
    calls: tuple[HostCall, ...] = ()


class HostCalls:
    """The calls of a program.

    Args:
        arena: gives the address of the arena.
        bound: gives the memory of a weight.

    Attributes:
        pieces: of a step, in order.
    """

    def __init__(
        self, card: Card, manifest: Manifest, arena: Callable[[], int], bound: Callable[[str], Buffer]
    ) -> None:
        self._card, self._arena, self._bound = card, arena, bound
        calls, nbytes = _calls(manifest)
        self.pieces = _pieces(manifest, calls)
        self._pinned, self._memory = 0, np.empty(0, np.uint8)
        if nbytes:
            self._event, self._pinned = card.event(), card.pinned(nbytes)
            self._memory = pinned_bytes(self._pinned, nbytes)

    def bring(self, piece: Piece, extents: Mapping[str, int]) -> None:
        """Begins to bring what the calls of a piece read, before its kernels are begun."""
        for call in piece.calls:
            for value, place in zip(call.operands, call.places, strict=False):
                self._card.bring(self._pinned + place, self._arena() + value.offset, value.nbytes(extents))
        if piece.calls:
            self._card.record(self._event)

    def compute(self, piece: Piece, extents: Mapping[str, int], called: Sequence[Called]) -> None:
        """Computes the calls of a piece, whose kernels are begun, and begins to send the results."""
        if piece.calls:
            self._card.wait_for(self._event)
        for call in piece.calls:
            *operands, result = (
                self._array(value, place, extents)
                for value, place in zip((*call.operands, call.result), call.places, strict=True)
            )
            called[call.number](operands, [self._bound(name) for name in call.weights], result)
            self._card.send(self._arena() + call.result.offset, self._pinned + call.places[-1], result.nbytes)

    def _array(self, value: InArena, place: int, extents: Mapping[str, int]) -> Array:
        return self._memory[place : place + value.nbytes(extents)].view(value.numbers).reshape(value.sizes(extents))

    def close(self) -> None:
        """Frees its memory."""
        if self._pinned:
            self._card.forget_event(self._event)
            self._card.free_pinned(self._pinned)
            self._pinned = 0


def _calls(manifest: Manifest) -> tuple[list[HostCall], int]:
    """The calls of a program, and the bytes that they need; those of different regions share them."""
    largest = {symbol: high for symbol, (_, high) in manifest["bounds"].items()}
    found, most, ends = list[HostCall](), 0, dict[int, int]()
    for number, row in enumerate(manifest.get("calls", ())):
        values, places = [InArena.of(each) for each in (*row["operands"], row["result"])], list[int]()
        for value in values:
            places.append(ends.get(row["region"], 0))
            ends[row["region"]] = places[-1] + -(-value.nbytes(largest) // _ALIGN) * _ALIGN
        most = max(most, ends[row["region"]])
        *operands, result = values
        found.append(HostCall(number, row["region"], tuple(operands), result, tuple(row["weights"]), tuple(places)))
    return found, most


def _pieces(manifest: Manifest, calls: Sequence[HostCall]) -> list[Piece]:
    """The pieces of a step: the regions with calls, and those between them."""
    launched = {kernel["region"] for row in manifest["launches"] for kernel in row["kernels"]}
    found, begin, end = list[Piece](), -1, len(manifest["regions"])
    for region in [*sorted({call.region for call in calls}), end]:
        own = tuple(call for call in calls if call.region == region)
        for regions, beside in ((range(begin, region), ()), (range(region, region + 1), own)):
            launches = any(each in launched for each in regions)
            if launches or beside:
                found.append(Piece(len(found), regions, launches, beside))
        begin = region + 1
    return found
