"""The log: a line of JSON for each request that has ended, and for everything else that the server has to say.

Server stage. A thread of its own writes, so that a full pipe or a slow disk delays no answer; what it cannot keep up
with is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from rlx.errors import OutputError, file_error
from rlx.serve.record import RequestRecord

QUEUED = 10_000  # lines that wait at most
TEXT = 20_000  # characters of a prompt or an answer in the log
NAMES = ("rlx.serve", "uvicorn.error", "asyncio")  # loggers whose warnings are lines, too


class Log:
    """Writes lines.

    Args:
        target: a file to append to, `-` for stderr, or `none`.

    Raises:
        OutputError: the file cannot be written.

    Attributes:
        dropped: number of lines that were lost because the target did not take them.
    """

    def __init__(self, target: str | PathLike[str]) -> None:
        self.dropped = 0
        self._target, self._moved = target, False
        self._file: TextIO | None = _opened(target)
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._handler = _LineHandler(self)
        for name in NAMES:  # also where nothing is written: without any handler Python would write to stderr
            logging.getLogger(name).addHandler(self._handler)

    def request(self, found: RequestRecord) -> None:
        """Writes the line of a request."""
        if self._file is not None:
            self.write(line_of(found))

    def write(self, fields: dict[str, Any]) -> None:
        """Writes one line."""
        if self._file is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlx-log", daemon=True)
            self._thread.start()
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        try:
            self._lines.put_nowait(json.dumps({"time": now, **fields}, ensure_ascii=False) + "\n")
        except queue.Full:
            self.dropped += 1

    def reopen(self) -> None:
        """The file was moved away, as by logrotate: the next line goes into a new one."""
        self._moved = True

    def close(self) -> None:
        """Writes what is left. May be called again."""
        for name in NAMES:
            logging.getLogger(name).removeHandler(self._handler)
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(5)
            self._thread = None
        if self._file is not None and self._file is not sys.stderr:
            self._file.close()
        self._file = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                assert self._file is not None
                if self._moved:
                    self._follow()
                self._file.write(line)
                if self._lines.empty():
                    self._file.flush()
            except (OSError, ValueError):  # a full disk, a reader that went away
                self.dropped += 1

    def _follow(self) -> None:
        """Opens the file again. If that is not possible, the old one stays."""
        self._moved = False
        if self._file is None or self._file is sys.stderr:
            return
        with suppress(OutputError):
            new = _opened(self._target)
            self._file.close()
            self._file = new


def _opened(target: str | PathLike[str]) -> TextIO | None:
    if target in ("none", "-"):
        return sys.stderr if target == "-" else None
    try:
        return Path(target).expanduser().open("a", encoding="utf-8")
    except OSError as error:
        raise file_error(OutputError, "the log cannot be written", error, f"log {target}") from error


class _LineHandler(logging.Handler):
    """Makes lines of what the server's parts report, from warnings on."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"event": "message", "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        self._log.write(fields)


def line_of(found: RequestRecord) -> dict[str, Any]:
    """The fields of a request's line; times are in milliseconds."""
    line: dict[str, Any] = {
        "event": "request",
        "id": found.id,
        "client": found.client,
        "method": found.method,
        "path": found.path,
        "status": found.status,
        "ms": _ms(found.seconds),
    }
    if found.gone:
        line["gone"] = True
    if found.error is not None:
        line["error"] = found.error
    if found.answered:
        line |= _answers(found)
    for name, texts in (("prompts", found.prompts), ("answers", found.answers)):
        if texts:
            line[name] = [text if len(text) <= TEXT else text[:TEXT] + "..." for text in texts]
    return line


def _answers(found: RequestRecord) -> dict[str, Any]:
    first = found.answered[0]
    firsts = [each.first_token for each in found.answered if each.first_token is not None]
    every = [one for each in found.answered for one in each.stats]
    return {
        "model": found.model,
        "stream": found.streamed,
        "prompt_tokens": sum(each.first.prompt_tokens for each in found.answered),
        "cached_tokens": sum(each.first.cached_tokens for each in found.answered),
        "completion_tokens": sum(each.tokens for each in found.answered),
        "prepare_ms": _ms(first.prepared),
        "queue_ms": _ms(first.first.queued_s),
        "prompt_ms": _ms(first.first.prompt_s),
        "decode_ms": _ms(max(one.decode_s for one in every)),
        "first_token_ms": _ms(min(firsts)) if firsts else None,
        "finish": [reason for each in found.answered for reason in each.reasons],
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
