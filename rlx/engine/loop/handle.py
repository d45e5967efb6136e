"""Handles, groups of them, and streams: how a consumer reads the tokens of a request, and the steps that it gets.

Runners stage, above the engine loop. A handle makes steps of tokens when somebody asks for them, in the thread that
asks: texts, stop strings, callbacks and log-probabilities cost the loop nothing. Any number of threads and asyncio
tasks may read one handle; each iterator gets all steps. The loop ends a request at a stop id, at the end of its
grammar, its number of tokens or its context (`Job.add`); the consumer ends it at a stop string or with its callback.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from types import TracebackType, coroutine
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.closing import Closing, of_one_process
from rlx.engine.loop.job import AHEAD, Job
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.loop.record import RequestStats
from rlx.engine.request import FinishReason, Logits, stop_strings
from rlx.errors import ArgumentError, TokenizerError
from rlx.notebook import GrowingText
from rlx.sampling.choice import log_probs
from rlx.text.tokenizer import AnswerText, answer_text

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer
    from rlx.text.tool_calls import ToolCallDelta

OnToken = Callable[[int], bool | None]
"""Called with every new token; False ends the generation."""

FULL = (FinishReason.LENGTH, FinishReason.CONTEXT)


def says_stop(on_token: OnToken | None, token: int) -> bool:
    """Whether the callback returned False, or NumPy's False; None and other values continue."""
    answer = None if on_token is None else on_token(token)
    return isinstance(answer, bool | np.bool_) and not answer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A candidate for the next token.

    Attributes:
        token: its id.
        text: its text, with its leading space; an incomplete character is U+FFFD.
        logprob: natural logarithm of its probability under the model.
        bytes: its bytes, which may be a part of a character.
    """

    token: int
    text: str
    logprob: float
    bytes: builtins.bytes = b""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a stream.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability under the model, before penalties, filters and temperature; None
            if the request asked for none.
        finish_reason: why the stream ends with it; None if it continues.
        text: the text that this token completes, possibly empty. An incomplete character is held back, and so is a
            possible beginning of a stop string. The texts of all steps together are `Generation.text`.
        top_logprobs: the likeliest tokens of this step, the likeliest first; as many as `top_logprobs` requested.
        thinking: in a stream of `chat`, text of the model's reasoning; it is not part of `text`.
        tool_calls: in a stream of `chat`, pieces of tool calls; their texts are not part of `text`.
    """

    token: int
    logprob: float | None
    finish_reason: FinishReason | None
    text: str = ""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Generation(list[int]):
    """The result of a generation: a list of token ids, with its text and the reason why it ended.

    Attributes:
        finish_reason: why it ended.
        steps: log-probabilities of each token if `top_logprobs` requested them; else None.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        finish_reason: FinishReason | None,
        tokenizer: Callable[[], Tokenizer],
        text: str | None = None,
        steps: list[Step] | None = None,
        keep_ids: Collection[int] = (),
    ) -> None:
        super().__init__(tokens)
        self.finish_reason, self.steps, self._tokenizer, self._text = finish_reason, steps, tokenizer, text
        self._keep_ids = keep_ids

    @property
    def text(self) -> str:
        """The text of the tokens up to a stop string, without control tokens that its request does not keep.

        Raises:
            TokenizerError: the model has no tokenizer that can be built.
        """
        if self._text is not None:
            return self._text
        ids = self[:-1] if self.finish_reason == FinishReason.STOP else self
        return answer_text(self._tokenizer(), ids, self._keep_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its text: the tokenizer stays in this process."""
        try:
            text = self.text
        except TokenizerError:
            text = None
        return Generation, (list(self), self.finish_reason, _no_tokenizer, text, self.steps)


def _no_tokenizer() -> Tokenizer:
    raise TokenizerError("the model had no tokenizer", where="Generation")


def likeliest(tokenizer: Tokenizer, token: int, logprob: float, logits: Logits, count: int) -> tuple[TokenLogprob, ...]:
    """The likeliest tokens at a position; ties go to the lower id.

    Args:
        token, logprob: any token, and its log-probability there.
        logits: at the position, float32[vocab].
        count: how many.
    """
    count = min(count, len(logits))
    if not count:
        return ()
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    among = np.flatnonzero(logits >= bound)
    ids = among[np.argsort(-logits[among], kind="stable")][:count].tolist()
    shift = logprob - float(logits[token])  # log softmax is logit + shift
    return tuple(candidate(tokenizer, i, float(logits[i]) + shift) for i in ids)


def candidate(tokenizer: Tokenizer, token: int, logprob: float) -> TokenLogprob:
    """A token with its text and bytes; control tokens have theirs, too. What the tokenizer lacks has none."""
    piece = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    return TokenLogprob(token, piece.decode("utf-8", "replace"), logprob, piece)


@coroutine
def _other_tasks() -> Generator[None, None, None]:
    """Lets other asyncio tasks have their turn: `asyncio.sleep(0)` without the import of asyncio."""
    yield


class Handle(AbstractContextManager["Handle", None], AbstractAsyncContextManager["Handle", None]):
    """A request that was submitted. Iterating over it gives its steps as they come, also with `async for`.

        handle = runner.submit(rlx.Request(ids, 100))
        for step in handle:
            print(step.text, end="", flush=True)

    A request whose handle nobody has any more is aborted. So is one whose `with` block ends before it does.

    The loop ends a request where it can see the end. A handle ends it at a stop string, and where its callback says so.
    If several conditions hold, the first in the order of `FinishReason` counts.

    Args:
        loop: computes the job.
        job: not submitted yet.
        tokenizer: returns the tokenizer; `TokenizerError` if there is none.
        on_token: called once with every token, before the conditions are checked.
        has_texts: whether steps have texts without stop strings, too; they are empty if there is no tokenizer.

    Attributes:
        job: the request's state in the loop.
        over: called once with the job and the number of tokens that count, when there will be no more and the job keeps
            its sequence.
        finish_reason: why it ended; None if it goes on.
        stopped_by: the stop id or the stop string that ended it; None if it was another reason.

    Raises:
        ArgumentError: a stop string is empty, or the callback is not callable.
        TokenizerError: there are stop strings, and no tokenizer.
    """

    _ended = True  # until `__init__` is through
    __reduce__ = of_one_process

    def __init__(
        self,
        loop: EngineLoop,
        job: Job,
        tokenizer: Callable[[], Tokenizer],
        on_token: OnToken | None = None,
        *,
        has_texts: bool = True,
    ) -> None:
        if on_token is not None and not callable(on_token):
            raise ArgumentError(f"on_token is {on_token!r}, expected a function of a token", where="generate")
        self.job, self._loop, self._tokenizer, self._on_token = job, loop, tokenizer, on_token
        stop, self._answer = stop_strings(job.request.stop), None
        if stop or has_texts:
            try:
                self._answer = AnswerText(tokenizer(), stop, job.request.keep_ids)
            except TokenizerError:
                if stop:
                    raise
        self.over: Callable[[Job, int], object] | None = None
        self.finish_reason: FinishReason | None = None
        self.stopped_by: int | str | None = None
        self._steps: list[Step] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended = False  # whether all steps that will ever be are there

    def __del__(self) -> None:
        if not self._ended and self.job.record.submitted is not None:
            self._end(keeps=False)

    # -- reading -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """All steps, from the first one on, each as soon as it is there."""
        return Stream(lambda: self)

    def __aiter__(self) -> AsyncIterator[Step]:
        return Stream(lambda: self)

    def result(self) -> Generation:
        """Waits for the end, and returns the tokens.

        Raises:
            NumericalError, DeadlineError, PoolFullError: the request failed; the steps before can be read.
            BusyError: the runner was closed.
        """
        job = self.job
        while not self._ended:
            seen = job.notifier.news
            if not (job.tokens or job.ended) or not self.read():
                self._loop.wait(job.notifier, seen)
        if self._error is not None:
            raise self._error
        steps, text = self._steps, None if self._answer is None else self._answer.text
        tokens = [step.token for step in steps] if steps else job.tokens[: job.stopped_at]
        kept = steps if job.with_logits else None
        return Generation(tokens, self.finish_reason, self._tokenizer, text, kept, job.request.keep_ids)

    def __await__(self) -> Generator[Any, None, Generation]:
        """As `result`, for an asyncio task."""
        return self._result().__await__()

    async def _result(self) -> Generation:
        while await self.step_async(len(self._steps)) is not None:
            pass
        return self.result()

    def step(self, at: int) -> Step | None:
        """Waits for step number `at`; None if the request ended before it."""
        job, steps = self.job, self._steps
        while at >= len(steps) and not self._ended:
            seen = job.notifier.news  # before the look: what comes after it is news
            if len(job.tokens) > len(steps) or job.ended:
                self._read(at + 1)
            else:
                self._loop.wait(job.notifier, seen)
        return steps[at] if at < len(steps) else self._none()

    async def step_async(self, at: int) -> Step | None:
        """As `step`, for an asyncio task. Other tasks have their turn although steps come without a wait."""
        job, steps, waited = self.job, self._steps, False
        while at >= len(steps) and not self._ended:
            seen = job.notifier.news
            if len(job.tokens) > len(steps) or job.ended:
                self._read(at + 1)
            else:
                waited = True
                self._loop.wake()  # the task's own thread must not compute
                await job.notifier.wait_async(seen)
        if at % AHEAD == 0 and not waited:
            await _other_tasks()
        return steps[at] if at < len(steps) else self._none()

    def _none(self) -> Step | None:
        """None: there is no further step. Raises why, if the request failed."""
        if self._error is not None:
            raise self._error
        return None

    def read(self) -> bool:
        """Makes the steps of all tokens that have come, without waiting; returns whether anything was new."""
        job, before = self.job, len(self._steps)
        looks = job.streaming or job.with_logits or self._on_token is not None or before
        if not (self._ended or looks):  # no steps are made
            if job.ended:
                self._end(len(job.tokens), job.error)
        elif not self._ended and (len(job.tokens) > before or job.ended):
            self._read()
        return len(self._steps) > before or self._ended

    def steps(self, at: int) -> list[Step]:
        """The steps from number `at` on that are there, without waiting.

        Raises:
            RlxError: the request failed, and there are none.
        """
        self.read()
        if at >= len(self._steps):
            self._none()
        return self._steps[at:]

    def _read(self, most: int | None = None) -> None:
        """Makes steps of the tokens that have come, and notes the end.

        Args:
            most: how many steps there should be at most.
        """
        job, steps = self.job, self._steps
        with self._lock:
            while not self._ended and (most is None or len(steps) < most):
                at = len(steps)
                if at >= len(job.tokens):
                    if job.ended and at >= len(job.tokens):  # read in this order: tokens come before the end
                        self._end(at, job.error)
                    return
                try:
                    step = self._made(at)
                except BaseException as error:  # of a callback, or an interrupt
                    self._end(at + 1, error)
                    raise
                steps.append(step)
                job.consumed = at + 1
                if step.finish_reason is not None:
                    self._end(at + 1)
                elif job.backpressured and len(job.tokens) - job.consumed <= AHEAD // 2:
                    self._loop.consumed(job)

    def _made(self, at: int) -> Step:
        """The step of the next token, which is number `at`."""
        job, answer, piece = self.job, self._answer, ""
        token, logits = job.tokens[at], job.rows.popleft() if job.with_logits else None
        reason = job.last[1] if job.last is not None and job.last[0] == at + 1 else None
        halted = self._on_token is not None and says_stop(self._on_token, token)
        if reason == FinishReason.STOP:  # a stop id has no text
            self.stopped_by = token
        elif answer is not None:
            piece = answer.push(token, at + 1 >= job.request.min_tokens)
            if answer.stopped_at is not None:
                reason, self.stopped_by = FinishReason.STOP_STRING, answer.stopped_at
        if halted and (reason is None or reason in FULL):
            reason = FinishReason.CALLBACK
        if reason is not None:
            self.finish_reason = reason
            piece += "" if answer is None else answer.finish()
        if logits is None:
            return Step(token, None, reason, piece)
        logprob, count = float(log_probs(logits[None], [token])[0]), job.request.top_logprobs
        top = likeliest(self._tokenizer(), token, logprob, logits, count) if count else ()
        return Step(token, logprob, reason, piece, top)

    # -- the end -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ends the request. Steps that were read stay; its finish reason is then `aborted`. May be called again."""
        if not self._ended:
            self._end()

    @property
    def is_over(self) -> bool:
        """Whether all steps were read, or it was aborted."""
        return self._ended

    @property
    def stats(self) -> RequestStats:
        """The cost of the request so far, or in all once it ended: tokens, and seconds of each phase."""
        job, tokens = self.job, len(self._steps)
        if self._ended and not tokens:  # nobody looked at steps
            tokens = len(job.tokens[: job.stopped_at])
        return job.record.stats(len(job.prompt), tokens, self._loop.clock(), job.done)

    def _end(self, count: int | None = None, error: BaseException | None = None, *, keeps: bool = True) -> None:
        """Notes the end.

        Args:
            count: how many tokens count; by default those that were read.
            keeps: whether anybody may still want the sequence.
        """
        if self._ended:
            return
        job, count = self.job, len(self._steps) if count is None else count
        self._ended, self._error, was_over = True, error, self.job.ended
        if self.finish_reason is None:
            self.finish_reason = FinishReason.ABORTED
            if job.last is not None and job.last[0] == count and error is None:
                self.finish_reason = job.last[1]
                self.stopped_by = job.tokens[count - 1] if self.finish_reason == FinishReason.STOP else None
        job.keeps = job.keeps and keeps and count > 0 and job.error is None
        if not job.ended or (job.sequence is not None and (count < len(job.tokens) or not job.keeps)):
            self._loop.stop(job, count)
        if self.over is not None and job.keeps:
            self.over(job, count)
        self.over = None
        if not was_over:
            job.notifier.notify()  # other consumers wait for a token that will not come

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.abort()

    def __repr__(self) -> str:
        return f"<Handle: {len(self._steps)} steps{', over' if self._ended else ''}>"


News = list[tuple[int, list[Step]]]
"""Numbers of requests, and their new steps; no steps where one is over."""


class RequestGroup:
    """Requests that were handed over together, read by one thread or one asyncio task: whichever has tokens.

    Args:
        loop: computes them.
        handles: at least one.

    Attributes:
        handles: one for each request.
    """

    def __init__(self, loop: EngineLoop, handles: Sequence[Handle]) -> None:
        self._loop, self.handles, self._notifier = loop, handles, handles[0].job.notifier
        self._read = [0] * len(handles)
        self._open = set(range(len(handles)))

    async def news(self, seconds: float | None = None) -> News | None:
        """Waits until there are new steps, or one request is over: then its list of steps is empty.

        Args:
            seconds: how long it waits at most.

        Returns:
            What is new. An empty list if all requests are over; None if the time has passed.

        Raises:
            RlxError: of a request that failed, once its steps were read.
        """
        while self._open:
            seen = self._notifier.news
            if found := self._found():
                return found
            self._loop.wake()  # the task's own thread must not compute
            if not await self._notifier.wait_async(seen, seconds):
                return None
        return []

    def _found(self) -> News:
        found: News = []
        for i in sorted(self._open):
            handle, at = self.handles[i], self._read[i]
            if steps := handle.steps(at):
                self._read[i] += len(steps)
                found.append((i, steps))
            elif handle.is_over:
                self._open.discard(i)
                found.append((i, []))
        return found

    def results(self) -> list[Generation]:
        """Waits for the ends of all requests, and returns their tokens.

        Raises:
            RlxError: of the first request that fails; the others are aborted.
        """
        try:
            while left := [handle for handle in self.handles if not handle.is_over]:
                seen = self._notifier.news
                if not sum(handle.read() for handle in left):  # all of them, not only up to the first
                    self._loop.wait(self._notifier, seen)
                for handle in left:
                    if handle.is_over:
                        handle.result()
        finally:
            self.abort()
        return [handle.result() for handle in self.handles]

    def abort(self) -> None:
        """Ends all requests. May be called again."""
        for handle in self.handles:
            handle.abort()


class Stream(Closing, Iterator[Step], AsyncIterator[Step]):
    """The tokens of a generation as they come: an iterator of `Step`, also for `async for`.

    It starts with the first step that is asked for. The engine computes a few tokens ahead of its reader, and more
    while other requests wait for its place. A stream that is closed or dropped ends its generation; the session then
    holds the tokens that were read but the last.

    Args:
        start: submits the request.
        change: applied to each step.
    """

    def __init__(self, start: Callable[[], Handle], change: Callable[[Step], Step] | None = None) -> None:
        self._start, self._change = start, change
        self._handle: Handle | None = None
        self._at, self._closed = 0, False

    def __next__(self) -> Step:
        if self._closed:
            raise StopIteration
        if self._handle is None:
            self._handle = self._start()
        step = self._handle.step(self._at)
        if step is None:
            raise StopIteration
        self._at += 1
        return step if self._change is None else self._change(step)

    async def __anext__(self) -> Step:
        if self._closed:
            raise StopAsyncIteration
        if self._handle is None:
            self._handle = self._start()
        step = await self._handle.step_async(self._at)
        if step is None:
            raise StopAsyncIteration
        self._at += 1
        return step if self._change is None else self._change(step)

    def show(self) -> str:
        """Prints the text as it comes, in a terminal or in the cell of a notebook, and returns all of it."""
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
