"""The application: all routers over the models.

Server stage. `create_app` puts the parts together; what they are is in the modules beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import rlx
from rlx.errors import RlxError
from rlx.serve import messages, ollama, page, record, responses, status
from rlx.serve.asgi import call
from rlx.serve.batch.jobs import BatchJobs
from rlx.serve.batch.results import Answering
from rlx.serve.batch.source import MAX_LINE, BatchRequest
from rlx.serve.body import body_error
from rlx.serve.document import completed
from rlx.serve.errors import ApiError, api_error, shape_of
from rlx.serve.http import ClientGone, in_thread, json_bytes
from rlx.serve.middleware import Middleware
from rlx.serve.model import ServedModel
from rlx.serve.openai import chat, completions, embeddings, files, rerank, tokens
from rlx.serve.options import ServerOptions
from rlx.serve.server import Loader, Server

if TYPE_CHECKING:
    from rlx.runners import CachedRunner

log = logging.getLogger("rlx.serve")


AHEAD = 2
"""Requests with the engine for each slot: while one is computed the next one is tokenized."""

Router = Callable[[Server], APIRouter]

#: What makes the routers. Their paths are there with and without the prefix /v1.
VERSIONED: tuple[Router, ...] = (
    status.models_router,
    chat.router,
    completions.router,
    embeddings.router,
    rerank.router,
    files.router,
    files.batch_router,
    tokens.router,
    responses.router,
    messages.router,
    status.router,
)
#: Routers whose paths have no such prefix.
UNVERSIONED: tuple[Router, ...] = (page.router, status.unversioned, *ollama.ROUTERS)


def create_app(
    model: ServedModel | Loader | Sequence[ServedModel | Loader], options: ServerOptions | None = None
) -> FastAPI:
    """The ASGI application that serves a model, or several.

        uvicorn.run(create_app(ServedModel(rlx.auto_runner("model.gguf"), "model")))

    Args:
        model: the model, or a function that opens it while the server already answers 503. Of a list of these, requests
            choose one by its name, and the first is the default.
        options: how they are served.

    Raises:
        ArgumentError: two models have the same name, or the list is empty.
    """
    sources = model if isinstance(model, Sequence) else [model]
    server = Server(sources, options or ServerOptions())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.create_task(server.load())
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

    app.add_middleware(Middleware, server=server, respond=error_response)
    return app


@asynccontextmanager
async def answering_with(runner: CachedRunner, name: str) -> AsyncIterator[Answering]:
    """A function that answers requests of a batch with a runner.

    Args:
        name: of the model, in answers.
    """
    options = ServerOptions(queue=100_000, max_body_mb=MAX_LINE / 1e6 + 1, log="none")
    app = create_app(ServedModel(runner, name), options)

    async def answer(request: BatchRequest, request_id: str) -> tuple[int, Any]:
        return await call(app, request.url, request.body, [("x-request-id", request_id)])

    async with app.router.lifespan_context(app):
        yield answer


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
    if isinstance(error, RequestValidationError):  # of the query: `parsed` reads bodies
        return body_error([{**each, "loc": each["loc"][1:]} for each in error.errors()], dict(request.query_params))
    if not isinstance(error, HTTPException):
        return None
    what, hint, call = str(error.detail), None, f"{request.method} {request.url.path[:100]}"
    if error.status_code == 404:
        what, hint = f"there is no {call}", "`/openapi.json` lists what there is"
    elif error.status_code == 405:
        what = f"there is no {call}, only with {(error.headers or {}).get('Allow', 'another method')}"
    return ApiError(error.status_code, what, hint=hint, headers=error.headers)
