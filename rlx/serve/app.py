"""The application: all routers over one model.

Server stage. `create_app` puts the parts together; what they are is in the modules beside it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import rlx
from rlx.errors import RlxError
from rlx.serve import page
from rlx.serve.errors import ApiError, api_error, shape_of
from rlx.serve.fields import body_error, known_fields
from rlx.serve.model import ServedModel, in_thread
from rlx.serve.openai import chat, models
from rlx.serve.options import ServerOptions
from rlx.serve.streaming import ClientGone, json_bytes

log = logging.getLogger("rlx.serve")

Loader = Callable[[], ServedModel]


class Server:
    """What all routers share.

    Args:
        model: the model, or what opens it; it then answers 503 until the model is there.
        options: how it is served.
    """

    def __init__(self, model: ServedModel | Loader, options: ServerOptions) -> None:
        self.options = options
        self._model = model if isinstance(model, ServedModel) else None
        self._load = None if isinstance(model, ServedModel) else model

    @property
    def is_ready(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        """The model; `ApiError` 503 while it is loading."""
        if self._model is None:
            raise ApiError(503, "the model is loading", code="loading", headers={"Retry-After": "1"})
        return self._model

    def named(self, name: str | None) -> ServedModel:
        """The model that a request names; None is any.

        Raises:
            ApiError: there is no such model, or it is loading.
        """
        model = self.model
        if name is not None and not model.is_named(name):
            what = f"the model {name!r} does not exist here"
            hint = f"there is {', '.join(map(repr, (model.name, *model.aliases)))}"
            raise ApiError(404, what, param="model", code="model_not_found", hint=hint)
        return model

    async def load(self) -> None:
        """Opens the model, if that was left to the server."""
        if self._load is not None:
            self._model, self._load = await in_thread(self._load), None


Router = Callable[[Server], APIRouter]

#: What makes the routers. Their paths are there with and without the prefix /v1.
VERSIONED: tuple[Router, ...] = (models.router, chat.router)
#: Routers whose paths have no such prefix.
UNVERSIONED: tuple[Router, ...] = (page.router,)


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
        await server.load()
        yield

    app = FastAPI(title="rlx", version=rlx.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    for make in VERSIONED:
        router = make(server)
        app.include_router(router, prefix="/v1")
        app.include_router(router, include_in_schema=False)
    for make in UNVERSIONED:
        app.include_router(make(server))
    for kind in (RlxError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientGone, _answer_nobody)
    return app


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_error(request: Request, error: Exception) -> Response:
    found = _foreign(request, error) or api_error(error)
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
        return body_error(error.errors(), error.body, known_fields(request))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return None
