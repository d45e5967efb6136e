"""The output of a batch: a file to which whole lines are appended, and which says what is done already.

Serve stage, after the source. Each line has an id made of the number and the digest of its request. So an output that
was interrupted is continued, and one of another input is refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rlx import platform
from rlx.errors import BatchError, OutputError, file_error
from rlx.serve.batch.source import Source

SYNC_SECONDS = 1.0  # at most so much work is lost when the power fails; when the process dies nothing is

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | platform.flags("O_CLOEXEC", "O_BINARY")
_BEGIN = b'{"id": "batch_req_'
_ID = re.compile(r"batch_req_(\d+)_([0-9a-f]{16})")


def request_id(source: Source, number: int) -> str:
    """The id of a request's line in the output."""
    return f"batch_req_{number + 1}_{source.digest(number):016x}"


class Results:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
