"""Who may come in: a bounded number of requests, and a bounded number of bytes of their bodies.

Server stage. The gate stands in front of the application: a request that is refused costs nothing, its body is not
even read.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlx.serve.errors import ApiError

SMALL = 1 << 20  # bytes of a body that waits for no room
ROOM = 256 << 20  # bytes of larger bodies at once, if a body may not be larger
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

    def enter(self) -> None:
        """Counts a request in; `left` has to follow.

        Raises:
            ApiError: 429, the queue is full.
        """
        if self.inside >= self.slots + self.queue:
            self.rejected += 1
            raise self._full()
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
    """Bytes that the bodies of all requests may take. Small bodies wait for nobody; larger ones go in order.

    Args:
        total: bytes; at least as many as one body may have.
    """

    def __init__(self, total: int) -> None:
        self._free = self._total = total
        self._waiting: deque[tuple[int, asyncio.Event]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Waits until there is room for a body of so many bytes, and keeps it."""
        size = 0 if size <= SMALL else min(size, self._total)
        if size and (self._waiting or size > self._free):
            turn = asyncio.Event()
            self._waiting.append((size, turn))
            try:
                await turn.wait()
            except BaseException:
                if turn.is_set():
                    self._give(size)
                else:
                    self._waiting.remove((size, turn))
                    self._give(0)
                raise
        else:
            self._free -= size
        try:
            yield
        finally:
            self._give(size)

    def _give(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            self._free -= size
            turn.set()
