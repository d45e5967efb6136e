"""/v1/batches: files of requests, answered while there is nothing better to do. Server stage, one of OpenAI's paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from rlx.serve.batch.jobs import Batch
from rlx.serve.batch.source import URLS
from rlx.serve.body import Body, Ignored, hint
from rlx.serve.errors import invalid
from rlx.serve.http import new_router
from rlx.serve.openai.files import page
from rlx.serve.security import Keys

if TYPE_CHECKING:
    from rlx.serve.app import Server

_KEYS = ("authorization", "x-api-key")  # headers that may have the client's key


class BatchBody(Body):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[Any, hint("24h")] = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: Ignored = None


def router(server: Server) -> APIRouter:
    """The paths of `/batches`."""
    found, jobs, keys = new_router(tags=["batches"]), server.batches, Keys(server.options.api_key)

    @found.post("/batches")
    async def create(body: BatchBody, request: Request) -> dict[str, Any]:
        """Begins a batch."""
        if body.endpoint not in URLS:
            raise invalid("endpoint", f"expected one of {', '.join(URLS)}, found {body.endpoint[:80]!r}")
        owner = keys.owner(request.headers)
        source = server.files.find(owner, body.input_file_id)
        headers = tuple((name, request.headers[name]) for name in _KEYS if name in request.headers)
        return jobs.start(Batch(owner, body.endpoint, source, headers, body.metadata)).as_json()

    @found.get("/batches")
    async def batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        """The batches of the client, the newest first."""
        return page(jobs.of(keys.owner(request.headers)), limit, after)

    @found.get("/batches/{batch_id}")
    async def batch(batch_id: str, request: Request) -> dict[str, Any]:
        """One batch."""
        return jobs.find(keys.owner(request.headers), batch_id).as_json()

    @found.post("/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        """Ends a batch; what was answered is kept."""
        found = jobs.find(keys.owner(request.headers), batch_id)
        jobs.cancel(found)
        return found.as_json()

    return found
