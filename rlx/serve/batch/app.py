"""What answers the requests of a batch: the application of the server, called in this process.

Serve stage, after the application. So a request in a file gets what it would get over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlx.serve.app import create_app
from rlx.serve.asgi import call
from rlx.serve.batch.run import Answering
from rlx.serve.batch.source import MAX_LINE, BatchRequest
from rlx.serve.model import ServedModel
from rlx.serve.options import ServerOptions

if TYPE_CHECKING:
    from rlx.runners import CachedRunner

AHEAD = 2
"""Requests with the engine for each slot: while one is computed the next one is tokenized."""


@asynccontextmanager
async def answering_with(runner: CachedRunner, name: str) -> AsyncIterator[Answering]:
    """What answers requests with a runner.

    Args:
        name: of the model, in answers.
    """
    options = ServerOptions(queue=100_000, max_body_mb=MAX_LINE / 1e6 + 1, log="none")
    app = create_app(ServedModel(runner, name), options)

    async def answer(request: BatchRequest, request_id: str) -> tuple[int, Any]:
        return await call(app, request.url, request.body, [("x-request-id", request_id)])

    async with app.router.lifespan_context(app):
        yield answer
