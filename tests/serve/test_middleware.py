"""What stands in front of the application: keys, names, origins, the queue, bodies, deadlines, drain, slow clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from exchanges import HANGS, until

from rlx.cli.output import Bars
from rlx.cli.serve import Announcer
from rlx.errors import BusyError, DeadlineError, PoolFullError, PromptError, ResourceError, RlxError
from rlx.serve import ServedModel, create_app, lifecycle
from rlx.serve.errors import ApiError, api_error
from rlx.serve.http import MAX_DEPTH, parsed
from rlx.serve.middleware import ConcurrencyLimiter
from rlx.serve.options import ServerOptions

KEY = "sk-0123456789"
CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 900, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}

Make = Callable[..., httpx.Client]


@pytest.fixture
def make(server: Any, serve: Any) -> Iterator[Make]:
    """`make(queue=1)`: a client of another application over the same model."""
    with ExitStack() as stack:

        def made(**options: Any) -> httpx.Client:
            app = create_app(server.model, ServerOptions(log="none", **options))
            url = stack.enter_context(serve(app))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=HANGS))
            client.app = app  # type: ignore[attr-defined]
            return client

        yield made


@contextmanager
def streaming(client: httpx.Client, **more: Any) -> Iterator[Iterator[str]]:
    with client.stream("POST", CHAT, json={**LONG, "stream": True, **more}) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield lines


# ------------------------------------------------------------------------------------------------ who may ask


def test_a_key_comes_as_bearer_or_as_x_api_key(make: Make) -> None:
    client = make(api_key=("another-key", KEY))
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}):
        assert client.post(CHAT, json=SHORT, headers=headers).status_code == 200
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": KEY}, {"X-Api-Key": KEY[:-1]}):
        response = client.post(CHAT, json=SHORT, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/metrics").status_code == client.get("/props").status_code == 401
    assert client.get("/health").status_code == client.get("/").status_code == client.get("/ping").status_code == 200


def cached(client: httpx.Client, text: str, key: str, **more: Any) -> int:
    """How many tokens of a prompt the cache knew."""
    body = {"prompt": text, "max_tokens": 1, **more}
    response = client.post("/v1/completions", json=body, headers={"X-Api-Key": key})
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_no_key_learns_how_the_prompts_of_another_begin(make: Make) -> None:
    """By `cached_tokens` one finds out a secret piece by piece: the right guess is known to the cache."""
    text, keys = f"{uuid.uuid4()} The secret number of the brave fox is 4711. " * 4, (KEY, "another-key")
    client = make(api_key=keys)
    assert cached(client, text, KEY) < 8 and cached(client, text, "another-key") < 8
    assert cached(client, text, KEY) > 60, "its own prompts are known"
    assert cached(client, text, KEY, cache_salt="one") < 8 and cached(client, text, KEY, cache_salt="two") < 8
    assert cached(client, text, KEY, cache_salt="two") > 60
    assert cached(client, text, "another-key", cache_salt="two") < 8, "a salt does not lead to another key"
    shares, other = make(api_key=keys, share_prefixes=True), f"{uuid.uuid4()} Once upon a time there was a fox. " * 4
    assert cached(shares, other, KEY) < 8 < 60 < cached(shares, other, "another-key")


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1:80", "127.0.0.1.evil.example"])
def test_another_name_is_refused_on_this_machine(make: Make, host: str) -> None:
    response = make().get("/v1/models", headers={"Host": host})
    assert response.status_code == 403 and "--allowed-host" in response.json()["error"]["message"]


def test_pages_of_this_machine_may_ask(make: Make) -> None:
    client = make(cors_origin=("https://app.example", "vscode-webview://*"))
    for origin in ("http://localhost:3000", "https://127.0.0.1", "https://app.example", "vscode-webview://abc"):
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = client.options(CHAT, headers={"Origin": origin, **asked})
        assert preflight.status_code == 204 and not preflight.content
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        found = client.get("/v1/models", headers={"Origin": origin})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://["])
def test_pages_of_others_may_not(make: Make, origin: str) -> None:
    response = make().post(CHAT, json=SHORT, headers={"Origin": origin})
    assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


# ------------------------------------------------------------------------------------------------ what may come in


def test_a_full_queue_refuses_at_once(make: Make, idle: Any, server: Any) -> None:
    idle(server)
    client = make(queue=1)
    client.app.state.server.limiter.slots = 1  # type: ignore[attr-defined]
    with streaming(client), streaming(client):
        response = client.post(CHAT, json=SHORT)
        assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1 and int(response.headers["retry-after-ms"]) >= 50
        official = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            official.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
        assert client.get("/health").status_code == 200
        assert 'rlx:request_rejections_total{model_name="demo"} 2.0' in client.get("/metrics").text
    assert until(lambda: client.post(CHAT, json=SHORT).status_code == 200)


def test_the_wait_follows_from_what_requests_took() -> None:
    limiter = ConcurrencyLimiter(4, 0)
    for _ in range(4):
        limiter.enter()
    for _ in range(50):
        limiter.left(8.0)
        limiter.enter()
    with pytest.raises(ApiError) as caught:
        limiter.enter()
    assert caught.value.status == 429 and caught.value.headers["Retry-After"] == "2"  # four of eight seconds each
    assert limiter.inside == 4 and limiter.rejected == 1


def test_a_body_that_is_too_large_is_not_read(make: Make) -> None:
    client = make(max_body_mb=0.01)
    for body in (b"x" * 20_000, iter([b"x" * 9_000] * 3)):  # with a length, and in chunks
        response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 413 and "--max-body-mb" in response.json()["error"]["message"]
    host = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    status, _ = raw(str(client.base_url), f"{host}Content-Length: 100000000000\r\nConnection: close\r\n\r\n")
    assert status == 413  # before a byte of it came
    assert client.post(CHAT, json=SHORT).status_code == 200


def test_nesting_has_a_limit_that_every_python_keeps() -> None:
    def nested(levels: int) -> bytes:
        return b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    assert parsed(nested(MAX_DEPTH)) and parsed(b'{"x": [%s]}' % b",".join([b"[]"] * 1000))
    for levels in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ApiError, match="nested"):
            parsed(nested(levels))


# ------------------------------------------------------------------------------------------------ time


def test_a_deadline_of_the_request_or_of_the_server(make: Make, server: Any, idle: Any) -> None:
    for client, body, headers in (
        (make(), {"timeout": 0.001}, {}),
        (make(), {}, {"X-Request-Timeout": "0.001"}),
        (make(timeout=0.001), {"timeout": 100}, {}),
    ):
        response = client.post(CHAT, json={**LONG, **body}, headers=headers)
        assert response.status_code == 408 and response.json()["error"]["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false", "clients would ask again, and wait in vain again"
    assert make().post(CHAT, json=SHORT, headers={"X-Request-Timeout": "soon"}).status_code == 400
    idle(server)


def test_a_request_id_is_kept_or_made(server: Any) -> None:
    assert server.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    bad = ("", "a b", "x" * 999)
    own = {server.http.get("/health", headers={"X-Request-Id": each}).headers["x-request-id"] for each in bad}
    assert len(own) == 3 and all(re.fullmatch(r"req-[0-9a-f]{32}", each) for each in own)


# ------------------------------------------------------------------------------------------------ clients that go away


def test_60_cancelled_requests_and_then_an_answer(server: Any, idle: Any) -> None:
    """Of all kinds: streams and whole answers, running and queued ones."""

    async def one(client: httpx.AsyncClient, i: int) -> None:
        body = {**LONG, "stream": i % 2 == 0}
        with pytest.raises(asyncio.CancelledError):
            task = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.sleep(0.002 * i)
            task.cancel()
            await task

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGS, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(60)))

    asyncio.run(main())
    assert server.post(CHAT, **SHORT).status_code == 200
    idle(server)
    assert until(lambda: server.app.state.server.limiter.inside == 0)  # the answer comes before its request leaves


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(server: Any, idle: Any, stream: bool) -> None:
    idle(server)
    requests = server.model.runner.stats()["requests"]
    connection = sent(server.url, {**LONG, "stream": stream})
    assert until(lambda: bool(server.model.runner.stats()["requests"]["running"]))
    connection.close()
    idle(server)
    after = server.model.runner.stats()["requests"]
    assert after["requests"] == requests["requests"] + 1
    assert after["tokens"] - requests["tokens"] < LONG["max_tokens"], "it was computed to the end"


def test_a_slow_reader_holds_little_and_is_cut(server: Any, serve: Any, idle: Any) -> None:
    """The engine waits for it; then its connection is ended, and its sequence is free."""
    idle(server)
    app = create_app(server.model, ServerOptions(log="none", send_timeout=1))
    with serve(app) as url:
        own = httpx.URL(url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((own.host, own.port))
        body = json.dumps({**LONG, "n": 8, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        tokens = server.model.runner.stats()["requests"]["tokens"]
        idle(server)  # it is cut, although nobody reads
        assert server.model.runner.stats()["requests"]["tokens"] - tokens < 8 * LONG["max_tokens"]
        assert until(lambda: app.state.server.limiter.inside == 0)
        connection.close()


def test_half_open_connections_end(server: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HEAD_SECONDS", 0.2)
    with serve(create_app(server.model, ServerOptions(log="none"))) as url:
        own = httpx.URL(url)
        for piece in ("", "GET / HT"):
            with socket.create_connection((own.host, own.port), timeout=HANGS) as connection:
                connection.sendall(piece.encode())
                with suppress(ConnectionResetError):
                    assert connection.recv(100) == b""
        with httpx.Client(base_url=url, timeout=HANGS) as client:  # an idle connection between two requests is kept
            assert client.get("/health").status_code == 200
            time.sleep(0.5)
            assert client.post(CHAT, json=SHORT).status_code == 200


# ------------------------------------------------------------------------------------------------ the life of a server


def test_while_the_model_loads(server: Any, serve: Any) -> None:
    go = threading.Event()

    def opening() -> Any:
        assert go.wait(HANGS)
        return server.model

    with serve(create_app(opening, ServerOptions(log="none"))) as url, httpx.Client(base_url=url) as client:
        for response in (client.get("/health"), client.post(CHAT, json=SHORT), client.get("/v1/models")):
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "loading"
        assert client.get("/metrics").status_code == 200
        go.set()
        assert until(lambda: client.get("/health").status_code == 200)
        assert client.post(CHAT, json=SHORT).status_code == 200


def test_while_the_first_programs_are_compiled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe says so; a request is answered all the same."""
    warm = False
    monkeypatch.setattr(ServedModel, "is_warm", property(lambda model: warm))
    client = make()
    for path in ("/health", "/v1/health", "/ping"):
        response = client.get(path)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["status"] == "loading" == response.json()["error"]["code"]
    assert client.post(CHAT, json=SHORT).status_code == 200
    warm = True
    assert client.get("/health").json() == {"status": "ok"}
    warm = False
    assert client.get("/health").status_code == 200, "once is enough"


def test_ready_is_said_when_health_says_so(
    server: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm, said = False, ""
    monkeypatch.setattr(ServedModel, "is_warm", property(lambda model: warm))
    app = create_app(lambda: server.model, ServerOptions(log="none"))
    Announcer(app.state.server, "demo", ["http://127.0.0.1:1"], Bars()).begin()

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "ready after" in said

    with serve(app) as url:
        assert until(lambda: app.state.server.state == "ready")
        time.sleep(0.3)
        assert not is_said()
        warm = True
        assert until(is_said) and httpx.get(f"{url}/health").status_code == 200
    assert said.count("ready after") == 1


def test_a_model_that_cannot_be_opened(serve: Any) -> None:
    def opening() -> Any:
        raise OSError("the disk is gone")

    app = create_app(opening, ServerOptions(log="none"))
    with serve(app):
        assert until(lambda: app.state.server.state == "failed")
    assert "disk is gone" in str(app.state.server.refusal())


def test_a_draining_server_finishes_what_has_begun(make: Make) -> None:
    client = make()
    shared = client.app.state.server  # type: ignore[attr-defined]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, CHAT, json={**LONG, "max_tokens": 300})
        assert until(lambda: shared.in_flight == 1)
        shared.drain()
        for response in (client.post(CHAT, json=SHORT), client.get("/health")):
            assert response.status_code == 503 and "retry-after" in response.headers
        assert running.result(HANGS).json()["usage"]["completion_tokens"] == 300
    assert until(lambda: shared.in_flight == 0)


# ------------------------------------------------------------------------------------------------ raw connections


def sent(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection over which a request was sent, and nothing read."""
    own, content = httpx.URL(url), json.dumps(body).encode()
    connection = socket.create_connection((own.host, own.port), timeout=HANGS)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def raw(url: str, text: str) -> tuple[int, bytes]:
    """Status and body of what a text gets; the server closes the connection."""
    own = httpx.URL(url)
    with socket.create_connection((own.host, own.port), timeout=HANGS) as connection:
        connection.sendall(text.encode())
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PoolFullError("full", needed=20, available=0, total=10), 400, "kv_cache_full"),  # never has room
        (PoolFullError("full", needed=10, available=0, total=10), 503, "kv_cache_full"),
        (DeadlineError("late"), 408, "deadline_exceeded"),
        (BusyError("closed"), 503, "unavailable"),
        (ResourceError("no memory"), 503, "out_of_resources"),
        (PromptError("empty", where="prompt"), 400, None),
        (RlxError("broken"), 500, None),
        (ZeroDivisionError(), 500, None),
    ],
)
def test_errors_of_the_engine_have_a_status(error: Exception, status: int, code: str | None) -> None:
    found = api_error(error)
    assert (found.status, found.code) == (status, code)
    assert status != 500 or "log" in str(found) or isinstance(error, RlxError)
