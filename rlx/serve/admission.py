"""Admission of requests: a bounded number of them, and a bounded number of bytes of their bodies, in bounded time.

Server stage, under `middleware.py`. A request that is refused costs nothing, its body is not even read. One whose body
is not complete has no place in the queue. What was not sent takes no room, and who sends too slowly is told so.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive

from rlx.errors import DeadlineError
from rlx.serve.body import MAX_VALUES, VALUE_BYTES, count_of
from rlx.serve.errors import ApiError, api_error
from rlx.serve.http import in_thread

T = TypeVar("T")

SMALL = 64 << 10  # bytes of a body that needs none of the budget
BUDGET = 320 << 20  # bytes that larger bodies take at once, with what their values take
RECENT = 0.2  # weight of the newest duration in the average
LONGEST = 120.0  # seconds after which clients try again at the latest
GRACE = 20.0  # seconds that every body may take
LEAST_RATE = 10_000  # bytes a second that a body must have beyond these
LONGEST_BODY = 600.0  # seconds that no body may exceed


class ConcurrencyLimiter:
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


class BodyBudget:
    """Bytes that the bodies of all requests may take, as they come in: what was not sent takes none.

    Bodies wait for room in order. So that they do not all wait for one another, there is a reserve for one body of the
    largest size: the first of those that wait has it until its request is over.

    Args:
        total: bytes.
        largest: bytes that one body may need.
    """

    def __init__(self, total: int, largest: int) -> None:
        self._free = max(0, total - largest)
        self._first: BodyShare | None = None
        self._waiting: deque[tuple[BodyShare, int, asyncio.Event]] = deque()

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """The share of a body, which takes nothing yet; what it takes is given back at the end."""
        found = BodyShare(self)
        try:
            yield found
        finally:
            self._free += found.size
            if self._first is found:
                self._first = None
            self._serve()

    async def take(self, share: BodyShare, count: int) -> None:
        """Waits until there are so many bytes for a body, which then has them."""
        if self._first is share:
            return
        if not self._waiting and count <= self._free:
            self._give(share, count)
            return
        turn = asyncio.Event()
        self._waiting.append((share, count, turn))
        self._serve()
        try:
            await turn.wait()
        finally:
            if not turn.is_set():
                self._waiting.remove((share, count, turn))
                self._serve()

    def _serve(self) -> None:
        """Gives room to those that wait, in order."""
        while self._waiting and (self._first is None or self._waiting[0][1] <= self._free):
            share, count, turn = self._waiting.popleft()
            if count <= self._free:
                self._give(share, count)
            else:
                self._first = share
            turn.set()

    def _give(self, share: BodyShare, count: int) -> None:
        self._free -= count
        share.size += count


class BodyShare:
    """The bytes that one body takes of the budget.

    Attributes:
        size: bytes, beside those of the reserve.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self.size = budget, 0

    async def grow(self, size: int) -> None:
        """Waits until there is room for so many bytes in all."""
        if size > self.size:
            await self._budget.take(self, size - self.size)


async def read(receive: Receive, most: int, share: BodyShare, seconds: float | None) -> bytes | None:
    """The body of a request, as far as its share of the budget allows; None if the client went away.

    Args:
        most: bytes.
        seconds: how long it may take in all, beside the bounds here.

    Raises:
        ApiError: 413, it is larger than `most` bytes; 408, it comes too slowly.
    """
    loop, body, more = asyncio.get_running_loop(), bytearray(), True
    begun = loop.time()
    end = None if seconds is None else begun + seconds
    while more:
        allowed = begun + min(LONGEST_BODY, GRACE + len(body) / LEAST_RATE)
        is_first = end is None or allowed < end
        message = await _until(allowed if is_first else end, receive(), _too_slow if is_first else _too_late)
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise _too_large(most)
        if len(body) > SMALL:
            before = loop.time()
            await _until(end, share.grow(len(body)), _too_late)
            begun += loop.time() - before  # it was the server that waited
    if len(body) > SMALL:
        values = min(MAX_VALUES, await _values(body))
        await _until(end, share.grow(len(body) + VALUE_BYTES * values), _too_late)
    return bytes(body)


async def _values(body: bytearray) -> int:
    """How many values the JSON of a body may have."""
    return count_of(body) if len(body) < 1 << 20 else await in_thread(lambda: count_of(body))


async def _until(end: float | None, step: Awaitable[T], error: Callable[[], ApiError]) -> T:
    """The result of a step of reading, which ends in time, by the loop's clock; otherwise it raises that error."""
    try:
        async with asyncio.timeout_at(end):
            return await step
    except TimeoutError:
        raise error() from None


def _too_slow() -> ApiError:
    hint = f"send at least {LEAST_RATE // 1000} kB a second"
    return ApiError(408, "the body came too slowly", code="body_too_slow", hint=hint)


def _too_late() -> ApiError:
    return api_error(DeadlineError("the body of the request was not complete in time", where="timeout"))


def check_length(headers: Headers, most: int) -> None:
    """Refuses a body by the header that says how long it is.

    Raises:
        ApiError: 413, it has more than `most` bytes.
    """
    with suppress(KeyError, ValueError):
        if int(headers["content-length"]) > most:
            raise _too_large(most)


def _too_large(most: int) -> ApiError:
    """The 413 of a body with more bytes than these."""
    hint = "send less, or start the server with a larger --max-body-mb"
    return ApiError(413, f"the body is larger than {most / 1e6:g} MB", code="body_too_large", hint=hint)
