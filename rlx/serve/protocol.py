"""Connections of the HTTP server, each bounded in time: a client that says nothing, or takes nothing, is cut off.

Server stage, under `lifecycle.py`. uvicorn bounds the time between two requests of a connection; here are the bounds
of a request's head and body, and of an answer that nobody reads.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rlx import platform

HEAD_SECONDS = 30.0  # from the begin of a connection, or of a request, to the end of the request's head
BODY_SECONDS = 60.0  # between two pieces of a body
SILENT = (60, 15, 4)  # seconds until a silent connection is probed, between two probes, and number of probes


def most_connections() -> int:
    """How many connections there may be: half of the files that the process may open, at most 4096."""
    most = platform.current().open_files()
    return max(16, min(4096, most // 2 or 4096))


class BoundedProtocol(H11Protocol):
    """One connection.

    The loop pauses whoever writes when the client does not read, so that no more than a buffer is held for it.
    """

    send_seconds = 60.0
    """How long a client may leave its answer unread."""

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _expects: str = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _probe_silence(transport.get_extra_info("socket"), self.send_seconds)
        self._expect("head")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._expect(self._awaited())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect(self._awaited())

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect("")
        self._stop_writing_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_writing_timer()
        self._writing = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _awaited(self) -> str:
        """What the client has to send next: the rest of a head or of a body, or nothing."""
        if self._is_answering:
            return "body" if self.cycle.more_body else ""
        return "" if self.timeout_keep_alive_task is not None else "head"

    def _expect(self, what: str) -> None:
        """Starts the time for it; that of a head goes on, that of a body begins again with each piece."""
        if what == "head" == self._expects:
            return
        if self._reading is not None:
            self._reading.cancel()
        seconds = {"head": HEAD_SECONDS, "body": BODY_SECONDS}.get(what)
        self._expects = what
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        """The client has not sent what it has to: nothing is waited for any longer."""
        if not self._is_answering:
            self.transport.close()
        elif self.flow.read_paused:  # the server does not read yet
            self._expects = ""
            self._expect("body")
        else:
            self.transport.abort()


def _probe_silence(connection: Any, send_seconds: float) -> None:
    """Has the system end a connection whose other side is gone without a word."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    for name, value in zip(names, (*SILENT, int(1000 * send_seconds)), strict=True):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
