"""Handles: how a consumer reads the tokens of a request that the engine loop computes.

Runners stage, above the engine loop. A handle makes steps of tokens when somebody asks for them, in the thread that
asks: texts, stop strings, callbacks and log-probabilities cost the loop nothing. Any number of threads and asyncio
tasks may read one handle; each iterator gets all steps.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Self

from rlx.engine.loop.bell import Bell
from rlx.engine.loop.job import AHEAD, Job
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.loop.request_stats import RequestStats
from rlx.engine.request.output import Generation, Output, Step


class Handle(AbstractContextManager["Handle", None], AbstractAsyncContextManager["Handle", None]):
    """A request that was submitted. Iterating over it gives its steps as they come, also with `async for`.

        handle = runner.submit(rlx.Request(ids, 100))
        for step in handle:
            print(step.text, end="", flush=True)

    A request whose handle nobody has any more is aborted. So is one whose `with` block ends before it does.

    Args:
        loop: computes the job.
        job: not submitted yet, or ended if there is nothing to compute.
        output: makes its steps.
        over: called once with the job and the number of tokens that count, when there will be no more and the job keeps
            its sequence.

    Attributes:
        stopping: why it ended (`reason`, `stopped_by`), once it is over.
    """

    _ended = True  # until `__init__` is through

    def __init__(
        self, loop: EngineLoop, job: Job, output: Output, over: Callable[[Job, int], object] | None = None
    ) -> None:
        self._loop, self._job, self._output, self._over = loop, job, output, over
        self.stopping = output.stopping
        self._steps: list[Step] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended = False  # whether all steps that will ever be are there

    def __del__(self) -> None:
        if not self._ended:
            self._end(keeps=False)

    # ---------------------------------------------------------------------------------------------- reading

    def __iter__(self) -> Iterator[Step]:
        """All steps, from the first one on, each as soon as it is there."""
        return Steps(self)

    def __aiter__(self) -> AsyncIterator[Step]:
        return Steps(self)

    def result(self) -> Generation:
        """Waits for the end, and returns the tokens.

        Raises:
            NumericalError, DeadlineError, PoolFullError: the request failed; the steps before can be read.
            BusyError: the runner was closed.
        """
        job = self._job
        if not (job.watched or job.with_logits or self._steps):
            return self._all_at_once()
        while not self._ended:
            if not self.read():
                self._loop.wait(job.bell, self.has_news)
        self._given(len(self._steps))
        return self._generation()

    def _all_at_once(self) -> Generation:
        """The result where nobody looks at steps: none are made."""
        job, stopping = self._job, self._output.stopping
        self._loop.wait(job.bell, lambda: job.ended or self._ended)
        tokens = job.tokens[: job.stopped_at]
        if not self._ended:
            for at, token in enumerate(tokens):
                stopping.push(token, job.complete_at == at + 1)
            self._end(len(tokens), job.error)
        if self._error is not None:
            raise self._error
        return Generation(tokens, self._output)

    def __await__(self) -> Generator[Any, None, Generation]:
        """As `result`, for an asyncio task."""
        return self._result().__await__()

    async def _result(self) -> Generation:
        while await self.step_async(len(self._steps)) is not None:
            pass
        return self._generation()

    def _generation(self) -> Generation:
        steps = self._steps if self._output.logprobs else None
        return Generation((step.token for step in self._steps), self._output, steps)

    def step(self, at: int) -> Step | None:
        """Waits for step number `at`; None if the request ended before it."""
        while not self._is_there(at):
            self._loop.wait(self._job.bell, lambda: self._has_news(at))
        return self._given(at)

    async def step_async(self, at: int) -> Step | None:
        """As `step`, for an asyncio task. Other tasks have their turn although steps come without a wait."""
        if self._is_there(at):
            if at % AHEAD == 0:
                import asyncio  # slow, and few programs need it

                await asyncio.sleep(0)
            return self._given(at)
        while not self._is_there(at):
            self._loop.wake()  # the task's own thread must not compute
            await self._job.bell.wait_async(lambda: self._has_news(at))
        return self._given(at)

    def read(self) -> bool:
        """Makes the steps of all tokens that have come, without waiting; returns whether anything was new."""
        before = len(self._steps)
        with self._lock:
            while not self._ended and self._make():
                pass
        return len(self._steps) > before or self._ended

    def steps(self, at: int) -> list[Step]:
        """The steps from number `at` on that are there, without waiting.

        Raises:
            RlxError: the request failed, and there are none.
        """
        self.read()
        if at >= len(self._steps) and self._error is not None:
            raise self._error
        return self._steps[at:]

    def has_news(self) -> bool:
        """Whether there is a token that nobody has read, or an end."""
        return not self._ended and self._has_news(len(self._steps))

    def _has_news(self, at: int) -> bool:
        job = self._job
        return len(job.tokens) > at or job.ended or self._ended

    def _given(self, at: int) -> Step | None:
        if at < len(self._steps):
            return self._steps[at]
        if self._error is not None:
            raise self._error
        return None

    def _is_there(self, at: int) -> bool:
        """Makes steps of the tokens that have come, up to step `at`; returns whether it is there, or never will be."""
        if at >= len(self._steps) and not self._ended:
            with self._lock:
                while at >= len(self._steps) and not self._ended:
                    if not self._make():
                        return False
        return True

    def _make(self) -> bool:
        """Makes the next step, or notes the end; False if there is neither."""
        job, output, at = self._job, self._output, len(self._steps)
        if at < len(job.tokens):
            try:
                row = job.rows.popleft() if job.with_logits else None
                step = output.step(job.tokens[at], row, job.complete_at == at + 1)
            except BaseException as error:  # of a callback, or an interrupt
                self._end(at + 1, error)
                raise
            self._steps.append(step)
            job.taken = at + 1
            if step.finish_reason is not None:
                self._end(at + 1)
            elif job.held and len(job.tokens) - job.taken <= AHEAD // 2:
                self._loop.took(job)
            return True
        if job.ended and at >= len(job.tokens):  # read in this order: tokens come before the end
            self._end(at, job.error)
            return True
        return False

    # ---------------------------------------------------------------------------------------------- the end

    def abort(self) -> None:
        """Ends the request. Steps that were read stay; `finish_reason` is then `aborted`. May be called again."""
        self._end()

    @property
    def is_over(self) -> bool:
        """Whether all steps were read, or it was aborted."""
        return self._ended

    @property
    def stats(self) -> RequestStats:
        """What the request cost so far, or in all once it ended: tokens, and seconds of each phase."""
        job, tokens = self._job, len(self._steps)
        if self._ended and not tokens:  # nobody looked at steps
            tokens = len(job.tokens[: job.stopped_at])
        return job.record.stats(len(job.prompt), tokens, job.last_time, self._loop.clock(), job.done)

    def _end(self, count: int | None = None, error: BaseException | None = None, *, keeps: bool = True) -> None:
        """Notes the end.

        Args:
            count: how many tokens count; by default those that were read.
            keeps: whether anybody may still want the sequence.
        """
        if self._ended:
            return
        job, count = self._job, len(self._steps) if count is None else count
        self._ended, self._error = True, error
        self._output.stopping.abort()  # unless it has ended by itself
        job.keeps = job.keeps and keeps and count > 0 and job.error is None
        if not job.ended or (job.sequence is not None and (count < len(job.tokens) or not job.keeps)):
            self._loop.stop(job, count)
        if self._over is not None and job.keeps:
            self._over(job, count)
        self._over = None
        job.bell.ring()  # other consumers wait for a token that will not come

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.abort()

    def __repr__(self) -> str:
        return f"<Handle: {len(self._steps)} steps{', over' if self._ended else ''}>"


class Steps(Iterator[Step], AsyncIterator[Step]):
    """An iterator over the steps of a handle, for threads and for asyncio."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self._at = handle, 0

    def __next__(self) -> Step:
        step = self._handle.step(self._at)
        if step is None:
            raise StopIteration
        self._at += 1
        return step

    async def __anext__(self) -> Step:
        step = await self._handle.step_async(self._at)
        if step is None:
            raise StopAsyncIteration
        self._at += 1
        return step


class Stream(Iterator[Step], AsyncIterator[Step]):
    """The tokens of a generation as they come: an iterator of `Step`, also for `async for`.

    It starts with the first step that is asked for. The engine computes a few tokens ahead of its reader. A stream that
    is closed or dropped ends its generation; the session then holds the tokens that were read but the last.

    Args:
        start: submits the request.
        change: applied to each step.
    """

    def __init__(self, start: Callable[[], Handle], change: Callable[[Step], Step] | None = None) -> None:
        self._start, self._change = start, change
        self._steps: Steps | None = None
        self._handle: Handle | None = None
        self._closed = False

    def __next__(self) -> Step:
        if self._closed:
            raise StopIteration
        return self._changed(next(self._begun()))

    async def __anext__(self) -> Step:
        if self._closed:
            raise StopAsyncIteration
        return self._changed(await anext(self._begun()))

    def _begun(self) -> Steps:
        if self._steps is None:
            self._handle = self._start()
            self._steps = Steps(self._handle)
        return self._steps

    def _changed(self, step: Step) -> Step:
        return step if self._change is None else self._change(step)

    def mapped(self, change: Callable[[Step], Step]) -> Stream:
        """This stream with transformed steps; use it in place of this one."""
        return Stream(self._start, change)

    def show(self) -> str:
        """Prints the text as it comes, in a terminal or in the cell of a notebook, and returns all of it."""
        from rlx.notebook import GrowingText

        shown = GrowingText()
        for step in self:
            shown.add(step.text)
        return shown.finish()

    def _ipython_display_(self) -> None:
        """Shows the answer as it comes where the stream is the last value of a cell."""
        self.show()

    def close(self) -> None:
        """Ends the generation. Can be called more than once."""
        self._closed = True
        if self._handle is not None:
            self._handle.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_together(loop: EngineLoop, handles: list[Handle], bell: Bell) -> None:
    """Reads several handles to their ends, whichever has news.

    Args:
        loop: computes them.
        bell: the one that all of their jobs ring.

    Raises:
        RlxError: of the first request that fails; the others are aborted.
    """
    try:
        while left := [handle for handle in handles if not handle.is_over]:
            if not sum(handle.read() for handle in left):  # all of them, not only up to the first
                loop.wait(bell, lambda: any(handle.has_news() for handle in handles))
            for handle in left:
                if handle.is_over:
                    handle.result()
    finally:
        for handle in handles:
            handle.abort()
