"""One HTTP request to an ASGI app in this process, without a network.

Serve stage, beside the app: batches and Ray replicas call the app that a server listens with, so that there is one way
in which a request becomes an answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

AHEAD = 16  # messages that the app may send before anybody reads them


def scope_of(path: str, headers: Iterable[tuple[str, str]] = (), method: str = "POST") -> dict[str, Any]:
    """The scope of a request with a JSON body (https://asgi.readthedocs.io/en/latest/specs/www.html)."""
    named = [("host", "localhost"), ("content-type", "application/json"), *headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }


async def messages(app: App, scope: Message, body: bytes) -> AsyncGenerator[Message, None]:
    """The messages of the app: `http.response.start`, then parts of the body, each as soon as it is there.

    To close the iterator is what a client does that goes away: the app is told, and its task cancelled.

    Raises:
        Exception: of the app, if it fails before its answer is complete.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue(AHEAD)
    gone = asyncio.Event()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    complete = False

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, sent.put)
        finally:
            gone.set()
            with suppress(asyncio.QueueFull):  # then somebody reads on, and finds the task done
                sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while not (task.done() and sent.empty()):
            message = await sent.get()
            if message is None:
                break
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            yield message
            if complete:
                break
        if not complete:
            await task
            raise RuntimeError("the app ended without an answer")
    finally:
        gone.set()
        if complete:
            with suppress(Exception):  # what it does behind its answer; errors there are in its log
                await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def call(
    app: App,
    path: str,
    body: Any = None,
    headers: Iterable[tuple[str, str]] = (),
    method: str = "POST",
    *,
    background: bool = False,
) -> tuple[int, Any]:
    """Sends a JSON body, or none; returns the status and the parsed body of the answer.

    Args:
        background: what is computed has a lower priority than requests from elsewhere.
    """
    status, parts = 0, []
    raw = b"" if body is None else json.dumps(body).encode()
    scope = scope_of(path, headers, method)
    scope["state"]["background"] = background
    async with aclosing(messages(app, scope, raw)) as found:
        async for message in found:
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
    text = b"".join(parts)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode(errors="replace")
