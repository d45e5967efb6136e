"""A request inside the loop: its state, how others wait for its news, and a task, a call that runs between two steps.

Runners stage, under `handle.py` and `executor.py`. The thread that drives the loop computes a `Job` and adds tokens; a
handle reads them in the consumer's thread, which waits for news at a `Notifier`. Every field has one writer, named
below, so neither side ever waits for a lock.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.memory import Values
from rlx.engine.kv.prefix import Keys
from rlx.engine.kv.sequence import keys_of
from rlx.engine.loop.record import ActiveRequest, Record
from rlx.engine.request import Context, FinishReason, Logits, Request
from rlx.sampling.choice import Constraint, Sampler
from rlx.sampling.options import SampleOpts

if TYPE_CHECKING:
    import asyncio

    from rlx.engine.speculation.drafts import Drafts

AHEAD = 8  # most tokens that are computed before their consumer has taken them
QUIET = 0.001  # seconds of tokens that a consumer may get together, if they come so quickly
LOOK = 0.1  # seconds after which a waiting thread looks for signals: the system may give them to another thread


class Notifier:
    """Any number of threads and tasks wait here for news.

        seen = notifier.news          # in one thread, before it looks
        if not job.ended:
            notifier.wait(seen)

        job.ended = True              # in another
        notifier.notify()

    A waiting thread may be interrupted (Ctrl-C) at any instruction, so there is no lock that it would have to release:
    whoever waits leaves a function that wakes it, and looks once more.

    Attributes:
        news: another object with each news. To set it without `notify` lets those see it who look anyway.
    """

    __slots__ = ("_waiters", "news")

    def __init__(self) -> None:
        self.news = object()
        self._waiters: deque[Callable[[], object]] = deque()

    def notify(self) -> None:
        """Wakes everybody who waits. Cheap if nobody does; safe in any thread, callback or finalizer."""
        self.news = object()
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread notifies, too
                return
            wake()

    @property
    def waiting(self) -> int:
        """How many threads and tasks wait, or more: one that went on by itself counts up to the next news."""
        return len(self._waiters)

    def wait(self, seen: object, seconds: float | None = None) -> bool:
        """Waits until `news` is not `seen`, at most so many seconds; returns whether. An interrupt ends the wait."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.news is seen:
            lock = threading.Lock()
            lock.acquire()
            self._waiters.append(lock.release)
            if self.news is not seen:  # after the append: a call of `notify` before it would have been missed
                return True
            while not lock.acquire(timeout=LOOK if end is None else min(LOOK, max(0.0, end - time.monotonic()))):
                if end is not None and time.monotonic() >= end:
                    return self.news is not seen
        return True

    async def wait_async(self, seen: object, seconds: float | None = None) -> bool:
        """As `wait`, for an asyncio task."""
        import asyncio  # slow, and few programs need it

        here = asyncio.get_running_loop()
        end = None if seconds is None else here.time() + seconds
        while self.news is seen:
            if end is not None and here.time() >= end:
                return False
            woken = here.create_future()
            self._waiters.append(partial(_waker_of(here).wake, woken))
            if self.news is not seen:
                return True
            timer = None if end is None else here.call_at(end, _wake, woken)
            await woken
            if timer is not None:
                timer.cancel()
        return True


class _Waker:
    """Wakes tasks of one event loop from other threads: all of a step with one call, since each is a system call.

    Args:
        here: the event loop.
    """

    def __init__(self, here: asyncio.AbstractEventLoop) -> None:
        self._here = weakref.ref(here)
        self._sleeping: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def wake(self, task: asyncio.Future[None]) -> None:
        """Wakes the task that waits for this."""
        self._sleeping.append(task)  # before the look: whoever wakes takes all that are there
        if not self._scheduled and (here := self._here()) is not None:
            self._scheduled = True
            with suppress(RuntimeError):  # the event loop was closed, and its tasks with it
                here.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._scheduled = False
        while self._sleeping:
            _wake(self._sleeping.popleft())


def _wake(task: asyncio.Future[None]) -> None:
    if not task.done():
        task.set_result(None)


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = weakref.WeakKeyDictionary()


def _waker_of(here: asyncio.AbstractEventLoop) -> _Waker:
    found = _wakers.get(here)
    if found is None:
        found = _wakers[here] = _Waker(here)
    return found


DraftsOf = Callable[[Any], "Drafts | None"]
"""Makes the drafts for a sequence; None if there are none now."""

_numbers = itertools.count()


@dataclass(eq=False)
class Job:
    """The state of a request in the loop, from its prompt to its last token.

    Attributes:
        request: what is asked, with defaults filled in: `ids` is a `Context`, `sample` a `SampleOpts`, `stop_ids` are
            all that end it, and `embeds` the checked prompt embeddings.
        sampler: chooses the tokens; used by the thread that drives only.
        room: how many tokens the context has room for after the prompt; None if it is unlimited.
        constraint: what the tokens may be; the sampler applies it.
        turn_ids: tokens that end a turn of a conversation: prompts branch there.
        streaming: whether the consumer looks at each token as it comes: it is then woken for each, and the request
            waits for it after `AHEAD` tokens. If not, the consumer is woken once, at the end.
        drafts_of: makes the drafts for a sequence that begins; None for no drafts.
        adapter: the number of the adapter of its sequence, 0 for none.
        keeps: whether the sequence stays open at the end; its owner then closes it.
        replaces: a sequence that nobody needs any more once this one starts; it is closed before.
        label: names it in errors; its position by default.
        notifier: has the news for the consumer; several requests may share one.

        number: the order of arrival.
        needs_steps: whether the host has to see the logits of each step, or to say how the next token is chosen.
        order: sorts requests, by priority, then by arrival.
        prompt, images: the ids of the prompt, and its images until they are encoded; it begins then.
        embeddings: rows in place of the embeddings of some ids.
        limit: maximum number of tokens.
        sequence: the tokens in the cache; None before it starts.
        tokens: the tokens so far.
        rows: logits of the tokens that the consumer has not taken yet. The loop appends, the consumer pops.
        forced: tokens that must come next by the grammar.
        last: how many tokens there are in all and why, once the loop has chosen the last one.
        ended, error: whether there will be no more tokens, and why not if it is an error.
        branches: where prompts that wait for this one part from it.
        drafts: makes drafts of its next tokens, if it has any.
        deadline: time by the loop's clock after which it fails.
        record: when it changed its phase, for statistics and traces.
        entered: whether the loop knows it.
        backpressured: whether it waits for the consumer to take tokens.
        looked_up, loading: whether the states of its prompt were looked up on disk, and whether they are being read.
        paused: whether its state was saved elsewhere, because the cache was full.

        consumed: number of tokens that the consumer has taken. This and the next field are written by the consumer.
        stopped_at: how many tokens the consumer uses, if it ended the request.
    """

    request: Request
    sampler: Sampler
    room: int | None = None
    constraint: Constraint | None = None
    turn_ids: Collection[int] = frozenset()
    streaming: bool = True
    drafts_of: DraftsOf | None = None
    adapter: int = 0
    keeps: bool = False
    replaces: Any = None
    label: str | None = None
    notifier: Notifier = field(default_factory=Notifier)

    def __post_init__(self) -> None:
        request, self.number = self.request, next(_numbers)
        assert isinstance(request.ids, Context), "the request is checked"
        self.order = -request.priority, self.number
        self.prompt, self.images, self.embeddings = request.ids.ids, request.ids.images, request.embeds
        self.limit = request.n_new if self.room is None else min(request.n_new, self.room)
        self.stop_ids = frozenset(request.stop_ids)
        self.with_logits = request.top_logprobs is not None
        self.is_greedy = isinstance(request.sample, SampleOpts) and request.sample.is_plain_greedy
        looks_back = not self.is_greedy and self.sampler.looks_back
        self.needs_steps = self.with_logits or looks_back or self.constraint is not None
        self.deadline: float | None = None
        self.sequence: Any = None
        self.drafts: Drafts | None = None
        self.branches, self.forced = set[int](), deque[int]()
        self.tokens, self.rows = list[int](), deque[Logits]()
        self._full = FinishReason.LENGTH if self.limit == request.n_new else FinishReason.CONTEXT
        self.last: tuple[int, FinishReason] | None = (0, self._full) if self.limit <= 0 else None
        self.ended = self.limit <= 0  # there is nothing to compute
        self.error: BaseException | None = None
        self.entered = self.backpressured = self.paused = self.looked_up = self.loading = False
        self.record = Record()
        self.consumed = 0
        self.stopped_at: int | None = None

    @cached_property
    def keys(self) -> Keys:
        """A key of each position of the prompt, for comparison with other prompts."""
        return keys_of(self.prompt, self.embeddings, self.request.cache_salt)

    @property
    def ends_of_turns(self) -> list[int]:
        """Lengths of the prompt where others may part from it: after its first turn (system and tools) and its last."""
        ends = [i + 1 for i, token in enumerate(self.prompt) if token in self.turn_ids] if self.turn_ids else []
        return ends[:1] + ends[1:][-1:]

    @property
    def done(self) -> int:
        """How many tokens of the prompt are computed."""
        return 0 if self.sequence is None else min(len(self.sequence.ids), len(self.prompt))

    @property
    def position(self) -> int:
        """How many tokens come before the newest one."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def place(self) -> str:
        """The name in errors of the row of logits that the next token is chosen from."""
        return self.label or (f"position {self.position}" if self.tokens else "prefill")

    @property
    def left(self) -> int:
        """Maximum number of further tokens."""
        return self.limit - len(self.tokens)

    @property
    def banned(self) -> Collection[int]:
        """Ids that the next token must not be."""
        return self.stop_ids if len(self.tokens) < self.request.min_tokens else ()

    @property
    def is_ahead(self) -> bool:
        """Whether the consumer has to take tokens before more are computed."""
        return self.streaming and len(self.tokens) - self.consumed >= AHEAD

    @property
    def can_run(self) -> bool:
        """Whether a run may find its next tokens: nobody needs their logits, or looks back for a choice.

        If the consumer looks at each token it may stop at any of them: the sequence has to be able to go back.
        """
        if self.needs_steps or self.banned or (self.drafts and not self.is_greedy):
            return False
        return not (self.streaming and (self.drafts or self.sequence.recurrent))

    def is_forced(self) -> bool:
        """Whether the next token must be `forced[0]`, whatever its logits are."""
        if self.constraint is None:
            return False
        if not self.forced:
            self.forced.extend(self.constraint.forced())
        return bool(self.forced)

    def take_forced(self) -> int:
        """The next token, which the grammar has forced."""
        token = self.forced.popleft()
        self.sampler.accept(token)
        return token

    @property
    def uncomputed(self) -> list[int]:
        """The tokens that the sequence does not contain yet; the last one, unless a grammar has forced some."""
        return self.tokens[len(self.sequence) - len(self.prompt) :]

    @property
    def has_forced(self) -> bool:
        """Whether a step computes rows of tokens that the grammar has forced."""
        if self.constraint is None:
            return False
        return bool(self.forced) or len(self.prompt) + len(self.tokens) > len(self.sequence) + 1

    def add(self, token: int, row: Values | None = None) -> FinishReason | None:
        """Adds a token, which the sampler has chosen or accepted, and a copy of its logits. The caller notifies.

        Returns:
            Why it is the last one, of several reasons the first in the order of `FinishReason`; None if it goes on.
        """
        count, reason = len(self.tokens) + 1, None
        if token in self.stop_ids and count > self.request.min_tokens:
            reason = FinishReason.STOP
        elif self.constraint is not None and self.constraint.is_over:
            reason = FinishReason.GRAMMAR
        elif count >= self.limit:
            reason = self._full
        if reason is not None:
            self.last = count, reason
        if row is not None and self.with_logits:
            self.rows.append(np.array(row))
        self.tokens.append(token)  # at the end: whoever sees the token finds its row, and that it is the last one
        return reason

    def rewind(self, length: int) -> None:
        """Drops what follows the first `length` tokens of the sequence."""
        self.sequence.rewind(length)
        if self.drafts:
            self.drafts.forget(length)

    def active(self) -> ActiveRequest:
        """Its progress while it is computed; any thread may ask."""
        sizes = len(self.prompt), self.record.cached, self.done, len(self.tokens)
        return ActiveRequest(self.number, *sizes, self.limit, self.drafts is not None, self.paused)


class Task:
    """A call between two steps: a generator, which stops at each `yield` for a step of the requests.

    Attributes:
        result, error: what it returned or raised, once `ended`.
        cancelled: the caller has no interest any more. Written by the caller.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self.notifier = work, Notifier()
        self._generator: Generator[None, None, Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = self.cancelled = False

    def step(self) -> None:
        """Runs it up to its next `yield`, its end, or its error."""
        try:
            if self.cancelled:
                self.close()
            elif self._generator is not None:
                next(self._generator)
            else:
                found = self._work()
                if isinstance(found, Generator):
                    self._generator = found
                    next(found)
                else:
                    self._end(found)
        except StopIteration as end:
            self._end(end.value)
        except BaseException as error:
            self.error = error
            self._end(None)

    def close(self, error: BaseException | None = None) -> None:
        """Ends it before its time."""
        if self._generator is not None:
            self._generator.close()
        self.error = error
        self._end(None)

    def _end(self, result: Any) -> None:
        self.result, self.ended, self._generator = result, True, None
        self.notifier.notify()
