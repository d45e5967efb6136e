"""A job: one request inside the engine loop, from its prompt to its last token.

Runners stage. The thread that drives the loop computes a job and adds tokens; a handle reads them in the consumer's
thread. Every field has one writer, named below, so neither side ever waits for a lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx.engine.kv.prefix import Keys
from rlx.engine.kv.prompt_embeddings import keys_of
from rlx.engine.loop.bell import Bell
from rlx.engine.loop.request_stats import ActiveRequest, JobRecord
from rlx.engine.speculation.drafts import Drafts
from rlx.sampling.masks import Constraint

if TYPE_CHECKING:
    from rlx.engine.loop.request_trace import JobTrack

Logits = npt.NDArray[np.float32]

AHEAD = 8  # most tokens that a job computes before its consumer has taken them

QUIET = 0.001  # seconds of tokens that a consumer may get together, if they come so quickly

_numbers = itertools.count()


DraftsOf = Callable[[Any], Drafts | None]
"""Makes the drafts for a sequence; None if there are none now."""


class Chooser(Protocol):
    """Chooses the next token from logits; `rlx.sampling.Sampler` does."""

    def sample(self, logits: Logits, banned: Collection[int] = ()) -> int: ...

    def accept(self, token: int) -> None: ...


class Images(Protocol):
    """The images of a prompt; `rlx.engine.images.PlacedImages` implements it."""

    def encoded(self) -> Generator[None, None, Any]:
        """Encodes them, a piece between two `yield`s; the prompt embeddings that they become."""
        ...


class Job:
    """One request of the loop.

    Args:
        prompt: token ids, at least one.
        sampler: chooses the tokens; used by the thread that drives only.
        limit: maximum number of tokens, at least one.
        stop_ids: tokens that end it.
        turn_ids: tokens that end a turn of a conversation: prompts branch there.
        min_tokens: until there are this many tokens, `stop_ids` are not chosen.
        watched: whether the consumer looks at each token as it comes: it is then woken for each, and the job waits for
            it after `AHEAD` tokens. If not, the consumer is woken once, at the end.
        with_logits: whether the consumer needs the logits that each token was chosen from.
        is_greedy: whether the likeliest token is always chosen, so that native code may choose it.
        drafts_of: makes the drafts for a sequence that begins; None for no drafts.
        priority: a job with a higher one goes first.
        seconds: time from its submission after which the job fails; None for never.
        embeddings: rows in place of the embeddings of some ids, which the engine has checked.
        images: the images of the prompt; the job begins when they are encoded.
        keeps: whether the sequence stays open when the job ends; its owner then closes it.
        replaces: a sequence that nobody needs any more once the job starts; it is closed before.
        label: names the job in errors; its position by default.
        bell: rings when there is something new for the consumer; several jobs may share one.
        constraint: what the tokens may be; the sampler applies it.
        salt: only prompts with the same salt share what was computed of them.

    Attributes:
        number: the order of arrival.
        sequence: the tokens in the cache; None before the job starts. Written by the loop.
        tokens: the tokens so far. Written by the loop.
        rows: logits of the tokens that the consumer has not taken yet. The loop appends, the consumer pops.
        forced: tokens that must come next by the grammar. Written by the loop.
        complete_at: number of tokens of an answer that the grammar has ended, or None. Written by the loop.
        ended, error: whether there will be no more tokens, and why not if it is an error. Written by the loop.
        branches: where prompts that wait for this one part from it. Written by the loop.
        drafts: makes drafts of its next tokens, if it has any. Written by the loop.
        deadline: time by the loop's clock after which it fails. Written by the loop.
        record: when it changed its phase, for statistics.
        track: where a trace shows it, if one is recorded. Written by the loop.
        taken: number of tokens that the consumer has taken. Written by the consumer.
        stopped_at: how many tokens the consumer uses, if it ended the job. Written by the consumer.
        entered: whether the loop knows it. Written by the loop.
        held: whether the loop waits for the consumer. Written by the loop.
        looked_up: whether the states of its prompt were looked up on disk. Written by the loop.
        loading: whether they are being read; it begins afterwards. Written by the loop.
        paused: whether its state was saved elsewhere, because the cache was full. Written by the loop.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampler: Chooser,
        limit: int,
        *,
        stop_ids: Collection[int] = frozenset(),
        turn_ids: Collection[int] = frozenset(),
        min_tokens: int = 0,
        watched: bool = True,
        with_logits: bool = False,
        is_greedy: bool = False,
        priority: int = 0,
        seconds: float | None = None,
        drafts_of: DraftsOf | None = None,
        embeddings: Any = None,
        images: Images | None = None,
        keeps: bool = False,
        replaces: Any = None,
        label: str | None = None,
        bell: Bell | None = None,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> None:
        self.prompt, self.sampler, self.limit = list(prompt), sampler, limit
        self.stop_ids, self.turn_ids, self.min_tokens = frozenset(stop_ids), frozenset(turn_ids), min_tokens
        self.watched, self.with_logits, self.is_greedy = watched, with_logits, is_greedy
        self.drafts_of, self.embeddings, self.images, self.keeps = drafts_of, embeddings, images, keeps
        self.salt = salt
        self.priority, self.seconds, self.number = priority, seconds, next(_numbers)
        self.deadline: float | None = None
        self.sequence: Any = None
        self.drafts: Drafts | None = None
        self.branches: set[int] = set()
        self.constraint, self.complete_at = constraint, None if constraint is None or not constraint.is_over else 0
        self.forced: deque[int] = deque()
        self.tokens: list[int] = []
        self.rows: deque[Logits] = deque()
        self.entered = self.ended = self.held = self.paused = self.looked_up = self.loading = False
        self.stopped_at: int | None = None
        self.error: BaseException | None = None
        self.taken = 0
        self.rung = 0.0  # when the consumer was last woken, by the loop's clock
        self.last_time: float | None = None  # when the last token came, by the loop's clock
        self.replaces, self.label, self.bell = replaces, label, bell or Bell()
        self.record = JobRecord()
        self.track: JobTrack | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Sorts jobs: by priority, then by arrival."""
        return -self.priority, self.number

    @cached_property
    def keys(self) -> Keys:
        """What stands at each position of the prompt, for comparison with other prompts."""
        return keys_of(self.prompt, self.embeddings, self.salt)

    @property
    def ends_of_turns(self) -> list[int]:
        """Lengths of the prompt where others may part from it: after its first turn (system and tools) and its last."""
        ends = [i + 1 for i, token in enumerate(self.prompt) if token in self.turn_ids] if self.turn_ids else []
        return ends[:1] + ends[1:][-1:]

    @property
    def done(self) -> int:
        """How many tokens of the prompt are computed."""
        return 0 if self.sequence is None else min(len(self.sequence), len(self.prompt))

    @property
    def left(self) -> int:
        """Maximum number of further tokens."""
        return self.limit - len(self.tokens)

    @property
    def banned(self) -> Collection[int]:
        """Ids that the next token must not be."""
        return self.stop_ids if len(self.tokens) < self.min_tokens else ()

    @property
    def is_ahead(self) -> bool:
        """Whether the consumer has to take tokens before more are computed."""
        return self.watched and len(self.tokens) - self.taken >= AHEAD

    @property
    def runs_natively(self) -> bool:
        """Whether one native call may compute several tokens: greedy ones, and nobody needs their logits.

        If the consumer looks at each token it may stop at any of them: the sequence has to be able to go back.
        """
        if not self.is_greedy or self.with_logits or self.banned or self.constraint is not None:
            return False
        return not (self.watched and (self.drafts or self.sequence.recurrent))

    def choose(self, logits: Logits) -> int:
        """The next token, for these logits, float32[vocab]."""
        return self.take_forced() if self.is_forced() else self.sampler.sample(logits, self.banned)

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

    def is_last(self, token: int) -> bool:
        """Whether the job ends with this token, which the sampler has chosen or accepted."""
        count = len(self.tokens) + 1
        if count >= self.limit or (token in self.stop_ids and count > self.min_tokens):
            return True
        return self.constraint is not None and self.constraint.is_over

    def active(self) -> ActiveRequest:
        """What can be said of it while it is computed, in any thread."""
        sizes = len(self.prompt), self.record.cached, self.done, len(self.tokens)
        return ActiveRequest(self.number, *sizes, self.limit, self.drafts is not None, self.paused)

    def encode(self, fail: Callable[[Job, BaseException], object]) -> Generator[None, None, None]:
        """For a task: encodes the images, unless the job ends before.

        Args:
            fail: called with the job and the error if an image cannot be encoded.
        """
        assert self.images is not None
        work = self.images.encoded()
        try:
            while not self.ended:
                next(work)
                yield
        except StopIteration as done:
            self.embeddings, self.images = done.value, None
        except Exception as error:
            fail(self, error)
        finally:
            work.close()

    def load(
        self, work: Generator[None, None, None], done: Callable[[Job, BaseException | None], object]
    ) -> Generator[None, None, None]:
        """For a task: reads states of the prompt's beginning, unless the job ends before.

        Args:
            done: called with the job, and the error if there was one, when it may begin.
        """
        error = None
        try:
            while not self.ended:
                next(work)
                yield
        except StopIteration:
            pass
        except Exception as found:
            error = found
        finally:
            work.close()
            done(self, error)

    def add(self, token: int, row: Logits | None = None) -> bool:
        """Adds a token and a copy of its logits; returns whether it is the last one. The caller rings the bell."""
        last = self.is_last(token)
        if last and self.constraint is not None and self.constraint.is_over:
            self.complete_at = len(self.tokens) + 1  # before the token: whoever sees the token finds it
        if row is not None and self.with_logits:
            self.rows.append(row.copy())  # before the token: whoever sees the token finds its row
        self.tokens.append(token)
        return last

    def rewind(self, length: int) -> None:
        """Drops what follows the first `length` tokens of the sequence."""
        self.sequence.rewind(length)
        if self.drafts:
            self.drafts.forget(length)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the job, once, and tells the consumer."""
        if not self.ended:
            self.error, self.ended = error, True
            self.bell.ring()


class Task:
    """A call between two steps: a generator, which stops at each `yield` for a step of the jobs.

    Attributes:
        result, error: what it returned or raised, once `ended`.
        cancelled: the caller has no interest any more. Written by the caller.
    """

    priority = 0

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self.number = work, next(_numbers)
        self._generator: Generator[None, None, Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = self.cancelled = False
        self.bell = Bell()

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number

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
        self.bell.ring()
