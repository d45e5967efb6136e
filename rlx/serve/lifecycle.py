"""The HTTP server around the application: where it listens, and how it ends.

Server stage. `run` is what `rlx serve` calls: a server that is told to end finishes what it computes first.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from rlx import platform
from rlx.errors import ArgumentError
from rlx.serve.protocol import BoundedProtocol, Turns, most_connections

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlx.serve.options import ServerOptions
    from rlx.serve.server import Server

BACKLOG = 512
CUT_SECONDS = 2.0  # for requests that were cut to say so to their clients
SEND_BUFFER = 64 << 10  # bytes that the system holds for a client that does not read; it doubles them


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
    shared: Server = app.state.server
    if shared.error is not None:
        raise shared.error
    if server.force_exit:
        raise KeyboardInterrupt


def http_server(app: FastAPI, options: ServerOptions) -> uvicorn.Server:
    """The HTTP server of an application, with bounds for every connection. While it drains it goes on listening."""
    shared: Server = app.state.server
    own = {
        "send_seconds": options.send_timeout,
        "turns": Turns(),
        "others_wait": staticmethod(lambda: shared.is_crowded),
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
    return DrainingServer(config, shared, options.drain)


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
        over, shared = await super().on_tick(counter), self._shared
        if self._deadline is None or over:
            return over or shared.state == "failed"
        if not shared.in_flight:
            return True
        if time.monotonic() < self._deadline:
            return False
        shared.cut()
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
        self._shared.drain()
