"""The record of a request over HTTP while it is answered, and the log, which has a line of JSON for each.

Server stage. The outermost middleware makes a record; what computes an answer finds it by `current` and adds to it. The
line in the log, metrics, headers and spans are made of it. A thread of its own writes the log, so that a full pipe or a
slow disk delays no answer; what it cannot keep up with is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from rlx.errors import DeadlineError, OutputError, file_error
from rlx.runners import FinishReason, Handle, RequestStats


@dataclass
class Answered:
    """One generation of a request.

    Attributes:
        stats: of each choice.
        reasons: why each choice ended: stop, length, deadline, error, or abort where nobody wanted the rest.
        prepared: seconds from the arrival of the request until it was handed to the engine.
        max_tokens: the limit that the request gave.
    """

    stats: list[RequestStats]
    reasons: list[str]
    prepared: float
    max_tokens: int | None = None

    @property
    def first(self) -> RequestStats:
        """Of the choice that computed the prompt."""
        return self.stats[0]

    @property
    def first_token(self) -> float | None:
        """Seconds from the arrival of the request to its first token; None if there was none."""
        times = [each.queued_s + each.prompt_s for each in self.stats if each.tokens]
        return self.prepared + min(times) if times else None

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(each.tokens for each in self.stats)


@dataclass
class RequestRecord:
    """A request over HTTP.

    Attributes:
        id: as the client or the server named it.
        method, path, client: what was asked, and by whom.
        route: the path if the server has it, else `other`: what clients invent must not become labels of metrics.
        arrived: when, by `time.perf_counter`.
        deadline: until when it must be answered; None for no limit.
        owner: whose key it came with, see `Keys.owner`; empty if all share what the cache knows of prompts.
        status: of the response; 499 if the client went away before one.
        streamed: whether the response came in pieces.
        error: the message of the error that it got.
        model: the name of the model that it means; None if it means none, or was refused before.
        answered: its generations.
        keeps_texts: whether the log has prompts and answers.
        prompts, answers: these texts.
        gone: whether the client went away before the end.
        background: whether what it computes has a lower priority than requests of clients.
        ignored: names of fields that change nothing, for the header of the response.
    """

    id: str
    method: str
    path: str
    client: str = ""
    route: str = "other"
    arrived: float = field(default_factory=time.perf_counter)
    deadline: float | None = None
    owner: str = ""
    status: int = 0
    streamed: bool = False
    error: str | None = None
    model: str | None = None
    answered: list[Answered] = field(default_factory=list)
    keeps_texts: bool = False
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    gone: bool = False
    background: bool = False
    ignored: dict[str, None] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time since it arrived."""
        return time.perf_counter() - self.arrived

    def time_left(self, timeout: float | None) -> float | None:
        """The seconds that a generation may take: its own `timeout`, or what is left of the request's, if that is less.

        At least a moment: a generation with no time at all fails with the error that says so.
        """
        if self.deadline is None:
            return timeout
        left = max(1e-6, self.deadline - time.perf_counter())
        return left if timeout is None else min(timeout, left)


Note = Callable[[BaseException | None], None]


def observer(
    begun: float, choices: Sequence[Sequence[Handle]], limits: Sequence[int | None], prompts: Callable[[], list[str]]
) -> Note:
    """A function that adds generations to the current record; called once, when they are over, with their error if any.

    Args:
        begun: when they were handed over, by `time.perf_counter`.
        choices: those of each generation.
        limits: the limit of tokens that each gave.
        prompts: decodes their prompts, for the log.
    """
    found = current()
    if found is None:
        return lambda error: None
    prepared = begun - found.arrived

    def note(error: BaseException | None) -> None:
        for handles, limit in zip(choices, limits, strict=True):
            reasons = [_reason(each, error) for each in handles]
            found.answered.append(Answered([each.stats for each in handles], reasons, prepared, limit))
        if found.keeps_texts:
            every = [each for handles in choices for each in handles if each.stats.tokens]
            found.prompts += prompts()
            found.answers += ["".join(step.text for step in each.steps(0)) for each in every]

    return note


def _reason(handle: Handle, error: BaseException | None) -> str:
    """Why a choice ended: stop, length, deadline, error, or abort where nobody wanted the rest."""
    reason = handle.finish_reason
    if reason in (FinishReason.LENGTH, FinishReason.CONTEXT):
        return "length"
    if reason not in (None, FinishReason.ABORTED):
        return "stop"
    if isinstance(error, DeadlineError):
        return "deadline"
    return "error" if isinstance(error, Exception) else "abort"


_current: ContextVar[RequestRecord | None] = ContextVar("rlx_request", default=None)


def current() -> RequestRecord | None:
    """The record of the request that the current task answers; None outside of one."""
    return _current.get()


def ignore(*names: str) -> None:
    """Has the header `X-Rlx-Ignored` of the current request's response name fields that change nothing."""
    if (found := current()) is not None:
        found.ignored |= dict.fromkeys(names)


def begin(record: RequestRecord) -> None:
    """Makes a record the current one of this task and of those that it starts."""
    _current.set(record)


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
            with suppress(OSError):  # it is full: the lines are counted already
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
            old, self._file = self._file, _opened(self._target)
            with suppress(OSError):  # what it could not take is lost
                old.close()


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
