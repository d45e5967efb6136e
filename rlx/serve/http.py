"""Requests with JSON bodies: what is no JSON object of the right form is a 400 that names the field.

Server stage, below the APIs: every router is made with `JsonRoute`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from rlx.serve import record
from rlx.serve.errors import ApiError, invalid
from rlx.serve.fields import body_of, ignored_fields

MAX_DEPTH = 200  # of nested arrays and objects


class JsonRequest(Request):
    """A request whose body is one JSON object, and which says so: FastAPI parses no body of another type."""

    def __init__(self, request: Request) -> None:
        others = [each for each in request.scope["headers"] if each[0] != b"content-type"]
        headers = [*others, (b"content-type", b"application/json")]
        super().__init__({**request.scope, "headers": headers}, request.receive)

    async def json(self) -> Any:
        return self._json

    async def read(self) -> None:
        """Reads the body; `ApiError` if it is no JSON object."""
        self._json = parsed(await self.body())


class OpenRoute(APIRoute):
    """A route that reads bodies strictly, whatever content type they have: for clients such as `curl -d`."""

    def check(self, request: Request) -> None:
        """Refuses a request before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read(request: Request) -> Response:
            if self.body_field is None:
                return await handler(request)
            self.check(request)
            found = JsonRequest(request)
            await found.read()
            if (body := body_of(self)) is not None:
                record.ignore(*ignored_fields(body, await found.json()))
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


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is something else.
    """
    if not body.strip():
        raise invalid(None, "the body is empty", "send a JSON object")
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"the body is no JSON: {what}") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body is a JSON {_NAMES[type(found)]}", "send a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(found):
        raise invalid(None, f"the body is nested more than {MAX_DEPTH} levels deep")
    return found


def _is_deep(value: Any) -> bool:
    """Whether arrays and objects are nested more than `MAX_DEPTH` deep. Python's own limit differs by version."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True


_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
