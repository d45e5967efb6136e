"""The HTTP server around the application: where it listens, how long a connection may say nothing, and how it ends.

Server stage. `run` is what `rlx serve` calls: a server that is told to end finishes what it computes first. uvicorn
bounds the time between two requests of a connection; here are the bounds of a request's head and of an answer that
nobody reads, and what becomes of a client that sends no more: it may still read. The time of a body is bounded in
`middleware.py`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlx import platform
from rlx.closing import on_error
from rlx.errors import ArgumentError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlx.serve.options import ServerOptions
    from rlx.serve.server import Server


HEAD_SECONDS = 30.0  # from the begin of a connection, or of a request, to the end of the request's head
LINGER_SECONDS = 2.0  # in which a client may read an answer although it has not sent its whole body
STALLED_SECONDS = 5.0  # in which a client may take nothing of its answer while others wait
SILENT = (60, 15, 4)  # seconds until a silent connection is probed, between two probes, and number of probes
LEAST_PIECE, MOST_PIECE = 1 << 10, 8 << 10  # bytes of a chunked body that are read in one turn of the event loop
PIECE_SECONDS = 0.002  # how long that is to take


def most_connections() -> int:
    """How many connections there may be: half of the files that the process may open, at most 4096."""
    most = platform.current().open_files()
    return max(16, min(4096, most // 2 or 4096))


class Turns:
    """Connections that have received more than is read in one turn of the event loop. In each, one of them goes on.

    A body in chunks of one byte costs tens of microseconds a byte. However many of them come, others have their turns.
    """

    def __init__(self) -> None:
        self._waiting: deque[BoundedProtocol] = deque()

    def add(self, connection: BoundedProtocol) -> None:
        """Puts a connection at the end."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            connection.loop.call_soon(self._next)

    def _next(self) -> None:
        connection, more = self._waiting[0], False
        try:
            more = connection.read_piece()
        except Exception:
            connection.transport.abort()  # as the event loop does where reading fails
            raise
        finally:
            self._waiting.popleft()
            if more:
                self._waiting.append(connection)
            if self._waiting:
                connection.loop.call_soon(self._next)


class Transport:
    """The transport of a connection, which closes when the client has read the answer.

    To close a socket with unread bytes discards the answer on its way.

    Args:
        transport: asyncio's.
        closing: called in place of `close`; returns whether it does that itself.
    """

    def __init__(self, transport: asyncio.Transport, closing: Callable[[], bool]) -> None:
        self._transport, self._closing = transport, closing
        self._paused = {"flow": False, "turns": False}
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Closes it, unless the client still sends; then soon."""
        if not self.lingers:
            self.lingers = self._closing()
            if not self.lingers:
                self._transport.close()

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def pause_reading(self) -> None:
        self.pause("flow", True)

    def resume_reading(self) -> None:
        self.pause("flow", False)

    def pause(self, who: str, whether: bool) -> None:
        """Reads no more while anybody wants that."""
        self._paused[who] = whether
        if any(self._paused.values()):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class BoundedProtocol(H11Protocol):
    """One connection.

    The loop pauses whoever writes when the client does not read, so that no more than a buffer is held for it.
    """

    send_seconds = 60.0
    """How long a client may leave its answer unread."""

    turns = Turns()
    """The connections that have more to read."""

    others_wait: Callable[[], bool] = staticmethod(lambda: False)
    """Whether other requests wait for those that are answered."""

    transport: Any
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _watching: asyncio.TimerHandle | None = None
    _expects: str = ""
    _received = b""
    _piece = LEAST_PIECE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Transport(transport, self._closes))  # type: ignore[arg-type]
        _probe_silence(transport.get_extra_info("socket"), self.send_seconds)
        self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._received = b""
        self._expect("")
        for timer in (self._writing, self._watching):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # ---------------------------------------------------------------------------------------------- reading

    def data_received(self, data: bytes) -> None:
        if self.transport.lingers:
            return
        if self._received or (len(data) > LEAST_PIECE and not self._has_length):
            is_first, self._received = not self._received, self._received + data
            if is_first:
                self.transport.pause("turns", True)
                self.turns.add(self)
        else:
            self._read(data)

    def read_piece(self) -> bool:
        """Reads a part of what was received; returns whether there is more."""
        if not self._received:  # the connection has ended since
            return False
        piece, start = self._received[: self._piece], time.perf_counter()
        self._received = self._received[len(piece) :]
        self._read(piece)
        is_slow = time.perf_counter() - start > PIECE_SECONDS
        self._piece = max(LEAST_PIECE, self._piece // 2) if is_slow else min(MOST_PIECE, 2 * self._piece)
        if self.transport.is_closing():
            self._received = b""
        elif self._received and self._has_length:
            rest, self._received = self._received, b""
            self._read(rest)
        if not self._received:
            self.transport.pause("turns", False)
        return bool(self._received)

    @property
    def _has_length(self) -> bool:
        """Whether what comes is the rest of a body without chunks."""
        return (
            self._is_answering
            and self.cycle.more_body
            and not any(name == b"transfer-encoding" for name, _ in self.headers)
        )

    def _read(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._expect(self._awaited())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect(self._awaited())

    def _closes(self) -> bool:
        """Ends the side of the server first where the client still sends: it is to read the answer."""
        cycle: Any = self.cycle
        if cycle is None or not (cycle.response_complete and cycle.more_body) or not self.transport.can_write_eof():
            return False
        self._received = b""
        for who in ("flow", "turns"):
            self.transport.pause(who, False)
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        return True

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It gets its answer if it still reads; whether it does, it shows by no reset."""
        if self.transport.lingers or not self._is_answering or self.cycle.more_body:
            return False
        cycle = self.cycle
        cycle.keep_alive = False
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            )
        cycle.message_event.set()  # a stream sends something, too
        self._watch(0.02)
        return True

    def _watch(self, seconds: float) -> None:
        """Ends the connection of a client that has closed it completely: what is sent to it then fails."""
        connection = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or connection is None:
            return
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._watching = self.loop.call_later(seconds, self._watch, min(1.0, 2 * seconds))

    # ---------------------------------------------------------------------------------------------- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_writing_timer()
        self._stalled(time.monotonic())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    def _stalled(self, since: float) -> None:
        """Ends the connection of a client that takes nothing: sooner if others wait for its place."""
        stalled = time.monotonic() - since
        if stalled >= self.send_seconds or (stalled >= STALLED_SECONDS and self.others_wait()):
            self.transport.abort()
        else:
            seconds = min(1.0, self.send_seconds - stalled)
            self._writing = self.loop.call_later(seconds, self._stalled, since)

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # ---------------------------------------------------------------------------------------------- time

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _awaited(self) -> str:
        """The part that the client has to send next: the rest of a head, or nothing."""
        return "" if self._is_answering or self.timeout_keep_alive_task is not None else "head"

    def _expect(self, what: str) -> None:
        """Starts the time for it, unless it runs."""
        if what == self._expects:
            return
        if self._reading is not None:
            self._reading.cancel()
        self._expects = what
        self._reading = self.loop.call_later(HEAD_SECONDS, self.transport.close) if what else None


def _probe_silence(connection: Any, send_seconds: float) -> None:
    """Has the system end a connection whose other side is gone without a word."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    for name, value in zip(names, (*SILENT, int(1000 * send_seconds)), strict=True):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
        with on_error(found.close):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if family == socket.AF_INET6 and host == "::":
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(address)
            found.listen(BACKLOG)
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
        self._settled = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            gc.unfreeze()

    async def on_tick(self, counter: int) -> bool:
        over, shared = await super().on_tick(counter), self._shared
        settled = sum(each.is_warm + each.is_compiled for each in shared.opened)
        if settled > self._settled:
            # Otherwise all answers wait now and then for a collection that looks at models, programs and vocabularies.
            self._settled = settled
            gc.collect()
            gc.freeze()
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
