"""Clients that send slowly, in tiny pieces, without a key, or do not read: they cost the others nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from exchanges import HANGS, until

from rlx.serve import ServerOptions, create_app, lifecycle, middleware
from rlx.serve.lifecycle import MOST_PIECE, BoundedProtocol
from rlx.serve.middleware import BodyBudget

CHAT = "/v1/chat/completions"
SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
LONG = {**SHORT, "max_tokens": 900, "ignore_eos": True}
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()


@contextmanager
def connected(url: str, *pieces: bytes) -> Iterator[socket.socket]:
    """A connection over which something was sent."""
    own = httpx.URL(url)
    with socket.create_connection((own.host, own.port), timeout=HANGS) as found:
        for piece in pieces:
            found.sendall(piece)
        yield found


def received(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def whole(body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    return "".join([HEAD, *headers, f"Content-Length: {len(content)}\r\n\r\n"]).encode() + content


def app_of(server: Any, **options: Any) -> Any:
    return create_app(server.model, ServerOptions(log="none", **options))


# ------------------------------------------------------------------------------------------------ slow bodies


def test_a_body_that_is_not_complete_has_no_place_in_the_queue(server: Any, serve: Any) -> None:
    app = app_of(server, queue=0)
    app.state.server.limiter.slots = 1
    with serve(app) as url, httpx.Client(base_url=url, timeout=HANGS) as client:
        part = CHUNKED + b"1\r\n{\r\n"
        with (
            connected(url, part),
            connected(url, part),
            connected(url, HEAD.encode() + b"Content-Length: 9999\r\n\r\n{"),
        ):
            assert until(lambda: app.state.server.in_flight == 3)
            assert client.post(CHAT, json=SHORT).status_code == 200


@pytest.mark.parametrize("head", [CHUNKED + b"1\r\n{\r\n", HEAD.encode() + b"Content-Length: 9999\r\n\r\n{"])
def test_a_slow_body_is_refused(server: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(middleware, "GRACE", 0.1)
    with serve(app_of(server)) as url, connected(url, head) as connection:
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"body_too_slow" in answer
    assert b"connection: close" in answer.lower()


def test_a_body_needs_a_least_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it has follows from what has come of it."""
    monkeypatch.setattr(middleware, "GRACE", 0.0)
    ends: list[float] = []

    async def main() -> None:
        loop, room, sent = asyncio.get_running_loop(), BodyBudget(1 << 20, 1 << 20), iter([60_000, 10_000, 0])

        async def receive() -> dict[str, Any]:
            size = next(sent)
            return {"type": "http.request", "body": b"x" * size, "more_body": bool(size)}

        async def until(end: float | None, step: Any, error: Any) -> Any:
            ends.append((end or 0.0) - loop.time())
            return await step

        monkeypatch.setattr(middleware, "_until", until)
        with room.share() as place:
            found = await middleware.read(receive, 1 << 20, place, None)
        assert found == b"x" * 70_000

    asyncio.run(main())
    waits = [round(each * middleware.LEAST_RATE, -4) for each in ends]
    assert waits[:3] == [0, 60_000, waits[2]] and 70_000 in waits


def test_room_is_taken_as_bytes_come() -> None:
    """Eight that have sent little hold little; those that wait for one another all come through."""
    order: list[str] = []

    async def body(room: BodyBudget, name: str, *sizes: int, over: asyncio.Event | None = None) -> None:
        with room.share() as place:
            for size in sizes:
                await place.grow(size)
                await asyncio.sleep(0)
            order.append(name)
            if over is not None:
                await over.wait()

    async def main() -> None:
        room, over = BodyBudget(20, 10), asyncio.Event()
        slow = [asyncio.create_task(body(room, "slow", 1, over=over)) for _ in range(8)]
        await asyncio.sleep(0.01)
        await body(room, "quick", 10)  # two are free, and the reserve holds the rest
        assert order == ["slow"] * 8 + ["quick"]
        over.set()
        await asyncio.gather(*slow)
        order.clear()
        await asyncio.gather(*(body(room, "together", 3, 6, 9) for _ in range(9)))
        assert order == ["together"] * 9
        over.clear()
        first = asyncio.create_task(body(room, "first", 10, over=over))
        await asyncio.sleep(0)
        second, gives_up, fourth = (asyncio.create_task(body(room, name, 9, over=over)) for name in ("2", "3", "4"))
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.sleep(0.01)
        assert not second.done() and not fourth.done() and order[9:] == ["first", "2"]
        over.set()
        await asyncio.gather(first, second, fourth)
        assert room._free == 10 and room._first is None and not room._waiting

    asyncio.run(asyncio.wait_for(main(), HANGS))


# ------------------------------------------------------------------------------------------------ without a key


def test_without_a_key_no_body_is_read(server: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes at once, closes the connection, and is not lost although the client goes on sending."""
    seen: list[int] = []
    read = BoundedProtocol._read
    monkeypatch.setattr(BoundedProtocol, "_read", lambda self, data: (seen.append(len(data)), read(self, data))[1])
    with serve(app_of(server, api_key=("sk-0123456789",))) as url:
        for more in (f"{HEAD}Content-Length: 100000000\r\n\r\n".encode(), CHUNKED):
            with connected(url, more) as connection:
                with suppress(ConnectionError):
                    for _ in range(50):
                        connection.sendall(b"1\r\nx\r\n" * 10_000)
                answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" in answer.lower()
            assert answer.endswith(b"}")
    assert sum(seen) < 1_500_000, "what came behind the answer was read as a body"


# ------------------------------------------------------------------------------------------------ tiny pieces


def test_chunks_of_one_byte_are_read_in_turns(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    read = BoundedProtocol._read
    monkeypatch.setattr(BoundedProtocol, "_read", lambda self, data: (pieces.append(len(data)), read(self, data))[1])
    content = json.dumps({**SHORT, "user": "x" * 20_000}).encode()
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    with connected(server.url, CHUNKED + body) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.sendall(whole(SHORT, "Connection: close\r\n"))  # the connection goes on
        assert received(connection).count(b"HTTP/1.1 200") == 1
    assert max(pieces) <= MOST_PIECE


def test_a_connection_that_fails_in_its_turn_ends_alone() -> None:
    calls, ended, read = list[Callable[[], None]](), [], []

    class Connection:
        def __init__(self, fails: bool) -> None:
            self.fails, self.loop, self.transport = fails, self, self

        def read_piece(self) -> bool:
            if self.fails:
                raise ValueError("broken")
            read.append(self)
            return False

        def call_soon(self, call: Callable[[], None]) -> None:
            calls.append(call)

        def abort(self) -> None:
            ended.append(self)

    turns, connections = lifecycle.Turns(), [Connection(True), Connection(False)]
    for each in connections:
        turns.add(each)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broken"):
        calls.pop(0)()
    calls.pop(0)()
    turns.add(connections[1])  # type: ignore[arg-type]
    calls.pop(0)()
    assert ended == connections[:1] and read == connections[1:] * 2 and not calls


# ------------------------------------------------------------------------------------------------ half of a connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(server: Any, stream: bool) -> None:
    with connected(server.url, whole({**SHORT, "max_tokens": 200, "ignore_eos": True, "stream": stream})) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_closes_while_its_prompt_waits_is_gone(server: Any, serve: Any, idle: Any, stream: bool) -> None:
    """Before its first token a stream has nothing to send by which it would be noticed."""
    idle(server)
    scheduler = server.model.runner._loop.scheduler
    before, scheduler.slots = scheduler.slots, 0
    try:
        with connected(server.url, whole({**LONG, "stream": stream})):
            assert until(lambda: server.model.runner.stats()["requests"]["queue"] == 1)
        assert until(lambda: server.model.runner.stats()["requests"]["queue"] == 0)
    finally:
        scheduler.slots = before
    idle(server)


# ------------------------------------------------------------------------------------------------ readers that stop


def test_one_that_stops_reading_keeps_no_place_from_others(
    server: Any, serve: Any, idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(server)
    monkeypatch.setattr(lifecycle, "STALLED_SECONDS", 0.2)
    app = app_of(server, send_timeout=10 * HANGS)
    with serve(app) as url:
        own, connection = httpx.URL(url), socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((own.host, own.port))
        running = server.model.runner.stats
        body = {**LONG, "n": running()["requests"]["slots"], "stream": True, "logprobs": True, "top_logprobs": 20}
        connection.sendall(whole(body))
        assert until(lambda: bool(running()["requests"]["running"]))
        time.sleep(1)
        assert app.state.server.limiter.inside == 1, "nobody waits: it may go on later"
        answer = httpx.post(f"{url}{CHAT}", json=SHORT, timeout=HANGS)
        assert answer.status_code == 200, "there are more slots than requests, but its choices have them all"
        assert until(lambda: app.state.server.limiter.inside == 0)
        connection.close()
    idle(server)
