"""From the events of a generation to server-sent events in OpenAI's form.

Server stage, under OpenAI's paths. What happens at the same time is written at once, an event for each token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from rlx.serve.errors import api_error, openai_body
from rlx.serve.generation import Event, Progress
from rlx.serve.streaming import comment, event, json_bytes

if TYPE_CHECKING:
    from rlx.serve.answering import Answering

DONE = event("[DONE]")
log = logging.getLogger("rlx.serve")


class Chunks(Protocol):
    """Makes the pieces of a stream."""

    def first(self) -> bytes:
        """What comes before anything is computed."""
        ...

    def of(self, event: Event) -> bytes:
        """What an event becomes, perhaps nothing."""
        ...


async def event_stream(answering: Answering, chunks: Chunks, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream, `[DONE]` at the end.

    Args:
        answering: closed with it.
        ping_seconds: how long it may be silent; then a comment is sent.
    """
    try:
        sent = time.monotonic()
        if first := chunks.first():
            yield first
        while batch := await answering.batch():
            piece = b"".join([chunks.of(each) for each in batch])
            if not piece and isinstance(batch[0], Progress) and time.monotonic() - sent >= ping_seconds:
                piece = comment(f"{batch[0].processed} of {batch[0].total} prompt tokens")
            if piece:
                yield piece
                sent = time.monotonic()
        yield DONE
    except Exception as error:
        found = api_error(error)
        if found.status == 500:
            log.error("a stream failed", exc_info=error)
        yield event(json_bytes(openai_body(found))) + DONE
    finally:
        answering.close()
