"""From the events of one choice to what an API sends, in one piece or as a stream.

Server stage, below the APIs. Each API has a `Builder`, which makes the objects of its stream; an answer in one piece is
made of the same objects.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from rlx.errors import GrammarError
from rlx.grammar import Grammar
from rlx.serve.answering import Answering
from rlx.serve.errors import ApiError, api_error, invalid
from rlx.serve.generation import Event, Progress

if TYPE_CHECKING:
    from rlx.serve.app import Server

log = logging.getLogger("rlx.serve")

JsonObject = dict[str, Any]


def request_fields(server: Server, request: Request) -> JsonObject:
    """The fields of a `GenerationSpec` that do not depend on the body."""
    return {"timeout": server.options.timeout, "request_id": request.headers.get("x-request-id", "")}


def schema_grammar(schema: Any, field: str) -> Grammar:
    """The grammar of a JSON schema.

    Args:
        field: what it is called in the request.

    Raises:
        ApiError: it is no schema, or has a keyword that cannot be enforced.
    """
    try:
        return Grammar.json_schema(schema)
    except GrammarError as error:
        raise invalid(field, error.what, error.hint) from error


class Builder(Protocol):
    """Makes the objects of a stream of the events of one choice."""

    def begin(self) -> Iterator[JsonObject]:
        """The first objects."""

    def push(self, event: Event) -> Iterator[JsonObject]:
        """Those of one event."""

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        """The last ones of an answer that fails after it has begun."""


async def streamed(
    answering: Answering,
    builder: Builder,
    written: Callable[[JsonObject], bytes],
    keep_alive: bytes = b"",
) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream. Closing it aborts the answer.

    Args:
        written: an object as it is sent.
        keep_alive: sent while the prompt is computed, where the builder says nothing.
    """
    try:
        if first := b"".join(map(written, builder.begin())):
            yield first
        while events := await answering.batch():
            piece = b"".join(written(each) for event in events for each in builder.push(event))
            if not piece and isinstance(events[0], Progress):
                piece = keep_alive
            if piece:
                yield piece
    except Exception as error:
        found = api_error(error)
        if found.status == 500:
            log.error("an answer has failed after it began", exc_info=error)
        yield b"".join(map(written, builder.fail(found)))
    finally:
        answering.close()


async def completed(answering: Answering, builder: Builder) -> list[JsonObject]:
    """All objects of an answer.

    Raises:
        RlxError: the answer fails.
    """
    try:
        found = list(builder.begin())
        while events := await answering.batch():
            found += [each for event in events for each in builder.push(event)]
        return found
    finally:
        answering.close()
