"""From the events of a generation to the bytes of an answer, in one piece or as a stream.

Server stage, below the APIs. Each has a `Writer`: what an event becomes in its form. `answered` is what every path for
answers calls. What happens at the same time is sent at once.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from rlx.serve.errors import ApiError, api_error
from rlx.serve.events import Asked, Delta, End, Event, EventStream, Finished, Progress
from rlx.serve.http import EVENTS, Stream, event, in_thread, json_bytes, json_response, while_connected

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

JsonObject = dict[str, Any]
log = logging.getLogger("rlx.serve")


class Writer(ABC):
    """Writes one answer in the form of an API.

    Args:
        asked: what is to be generated.

    Attributes:
        media_type: of a stream.
        ping: how many seconds a stream may be silent while the prompt is computed; None for what the server's options
            say.
        table: kind of event -> the bytes that one becomes in a stream, perhaps none.
    """

    media_type = EVENTS
    ping: float | None = None
    table: Mapping[type, Callable[[Any], bytes]]

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked

    def first(self) -> bytes:
        """The bytes that come before anything is computed."""
        return b""

    @abstractmethod
    def waiting(self, progress: Progress) -> bytes:
        """The sign that the prompt is still computed, so that nobody takes the connection for dead."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The end of an answer that fails after it has begun."""

    def last(self) -> bytes:
        """The end of an answer that is complete."""
        return b""

    @abstractmethod
    def add(self, event: Event) -> None:
        """Takes an event of an answer in one piece."""

    @abstractmethod
    def whole(self) -> Any:
        """The answer in one piece."""


class ObjectWriter(Writer):
    """Writes a stream of objects, of one choice; an answer in one piece is made of the same objects."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        super().__init__(asked)
        self.objects: dict[type, Callable[[Any], Iterable[JsonObject]]] = {
            Delta: self.delta, End: self.end, Finished: self.finished, Progress: lambda progress: (),
        }  # fmt: skip
        self.table = dict.fromkeys(self.objects, lambda event: self._joined(self.push(event)))

    def push(self, event: Event) -> Iterable[JsonObject]:
        """The objects that one event becomes. All of them must be read."""
        return self.objects[type(event)](event)

    @abstractmethod
    def delta(self, delta: Delta) -> Iterable[JsonObject]:
        """The objects of new tokens."""

    @abstractmethod
    def end(self, end: End) -> Iterable[JsonObject]:
        """The objects of the end of the choice."""

    @abstractmethod
    def finished(self, numbers: Finished) -> Iterable[JsonObject]:
        """The last objects of an answer that is complete."""

    def first(self) -> bytes:
        return self._joined(self.begin())

    def failed(self, error: ApiError) -> bytes:
        return self._joined(self.fail(error))

    def add(self, event: Event) -> None:
        for each in self.push(event):
            self.keep(each)

    def begin(self) -> Iterable[JsonObject]:
        """The first objects."""
        return ()

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[JsonObject]:
        """The last objects of an answer that cannot be completed."""

    def keep(self, found: JsonObject) -> None:
        """Takes an object of an answer in one piece."""

    def written(self, found: JsonObject) -> bytes:
        """The bytes of an object."""
        return event(json_bytes(found), found["type"])

    def _joined(self, objects: Iterable[JsonObject]) -> bytes:
        return b"".join(map(self.written, objects))


async def answered(
    server: Server,
    request: Request,
    model: ServedModel,
    prepare: Callable[[], Writer],
    stream: bool | None,
) -> Response:
    """The answer to a request.

    Args:
        prepare: makes the writer, in a worker thread.
        stream: whether the answer comes as it is generated.

    Raises:
        ApiError, RlxError: of `prepare`; or a request is invalid or refused. Of a whole answer also those of the
            generation: those of a stream are events.
        ClientGone: the client went away before a whole answer.
    """

    def begin() -> tuple[Writer, EventStream | None]:
        writer = prepare()
        return writer, None if writer.asked[0].grammar else model.submit(writer.asked)

    writer, events = await to_thread.run_sync(begin)
    if events is None:
        grammar = await model.grammar_of(writer.asked[0])  # all follow the same one
        writer.asked = [replace(each, request=replace(each.request, grammar=grammar)) for each in writer.asked]
        events = await in_thread(lambda: model.submit(writer.asked))
    if stream:
        return Stream(stream_of(events, writer, writer.ping or server.options.ping), writer.media_type)
    return json_response(await while_connected(request, _completed(events, writer)))


async def _completed(events: EventStream, writer: Writer) -> Any:
    """The answer in one piece."""
    try:
        while batch := await events.batch():
            for each in batch:
                writer.add(each)
        return writer.whole()
    finally:
        events.close()


async def stream_of(events: EventStream, writer: Writer, ping_seconds: float) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream.

    Args:
        events: closed with it.
        ping_seconds: how long it may be silent while the prompt is computed.
    """
    try:
        sent, table = time.monotonic(), writer.table
        if first := writer.first():
            yield first
        while batch := await events.batch():
            piece = b"".join([table[type(each)](each) for each in batch])
            if not piece and isinstance(batch[0], Progress) and time.monotonic() - sent >= ping_seconds:
                piece = writer.waiting(batch[0])
            if piece:
                yield piece
                sent = time.monotonic()
        if last := writer.last():
            yield last
    except Exception as error:
        found = api_error(error)
        if found.status == 500:
            log.error("a stream failed", exc_info=error)
        yield writer.failed(found)
    finally:
        events.close()
