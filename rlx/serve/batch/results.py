"""Answers a file of requests, a bounded number of them at a time, into a file to which whole lines are appended.

Serve stage, after the source. Each line has an id made of the number and the digest of its request. So an output that
was interrupted is continued, and one of another input is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rlx import platform
from rlx.closing import Closing
from rlx.errors import BatchError, OutputError, file_error
from rlx.serve.batch.source import BatchRequest, LineProblem, Source

SYNC_SECONDS = 1.0  # at most so much work is lost when the power fails; when the process dies nothing is

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | platform.flags("O_CLOEXEC", "O_BINARY")
_BEGIN = b'{"id": "batch_req_'
_ID = re.compile(r"batch_req_(\d+)_([0-9a-f]{16})")


def request_id(source: Source, number: int) -> str:
    """The id of a request's line in the output."""
    return f"batch_req_{number + 1}_{source.digest(number):016x}"


class Results(Closing):
    """The answers of a source, in a file that nobody else writes to at the same time.

    Args:
        path: the file, which is made if there is none; `-` is stdout, which cannot be continued.
        source: whose answers they are.

    Attributes:
        done: for each request 1 if its answer is there.

    Raises:
        BatchError: the file holds something else, or another process writes to it.
        OutputError: it cannot be written.
    """

    def __init__(self, path: str, source: Source) -> None:
        self._source, self._name = source, "stdout" if path == "-" else path
        self.done = bytearray(len(source))
        self._synced, self._dirty = time.monotonic(), False
        self._is_file = path != "-"
        if self._is_file:
            self._descriptor = self._opened(path)
            try:
                self._continue()
            except BaseException:
                os.close(self._descriptor)
                raise
        else:
            self._descriptor = os.dup(sys.stdout.fileno())

    def _opened(self, path: str) -> int:
        try:
            descriptor = os.open(path, _FLAGS, 0o666)
        except OSError as error:
            raise file_error(OutputError, "the file cannot be written", error, path) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OutputError("this is not a regular file", where=path, hint="use - for stdout")
        if platform.current().lock(descriptor) is False:
            os.close(descriptor)
            raise BatchError("another process writes to this file", where=path, hint="wait for its end")
        return descriptor

    def _continue(self) -> None:
        """Notes what is done, and cuts off a half line at the end."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            end = 0
            for i, line in enumerate(file):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                        raise self._foreign(i)
                    os.ftruncate(self._descriptor, end)
                    break
                self.done[self._number(line, i)] = 1
                end += len(line)

    def _number(self, line: bytes, i: int) -> int:
        """Which request a line answers."""
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
        match = _ID.fullmatch(str(found.get("id"))) if isinstance(found, dict) else None
        if match is None:
            raise self._foreign(i)
        number, digest = int(match[1]) - 1, int(match[2], 16)
        if not (0 <= number < len(self.done) and self._source.digest(number) == digest):
            raise self._foreign(i)
        return number

    def _foreign(self, i: int) -> BatchError:
        what = f"line {i + 1} is no answer to a request of {self._source.name} by this model"
        return BatchError(what, where=self._name, hint="name another file for the answers, or remove this one")

    def append(self, number: int, line: dict[str, Any]) -> None:
        """Writes the line of one request.

        Raises:
            OutputError: the disk is full, for example; a half line is cut off by the next run.
            BrokenPipeError: nobody reads stdout any more.
        """
        whole = json.dumps({"id": request_id(self._source, number), **line})  # ASCII: half a surrogate pair is no UTF-8
        left = memoryview(f"{whole}\n".encode())
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise file_error(OutputError, "an answer cannot be written", error, self._name) from error
        self.done[number], self._dirty = 1, True

    @property
    def is_late(self) -> bool:
        """Whether it is time for a `sync`."""
        return self._is_file and self._dirty and time.monotonic() - self._synced >= SYNC_SECONDS

    def sync(self) -> None:
        """Brings what was written to the disk.

        Raises:
            OutputError: the disk fails.
        """
        if not (self._is_file and self._dirty):
            return
        self._synced, self._dirty = time.monotonic(), False
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise file_error(OutputError, "the answers cannot be written", error, self._name) from error

    def close(self) -> None:
        """Writes all to the disk. May be called once."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)


Report = Callable[["Progress"], object]


Answering = Callable[[BatchRequest, str], Awaitable[tuple[int, Any]]]
"""Answers a request, which gets an id: the status and the JSON body. With the app of this process, or on a cluster."""


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        total: requests of the source.
        done: how many of them have a line in the output.
        before: how many of those an earlier run wrote.
        failed: how many of this run's are errors: lines that are no requests, and answers with a status from 400 on.
        prompt_tokens, cached_tokens, tokens: of this run's answers.
    """

    total: int
    done: int = 0
    before: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0

    def count(self, usage: Any) -> None:
        """Adds the usage of an answer, of whichever API."""
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0)) or 0
        self.tokens += usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0
        self.cached_tokens += details.get("cached_tokens", 0) or 0


async def answer_all(
    source: Source, results: Results, answering: Answering, at_once: int, report: Report = lambda progress: None
) -> Progress:
    """Answers all requests that have no answer yet.

    Args:
        at_once: how many answers the engine computes at a time; a request that has more of them is alone.
        report: called after each answer.

    Raises:
        OutputError: an answer cannot be written.
        CancelledError: the task was cancelled. What was answered is in the file; the others begin anew next time.
    """
    before = sum(results.done)
    progress = Progress(len(source), done=before, before=before)
    report(progress)
    numbers, places = source.ordered(results.done), _Places(max(1, at_once))

    async def placed(request: BatchRequest, ident: str) -> tuple[int, Any]:
        async with places.taken(request.answers):
            return await answering(request, ident)

    async def work() -> None:
        for number in numbers:
            results.append(number, await _answered(source, number, placed, progress))
            progress.done += 1
            report(progress)
            if results.is_late:
                await asyncio.to_thread(results.sync)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(at_once, len(source) - before))):
                group.create_task(work())
    except* Exception as errors:
        raise _first(errors) from None
    finally:
        results.sync()
    return progress


class _Places:
    """Places of answers that the engine computes at a time. Requests get theirs in order, each all of its own."""

    def __init__(self, count: int) -> None:
        self._count, self._free, self._turn = count, asyncio.Semaphore(count), asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Waits for so many places, or for all if there are fewer; gives them back at the end."""
        taken = 0
        try:
            async with self._turn:
                while taken < min(count, self._count):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


async def _answered(source: Source, number: int, answering: Answering, progress: Progress) -> dict[str, Any]:
    """The line of a request in the output, without its id."""
    try:
        request = source.request(number)
    except LineProblem as problem:
        progress.failed += 1
        error = {"code": problem.code, "message": f"request {number + 1}: {problem.what}"}
        return {"custom_id": problem.custom_id, "response": None, "error": error}
    ident = request_id(source, number)
    status, body = await answering(request, ident)
    progress.failed += status >= 400
    progress.count(body.get("usage") if isinstance(body, dict) else None)
    response = {"status_code": status, "request_id": ident, "body": body}
    return {"custom_id": request.custom_id, "response": response, "error": None}
