"""A replica, a process with a model that answers requests with the application of the server; and the relay in front.

Ray stage. Ray starts replicas as actors, on the nodes that have the cores for them. The relay is an ASGI application
that passes requests on to them, and asks another one if a replica is lost. It does not import Ray: how a replica is
asked is an argument.

A request whose answer has not begun is computed again elsewhere, and the client notices nothing. One whose answer has
begun ends with an error in the form of its API: two halves of different answers do not fit together.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

import rlx
from rlx.errors import BusyError
from rlx.serve.app import create_app
from rlx.serve.asgi import call, messages
from rlx.serve.errors import ApiError, shape_of
from rlx.serve.http import DONE, EVENTS, LINES, event, json_bytes, json_response, until_gone
from rlx.serve.model import ServedModel
from rlx.serve.prefixes import prefix_keys, prompt_text

if TYPE_CHECKING:
    from rlx.serve.options import ServerOptions


REPLICA_HEADER = b"x-rlx-replica"  # which replica an answer is from
UNHEALTHY = 500  # a status from which on /health means that a replica is to be replaced


class Replica:
    """A model and the application that serves it.

    Args:
        model: as for `rlx.auto_runner`.
        names: of the model; the first one is that in answers.
        server: how it is served.
        options: those of `rlx.auto_runner`.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, model: str, names: Sequence[str], server: ServerOptions, options: dict[str, Any]
    ) -> None:
        self._stack, self._name = AsyncExitStack(), _own_name()
        self._runner = await asyncio.to_thread(partial(rlx.auto_runner, model, **options))
        self._app = create_app(ServedModel(self._runner, names[0], names[1:]), server)
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))

    async def answer(self, scope: dict[str, Any], body: bytes, keys: list[int]) -> AsyncGenerator[Message, None]:
        """The ASGI messages of an answer.

        Args:
            keys: those of the prompt's prefixes, which the router reads.
        """
        async with aclosing(messages(self._app, {**scope, "state": {}}, body)) as found:
            async for message in found:
                if message["type"] == "http.response.start":
                    yield {**message, "headers": [*message["headers"], (REPLICA_HEADER, self._name)]}
                else:
                    yield dict(message)

    async def check_health(self) -> None:
        """Ray Serve replaces the replica if this raises."""
        status, body = await call(self._app, "/health", method="GET")
        if status >= UNHEALTHY and body.get("status") != "loading":  # it compiles, and answers then
            raise BusyError(f"/health answers {status}: {body}", where="replica")

    async def __del__(self) -> None:  # Ray Serve awaits it, when the last request is answered
        if stack := getattr(self, "_stack", None):
            await stack.aclose()
        if runner := getattr(self, "_runner", None):
            await asyncio.to_thread(runner.close)


def _own_name() -> bytes:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id).encode()


log = logging.getLogger("rlx.ray")

ATTEMPTS = 5
RETRY_SECONDS = 1
LARGE = 100_000  # bytes of a body from which on it is parsed in a worker thread

Ask = Callable[[dict[str, Any], bytes, list[int]], AsyncGenerator[Message, None]]
"""Asks a replica: scope, body and prefix keys of a request -> the messages of its answer."""

_SCOPE = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers",
    "client", "server",
)  # fmt: skip


class Relay:
    """The application.

    Args:
        ask: asks a replica.
        lost: the errors of a replica that is gone, so that another one may be asked.
        full: the error where all replicas have as many requests as they may.
        most: largest body of a request, in bytes.
    """

    def __init__(self, ask: Ask, lost: tuple[type[Exception], ...], full: type[Exception], most: int) -> None:
        self._ask, self._lost, self._full, self._most = ask, lost, full, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                body = await self._body(receive)
                if body is not None:
                    await until_gone(self._answer(scope, body, send), receive)
            except ApiError as error:
                response = json_response(shape_of(scope["path"])(error), error.status, error.headers)
                await response(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body of a request; None if the client goes away before it is complete."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._most:
                raise ApiError(413, f"the body has more than {self._most} bytes", code="body_too_large")
        return b"".join(parts)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        keys = await asyncio.to_thread(keys_of, body) if len(body) > LARGE else keys_of(body)
        for attempt in range(1, ATTEMPTS + 1):
            sent = _Sent(send)
            try:
                async with aclosing(self._ask(plain, body, keys)) as answer:
                    async for message in answer:
                        await sent.pass_on(message)
                return None
            except self._full as error:
                what, retry = "all replicas are busy, and as many requests wait as may", str(RETRY_SECONDS)
                raise ApiError(429, what, code="queue_full", headers={"Retry-After": retry}) from error
            except self._lost as error:
                log.warning("a replica was lost with a request for %s, attempt %d: %s", scope["path"], attempt, error)
                if sent.has_begun:
                    return await sent.break_off(scope["path"])
        raise ApiError(503, f"{ATTEMPTS} replicas were lost with this request", code="replica_lost")


class _Sent:
    """The part of an answer that has gone to the client. Its head waits for the first part of its body."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self.has_begun = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self.has_begun and self._head is not None:
            self.has_begun = True
            await self._send(self._head)
        await self._send(message)

    async def break_off(self, path: str) -> None:
        """Ends an answer that has begun with an error in the form of its API.

        Raises:
            ConnectionError: it has no such form; the connection is then cut.
        """
        assert self._head is not None
        end = last_words(path, Headers(raw=self._head["headers"]).get("content-type", ""))
        if end is None:
            raise ConnectionError("the replica that sent this answer is lost")
        await self._send({"type": "http.response.body", "body": end, "more_body": False})


def last_words(path: str, content_type: str) -> bytes | None:
    """The end of a stream whose replica is lost; None where there is no form for it."""
    error = ApiError(
        503, "the replica that computed this answer was lost in the middle of it", code="replica_lost",
        hint="send the request again",
    )  # fmt: skip
    body = shape_of(path)(error)
    if content_type.startswith(LINES):
        return json_bytes(body) + b"\n"
    if not content_type.startswith(EVENTS):
        return None
    if path.endswith(("/messages", "/responses")):
        return event(body, "error")
    return event(body) + DONE


def keys_of(body: bytes) -> list[int]:
    """The keys of the prompt in a JSON body; none if it has none. The replica says what is wrong with it."""
    try:
        found = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return []
    return prefix_keys(prompt_text(found)) if isinstance(found, Mapping) else []


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        what = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{what}.complete"})
        if what == "shutdown":
            return
