"""Requests with JSON bodies: what is no JSON object of the right form is a 400 that names the field.

Server stage, below the APIs: every router is made with `JsonRoute`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from rlx.serve import record
from rlx.serve.errors import ApiError
from rlx.serve.fields import Body, body_of, ignored_fields, validated
from rlx.serve.json_body import parsed
from rlx.serve.model import in_thread

LARGE = 64 << 10  # bytes of a body from which on it is parsed outside of the event loop
_JSON = (b"content-type", b"application/json")


class JsonRequest(Request):
    """A request whose body is one JSON object of a kind, whatever content type it has."""

    def __init__(self, request: Request) -> None:
        headers = [each for each in request.scope["headers"] if each[0] != b"content-type"]
        super().__init__({**request.scope, "headers": [*headers, _JSON]}, request.receive)

    async def json(self) -> Any:
        return self._json

    async def read(self, kind: type[Body]) -> None:
        """Reads the body; `ApiError` if it is none. Its bytes are not kept."""
        body = await self.body()
        found = _read(kind, body) if len(body) < LARGE else await in_thread(lambda: _read(kind, body))
        self._json, ignored = found
        record.ignore(*ignored)
        self._body = b"{}"


def _read(kind: type[Body], body: bytes) -> tuple[Body, list[str]]:
    """The body that bytes are, and the fields of it that are ignored."""
    found = parsed(body)
    return validated(kind, found), ignored_fields(kind, found)


class OpenRoute(APIRoute):
    """A route that reads bodies strictly, whatever content type they have: for clients such as `curl -d`."""

    def check(self, request: Request) -> None:
        """Refuses a request before its body is read."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(self._as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(self._as_get(scope), receive, send)

    def _as_get(self, scope: Scope) -> Scope:
        """HEAD is answered as GET; the HTTP server leaves the body out."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ())
        return {**scope, "method": "GET"} if is_head else scope

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        kind = body_of(self)
        if kind is None:
            return handler

        async def read(request: Request) -> Response:
            self.check(request)
            found = JsonRequest(request)
            await found.read(kind)
            return await handler(found)

        return read


class JsonRoute(OpenRoute):
    """An `OpenRoute` for bodies that are sent as JSON."""

    def check(self, request: Request) -> None:
        check_content_type(request)


def new_router(**options: Any) -> APIRouter:
    """A router for JSON bodies."""
    return APIRouter(route_class=JsonRoute, **options)


def check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        found = f"is {kind!r}" if kind else "is missing"
        raise ApiError(415, f"the content type {found}", hint="send the header Content-Type: application/json")
