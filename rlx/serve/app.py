"""The application: all routers over the models, and the OpenAPI document.

Server stage. `create_app` puts the parts together; what they are is in the modules beside it. The document is what
FastAPI knows of the routes, with the answers and errors that they really send. Answers are described here and not
checked while the server runs: generated requests check them (`tests/serve/test_generated_requests.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
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
from rlx.serve.batch import jobs
from rlx.serve.batch.jobs import BatchJobs
from rlx.serve.batch.results import Answering
from rlx.serve.batch.source import MAX_LINE, BatchRequest
from rlx.serve.errors import ApiError, api_error, shape_of
from rlx.serve.http import ClientGone, body_error, in_thread, json_response
from rlx.serve.middleware import Middleware
from rlx.serve.model import ServedModel
from rlx.serve.openai import chat, completions, embeddings, tokens
from rlx.serve.options import ServerOptions
from rlx.serve.server import Loader, Server

if TYPE_CHECKING:
    from rlx.runners import Model


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
    embeddings.rerank_router,
    jobs.router,
    jobs.batch_router,
    tokens.router,
    responses.router,
    messages.router,
    status.router,
)
#: Routers whose paths have no such prefix.
UNVERSIONED: tuple[Router, ...] = (page.router, status.unversioned, *ollama.ROUTERS, embeddings.ollama_router)


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
    app.include_router(embeddings.rerank_router(server), prefix="/v2", include_in_schema=False)  # Cohere's clients
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
        return json_response(app.openapi())

    app.add_middleware(Middleware, server=server, respond=error_response)
    return app


@asynccontextmanager
async def answering_with(runner: Model, name: str) -> AsyncIterator[tuple[Answering, int]]:
    """A function that answers requests of a batch with a runner, and how many it takes at a time.

    Args:
        name: of the model, in answers.
    """
    options = ServerOptions(queue=100_000, max_body_mb=MAX_LINE / 1e6 + 1, log="none")
    app = create_app(ServedModel(runner, name), options)

    async def answer(request: BatchRequest, request_id: str) -> tuple[int, Any]:
        return await call(app, request.url, request.body, [("x-request-id", request_id)])

    async with app.router.lifespan_context(app):
        yield answer, AHEAD * runner.slots


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
    return json_response(shape_of(request.url.path)(error), error.status, error.headers)


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


Schema = dict[str, Any]

TEXT, INTEGER, NUMBER, TRUTH = ({"type": name} for name in ("string", "integer", "number", "boolean"))
COUNT = {"type": "integer", "minimum": 0}
COUNTS = {"type": "array", "items": COUNT}
VECTOR = {"type": "array", "items": NUMBER}


def thing(**fields: Schema) -> Schema:
    """An object with these fields, and perhaps others."""
    return {"type": "object", "required": list(fields), "properties": fields}


def many(schema: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": schema}


def maybe(schema: Schema) -> Schema:
    """It, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def word(*values: str) -> Schema:
    """One of some texts."""
    return {"enum": list(values)}


USAGE = thing(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
TIMINGS = thing(prompt_n=COUNT, prompt_ms=NUMBER, predicted_n=COUNT, predicted_ms=NUMBER, predicted_per_second=NUMBER)
REASON = word("stop", "length", "tool_calls", "function_call")
_MESSAGE = thing(role=word("assistant"), content=maybe(TEXT))
_FUNCTION = thing(name=TEXT, arguments=TEXT)
_CALL = thing(id=TEXT, type=word("function", "custom"))
_CALL["properties"] |= {"function": _FUNCTION, "custom": thing(name=TEXT, input=TEXT)}
_MESSAGE["properties"] |= {"reasoning_content": TEXT, "tool_calls": many(_CALL), "function_call": _FUNCTION}


def _answer(noun: str, **choice: Schema) -> Schema:
    each = thing(index=COUNT, **choice, finish_reason=REASON)
    return thing(
        id=TEXT, object=word(noun), created=COUNT, model=TEXT, choices=many(each), usage=USAGE, timings=TIMINGS
    )


_MODEL = thing(id=TEXT, object=word("model"), created=COUNT, owned_by=TEXT)
_NATIVE = thing(index=COUNT, content=TEXT, stop=TRUTH, stop_type=word("limit", "word", "eos"), timings=TIMINGS)
_OLLAMA = {"model": TEXT, "created_at": TEXT, "done": TRUTH}
_STATUS = thing(status=TEXT)
_OLLAMA_MODELS = thing(models=many(thing(name=TEXT, model=TEXT)))
_TOKENS = thing(tokens={"type": "array"})
_TOKENS["properties"] |= {"count": COUNT, "max_model_len": COUNT}

_FILE = thing(id=TEXT, object=word("file"), bytes=COUNT, created_at=COUNT, filename=TEXT, purpose=TEXT)
_BATCH = thing(id=TEXT, object=word("batch"), endpoint=TEXT, input_file_id=TEXT, status=TEXT, created_at=COUNT)

#: Path -> the answer, in one piece. Fields that it may have besides are not forbidden.
ANSWERS: dict[str, Schema] = {
    "/v1/models": thing(object=word("list"), data=many(_MODEL)),
    "/v1/models/{name}": _MODEL,
    "/v1/chat/completions": _answer("chat.completion", message=_MESSAGE),
    "/v1/completions": _answer("text_completion", text=TEXT),
    **{path: {"anyOf": [_NATIVE, many(_NATIVE)]} for path in ("/v1/completion", "/v1/infill")},
    "/v1/embeddings": thing(
        object=word("list"),
        data=many(thing(object=word("embedding"), index=COUNT, embedding={"anyOf": [VECTOR, TEXT]})),
        model=TEXT,
        usage=thing(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "/v1/rerank": thing(
        model=TEXT,
        results=many(thing(index=COUNT, relevance_score=NUMBER)),
        usage=thing(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "/v1/files": _FILE,
    "/v1/files/{file_id}": _FILE,
    "/v1/batches": _BATCH,
    "/v1/batches/{batch_id}": _BATCH,
    "/v1/batches/{batch_id}/cancel": _BATCH,
    "/v1/tokenize": _TOKENS,
    "/v1/detokenize": thing(content=TEXT, prompt=TEXT),
    "/v1/tokenizer_info": thing(bos_token=maybe(TEXT), eos_token=maybe(TEXT), chat_template=maybe(TEXT)),
    "/v1/apply-template": thing(prompt=TEXT),
    "/v1/responses": thing(
        id=TEXT,
        object=word("response"),
        created_at=NUMBER,
        model=TEXT,
        status=word("completed", "incomplete"),
        output=many(thing(id=TEXT, type=word("message", "function_call", "reasoning", "custom_tool_call"))),
        usage=thing(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
    ),
    "/v1/messages": thing(
        id=TEXT,
        type=word("message"),
        role=word("assistant"),
        model=TEXT,
        content=many(thing(type=word("text", "thinking", "tool_use"))),
        stop_reason=word("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        usage=thing(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "/v1/messages/count_tokens": thing(input_tokens=COUNT),
    "/v1/responses/input_tokens": thing(object=TEXT, input_tokens=COUNT),
    "/v1/chat/completions/input_tokens": thing(input_tokens=COUNT),
    "/v1/health": _STATUS,
    "/ping": _STATUS,
    "/version": thing(version=TEXT),
    "/props": thing(default_generation_settings={"type": "object"}, total_slots=COUNT, chat_template=TEXT),
    "/slots": many(thing(id=COUNT, n_ctx=COUNT, is_processing=TRUTH)),
    "/api/chat": thing(**_OLLAMA, message=thing(role=word("assistant"), content=TEXT)),
    "/api/generate": thing(**_OLLAMA, response=TEXT),
    "/api/version": thing(version=TEXT),
    "/api/tags": _OLLAMA_MODELS,
    "/api/ps": _OLLAMA_MODELS,
    "/api/show": thing(details={"type": "object"}, model_info={"type": "object"}, capabilities=many(TEXT)),
    "/api/embed": thing(model=TEXT, embeddings=many(VECTOR)),
    "/api/embeddings": thing(embedding=VECTOR),
}

_OF_ALL = (401, 403, 500, 503)
_OF_BODIES = (400, 408, 413, 429)
#: Where the answer is another one for some methods.
_BY_METHOD: dict[tuple[str, str], Schema] = {
    ("/v1/files", "get"): thing(object=word("list"), data=many(_FILE), has_more=TRUTH),
    ("/v1/files/{file_id}", "delete"): thing(id=TEXT, object=word("file"), deleted=TRUTH),
    ("/v1/batches", "get"): thing(object=word("list"), data=many(_BATCH), has_more=TRUTH),
}
_MORE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches/{batch_id}"), (404,)),
    "/v1/files": (400,),
    "/v1/batches": (400,),
    "/v1/batches/{batch_id}/cancel": (409,),
    "/v1/models/{name}": (404,),
    "/v1/responses/{response_id}": (404,),
    "/slots": (501,),
    "/metrics": (501,),
}


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document, with the answers and errors of each path; changed in place."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which nobody is sent
        schemas.pop(name, None)
    for path, operations in document["paths"].items():
        error = _error(path, schemas)
        for method, operation in operations.items():
            operation["responses"] = _responses(path, method, operation, schemas, error)
    return document


def _responses(path: str, method: str, operation: Schema, schemas: Schema, error: Schema) -> Schema:
    statuses = [*_OF_ALL, *_MORE.get(path, ()), *(_OF_BODIES if method == "post" else ())]
    if method == "post":
        statuses.append(404)  # of the model that a body names
        statuses += [] if path.startswith("/api/") else [415]
    found = dict(operation["responses"])
    found.pop("422", None)
    if answer := _BY_METHOD.get((path, method), ANSWERS.get(path)):
        found["200"] = {"description": "The answer", "content": {"application/json": {"schema": answer}}}
        if _streams(operation, schemas):
            kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
            found["200"]["content"][kind] = {"schema": TEXT}
    elif path == "/v1/responses/{response_id}":
        del found["200"]
    for each in sorted(statuses):
        found[str(each)] = {
            "description": HTTPStatus(each).phrase, "content": {"application/json": {"schema": error}},
        }  # fmt: skip
    return found


def _streams(operation: Schema, schemas: Schema) -> bool:
    """Whether the body may ask for a stream."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return "stream" in schemas.get(name, {}).get("properties", {})


def _error(path: str, schemas: Schema) -> Schema:
    """A reference to the schema of the errors at a path, which is made of an error as its clients get it."""
    shape = shape_of(path)
    name = f"{shape.__module__.split('.')[2].capitalize()}Error".replace("ErrorsError", "Error")
    schemas[name] = _schema_of(shape(ApiError(400, "")))
    return {"$ref": f"#/components/schemas/{name}"}


def _schema_of(example: Any) -> Schema:
    """The schema of values like this one."""
    if isinstance(example, Mapping):
        return thing(**{name: _schema_of(value) for name, value in example.items()})
    return maybe(TEXT) if example is None else TEXT
