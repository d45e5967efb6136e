"""The record of a request over HTTP while it is answered: for its line in the log, metrics, headers and spans.

Server stage. The outermost middleware makes a record; what computes an answer finds it by `current` and adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from rlx.errors import DeadlineError
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
    begun: float,
    choices: Sequence[Sequence[Handle]],
    limits: Sequence[int | None],
    prompts: Callable[[], list[str]],
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
