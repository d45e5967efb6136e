"""The application: all routers over one model.

Server stage. `create_app` puts the parts together; what they are is in the modules beside it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import rlx
from rlx.errors import RlxError
from rlx.grammar import trial
from rlx.runners.opening.options import SLOTS
from rlx.serve import messages, ollama, page, record, responses, status
from rlx.serve.admission import Gate
from rlx.serve.asgi import call
from rlx.serve.batch.jobs import BatchJobs
from rlx.serve.batch.store import FileStore
from rlx.serve.document import completed
from rlx.serve.errors import ApiError, api_error, shape_of
from rlx.serve.fields import body_error
from rlx.serve.front import Front
from rlx.serve.lifecycle import Lifecycle, load, unavailable
from rlx.serve.log import Log
from rlx.serve.media import MediaOptions
from rlx.serve.metrics import Metrics
from rlx.serve.model import ServedModel, in_thread
from rlx.serve.openai import batches, chat, completions, embeddings, files, models, native, tokens
from rlx.serve.options import ServerOptions
from rlx.serve.record import RequestRecord
from rlx.serve.streaming import ClientGone, json_bytes
from rlx.serve.telemetry import Telemetry

log = logging.getLogger("rlx.serve")

Loader = Callable[[], ServedModel]


class Server:
    """What all routers share.

    Args:
        model: the model, or what opens it; it then answers 503 until the model is there.
        options: how it is served.
    """

    def __init__(self, model: ServedModel | Loader, options: ServerOptions) -> None:
        self.options, self.lifecycle = options, Lifecycle()
        self.gate = Gate(SLOTS, options.queue)
        self.log = Log(options.log)
        self.telemetry = Telemetry.of(options.otlp_endpoint)
        self.metrics = Metrics(
            self._name, self._stats, self.gate, aliases=options.vllm_metrics, llama=options.llama_metrics
        )
        self.files = FileStore(int(options.files_mb * 1_000_000))
        self.batches: BatchJobs  # which call the application
        self._model: ServedModel | None = None
        self._is_warm = False
        self._load = None if isinstance(model, ServedModel) else model
        if isinstance(model, ServedModel):
            self._opened(model)
            self.lifecycle.opened()

    def _opened(self, model: ServedModel) -> None:
        model.media, model.sample = MediaOptions.of(self.options), self.options.sample
        model.max_tokens = self.options.max_tokens
        with suppress(RlxError):  # of a file without one: the requests that need it say so
            model.tokenizer.encode("")  # built now, not in the first request
        self._model, self.gate.slots = model, model.slots
        threading.Thread(target=_prepare_grammars, args=[model], name="rlx-grammars", daemon=True).start()

    @property
    def model(self) -> ServedModel:
        """The model; `ApiError` 503 while it is loading, or if it cannot be opened."""
        if self._model is None:
            raise self.lifecycle.refusal() or AssertionError("it is ready without a model")
        return self._model

    def unready(self) -> ApiError | None:
        """Why a request would not be answered now, or would wait for a compile; None if it is answered at once.

        One that comes while the first programs are compiled is answered all the same, when they are there.
        """
        problem = self.lifecycle.refusal()
        if problem is None and self._model is not None and not self._is_warm:
            self._is_warm = self._model.is_warm
            return None if self._is_warm else unavailable("the model is compiled for this CPU", "loading", None)
        return problem

    def _name(self) -> str:
        """What the model is called; while it is loading as the options say."""
        return next(iter(self.options.alias), "") if self._model is None else self._model.name

    def _stats(self) -> Mapping[str, Any] | None:
        return None if self._model is None else self._model.runner.stats()

    def named(self, name: str | None) -> ServedModel:
        """The model that a request names: with `strict_model` by one of its names, else by any.

        Raises:
            ApiError: there is no such model, or it is loading.
        """
        model = self.model
        if self.options.strict_model and name is not None and not model.is_named(name):
            what = f"the model {name!r} does not exist here"
            hint = f"there is {', '.join(map(repr, (model.name, *model.aliases)))}"
            raise ApiError(404, what, param="model", code="model_not_found", hint=hint)
        return model

    def places_for_batches(self) -> int:
        """How many requests of batches are computed at once: half of the slots stay free for others."""
        return max(1, self.gate.slots // 2)

    def load(self) -> None:
        """Opens the model, if that was left to the server."""
        if self._load is not None:
            opening, self._load = self._load, None
            self._opened(opening())

    def cut(self) -> None:
        """Ends what is still computed; its clients get an error that says so."""
        model, self._model = self._model, None
        if model is not None:
            threading.Thread(target=model.runner.close, name="rlx-closing", daemon=True).start()

    def done(self, found: RequestRecord, headers: Headers) -> None:
        """Notes a request that has ended."""
        if found.status not in (200, 503) or found.path not in status.PROBES:
            self.log.request(found)
        if self.telemetry is not None:
            self.telemetry.span(found, headers)
        self.metrics.count(found)


def _prepare_grammars(model: ServedModel) -> None:
    """Starts the process that tries grammars and reads the vocabulary for them, before the first request needs both.

    A large vocabulary takes a second.
    """
    with suppress(RlxError):  # without the package, or a tokenizer: the requests that need it say so
        trial.start()
        model.runner.grammars.vocabulary  # noqa: B018


Router = Callable[[Server], APIRouter]

#: What makes the routers. Their paths are there with and without the prefix /v1.
VERSIONED: tuple[Router, ...] = (
    models.router,
    chat.router,
    completions.router,
    embeddings.router,
    files.router,
    batches.router,
    tokens.router,
    native.router,
    responses.router,
    messages.router,
    status.router,
)
#: Routers whose paths have no such prefix.
UNVERSIONED: tuple[Router, ...] = (page.router, status.unversioned, *ollama.ROUTERS)


def create_app(model: ServedModel | Loader, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI application that serves a model.

        uvicorn.run(create_app(ServedModel(rlx.auto_runner("model.gguf"), "model")))

    Args:
        model: the model, or a function that opens it while the server already answers 503.
        options: how it is served.
    """
    server = Server(model, options or ServerOptions())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.create_task(load(server.lifecycle, server.load))
        yield
        opening.cancel()
        await server.batches.close()
        await in_thread(server.files.close)
        if server.telemetry is not None:
            await in_thread(server.telemetry.close)
        server.log.close()

    app = FastAPI(title="rlx", version=rlx.__version__, lifespan=lifespan, openapi_url=None)
    app.state.server = server
    server.batches = BatchJobs(server.files, partial(call, app, background=True), server.places_for_batches)
    for make in VERSIONED:
        router = make(server)
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    for make in UNVERSIONED:
        if make is not page.router or server.options.page:
            app.include_router(make(server))
    for kind in (RlxError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientGone, _answer_nobody)
    made = app.openapi
    app.openapi = lambda: app.openapi_schema or completed(made())  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    def document() -> Response:  # in a worker thread: it takes a second, the first time
        return Response(json_bytes(app.openapi()), media_type="application/json")

    app.add_middleware(
        Front,
        options=server.options,
        lifecycle=server.lifecycle,
        gate=server.gate,
        respond=error_response,
        done=server.done,
    )
    return app


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_error(request: Request, error: Exception) -> Response:
    found = _foreign(request, error) or api_error(error)
    if (noted := record.current()) is not None:
        noted.error = str(found)
    if found.status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(request, found)


def error_response(request: Request, error: ApiError) -> Response:
    """The response of an error, in the form of the API that the path belongs to."""
    body = json_bytes(shape_of(request.url.path)(error))
    return Response(body, error.status, error.headers, "application/json")


def _foreign(request: Request, error: Exception) -> ApiError | None:
    """An error of FastAPI's as ours; None for others."""
    if isinstance(error, RequestValidationError):
        return body_error(error.errors(), error.body)
    if not isinstance(error, HTTPException):
        return None
    what, hint, call = str(error.detail), None, f"{request.method} {request.url.path[:100]}"
    if error.status_code == 404:
        what, hint = f"there is no {call}", "`/openapi.json` lists what there is"
    elif error.status_code == 405:
        what = f"there is no {call}, only with {(error.headers or {}).get('Allow', 'another method')}"
    return ApiError(error.status_code, what, hint=hint, headers=error.headers)
