"""A request, from the API to the loop: what is asked, and its state while it is computed.

Runners stage. `LmRunner.checked_prompt` makes a `Context` of token ids or of a `Prompt`. `LmRunner.submit` takes a
`Request`; `generate` and `stream` make one of their arguments. The thread that drives the loop computes its `Job` and
adds tokens; a handle reads them in the consumer's thread, which waits for news at a `Notifier`. Every field has one
writer, named below, so neither side ever waits for a lock.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from inspect import Parameter
from math import isfinite
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import numpy as np
import numpy.typing as npt

from rlx import arguments, grammar
from rlx.backends.memory import Values
from rlx.engine.kv.prefix import Keys
from rlx.engine.kv.sequence import keys_of
from rlx.engine.request.record import ActiveRequest, Record
from rlx.errors import ArgumentError, MultimodalError, NumericalError, PromptError
from rlx.prompt import Prompt, TokenIds
from rlx.sampling.choice import Constraint, Sampler
from rlx.sampling.options import Sample, SampleOpts

if TYPE_CHECKING:
    import asyncio

    from rlx.engine.speculation.drafts import Drafts
    from rlx.grammar import Grammar

Logits = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model generated one of the stop ids."""
    STOP_STRING = "stop_string"
    """The text contains one of the stop strings."""
    GRAMMAR = "grammar"
    """The text is complete by its grammar, and nothing may follow."""
    CALLBACK = "callback"
    """`on_token` returned False."""
    LENGTH = "length"
    """The requested number of tokens is reached."""
    CONTEXT = "context"
    """The context is full."""
    ABORTED = "aborted"
    """It was aborted, or its stream was closed."""


@dataclass(frozen=True, eq=False)
class Context:
    """The tokens before an answer.

    Attributes:
        ids: one for each position, 0 for rows of images.
        images: where the images stand, and what is to be computed of them; None if there are none.
        adapter: the number of the adapter that its rows get, 0 for none.
        salt: only prompts with the same one share what the cache knows of them.
    """

    ids: list[int]
    images: Any = None
    adapter: int = 0
    salt: str = ""

    def __len__(self) -> int:
        return len(self.ids)


PromptLike = TokenIds | Prompt | Context


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_ids(ids: TokenIds, vocab_size: int, what: str) -> list[int]:
    """`ids` as a list of at least one Python int inside the vocabulary; `PromptError` otherwise."""
    if isinstance(ids, str | bytes):
        hint = "convert it to ids first: runner.tokenizer.encode(text), or runner.chat_ids(messages)"
        raise PromptError(f"expected token ids, found a {type(ids).__name__}", where=what, hint=hint)
    if not isinstance(ids, Sequence | np.ndarray):
        raise PromptError(f"expected a sequence of token ids, found a {type(ids).__name__}", where=what)
    if isinstance(ids, np.ndarray) and ids.ndim == 0:
        raise PromptError("expected a sequence of token ids, found one number", where=what, hint="give [id]")
    if len(ids) == 0:
        raise PromptError("it is empty", where=what, hint="give at least one token, such as tokenizer.bos_id")
    if isinstance(ids, Sequence) and {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)  # quick, also for a single id
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different length
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        _refuse_ids(ids, what)
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        found = f"id {array[outside[0]]} at position {outside[0]} is outside the vocabulary of {vocab_size}"
        raise PromptError(found, where=what, hint=f"ids run from 0 to {vocab_size - 1}")
    return [int(token) for token in array.tolist()]


def _refuse_ids(ids: Any, what: str) -> NoReturn:
    wrong = [(at, token) for at, token in enumerate(ids) if not _is_whole(token)]
    at, token = wrong[0] if wrong else max(enumerate(ids), key=lambda pair: abs(pair[1]))  # no wrong type: a huge int
    raise PromptError(f"expected a token id at position {at}, found {token!r}", where=what)


def too_long(context: Context, max_seq: int, what: str) -> PromptError:
    """The error of a prompt that has more tokens than the context holds."""
    count, rows, shorter = len(context.ids), "", "shorten it"
    if context.images is not None:
        rows, shorter = f", {context.images.rows} of them of images", "give fewer or smaller images"
    hint = f"{shorter}, or open the model with a max_seq of {count} plus the tokens of the answer"
    return PromptError(f"it has {count} tokens{rows}, and the context holds {max_seq}", where=what, hint=hint)


def checked_prompt(
    prompt: PromptLike, images: Any, vocab_size: int, max_seq: int | None, what: str, model: str
) -> Context:
    """The checked context of a prompt: each image takes as many positions as it has rows.

    Args:
        images: the `ImageInput` that puts images into prompts; None if the runner takes none.
        max_seq: how many positions there may be; None for any number.
        what: the argument, for messages.
        model: what the model is called in messages.

    Raises:
        PromptError: there is no id, an invalid one, or too many.
        MultimodalError: the model takes no images, or placeholders and images do not match.
        ImageError: the model takes no image of such a size.
    """
    if isinstance(prompt, Context):  # it is checked
        return prompt
    found: Context | None = None
    if isinstance(prompt, Prompt):
        found = None if images is None else images.placed(prompt, vocab_size, what)
        if found is None and prompt.images:
            raise no_tower(model, what, len(prompt.images))
        prompt = prompt.ids
    context = Context(check_ids(prompt, vocab_size, what)) if found is None else found
    if max_seq is not None and len(context.ids) > max_seq:
        raise too_long(context, max_seq, what)
    return context


def no_tower(model: str, where: str, images: int = 1) -> MultimodalError:
    """The error of images for a model that takes none."""
    count = "there is an image" if images == 1 else f"there are {images} images"
    return MultimodalError(
        f"{count}, and the {model} has no vision tower", where=where,
        hint="open the model with its vision projector (`mmproj`), or its folder of safetensors, which holds the tower",
    )  # fmt: skip


def check_finite(logits: Logits, where: str) -> Logits:
    """`logits`, [..., vocab]; `NumericalError` if one of them is NaN or infinite."""
    with np.errstate(all="ignore"):
        if isfinite(np.add.reduce(logits, axis=None)):  # one pass, no mask: the sum of finite logits is finite
            return logits
    for row in logits.reshape(-1, logits.shape[-1]):
        if not np.isfinite(row).all():
            at = int(np.flatnonzero(~np.isfinite(row))[0])
            raise NumericalError(
                f"logit {at} is {row[at]}", where=where,
                hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
            )  # fmt: skip
    return logits


AHEAD = 8  # most tokens that are computed before their consumer has taken them

NOTHING: frozenset[int] = frozenset()

QUIET = 0.001  # seconds of tokens that a consumer may get together, if they come so quickly


@dataclass(frozen=True)
class Request:
    """A generation that `submit` takes.

    handle = runner.submit(rlx.Request(ids, 100, priority=1, timeout=30))

    Attributes:
        ids: the prompt: at least one token id, or a `Prompt` with images.
        n_new: maximum number of tokens.
        sample: sampling options: a `SampleOpts`, or "recommended" for those in the model's files; the runner's default
            if None.
        stop_at_eog: False continues after the model's stop ids.
        stop: strings that end it.
        min_tokens: until there are this many tokens, stop ids are not chosen and stop strings are ignored.
        speculative: `prompt-lookup`, `mtp` or `model:PATH`; None takes the runner's default.
        top_logprobs: also report log-probabilities: of each token, and of this many of the likeliest tokens.
        priority: requests with a higher priority are served first.
        timeout: seconds after which it fails with a `DeadlineError`; None for never.
        embeds: numbers [len(ids), hidden] in place of the embeddings of `ids`.
        attn_bias: with `embeds`: numbers [len(ids), len(ids)] or [heads, len(ids), len(ids)] in place of the causal
            mask.
        grammar: what the text must look like. Stop ids are chosen only where it is complete.
        stop_ids: further token ids that end it, also without `stop_at_eog`.
        keep_ids: control tokens that are not left out of texts.
        adapter: the name of the LoRA adapter that answers, one of `adapters` of the opened model; None for the model
            as it is.
        cache_salt: requests share what the cache knows of their prompts only with requests of the same salt. Requests
            of users who must not learn of each other, not even by the time of an answer, need different ones.
    """

    ids: PromptLike
    n_new: int
    sample: Sample = None
    stop_at_eog: bool = True
    stop: str | Sequence[str] = ()
    min_tokens: int = 0
    speculative: str | None = None
    top_logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None
    embeds: Any = None
    attn_bias: Any = None
    grammar: Grammar | None = None
    stop_ids: Collection[int] = ()
    keep_ids: Collection[int] = ()
    adapter: str | None = None
    cache_salt: str = ""

    def check(self) -> None:
        """`ArgumentError` if a number is out of its range, or of another type."""
        if checked_count("n_new", self.n_new) is None:
            raise ArgumentError("n_new is None, expected a whole number of at least 0", where="generate")
        if (least := checked_count("min_tokens", self.min_tokens) or 0) > self.n_new:
            raise ArgumentError(f"min_tokens is {least}, more than the {self.n_new} of max_tokens", where="generate")
        checked_count("top_logprobs", self.top_logprobs)
        stop_strings(self.stop)
        arguments.whole("priority", self.priority, -(1 << 62), 1 << 62)
        arguments.text("cache_salt", self.cache_salt)
        arguments.flag("stop_at_eog", self.stop_at_eog)
        timeout: Any = self.timeout
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and timeout > 0):
            raise ArgumentError(f"timeout is {timeout!r}", where="submit", hint="give seconds above 0, or None")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several as a tuple; `ArgumentError` for other types and for an empty string."""
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"stop is {stop!r}, expected a text or several", where="generate")
    if "" in texts:
        raise ArgumentError("a stop string is empty", where="generate", hint="it would end every answer at once")
    return tuple(texts)


def checked_count(name: str, value: Any) -> int | None:
    """A whole number of at least 0, or None; `ArgumentError` for anything else."""
    if value is None:
        return None
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < 0:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number of at least 0", where="generate")
    return int(value)


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of every call that generates; `LmRunner.generate` says what they mean."""

    stop: str | Sequence[str]
    min_tokens: int
    speculative: str | None
    top_logprobs: int | None
    grammar: Grammar | None
    json_schema: Any
    adapter: str | None


#: The same as parameters, with their defaults, for signatures.
PARAMETERS = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(Request, name, None), annotation=kind.__forward_arg__)
    for name, kind in RequestOptions.__annotations__.items()
]


def request_of(
    ids: PromptLike, n_new: int, sample: Sample, stop_at_eog: bool, options: RequestOptions, **more: Any
) -> Request:
    """The request of a call.

    Args:
        more: further fields, which override the options.

    Raises:
        GrammarError: the grammar or the schema cannot be used.
    """
    fields: dict[str, Any] = {**options, **more}
    form, schema = fields.get("grammar"), fields.pop("json_schema", None)
    if form is not None or schema is not None:
        fields["grammar"] = grammar.chosen_grammar(form, schema)
    return Request(ids, n_new, sample, stop_at_eog, **fields)


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
    turn_ids: Collection[int] = NOTHING
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
    def runs_natively(self) -> bool:
        """Whether one native call may compute several tokens: nobody needs their logits, or looks back for a choice.

        If the consumer looks at each token it may stop at any of them: the sequence has to be able to go back.
        """
        if self.with_logits or self.banned or self.constraint is not None:
            return False
        if not self.is_greedy and (self.drafts or self.sampler.looks_back):
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
