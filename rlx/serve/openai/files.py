"""/v1/files and /v1/batches: files of requests, and their answers. Server stage, two of OpenAI's paths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from rlx.serve import record
from rlx.serve.batch.jobs import Batch
from rlx.serve.batch.source import URLS
from rlx.serve.body import Body, Ignored, hint
from rlx.serve.errors import ApiError, invalid
from rlx.serve.http import in_thread, new_router

if TYPE_CHECKING:
    from starlette.types import Message

    from rlx.serve.server import Server

FORM_FIELDS = 16
_PARTS = {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}}
_SCHEMA = {"type": "object", "required": list(_PARTS), "properties": _PARTS}
_UPLOAD = {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}
Limit = Annotated[int, Query(ge=1, le=10_000)]


def router(server: Server) -> APIRouter:
    """The paths of `/files`."""
    found, store, access = new_router(tags=["files"]), server.files, server.access

    @found.post("/files", openapi_extra={"requestBody": _UPLOAD})
    async def upload(request: Request) -> dict[str, Any]:
        """Keeps a file, which comes as a form (`multipart/form-data`) with `file` and `purpose`."""
        body, owner = await request.body(), access.owner(request.headers)
        name, purpose, data = await in_thread(lambda: asyncio.run(_form(request, body)))
        return (await in_thread(lambda: store.add(owner, name, purpose, data))).as_json()

    @found.get("/files")
    async def files(
        request: Request, limit: Limit = 10_000, after: str | None = None, purpose: str | None = None
    ) -> dict[str, Any]:
        """The files of the client, the newest first."""
        every = store.of(access.owner(request.headers))
        return page([each for each in every if purpose in (None, each.purpose)], limit, after)

    @found.get("/files/{file_id}")
    async def file(file_id: str, request: Request) -> dict[str, Any]:
        """One file."""
        return store.find(access.owner(request.headers), file_id).as_json()

    @found.get("/files/{file_id}/content", response_class=Response)
    async def content(file_id: str, request: Request) -> Response:
        """The content of a file."""
        path = store.find(access.owner(request.headers), file_id).path
        return FileResponse(path, media_type="application/octet-stream")

    @found.delete("/files/{file_id}")
    async def delete(file_id: str, request: Request) -> dict[str, Any]:
        """Removes a file."""
        store.delete(access.owner(request.headers), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return found


def page(entries: Sequence[Any], limit: int, after: str | None) -> dict[str, Any]:
    """A part of a list as OpenAI's clients read it.

    Args:
        entries: with `id` and `as_json`.
        after: the id of the entry before the part.
    """
    start = next((i + 1 for i, each in enumerate(entries) if each.id == after), 0)
    data = [each.as_json() for each in entries[start : start + limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {
        "object": "list", "data": data, "first_id": first, "last_id": last, "has_more": start + limit < len(entries),
    }  # fmt: skip


async def _form(request: Request, body: bytes) -> tuple[str, str, bytes]:
    """Name, purpose and content of the file in a form. Runs in an event loop of its own: a large form takes long."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return parts.pop()

    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "multipart/form-data":
        hint = "send the header Content-Type: multipart/form-data, with a boundary"
        raise ApiError(415, f"the content type is {kind!r}", hint=hint)
    try:
        form = await Request(request.scope, receive).form(max_files=1, max_fields=FORM_FIELDS)
    except HTTPException as error:
        raise invalid(None, f"the form is malformed: {error.detail}") from None
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise invalid("file", "it is required")
    if not isinstance(purpose, str):
        raise invalid("purpose", "it is required", "give batch")
    record.ignore(*(name for name in form if name not in ("file", "purpose")))
    return file.filename or "file", purpose, await file.read()


_KEYS = ("authorization", "x-api-key")  # headers that may have the client's key


class BatchBody(Body):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[Any, hint("24h")] = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: Ignored = None


def batch_router(server: Server) -> APIRouter:
    """The paths of `/batches`."""
    found, jobs, access = new_router(tags=["batches"]), server.batches, server.access

    @found.post("/batches")
    async def create(body: BatchBody, request: Request) -> dict[str, Any]:
        """Begins a batch."""
        if body.endpoint not in URLS:
            raise invalid("endpoint", f"expected one of {', '.join(URLS)}, found {body.endpoint[:80]!r}")
        owner = access.owner(request.headers)
        source = server.files.find(owner, body.input_file_id)
        headers = tuple((name, request.headers[name]) for name in _KEYS if name in request.headers)
        return jobs.start(Batch(owner, body.endpoint, source, headers, body.metadata)).as_json()

    @found.get("/batches")
    async def batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        """The batches of the client, the newest first."""
        return page(jobs.of(access.owner(request.headers)), limit, after)

    @found.get("/batches/{batch_id}")
    async def batch(batch_id: str, request: Request) -> dict[str, Any]:
        """One batch."""
        return jobs.find(access.owner(request.headers), batch_id).as_json()

    @found.post("/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        """Ends a batch; what was answered is kept."""
        found = jobs.find(access.owner(request.headers), batch_id)
        jobs.cancel(found)
        return found.as_json()

    return found
