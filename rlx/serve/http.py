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

from rlx.serve.errors import ApiError, invalid

MAX_DEPTH = 200  # of nested arrays and objects


class JsonRequest(Request):
    """A request whose body is one JSON object."""

    async def json(self) -> Any:
        return parsed(await self.body())


class JsonRoute(APIRoute):
    """A route that reads bodies strictly: JSON objects, sent as such."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if request.method == "POST":
                check_content_type(request)
            return await handler(JsonRequest(request.scope, request.receive))

        return checked


class OpenRoute(JsonRoute):
    """A `JsonRoute` for clients that send no content type, such as `curl -d`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super(JsonRoute, self).get_route_handler()

        async def read(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return read


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
    return found


_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
