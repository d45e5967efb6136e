"""`rlx serve` as a process: its options, its end, and that a restart changes no byte of an answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlx.errors import ArgumentError
from rlx.serve.options import ServerOptions

TIMEOUT = 180  # seconds: only against a hang
SYSTEM = "You are the narrator of a long story about a brave fox, an old owl and a quiet forest. " * 12
QUESTION: dict[str, Any] = {
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Tell me a story."}],
    "temperature": 0.9,
    "seed": 7,
    "max_tokens": 40,
    "logprobs": True,
    "top_logprobs": 2,
}


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server process on a free port, and a client of it. It is killed if the test leaves it running."""
    command = [sys.executable, "-m", "rlx", "serve", "--port", "0", "--log", "none", *arguments]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    guard = threading.Timer(TIMEOUT, started.kill)
    guard.start()
    try:
        assert started.stderr is not None
        address = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in started.stderr)))
        with httpx.Client(base_url=address[0], timeout=TIMEOUT) as client:
            while client.get("/health").status_code == 503:  # the model is being loaded
                time.sleep(0.05)
            yield started, client
    finally:
        guard.cancel()
        started.kill()
        started.communicate()


def ask(client: httpx.Client) -> tuple[Any, int]:
    """What the server answers: the choice, with the log-probability of each token, and how much was cached."""
    found = client.post("/v1/chat/completions", json=QUESTION).raise_for_status().json()
    return found["choices"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_answer_is_the_same_alone_after_a_hit_beside_others_and_after_a_restart(tmp_path: Path) -> None:
    options = ["--deterministic", "--cache-kv", str(tmp_path / "kv")]
    with process(*options) as (server, client):
        alone, cached = ask(client)
        assert cached == 0
        again, cached = ask(client)
        assert cached > 200 and again == alone
        beside = [threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": {
            "prompt": f"The fox {i}", "max_tokens": 60}}) for i in range(6)]  # fmt: skip
        for thread in beside:
            thread.start()
        assert ask(client)[0] == alone
        for thread in beside:
            thread.join()
        story = {"prompt": "The fox", "max_tokens": 300, "min_tokens": 300, "stream": True}
        with client.stream("POST", "/v1/completions", json=story) as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(events)
            server.send_signal(signal.SIGTERM)
            *_, end = events
        assert end == "data: [DONE]", "a signal lets running requests finish"
        assert server.wait(TIMEOUT) == 0
    with process(*options) as (_, client):
        restarted, cached = ask(client)
        assert cached > 200, "the prompt was read from the folder"
        assert restarted == alone


@pytest.mark.skipif(not (hasattr(signal, "SIGHUP") and socket.has_ipv6), reason="this system has no SIGHUP or no IPv6")
def test_it_listens_on_every_host_answers_as_its_options_say_and_goes_on_with_a_new_log(tmp_path: Path) -> None:
    log, old = tmp_path / "log", tmp_path / "old"
    body = {"messages": [{"role": "user", "content": "Tell me a story."}]}
    hosts = ("--host", "127.0.0.1", "--host", "::1", "--log", str(log))
    with process(*hosts, "--temp", "0.9", "--seed", "5", "--max-tokens", "12") as (server, client):
        first = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        url = f"http://[::1]:{client.base_url.port}/v1/chat/completions"
        second = httpx.post(url, json={**body, "max_tokens": 99}, timeout=TIMEOUT).raise_for_status().json()
        assert first["choices"] == second["choices"], "the seed of the server"
        assert first["usage"]["completion_tokens"] == 12 == second["usage"]["completion_tokens"]
        params = client.get("/props").json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["seed"], params["n_predict"]) == (0.9, 5, 12)
        other = client.post("/v1/chat/completions", json={**body, "seed": 6}).raise_for_status().json()
        assert other["choices"] != first["choices"]

        log.rename(old)
        server.send_signal(signal.SIGHUP)
        while not log.exists():
            client.get("/version").raise_for_status()
        assert '"path": "/v1/chat/completions"' in old.read_text() and server.poll() is None


# ---------------------------------------------------------------------------------------- options without a process


KEY, OTHER = "sk-0123456789", "other-key-of-a-file"


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{OTHER}\n{KEY}\n")
    monkeypatch.setenv("RLX_API_KEY", "key-of-the-environment")
    found = ServerOptions(api_key=(KEY,), api_key_file=file).resolved()
    assert found.api_key == (KEY, OTHER, "key-of-the-environment")
    assert found.resolved() == replace(found)


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    assert KEY not in repr(ServerOptions(api_key=(KEY,)))
    (tmp_path / "keys").write_text("bad key here\n")
    with pytest.raises(ArgumentError, match="line 1") as caught:
        ServerOptions(api_key_file=tmp_path / "keys").resolved()
    assert "bad key here" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str | None) -> None:
    """Otherwise a mistyped name would open the server to everybody."""
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ArgumentError, match="keys"):
        ServerOptions(api_key_file=tmp_path / "keys").resolved()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ((), True), (("127.0.0.1",), True), (("127.0.0.2", "localhost"), True), (("[::1]",), True),
        (("0.0.0.0",), False), (("127.0.0.1", "::"), False),
    ],
)  # fmt: skip
def test_what_listens_on_this_machine_only(host: tuple[str, ...], is_local: bool) -> None:
    assert ServerOptions(host=host).is_local is is_local
