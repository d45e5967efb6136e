"""/v1/files and /v1/batches: batches over HTTP, and the files that they read and write.

Serve stage, two of OpenAI's paths. A batch is a file of requests, answered one after the other while
there is nothing better to do. They go through the application like all others, with the key of the client and a
priority below every interactive request. Files are in a temporary folder, bounded in bytes and number, and gone when
the server ends. Who holds one key does not see what those of another have.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from rlx.errors import RlxError
from rlx.serve import record
from rlx.serve.batch.results import Progress, Results, answer_all
from rlx.serve.batch.source import URLS, BatchRequest, Source
from rlx.serve.errors import ApiError, invalid
from rlx.serve.http import Body, again, hints, in_thread, new_router

if TYPE_CHECKING:
    from rlx.serve.server import Server


MOST_FILES = 1000


O = TypeVar("O", "StoredFile", "Batch")


class Owned(Generic[O]):
    """Things by their ids, of which each client sees its own.

    Args:
        kind: what one is called.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, O] = {}

    def find(self, owner: str, ident: str) -> O:
        """One of a client's; `ApiError` 404 if it has no such one."""
        found = self._entries.get(ident)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no {self._kind} {ident[:80]!r}", param="id", code=f"{self._kind}_not_found")
        return found

    def of(self, owner: str) -> list[O]:
        """Those of a client, the newest first."""
        return [each for each in reversed(list(self._entries.values())) if each.owner == owner]


@dataclass(frozen=True)
class StoredFile:
    """A file.

    Attributes:
        id: its name here, such as `file-0f3e...`.
        owner: whose it is.
        name: that the client gave.
        purpose: what it is for.
        path: where it is.
        nbytes: its size.
        created: Unix time.
    """

    id: str
    owner: str
    name: str
    purpose: str
    path: Path
    nbytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self) -> dict[str, Any]:
        """The file as OpenAI's clients read it."""
        return {
            "id": self.id, "object": "file", "bytes": self.nbytes, "created_at": self.created, "filename": self.name,
            "purpose": self.purpose, "status": "processed", "expires_at": None,
        }  # fmt: skip


class FileStore(Owned[StoredFile]):
    """All files of a server.

    Args:
        most: bytes of all files together.
    """

    def __init__(self, most: int) -> None:
        super().__init__("file")
        self.most = most
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(each.nbytes for each in self._entries.values())

    def new_path(self) -> Path:
        """Where a new file may be written."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rlx-files-")
        return Path(self._folder.name) / f"file-{uuid.uuid4().hex}"

    def check_room(self, nbytes: int) -> None:
        """Refuses a file that there is no room for.

        Raises:
            ApiError: as said.
        """
        if self.used + nbytes > self.most or len(self._entries) >= MOST_FILES:
            what = f"there is no room for the file: {MOST_FILES} with {self.most / 1e6:g} MB together are kept"
            hint = "delete files, or start the server with a larger --files-mb"
            raise ApiError(413, what, param="file", code="storage_full", hint=hint)

    def add(self, owner: str, name: str, purpose: str, data: bytes) -> StoredFile:
        """Keeps the content of a file.

        Raises:
            ApiError: there is no room.
            OSError: the disk is full.
        """
        self.check_room(len(data))
        path = self.new_path()
        path.write_bytes(data)
        return self.adopt(owner, name, purpose, path)

    def adopt(self, owner: str, name: str, purpose: str, path: Path) -> StoredFile:
        """Keeps a file that was written to a `new_path`."""
        made = StoredFile(path.name, owner, name, purpose, path, path.stat().st_size)
        self._entries[made.id] = made
        return made

    def delete(self, owner: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            ApiError: 404, the client has no such file.
        """
        found = self.find(owner, file_id)
        del self._entries[file_id]
        with suppress(OSError):  # a system that keeps open files removes it with the folder
            found.path.unlink()

    def close(self) -> None:
        """Removes all files."""
        self._entries.clear()
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()


MOST_BATCHES = 1000
MOST_LINES = 50_000  # of a batch, as at OpenAI
DAY = 24 * 3600
AGAIN_SECONDS = 1.0  # until a request is sent again for which the queue had no place
ENDED = ("completed", "failed", "cancelled")

Headers = tuple[tuple[str, str], ...]


Caller = Callable[[str, Any, Iterable[tuple[str, str]]], Awaitable[tuple[int, Any]]]
"""Sends a body to a path of the application, with headers; returns the status and the body of the answer."""


@dataclass
class Batch:
    """One batch.

    Attributes:
        owner: whose it is.
        endpoint: the path of all its requests.
        input: the file with them.
        headers: the key that the client sent.
        metadata: that the client gave.
        times: Unix times of what has happened to it, by the names that OpenAI gives them.
        errors: why it failed.
        progress: how far it is.
        outputs: ids of the files with answers and with errors.
    """

    owner: str
    endpoint: str
    input: StoredFile
    headers: Headers = ()
    metadata: dict[str, str] | None = None
    id: str = field(default_factory=lambda: f"batch_{uuid.uuid4().hex}")
    status: str = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created_at": int(time.time())})
    errors: list[dict[str, Any]] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(0))
    outputs: dict[str, str] = field(default_factory=dict)

    def become(self, status: str) -> None:
        """Notes a new status and its time."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    def as_json(self) -> dict[str, Any]:
        """The batch as OpenAI's clients read it."""
        done = self.progress
        counts = {"total": done.total, "completed": done.done - done.failed, "failed": done.failed}
        names = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "input_file_id": self.input.id,
            "completion_window": "24h", "status": self.status, "metadata": self.metadata,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            **{f"{each}_file_id": self.outputs.get(each) for each in ("output", "error")},
            **{f"{each}_at": self.times.get(f"{each}_at") for each in names},
            "created_at": self.times["created_at"], "expires_at": self.times["created_at"] + DAY,
            "request_counts": counts,
        }  # fmt: skip


class BatchJobs(Owned[Batch]):
    """All batches of a server.

    Args:
        store: has their files.
        call: sends requests to the application.
        at_once: how many answers of a batch the engine computes at a time.
    """

    def __init__(self, store: FileStore, call: Caller, at_once: Callable[[], int]) -> None:
        super().__init__("batch")
        self._store, self._call, self._at_once = store, call, at_once
        self._waiting: deque[Batch] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._running: tuple[Batch, asyncio.Task[None]] | None = None

    def start(self, batch: Batch) -> Batch:
        """Adds a batch, whose turn comes after those before it.

        Raises:
            ApiError: there are too many that have not ended.
        """
        for old in [each for each in self._entries.values() if each.status in ENDED][: len(self) + 1 - MOST_BATCHES]:
            del self._entries[old.id]
        if len(self) >= MOST_BATCHES:
            raise ApiError(429, f"{MOST_BATCHES} batches have not ended", code="too_many_batches", hint="wait for them")
        self._entries[batch.id] = batch
        self._waiting.append(batch)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return batch

    def __len__(self) -> int:
        return len(self._entries)

    def cancel(self, batch: Batch) -> None:
        """Ends a batch; what was answered is kept.

        Raises:
            ApiError: it has ended.
        """
        if batch.status in ENDED:
            raise ApiError(409, f"the batch is {batch.status}", code="batch_ended")
        if batch in self._waiting:
            self._waiting.remove(batch)
            batch.become("cancelled")
        elif self._running is not None and self._running[0] is batch:
            batch.become("cancelling")
            self._running[1].cancel()

    async def close(self) -> None:
        """Ends all batches."""
        self._waiting.clear()
        for task in (self._running and self._running[1], self._worker):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _work(self) -> None:
        """Answers one batch after the other, until there are no more."""
        while self._waiting:
            batch = self._waiting.popleft()
            task = asyncio.create_task(self._answer(batch))
            self._running = (batch, task)
            await asyncio.wait([task])
            self._running = None

    async def _answer(self, batch: Batch) -> None:
        path = self._store.new_path()
        try:
            source = await asyncio.to_thread(Source.open, str(batch.input.path), batch.id, MOST_LINES)
            batch.become("in_progress")
            with source, Results(str(path), source) as results:
                await answer_all(source, results, self._answering(batch), self._at_once(), self._report(batch, path))
            batch.become("finalizing")
            status = "completed"
        except asyncio.CancelledError:
            status = "cancelled"
        except (RlxError, OSError) as error:
            code = "storage_full" if isinstance(error, ApiError) else "invalid_file"
            message = str(error).replace(str(batch.input.path), batch.input.name)
            batch.errors.append({"code": code, "message": message, "param": None, "line": None})
            status = "failed"
        await asyncio.shield(asyncio.to_thread(self._keep, batch, path))
        batch.become(status)

    def _answering(self, batch: Batch) -> Callable[[BatchRequest, str], Awaitable[tuple[int, Any]]]:
        async def answer(request: BatchRequest, request_id: str) -> tuple[int, Any]:
            if request.url != batch.endpoint:
                what = f"url: the batch is for {batch.endpoint}, found {request.url}"
                return 400, {"error": {"message": what, "type": "invalid_request_error", "param": "url", "code": None}}
            while True:
                headers = [("x-request-id", request_id), *batch.headers]
                status, body = await self._call(request.url, request.body, headers)
                if status not in (429, 503):
                    return status, body
                await asyncio.sleep(AGAIN_SECONDS)  # others are served first

        return answer

    def _report(self, batch: Batch, path: Path) -> Callable[[Progress], None]:
        def report(progress: Progress) -> None:
            batch.progress = progress
            with suppress(FileNotFoundError):
                self._store.check_room(path.stat().st_size)

        return report

    def _keep(self, batch: Batch, path: Path) -> None:
        """Makes files of the answers, and of those that are errors."""
        if not path.exists():
            return
        parts = {"output": self._store.new_path(), "error": self._store.new_path()}
        with parts["output"].open("wb") as good, parts["error"].open("wb") as bad, path.open("rb") as lines:
            for line in lines:
                (good if _is_good(line) else bad).write(line)
        path.unlink()
        for name, part in parts.items():
            if part.stat().st_size:
                kept = self._store.adopt(batch.owner, f"{batch.id}_{name}.jsonl", "batch_output", part)
                batch.outputs[name] = kept.id
            else:
                part.unlink()


def _is_good(line: bytes) -> bool:
    """Whether a line of the output has an answer."""
    response = json.loads(line)["response"]
    return response is not None and response["status_code"] < 400


FORM_FIELDS = 16
#: Those that clients of OpenAI's API read back; a list of files with another one is an error to them.
PURPOSES = ("assistants", "batch", "fine-tune", "user_data", "vision")
_PARTS = {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": list(PURPOSES)}}
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
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "multipart/form-data":
        hint = "send the header Content-Type: multipart/form-data, with a boundary"
        raise ApiError(415, f"the content type is {kind!r}", hint=hint)
    try:
        form = await Request(request.scope, again(body, request.receive)).form(max_files=1, max_fields=FORM_FIELDS)
    except HTTPException as error:
        raise invalid(None, f"the form is malformed: {error.detail}") from None
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise invalid("file", "it is required")
    if purpose not in PURPOSES:
        raise invalid("purpose", f"expected one of {', '.join(PURPOSES)}", "give batch for a file of requests")
    record.ignore(*(name for name in form if name not in ("file", "purpose")))
    return file.filename or "file", purpose, await file.read()


_KEYS = ("authorization", "x-api-key")  # headers that may have the client's key


@hints("output_expires_after", completion_window=["24h"])
class BatchBody(Body):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: str
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


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
