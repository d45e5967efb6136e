"""A replica: one process with a model, which answers requests with the application of the server.

Ray stage. Ray starts replicas as actors, on the nodes that have the cores for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import rlx
from rlx.errors import BusyError
from rlx.serve.app import create_app
from rlx.serve.asgi import call, messages
from rlx.serve.model import ServedModel

if TYPE_CHECKING:
    from starlette.types import Message

    from rlx.serve.options import ServerOptions

REPLICA_HEADER = b"x-rlx-replica"  # which replica an answer is from
UNHEALTHY = 500  # a status from which on /health means that a replica is to be replaced


class Replica:
    """A model and the application that serves it.

    Args:
        model: as for `rlx.auto_runner`.
        names: of the model; the first one is that in answers.
        server: how it is served.
        options: those of `rlx.auto_runner`.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, model: str, names: Sequence[str], server: ServerOptions, options: dict[str, Any]
    ) -> None:
        self._stack, self._name = AsyncExitStack(), _own_name()
        self._runner = await asyncio.to_thread(partial(rlx.auto_runner, model, **options))
        self._app = create_app(ServedModel(self._runner, names[0], names[1:]), server)
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))

    async def answer(self, scope: dict[str, Any], body: bytes, keys: list[int]) -> AsyncGenerator[Message, None]:
        """The ASGI messages of an answer.

        Args:
            keys: those of the prompt's prefixes, which the router reads.
        """
        async with aclosing(messages(self._app, {**scope, "state": {}}, body)) as found:
            async for message in found:
                if message["type"] == "http.response.start":
                    yield {**message, "headers": [*message["headers"], (REPLICA_HEADER, self._name)]}
                else:
                    yield dict(message)

    async def check_health(self) -> None:
        """Ray Serve replaces the replica if this raises."""
        status, body = await call(self._app, "/health", method="GET")
        if status >= UNHEALTHY and body.get("status") != "loading":  # it compiles, and answers then
            raise BusyError(f"/health answers {status}: {body}", where="replica")

    async def __del__(self) -> None:  # Ray Serve awaits it, when the last request is answered
        if stack := getattr(self, "_stack", None):
            await stack.aclose()
        if runner := getattr(self, "_runner", None):
            await asyncio.to_thread(runner.close)


def _own_name() -> bytes:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id).encode()
