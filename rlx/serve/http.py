"""Routes and responses: JSON bodies, streams of server-sent events or lines, and clients that go away.

Server stage, below the APIs. A body that is no JSON object of the right form is a 400 that names the field. A stream
ends when its client goes away.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlx.serve import record
from rlx.serve.body import Body, body_of, ignored_fields, parsed, validated
from rlx.serve.errors import ApiError

T = TypeVar("T")

LARGE = 64 << 10  # bytes of a body from which on it is parsed outside of the event loop
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


async def in_thread(work: Callable[[], T], turns: CapacityLimiter | None = None) -> T:
    """The result of `work`, which runs in a worker thread; with `turns`, when one of them is free."""
    return await to_thread.run_sync(work, limiter=turns)


# ---------------------------------------------------------------------------------------------- routes


class OpenRoute(APIRoute):
    """A route that reads bodies strictly, whatever content type they have: for clients such as `curl -d`.

    FastAPI knows the route, and its document shows it. A body is read and checked here, once.
    """

    def check(self, request: Request) -> None:
        """Refuses a request before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = body_of(self)
        if kind is None:
            return super().get_route_handler()
        answer, takes_request = self.endpoint, "request" in inspect.signature(self.endpoint).parameters

        async def handle(request: Request) -> Response:
            self.check(request)
            sent = await request.body()
            body = _read(kind, sent) if len(sent) < LARGE else await in_thread(lambda: _read(kind, sent))
            found = await (answer(body, request) if takes_request else answer(body))
            return found if isinstance(found, Response) else json_response(found)

        return handle


def _read(kind: type[Body], sent: bytes) -> Body:
    """The body that bytes are; the record of the request notes the fields of it that are ignored."""
    found = parsed(sent)
    body = validated(kind, found)
    if names := ignored_fields(kind, found):
        record.ignore(*names)
    return body


class JsonRoute(OpenRoute):
    """An `OpenRoute` for bodies that are sent as JSON."""

    def check(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            found = f"is {kind!r}" if kind else "is missing"
            raise ApiError(415, f"the content type {found}", hint="send the header Content-Type: application/json")
        if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
            raise ApiError(415, f"the content encoding is {coding!r}", hint="send the body uncompressed")


def new_router(**options: Any) -> APIRouter:
    """A router for JSON bodies."""
    return APIRouter(route_class=JsonRoute, **options)


# ---------------------------------------------------------------------------------------------- responses


def json_bytes(value: Any) -> bytes:
    """JSON as compactly as it goes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


def json_response(value: Any) -> Response:
    """The response that is a JSON value."""
    return Response(json_bytes(value), media_type="application/json")


def json_rows(fields: Mapping[str, Any], name: str, rows: Iterable[Any]) -> bytes:
    """An object with these fields, and a long array written row by row: other threads have their turns between them."""
    return b'%b,"%b":[%b]}' % (json_bytes(fields)[:-1], name.encode(), b",".join(map(json_bytes, rows)))


def event(data: str | bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    raw = data.encode() if isinstance(data, str) else data
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + raw + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore, so that nobody on the way takes the connection for dead."""
    return f": {text}\n\n".encode()


class Stream(Response):
    """A response that is sent in pieces as they come. When the client goes away the iterator is closed at once.

    Args:
        pieces: what is sent; its `aclose` is called at the end.
        media_type: `EVENTS` or `LINES`.
        headers: further headers.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], media_type: str = EVENTS, headers: Mapping[str, str] | None = None
    ) -> None:
        self.pieces, self.status_code, self.background = pieces, 200, None
        self._began = False
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def probe() -> None:
            if self._began:
                quiet = b":\n\n" if self.media_type == EVENTS else b" "
                await send({"type": "http.response.body", "body": quiet, "more_body": True})

        await until_gone(self._send(send), receive, probe)

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._began = True
            async for piece in self.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._began = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self.pieces, "aclose", None)
            if close is not None:
                await close()


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def until_gone(
    work: Awaitable[T], receive: Receive, probe: Callable[[], Awaitable[None]] | None = None
) -> T | None:
    """The result of `work`, which is cancelled when the client closes the connection; then None.

    Args:
        probe: called when the client sends no more, which it may have closed as well: sends it something.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive, probe))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _disconnect(receive: Receive, probe: Callable[[], Awaitable[None]] | None) -> None:
    while (await receive())["type"] != "http.disconnect":
        if probe is not None:
            await probe()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, for an answer in one piece.

    Raises:
        ClientGone: the client closed the connection before; `work` was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await until_gone(asyncio.shield(task), request.receive)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:  # also where the request itself was cancelled, as by a server that ends
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
