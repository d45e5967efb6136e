"""Errors over HTTP: the status and the body of everything that can go wrong.

Server stage. `ApiError` is an error with a status. `api_error` makes one of any `RlxError` by its class. `SHAPES` has
the body that the clients of each API expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlx.errors import (
    ArgumentError,
    BusyError,
    ChatTemplateError,
    DeadlineError,
    GrammarError,
    MultimodalError,
    PoolFullError,
    PromptError,
    ResourceError,
    RlxError,
    SamplingError,
    TokenizerError,
    ToolError,
    UnsupportedModelError,
)

INVALID, CONTEXT = "invalid_request_error", "exceed_context_size_error"
TYPES = {
    400: INVALID, 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: INVALID,
    408: "timeout_error", 409: INVALID, 413: INVALID, 415: INVALID, 429: "rate_limit_error", 500: "server_error",
    501: "not_supported_error", 503: "unavailable_error", 504: "timeout_error",
}  # fmt: skip


MAX_NAME = 256  # characters of the name of a field

OVERFLOW = "context_length_exceeded"
"""The code of the error of a prompt that the context has no room for."""


class ApiError(RlxError):
    """An error of a request, with its HTTP status.

    Args:
        status: the HTTP status.
        what: what is wrong.
        param: the field of the request.
        code: a name of the error for programs, such as `context_length_exceeded`.
        kind: its type; by default the usual one of the status.
        hint: the way out.
        headers: further headers of the response, such as `Retry-After`.
        details: further fields of the error's body.
    """

    def __init__(
        self,
        status: int,
        what: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(what, hint=hint)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or TYPES.get(status, INVALID if status < 500 else TYPES[500])
        self.headers, self.details = dict(headers or {}), dict(details or {})


def invalid(param: str | None, what: str, hint: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field; of a name that the client chose, no more than its beginning."""
    if param is not None and len(param) > MAX_NAME:
        param = f"{param[:MAX_NAME]}..."
    return ApiError(400, what if param is None else f"{param}: {what}", param=param, hint=hint, code=code)


def context_overflow(tokens: int, context: int, param: str = "messages", *, estimated: bool = False) -> ApiError:
    """The 400 of a prompt that the context has no room for."""
    return ApiError(
        400,
        f"the prompt has {'about ' if estimated else ''}{tokens} tokens, and the context holds {context}",
        param=param, kind=CONTEXT, code=OVERFLOW,
        hint="send less, or start the server with a larger --max-seq",
        details={"n_prompt_tokens": tokens, "n_ctx": context},
    )  # fmt: skip


_USER = (
    ArgumentError, ChatTemplateError, GrammarError, MultimodalError, PromptError, SamplingError, TokenizerError,
    ToolError,
)  # fmt: skip
_FIELDS = ("messages", "tools", "tool_choice", "prompt", "input")  # of requests, as errors of rlx name them


def api_error(error: BaseException) -> ApiError:
    """The `ApiError` that stands for an error: a user's mistake is a 400, everything unforeseen a 500."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, DeadlineError):
        # Clients ask again after a 408 unless they are told not to; the same time would not be enough again.
        return ApiError(408, message, code="deadline_exceeded", headers={"x-should-retry": "false"})
    if isinstance(error, PoolFullError):
        status = 400 if error.total and error.needed > error.total else 503
        return ApiError(status, message, code="kv_cache_full")
    if isinstance(error, BusyError):
        hint = "send the request again, to another server or later"
        return ApiError(503, "the server ends, before the answer was complete", code="unavailable", hint=hint)
    if isinstance(error, ResourceError):
        return ApiError(503, message, code="out_of_resources")
    if isinstance(error, UnsupportedModelError):  # of what this model cannot do
        return ApiError(400, message, code="not_supported")
    if isinstance(error, _USER):
        place = error.where or ""
        named = place if place.startswith(_FIELDS) else "tools" if isinstance(error, ToolError) else None
        return ApiError(400, message, param=named)
    if isinstance(error, RlxError):
        return ApiError(500, message)
    return ApiError(500, "the server has failed; its log has the details")


def openai_body(error: ApiError) -> dict[str, Any]:
    """The body of an error as OpenAI's clients expect it."""
    inner = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code, **error.details}
    return {"error": inner}


Shape = Callable[[ApiError], dict[str, Any]]

#: Beginning of a path -> the body of its errors. The first that fits counts; all others have OpenAI's.
SHAPES: dict[str, Shape] = {}


def shape_of(path: str) -> Shape:
    """The maker of the body of an error at a path."""
    return next((shape for prefix, shape in SHAPES.items() if path.startswith(prefix)), openai_body)
