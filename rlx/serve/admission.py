"""Who may come in: a bounded number of requests, and a bounded number of bytes of their bodies.

Server stage. The gate stands in front of the application: a request that is refused costs nothing, its body is not
even read. One whose body is not complete has no place in the queue.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.serve.errors import ApiError

SMALL = 64 << 10  # bytes of a body that waits for no room
ROOM = 320 << 20  # bytes that larger bodies take at once, with what their values take
RECENT = 0.2  # weight of the newest duration in the average
LONGEST = 120.0  # seconds after which clients try again at the latest


class Gate:
    """Bounds how many requests are answered at once.

    Args:
        slots: how many the engine computes at once.
        queue: how many may wait beside them.

    Attributes:
        inside: number of requests that came in and have no complete answer.
        rejected: number of requests that were refused.
    """

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self.queue = slots, queue
        self.inside = self.rejected = 0
        self._seconds: float | None = None  # a moving average of how long requests take

    @property
    def is_crowded(self) -> bool:
        """Whether requests wait."""
        return self.inside > self.slots

    def check(self) -> None:
        """Refuses a request for which there is no place.

        Raises:
            ApiError: 429, the queue is full.
        """
        if self.inside >= self.slots + self.queue:
            self.rejected += 1
            raise self._full()

    def enter(self) -> None:
        """Counts a request in; `left` has to follow.

        Raises:
            ApiError: as `check`.
        """
        self.check()
        self.inside += 1

    def left(self, seconds: float) -> None:
        """Counts a request out, which was inside for so long."""
        self.inside -= 1
        old = self._seconds
        self._seconds = seconds if old is None else old + RECENT * (seconds - old)

    @property
    def wait_seconds(self) -> float:
        """About how long it takes until the queue has a place: the time between two ends of requests."""
        each = 1.0 if self._seconds is None else self._seconds / max(1, min(self.slots, self.inside))
        return min(LONGEST, max(0.05, each))

    def _full(self) -> ApiError:
        wait = self.wait_seconds
        return ApiError(
            429,
            f"the queue is full: {self.slots} requests are computed at once and {self.queue} may wait",
            code="queue_full", hint=f"try again in {wait:.1f} s, or start the server with a larger --queue",
            headers={"Retry-After": str(math.ceil(wait)), "retry-after-ms": str(math.ceil(1000 * wait))},
        )  # fmt: skip


class Room:
    """Bytes that the bodies of all requests may take, as they come in: what was not sent takes none.

    Bodies wait for room in order. So that they do not all wait for one another, there is a reserve for one body of the
    largest size: the first of those that wait has it until its request is over.

    Args:
        total: bytes.
        largest: bytes that one body may need.
    """

    def __init__(self, total: int, largest: int) -> None:
        self._free = max(0, total - largest)
        self._first: Place | None = None
        self._waiting: deque[tuple[Place, int, asyncio.Event]] = deque()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """The place of a body, which takes nothing yet; what it takes is given back at the end."""
        found = Place(self)
        try:
            yield found
        finally:
            self._free += found.size
            if self._first is found:
                self._first = None
            self._serve()

    async def take(self, place: Place, count: int) -> None:
        """Waits until there are so many bytes for a place, which then has them."""
        if self._first is place:
            return
        if not self._waiting and count <= self._free:
            self._give(place, count)
            return
        turn = asyncio.Event()
        self._waiting.append((place, count, turn))
        self._serve()
        try:
            await turn.wait()
        finally:
            if not turn.is_set():
                self._waiting.remove((place, count, turn))
                self._serve()

    def _serve(self) -> None:
        """Gives room to those that wait, in order."""
        while self._waiting and (self._first is None or self._waiting[0][1] <= self._free):
            place, count, turn = self._waiting.popleft()
            if count <= self._free:
                self._give(place, count)
            else:
                self._first = place
            turn.set()

    def _give(self, place: Place, count: int) -> None:
        self._free -= count
        place.size += count


class Place:
    """What one body takes of a room.

    Attributes:
        size: bytes, beside those of the reserve.
    """

    def __init__(self, room: Room) -> None:
        self._room, self.size = room, 0

    async def grow(self, size: int) -> None:
        """Waits until there is room for so many bytes in all."""
        if size > self.size:
            await self._room.take(self, size - self.size)
