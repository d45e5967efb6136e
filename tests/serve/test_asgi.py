"""Requests to an application in the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlx.serve.asgi import call, messages, scope_of
from rlx.serve.http import Stream, while_connected


def app_of(answer: Any) -> Starlette:
    return Starlette(routes=[Route("/x", answer, methods=["GET", "POST"])])


def test_a_body_goes_in_and_an_answer_comes_out() -> None:
    async def echo(request: Request) -> Response:
        return JSONResponse({"body": await request.json(), "id": request.headers["x-id"]}, 201)

    assert asyncio.run(call(app_of(echo), "/x", {"a": "ä"}, [("x-id", "7")])) == (201, {"body": {"a": "ä"}, "id": "7"})
    status, text = asyncio.run(call(app_of(echo), "/y", {}))
    assert (status, text) == (404, "Not Found")


def test_an_app_that_fails_raises_or_says_so() -> None:
    async def fail(request: Request) -> Response:
        raise ValueError("a bug")

    assert asyncio.run(call(app_of(fail), "/x", {}))[0] == 500

    async def raw(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(call(raw, "/x", {}))

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with pytest.raises(RuntimeError, match="without an answer"):
        asyncio.run(asyncio.wait_for(call(silent, "/x", {}), 30))


@pytest.mark.parametrize("kind", ["whole", "stream"])
@pytest.mark.parametrize("cancelled", [False, True])
def test_work_ends_with_its_request(kind: str, cancelled: bool) -> None:
    """The client goes away, or the task of the request is cancelled as by a server that ends."""
    ended = asyncio.Event()

    async def work() -> Any:
        try:
            for _ in range(1_000_000):
                yield b"piece"
                await asyncio.sleep(0)
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def collect() -> None:
        async for _ in work():
            pass

    async def answer(request: Request) -> Response:
        if kind == "whole":
            return JSONResponse(await while_connected(request, collect()))
        return Stream(work())

    async def leave() -> None:
        found = messages(app_of(answer), scope_of("/x"), b"{}")
        reading = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0.05)
        if cancelled or kind == "whole":
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await found.aclose()
        await asyncio.wait_for(ended.wait(), 30)

    asyncio.run(leave())
