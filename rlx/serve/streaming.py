"""Streams over HTTP: server-sent events and lines of JSON, which end when the client goes away.

Server stage, below the APIs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENTS, LINES = "text/event-stream", "application/x-ndjson"


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


def event(data: str | bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    raw = data.encode() if isinstance(data, str) else data
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + raw + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore, so that nobody on the way takes the connection for dead."""
    return f": {text}\n\n".encode()


def json_bytes(value: Any) -> bytes:
    """JSON as compactly as it goes."""
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


def json_rows(fields: Mapping[str, Any], name: str, rows: Iterable[Any]) -> bytes:
    """An object with these fields, and a long array written row by row: other threads have their turns between them."""
    return b'%b,"%b":[%b]}' % (json_bytes(fields)[:-1], name.encode(), b",".join(map(json_bytes, rows)))
