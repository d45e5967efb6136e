"""A server that says what a test tells it to, for the chat page: slow, broken, hostile and refused answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from rlx.serve import page
from rlx.serve.options import ServerOptions

#: An item of an answer that ends the connection without a goodbye.
BREAK = object()


class Gate(threading.Event):
    """An item of an answer that waits until the test opens it."""


class Double:
    """The application, what it was asked, and what it will say.

    Attributes:
        requests: the bodies of the chat requests so far.
        answers: what comes next, an item a request: a list of pieces (a text, a delta, a `Gate`, `BREAK`,
            {"finish": reason}, {"chunk": a whole chunk}), or (status, error, headers). The last one is repeated.
        models: the names of its models; the first one takes images.
        gone: how many clients went away before their answer was complete.
    """

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.include_router(page.router(SimpleNamespace(options=ServerOptions())))  # type: ignore[arg-type]
        self.app.get("/v1/models")(self._models)
        self.app.get("/props")(self._props)
        self.app.post("/v1/chat/completions")(self._chat)
        self.reset()

    def reset(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Any] = [["Hello."]]
        self.models, self.key, self.context, self.gone = ["double"], "", 4096, 0
        self.props: dict[str, Any] = {
            "default_generation_settings": {"n_ctx": 4096, "params": {"temperature": 0.7, "top_k": 20, "top_p": 0.95}},
            "chat_template": "{% if enable_thinking %}<think>{% endif %}",
        }

    def _refused(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return error(401, "a valid API key is missing")

    async def _models(self, request: Request) -> Response:
        entries = [{"id": name, "object": "model", "max_model_len": self.context} for name in self.models]
        return self._refused(request) or JSONResponse({"object": "list", "data": entries})

    async def _props(self, request: Request) -> Response:
        sees = request.query_params["model"] == self.models[0]
        return self._refused(request) or JSONResponse({**self.props, "modalities": {"vision": sees}})

    async def _chat(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, tuple):
            return error(*answer)
        return StreamingResponse(self._stream(answer, self.requests[-1]["model"]), media_type="text/event-stream")

    async def _stream(self, pieces: list[Any], model: str) -> AsyncIterator[bytes]:
        yield chunk({"role": "assistant", "content": ""}, model=model)
        finish, count = "stop", 0
        try:
            for piece in pieces:
                if isinstance(piece, Gate):
                    while not piece.is_set():
                        await asyncio.sleep(0.01)
                elif piece is BREAK:
                    await asyncio.sleep(0.2)  # what came before is on its way first
                    raise ConnectionResetError
                elif isinstance(piece, dict) and "finish" in piece:
                    finish = piece["finish"]
                elif isinstance(piece, dict) and "chunk" in piece:
                    yield f"data: {json.dumps(piece['chunk'])}\n\n".encode()
                else:
                    count += 1
                    yield chunk({"content": piece} if isinstance(piece, str) else piece, model=model)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        yield chunk({}, finish, model)
        usage = {"prompt_tokens": 312, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 256}}
        timings = {
            "cache_n": 256,
            "prompt_n": 56,
            "prompt_ms": 80.0,
            "prompt_per_second": 700.0,
            "predicted_n": max(count, 2),
            "predicted_ms": 100.0,
            "predicted_per_second": 41.5,
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage, 'timings': timings})}\n\n".encode()
        yield b"data: [DONE]\n\n"


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serves any application at a free port, by nothing but uvicorn; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


def chunk(delta: dict[str, Any], finish: str | None = None, model: str = "double") -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'model': model, 'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def error(status: int, message: str | dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    inner = message if isinstance(message, dict) else {"message": message, "type": "x", "param": None, "code": None}
    return JSONResponse({"error": inner}, status, headers)
