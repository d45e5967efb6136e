"""What a generation is asked for, what comes out of it, and the loop between the two.

Runners stage, under `base.py`. Every way of computing tokens - anew for each one, cached, speculative, several in one
native call - is a source: a generator of tokens, which computes the next one when it is asked and not before. So the
loop that reports and stops is written once, and a source that is closed early has computed nothing in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rlx.errors import ArgumentError
from rlx.runners.exclusive import Use
from rlx.runners.stopping import FinishReason, OnToken, Stopping, answer_text, checked_count
from rlx.sampling import Sampler

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]
Source = Generator[tuple[int, Logits | None], None, None]
"""Tokens with the logits each was chosen by, float32[vocab]; None where nobody asked for them."""


@dataclass
class Ending:
    """What ends a generation, as the caller says it.

    Attributes:
        n_new: tokens at most.
        stop_at_eog: whether the model's stop ids count.
        stop, min_tokens, on_token, pieces: as for `Stopping`.
    """

    n_new: int
    stop_at_eog: bool = True
    stop: str | Sequence[str] = ()
    min_tokens: int = 0
    on_token: OnToken | None = None
    pieces: bool = False

    def behind(
        self, prompt: int, max_seq: int | None, stop_ids: Iterable[int], tokenizer: Callable[[], Tokenizer]
    ) -> Stopping:
        """What ends a generation behind `prompt` tokens in a context of `max_seq`; `ArgumentError` for wrong values."""
        if checked_count("n_new", self.n_new) is None:
            raise ArgumentError("n_new is None, expected a whole number of at least 0", where="generate")
        return Stopping(
            self.n_new,
            room=None if max_seq is None else max_seq - prompt + 1,
            stop_ids=frozenset(stop_ids),
            stop=self.stop,
            tokenizer=tokenizer,
            min_tokens=self.min_tokens,
            on_token=self.on_token,
            pieces=self.pieces,
        )


@dataclass
class Request:
    """One generation.

    Attributes:
        context: the prompt's ids.
        sampler: chooses the tokens.
        stopping: says when it is over.
        tokenizer: gives the tokenizer; `TokenizerError` if there is none.
        speculative: `prompt-lookup`, `mtp` or None.
        watched: whether someone looks at every token as it comes, or at its logits. If nobody does, and the sampler
            takes the likeliest, tokens may be computed several at a time.
        alternatives: how many of the likeliest tokens are reported at each step; None also leaves out the
            log-probabilities of the tokens themselves, where nobody streams.
    """

    context: list[int]
    sampler: Sampler
    stopping: Stopping
    tokenizer: Callable[[], Tokenizer]
    speculative: str | None = None
    watched: bool = True
    alternatives: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether each token but the last is the likeliest, and nobody looks at it before the next one is computed."""
        plain = self.sampler.opts.is_plain_greedy and not self.stopping.banned
        return plain and not self.watched


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could come next.

    Attributes:
        token: its id.
        text: what it stands for, with its leading space; a part of a character is U+FFFD.
        logprob: natural logarithm of the probability that the model gave it.
    """

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a stream.

    Attributes:
        token: its id.
        logprob: natural logarithm of the probability that the model gave it, before penalties, filters and temperature.
        finish_reason: why the stream ends with it; None if it goes on.
        text: the text that is complete with it, perhaps none: a part of a character waits for the rest, and what may
            begin a stop string waits until that is decided. The texts of all steps are `Generation.text`.
        top_logprobs: the likeliest tokens of this step, the likeliest first; as many as `top_logprobs` asked for.
        thinking: in a stream of `chat`, text of the model's reasoning, which is then not in `text`.
    """

    token: int
    logprob: float
    finish_reason: FinishReason | None
    text: str = ""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    thinking: str = ""


class Generation(list[int]):
    """The tokens of a generation: a list of ids, with its text and the reason why it ended.

    Attributes:
        steps: log-probabilities of each token, where `top_logprobs` asked for them; else None.
    """

    def __init__(self, tokens: Iterable[int], request: Request, steps: list[Step] | None = None) -> None:
        super().__init__(tokens)
        self._request, self.steps = request, steps

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self._request.stopping.reason

    @property
    def text(self) -> str:
        """The text of the tokens without control tokens, up to a stop string.

        Raises:
            TokenizerError: the model has no tokenizer that can be built.
        """
        stopping = self._request.stopping
        if stopping.text is not None:
            return stopping.text
        return answer_text(self._request.tokenizer(), self[:-1] if stopping.reason == FinishReason.STOP else self)


class Stream(Iterator[Step]):
    """The tokens of a generation, each computed when it is asked for; an iterator of `Step`.

    A stream that is not finished owns its runner in other threads. A further call in its own thread ends it: the
    stream then raises a `BusyError` if somebody continues it.

    Args:
        use: of the runner.
        steps: what it yields.
    """

    def __init__(self, use: Use, steps: Generator[Step, None, None]) -> None:
        self._use, self._steps = use, steps
        use.closing(steps)

    def __next__(self) -> Step:
        """The next token; `BusyError` if the runner is in use, or was used for something else meanwhile."""
        self._use.resume()
        for step in self._steps:
            return step
        self._use.check()  # another thread may have ended it since we looked
        raise StopIteration

    def mapped(self, change: Callable[[Generator[Step, None, None]], Generator[Step, None, None]]) -> Stream:
        """The same stream with changed steps, in place of this one."""
        return Stream(self._use, change(self._steps))

    def close(self) -> None:
        """Ends it; more than once does no harm. The runner's session keeps the tokens that were computed."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def stepwise(first: Callable[[], Logits], after: Callable[[int], Logits], request: Request) -> Source:
    """The source that computes a token at a time.

    Args:
        first: the logits after the prompt.
        after: the logits after one more token.
    """
    logits = first()
    while True:
        token = request.sampler.sample(logits, request.stopping.banned)
        yield token, logits
        logits = after(token)


def tokens(source: Source, stopping: Stopping) -> Source:
    """What a source gives until the generation is over; a source that is not needed is never started."""
    with closing(source):
        while stopping.reason is None:
            token, logits = next(source)
            stopping.push(token)
            yield token, logits


def steps(source: Source, request: Request) -> Generator[Step, None, None]:
    """As `tokens`, with texts and log-probabilities."""
    stopping = request.stopping
    with closing(tokens(source, stopping)) as chosen:
        for token, logits in chosen:
            assert logits is not None, "a watched request gets them"
            yield step_of(token, logits, request)


def step_of(token: int, logits: Logits, request: Request) -> Step:
    """The token that was pushed last as a step."""
    logprob = float(log_probs(logits[None], [token])[0])
    stopping = request.stopping
    return Step(token, logprob, stopping.reason, stopping.piece, _likeliest(token, logprob, logits, request))


def _likeliest(token: int, logprob: float, logits: Logits, request: Request) -> tuple[TokenLogprob, ...]:
    """The likeliest tokens of a step, of equals the lower id first."""
    count = min(request.alternatives or 0, len(logits))
    if not count:
        return ()
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    among = np.flatnonzero(logits >= bound)
    ids = among[np.argsort(-logits[among], kind="stable")][:count].tolist()
    bytes_of, shift = request.tokenizer().token_bytes, logprob - float(logits[token])  # log softmax: logit plus shift
    return tuple(TokenLogprob(i, bytes_of(i).decode("utf-8", "replace"), float(logits[i]) + shift) for i in ids)


def collected(source: Source, request: Request, use: Use) -> Generation:
    """All of a generation."""
    if request.alternatives is None:
        chosen = tokens(source, request.stopping)
        use.closing(chosen)
        with closing(chosen):
            return Generation((token for token, _ in chosen), request)
    found = steps(source, request)
    use.closing(found)
    with closing(found):
        kept = list(found)
    return Generation((step.token for step in kept), request, kept)


def log_probs(logits: Logits, ids: Iterable[int]) -> npt.NDArray[np.float32]:
    """log softmax(logits)[i, ids[i]]: float32[n] of float32[n, vocab]; sums of exponentials in float64."""
    found = np.empty(len(logits), np.float32)
    for i, (row, token) in enumerate(zip(logits, ids, strict=True)):  # a row at a time: no second [n, vocab]
        top: Any = row.max()
        found[i] = row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
    return found
