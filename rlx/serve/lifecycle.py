"""The life of a server: it loads its models, serves, drains, ends.

Server stage, above the application. `run` is what `rlx serve` calls: an HTTP server that is told to end finishes what
it computes first.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING

import uvicorn

from rlx import platform
from rlx.errors import ArgumentError
from rlx.serve.errors import ApiError
from rlx.serve.protocol import BoundedProtocol, Turns, most_connections

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlx.serve.admission import ConcurrencyLimiter
    from rlx.serve.app import Server
    from rlx.serve.options import ServerOptions

BACKLOG = 512
CUT_SECONDS = 2.0  # for requests that were cut to say so to their clients
SEND_BUFFER = 64 << 10  # bytes that the system holds for a client that does not read; it doubles them


class State(StrEnum):
    """The states of a server."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Lifecycle:
    """Where a server stands, and how many requests it answers.

    Attributes:
        state: what it can do now.
        error: why a model could not be opened.
        in_flight: number of requests that are being answered and want something computed.
        changed: called after every change of the state.
    """

    def __init__(self) -> None:
        self.state = State.LOADING
        self.error: BaseException | None = None
        self.in_flight = 0
        self.changed: Callable[[], object] = lambda: None

    def opened(self) -> None:
        """The models are there."""
        if self.state == State.LOADING:
            self._set(State.READY)

    def failed(self, error: BaseException) -> None:
        """A model cannot be opened."""
        self.error = error
        self._set(State.FAILED)

    def drain(self) -> None:
        """From now on nothing new begins."""
        self._set(State.DRAINING)

    def refusal(self) -> ApiError | None:
        """The error of a request that wants something computed now; None if that is possible."""
        if self.state == State.READY:
            return None
        if self.state == State.LOADING:
            return unavailable("the model is loading", "loading", "try again in some seconds")
        if self.state == State.FAILED:
            return unavailable(f"the model cannot be opened: {self.error}", "failed", None)
        return unavailable("the server is ending", "draining", "send the request to another one, or again later")

    def _set(self, state: State) -> None:
        self.state = state
        self.changed()


def unavailable(what: str, code: str, hint: str | None) -> ApiError:
    """The 503 of a server that does not answer now; `code` is one word for why."""
    return ApiError(503, what, code=code, hint=hint, headers={"Retry-After": "1"})


@contextmanager
def listening(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """The sockets of a server, so that an address that cannot be used is an error before anything is loaded.

    All have the same port, the first one's where the system chooses it.

    Raises:
        ArgumentError: the port is in use or not allowed, or this machine has no such address.
    """
    found: list[socket.socket] = []
    try:
        for host in options.hosts:
            found.append(_listener(host, found[0].getsockname()[1] if found else options.port))
        yield found
    finally:
        for each in found:
            each.close()


def _listener(host: str, port: int) -> socket.socket:
    where = f"{host}:{port}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, number)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if family == socket.AF_INET6 and host == "::":
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(address)
            found.listen(BACKLOG)
        except BaseException:
            found.close()
            raise
    except socket.gaierror as error:
        raise ArgumentError(f"there is no such address: {error.strerror}", where=f"host {host}") from error
    except PermissionError as error:
        raise ArgumentError("the port is not allowed", where=where, hint="take a `port` above 1023") from error
    except OSError as error:
        in_use = error.errno == 98 or "in use" in str(error)
        hint = "end that program, or choose another `port`; 0 takes a free one" if in_use else None
        what = "another program uses the port" if in_use else f"it cannot listen there: {error.strerror}"
        raise ArgumentError(what, where=where, hint=hint) from error
    return found


def addresses(options: ServerOptions, listeners: list[socket.socket]) -> list[str]:
    """The addresses to type into a browser on this machine, one for each host."""
    hosts = dict.fromkeys({"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host) for host in options.hosts)
    port = listeners[0].getsockname()[1]
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]


def run(app: FastAPI, options: ServerOptions, listeners: list[socket.socket]) -> None:
    """Serves until a signal ends it. SIGINT and SIGTERM drain; a second one ends at once.

    Args:
        app: of `create_app`.
        listeners: of `listening`.

    Raises:
        RlxError: a model cannot be opened.
        KeyboardInterrupt: there was a second signal.
    """
    server = http_server(app, options)
    asyncio.run(server.serve(listeners))
    lifecycle: Lifecycle = app.state.server.lifecycle
    if lifecycle.error is not None:
        raise lifecycle.error
    if server.force_exit:
        raise KeyboardInterrupt


def http_server(app: FastAPI, options: ServerOptions) -> uvicorn.Server:
    """The HTTP server of an application, with bounds for every connection. While it drains it goes on listening."""
    limiter: ConcurrencyLimiter = app.state.server.limiter
    own = {
        "send_seconds": options.send_timeout,
        "turns": Turns(),
        "others_wait": staticmethod(lambda: limiter.is_crowded),
    }
    config = uvicorn.Config(
        app,
        http=type("Connection", (BoundedProtocol,), own),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(CUT_SECONDS),
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=most_connections(),
    )
    return DrainingServer(config, app.state.server, options.drain)


class DrainingServer(uvicorn.Server):
    """A server that goes on listening while it drains, so that new requests get an answer.

    Args:
        config: of the HTTP server.
        shared: what it serves.
        seconds: how long requests have to end.
    """

    def __init__(self, config: uvicorn.Config, shared: Server, seconds: float) -> None:
        super().__init__(config)
        self._shared, self._seconds = shared, seconds
        self._deadline: float | None = None

    async def on_tick(self, counter: int) -> bool:
        over, lifecycle = await super().on_tick(counter), self._shared.lifecycle
        if self._deadline is None or over:
            return over or lifecycle.state == State.FAILED
        if not lifecycle.in_flight:
            return True
        if time.monotonic() < self._deadline:
            return False
        self._shared.registry.close()
        return time.monotonic() >= self._deadline + CUT_SECONDS

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, hang_up = asyncio.get_running_loop(), [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
        with (
            platform.current().on_signals(loop, (signal.SIGINT, signal.SIGTERM), self.end),
            platform.current().on_signals(loop, hang_up, self._shared.log.reopen),
        ):
            yield

    def end(self) -> None:
        """Drains, and ends at once if it does so already: the effect of a signal."""
        if self._deadline is not None:
            self.force_exit = self.should_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # that requests were cut is what was asked for
            return
        self._deadline = time.monotonic() + self._seconds
        self._shared.lifecycle.drain()


async def load(lifecycle: Lifecycle, opening: Callable[[], None]) -> None:
    """Calls `opening`, which opens the models, in a thread of its own, and notes how it went.

    Nobody waits for the thread where the process ends before they are there.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            opening()
        except BaseException as error:
            errors.append(error)
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name="rlx-opening", daemon=True).start()
    await done.wait()
    if errors:
        lifecycle.failed(errors[0])
    else:
        lifecycle.opened()
