"""Answers a file of requests: a bounded number of them at a time, so that the engine always has enough to batch.

Serve stage, after source and results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rlx.serve.batch.results import Results, request_id
from rlx.serve.batch.source import BatchRequest, LineProblem, Source

Report = Callable[["Progress"], object]


class Answering(Protocol):
    """What answers requests: the app of this process, or one on a cluster."""

    def __call__(self, request: BatchRequest, request_id: str, /) -> Awaitable[tuple[int, Any]]:
        """The status and the JSON body of the answer."""
        ...


@dataclass
class Progress:
    """What a run has done so far.

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
        at_once: how many requests are with the engine at a time.
        report: called after each answer.

    Raises:
        OutputError: an answer cannot be written.
        CancelledError: the task was cancelled. What was answered is in the file; the others begin anew next time.
    """
    before = sum(results.done)
    progress = Progress(len(source), done=before, before=before)
    report(progress)
    numbers = source.ordered(results.done)
    run = _Run(source, results, answering, progress, report)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(at_once, len(source) - before))):
                group.create_task(run.work(numbers))
    except* Exception as errors:
        raise _first(errors) from None
    finally:
        results.sync()
    return progress


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


@dataclass
class _Run:
    source: Source
    results: Results
    answering: Answering
    progress: Progress
    report: Report

    async def work(self, numbers: Iterator[int]) -> None:
        """Answers one request after the other, until there are no more."""
        for number in numbers:
            line = await self._answer(number)
            self.results.append(number, line)
            self.progress.done += 1
            self.report(self.progress)
            if self.results.is_late:
                await asyncio.to_thread(self.results.sync)

    async def _answer(self, number: int) -> dict[str, Any]:
        """The line of a request in the output, without its id."""
        try:
            request = self.source.request(number)
        except LineProblem as problem:
            self.progress.failed += 1
            error = {"code": problem.code, "message": f"request {number + 1}: {problem.what}"}
            return {"custom_id": problem.custom_id, "response": None, "error": error}
        ident = request_id(self.source, number)
        status, body = await self.answering(request, ident)
        self.progress.failed += status >= 400
        self.progress.count(body.get("usage") if isinstance(body, dict) else None)
        response = {"status_code": status, "request_id": ident, "body": body}
        return {"custom_id": request.custom_id, "response": response, "error": None}
