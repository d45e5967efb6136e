"""The real application under uvicorn, in a thread of the test run, with the embedded demo model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
import openai
import pytest

import rlx
from rlx import demo
from rlx.serve import ServedModel, create_app
from rlx.serve.lifecycle import http_server

TIMEOUT = 120  # seconds: only against a hang


@dataclass
class Running:
    """A server that runs.

    Attributes:
        url: without a path.
        model: what it serves.
        app: the application.
    """

    url: str
    model: ServedModel
    app: Any = field(repr=False, default=None)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT)

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The official client, which refuses answers that are not as OpenAI's documents say."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=TIMEOUT, max_retries=0,
            _strict_response_validation=True,
        )  # fmt: skip

    @cached_property
    def lenient(self) -> openai.OpenAI:
        """The official client as programs use it. Its own classes are stricter than OpenAI's documents in places: in
        pieces of completions they know no null for `finish_reason`, and for embeddings no base64.
        """
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=TIMEOUT, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serves an application at a free port; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(app, app.state.server.options)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)


def demo_server(name: str, **options: Any) -> Iterator[Running]:
    with rlx.auto_runner(demo.path(name), **options) as runner:
        model = ServedModel(runner, name, aliases=("gpt-4o",))
        app = create_app(model)
        with serving(app) as url:
            found = Running(url, model, app)
            yield found
            found.http.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """Serves the demo model for text, as "demo" and "gpt-4o". Answers are the same alone and beside others."""
    yield from demo_server(demo.TEXT, deterministic=True)


@pytest.fixture(scope="session")
def server_that_sees() -> Iterator[Running]:
    """Serves the demo model with a vision tower, as "demo-vision". Answers are the same alone and beside others."""
    yield from demo_server(demo.VISION, deterministic=True)


@pytest.fixture(scope="session")
def serve() -> Callable[[Any], Any]:
    """`with serve(app) as url`: another application, for tests of options."""
    return serving


@pytest.fixture(scope="session")
def idle() -> Callable[[Running], None]:
    """`idle(server)`: waits until nothing is computed; it fails if that takes long."""

    def wait(found: Running) -> None:
        end = time.monotonic() + TIMEOUT
        while not found.model.runner._loop.is_idle:
            assert time.monotonic() < end, "a request is still computed"
            time.sleep(0.005)

    return wait
