"""The body of a request as it comes in: bounded in size and in time.

Server stage, under `front.py`. What was not sent takes no room, and who sends too slowly is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

from rlx.errors import DeadlineError
from rlx.serve.admission import SMALL, Place
from rlx.serve.errors import ApiError, api_error
from rlx.serve.json_body import MAX_VALUES, VALUE_BYTES, count_of
from rlx.serve.model import in_thread

T = TypeVar("T")

GRACE = 20.0  # seconds that every body may take
LEAST_RATE = 10_000  # bytes a second that a body must have beyond these
LONGEST = 600.0  # seconds that no body may exceed


async def read(receive: Receive, most: int, place: Place, seconds: float | None) -> bytes | None:
    """The body of a request, as far as `place` has room; None if the client went away.

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
        allowed = begun + min(LONGEST, GRACE + len(body) / LEAST_RATE)
        is_first = end is None or allowed < end
        message = await _until(allowed if is_first else end, receive(), _too_slow if is_first else _too_late)
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise too_large(most)
        if len(body) > SMALL:
            before = loop.time()
            await _until(end, place.grow(len(body)), _too_late)
            begun += loop.time() - before  # it was the server that waited
    if len(body) > SMALL:
        values = min(MAX_VALUES, await _values(body))
        await _until(end, place.grow(len(body) + VALUE_BYTES * values), _too_late)
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


def too_large(most: int) -> ApiError:
    """The 413 of a body with more bytes than these."""
    hint = "send less, or start the server with a larger --max-body-mb"
    return ApiError(413, f"the body is larger than {most / 1e6:g} MB", code="body_too_large", hint=hint)
