"""The middleware in front of the application: every request passes here, whichever API it is for.

Server stage, between the HTTP server and the routers. In order: a record with an id, name, origin and key of the
sender, room for one more request, the body as far as it may be large; then the application; then log and metrics.

A bounded number of requests is admitted, with a bounded number of bytes of their bodies, in bounded time. One that is
refused costs nothing, its body is not even read. One whose body is not complete has no place in the queue. What was not
sent takes no room, and who sends too slowly is told so.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlx.errors import DeadlineError
from rlx.serve import record
from rlx.serve.errors import ApiError, api_error
from rlx.serve.http import MAX_ID, MAX_VALUES, VALUE_BYTES, again, count_of, in_thread
from rlx.serve.options import ServerOptions
from rlx.serve.record import RequestRecord

if TYPE_CHECKING:
    from rlx.serve.server import Server


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


PUBLIC = frozenset({"/", "/docs", "/health", "/v1/health", "/ping", "/favicon.ico"})
"""Paths that need no key: they tell nothing about the model or its users."""

_LOCAL_HOST = re.compile(r"(?:[\w-]+\.)*localhost|127(?:\.\d{1,3}){3}|\[?::1\]?")


class Access:
    """Says which requests a server answers.

    Args:
        options: keys, host names, origins.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._digests = [_digest(key) for key in options.api_key]
        self._hosts = frozenset(options.allowed_host) if options.is_local else None
        self._origins = frozenset(options.cors_origin)

    def check(self, path: str, method: str, headers: Headers) -> str:
        """Looks at the head of a request.

        Returns:
            What tells the holders of different keys apart, see `owner`.

        Raises:
            ApiError: 403, it is for another name or of a page that may not use the server; 401, it has no valid key.
        """
        host, origin = headers.get("host"), headers.get("origin")
        if host and self._hosts is not None and not self._is_known(host.lower(), self._hosts):
            what = f"the server of this machine is not reached as {host[:200]!r}"
            hint = "use http://localhost, or start the server with --allowed-host NAME"
            raise ApiError(403, what, code="host_not_allowed", hint=hint)
        if origin is not None and not self._allows(origin, headers):
            what, hint = f"pages of {origin[:200]!r} may not use this server", "start it with --cors-origin ORIGIN"
            raise ApiError(403, what, code="origin_not_allowed", hint=hint)
        if not self._digests or (method == "OPTIONS" and origin is not None):
            return ""
        if path not in PUBLIC:
            self._check_key(_sent(headers))
        return self.owner(headers)

    def _check_key(self, sent: str) -> None:
        """Compares a key with those that there are, in constant time."""
        digest = _digest(sent)
        if not sum([hmac.compare_digest(digest, each) for each in self._digests]):
            what = "the API key is wrong" if sent else "the request has no API key"
            hint = "send the header Authorization: Bearer KEY, or X-Api-Key: KEY"
            raise ApiError(401, what, code="invalid_api_key", hint=hint, headers={"WWW-Authenticate": "Bearer"})

    def owner(self, headers: Headers) -> str:
        """Tells the holders of different keys apart; empty where no key is needed. It does not tell the key."""
        return _digest(_sent(headers)).hex() if self._digests else ""

    @staticmethod
    def _is_known(host: str, more: frozenset[str]) -> bool:
        """Whether this machine has a name.

        A web page anywhere may give its own name the address 127.0.0.1, and then read what the server answers (DNS
        rebinding). Its requests carry that name in the header Host. A server that is reached from elsewhere takes every
        name.
        """
        name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
        return bool(_LOCAL_HOST.fullmatch(name)) or name in more or host in more

    def _allows(self, origin: str, headers: Headers) -> bool:
        """Whether a page of this origin may use the server: those of this machine may, and those that were named."""
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        try:
            parts = urlsplit(origin.lower())
        except ValueError:  # such as http://[
            return False
        if f"{parts.scheme}://*" in self._origins or parts.netloc == headers.get("host", "").lower():
            return bool(parts.netloc)
        return parts.scheme in ("http", "https") and bool(_LOCAL_HOST.fullmatch(parts.hostname or ""))

    def cors(self, headers: Headers) -> dict[str, str]:
        """The headers of a response to a page; none for one that may not ask."""
        origin = headers["origin"]
        if not self._allows(origin, headers):
            return {}
        found = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": "X-Request-Id, X-Rlx-Ignored, Server-Timing, Retry-After, Retry-After-Ms",
            "Vary": "Origin",
        }
        if "access-control-request-method" in headers:
            found["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
            found["Access-Control-Allow-Headers"] = headers.get("access-control-request-headers", "*")
            found["Access-Control-Max-Age"] = "600"
            if "access-control-request-private-network" in headers:
                found["Access-Control-Allow-Private-Network"] = "true"
        return found


def _sent(headers: Headers) -> str:
    """The key in the head of a request, or ""."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


log = logging.getLogger("rlx.serve")

ErrorResponse = Callable[[Request, ApiError], Response]
CLIENT_CLOSED = 499
_ID = re.compile(rf"[\w.:-]{{1,{MAX_ID}}}")
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,6})?")


class Middleware:
    """Checks, records and bounds every request, whichever API it is for.

    Args:
        app: the application.
        server: has the limits, and is told of the end of each request.
        respond: makes the response of an error in the form of the API that the path belongs to.
    """

    def __init__(self, app: ASGIApp, server: Server, respond: ErrorResponse) -> None:
        self._app, self._server, self._respond, self._options = app, server, respond, server.options
        self._most = server.options.max_body_bytes
        self._budget = BodyBudget(BUDGET, self._most + MAX_VALUES * VALUE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        found = _record(scope, headers)
        found.keeps_texts = self._options.log_prompts
        record.begin(found)
        cors = self._server.access.cors(headers) if "origin" in headers else {}
        answer = _Answer(send, found, headers, cors)
        try:
            await self._answer(scope, headers, receive, answer, found)
        except ApiError as error:
            if not answer.started:
                await self._refuse(scope, receive, answer, error, found)
        except asyncio.CancelledError:
            found.gone = True
            raise
        except Exception as error:
            log.exception("%s %s failed", found.method, found.path)
            if answer.started:
                raise  # the connection is closed: the client sees that the answer is incomplete
            await self._refuse(scope, receive, answer, api_error(error), found)
        finally:
            if not found.status:
                found.status, found.gone = CLIENT_CLOSED, True
            if "endpoint" in scope and not scope.get("path_params"):
                found.route = found.path
            self._server.done(found, headers)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError, found: RequestRecord) -> None:
        found.error = str(error)
        await self._respond(Request(scope), error)(scope, receive, send)

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, send: _Answer, found: RequestRecord
    ) -> None:
        """Has a request answered; one with a body is read first, and counted by the limiter from then on."""
        server, method = self._server, scope["method"]
        found.deadline = self._deadline(headers, found)
        owner = server.access.check(scope["path"], method, headers)
        if method == "OPTIONS" and "origin" in headers:
            await Response(status_code=204)(scope, receive, send)
            return
        found.owner = "" if self._options.share_prefixes else owner
        if method not in ("POST", "PUT", "PATCH"):
            if method == "HEAD":  # answered as GET; the HTTP server leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive, send)
            return
        if (problem := server.refusal()) is not None:
            raise problem
        check_length(headers, self._most)
        server.limiter.check()
        server.in_flight += 1
        try:
            with self._budget.share() as share:
                body = await read(receive, self._most, share, found.time_left(None))
                send.is_read = True
                if body is None:
                    found.gone = True
                    return
                server.limiter.enter()
                start = time.perf_counter()
                try:
                    await self._app(scope, again(body, receive), send)
                finally:
                    server.limiter.left(time.perf_counter() - start)
        finally:
            server.in_flight -= 1

    def _deadline(self, headers: Headers, found: RequestRecord) -> float | None:
        """When the request is to be answered: by its header X-Request-Timeout, at the latest by the server's limit."""
        own, most = headers.get("x-request-timeout"), self._options.timeout
        if own is not None and (not _SECONDS.fullmatch(own) or not float(own)):
            what = f"X-Request-Timeout is {own[:40]!r}"
            raise ApiError(400, what, param="X-Request-Timeout", hint="give seconds above 0")
        limits = [each for each in (own and float(own), most) if each]
        return found.arrived + min(limits) if limits else None


class _Answer:
    """Sends a response, with the headers that each one has, and notes its status.

    Attributes:
        is_read: whether the body of the request was read; otherwise the connection ends with the response.
    """

    def __init__(self, send: Send, found: RequestRecord, request: Headers, headers: dict[str, str]) -> None:
        self._send, self._record, self._headers, self.started = send, found, headers, False
        self.is_read = "transfer-encoding" not in request and request.get("content-length", "0") == "0"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self._record.status = True, message["status"]
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in self._headers.items():
                headers[name] = value
            if not self.is_read:
                headers["Connection"] = "close"
            headers["X-Request-Id"] = self._record.id
            headers["Server-Timing"] = server_timing(self._record)
            if self._record.ignored:
                headers["X-Rlx-Ignored"] = ", ".join(self._record.ignored)
            self._record.streamed = "content-length" not in headers
        await self._send(message)


def _record(scope: Scope, headers: Headers) -> RequestRecord:
    sent = headers.get("x-request-id", "")
    client = scope.get("client")
    return RequestRecord(
        id=sent if _ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}",
        method=scope["method"],
        path=scope["path"],
        background=bool(scope.get("state", {}).get("background")),
        client=client[0] if client else "",
        arrived=time.perf_counter(),
    )


def server_timing(found: RequestRecord) -> str:
    """The value of the header Server-Timing: what is known when the response begins, in milliseconds."""
    parts = []
    if found.answered:
        each = found.answered[-1]
        parts = [
            ("prepare", each.prepared),
            ("queue", each.first.queued_s),
            ("prompt", each.first.prompt_s),
            ("decode", max(one.decode_s for one in each.stats)),
        ]
    return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in [*parts, ("total", found.seconds)])
