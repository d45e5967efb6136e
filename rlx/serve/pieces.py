"""From the events of a generation to the bytes of a stream.

Server stage, below the APIs. What happens at the same time is sent at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from rlx.serve.errors import ApiError, api_error
from rlx.serve.generation import Event, Progress

if TYPE_CHECKING:
    from rlx.serve.answering import Answering

log = logging.getLogger("rlx.serve")


class Pieces(Protocol):
    """Makes the pieces of a stream in the form of one API."""

    def first(self) -> bytes:
        """What comes before anything is computed."""
        ...

    def of(self, event: Event) -> bytes:
        """What an event becomes, perhaps nothing."""
        ...

    def waiting(self, progress: Progress) -> bytes:
        """What says that the prompt is still computed, so that nobody takes the connection for dead."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The end of an answer that fails after it has begun."""
        ...

    def last(self) -> bytes:
        """The end of an answer that is complete."""
        ...


async def stream_of(answering: Answering, pieces: Pieces, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream.

    Args:
        answering: closed with it.
        ping_seconds: how long it may be silent while the prompt is computed.
    """
    try:
        sent = time.monotonic()
        if first := pieces.first():
            yield first
        while batch := await answering.batch():
            piece = b"".join([pieces.of(each) for each in batch])
            if not piece and isinstance(batch[0], Progress) and time.monotonic() - sent >= ping_seconds:
                piece = pieces.waiting(batch[0])
            if piece:
                yield piece
                sent = time.monotonic()
        if last := pieces.last():
            yield last
    except Exception as error:
        found = api_error(error)
        if found.status == 500:
            log.error("a stream failed", exc_info=error)
        yield pieces.failed(found)
    finally:
        answering.close()
