"""A generation: its request, its result, and the loop between them.

Runners stage, under `base.py`. Tokens come from a source: a lazy generator, which computes each token on demand. There
is one source for each way of computing tokens: without a cache, cached, speculative, and several tokens per native
call. The loop that reports and stops is the same for all. A source that is closed early has computed no extra tokens.
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
from rlx.runners.generation.exclusive import Use
from rlx.runners.generation.stopping import FinishReason, OnToken, Stopping, answer_text, checked_count
from rlx.sampling import Sampler

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]
Source = Generator[tuple[int, Logits | None], None, None]
"""Tokens with the logits each was chosen from, float32[vocab]; None if nobody requested them."""


@dataclass
class Ending:
    """The caller's limits for a generation.

    Attributes:
        n_new: maximum number of tokens.
        stop_at_eog: whether the model's stop ids end it.
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
        """The `Stopping` after `prompt` tokens in a context of `max_seq`; `ArgumentError` for invalid values."""
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
        stopping: decides when the generation ends.
        tokenizer: returns the tokenizer; `TokenizerError` if there is none.
        speculative: `prompt-lookup`, `mtp` or None.
        watched: whether a caller observes each token, or its logits, before the next one is computed. If not, and the
            sampler is greedy, one native call may compute several tokens.
        alternatives: how many of the likeliest tokens each step reports. None reports none, and no log-probabilities of
            the chosen tokens either, except in a stream.
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
        """Whether tokens are greedy and unobserved, so that one native call may compute several of them."""
        plain = self.sampler.opts.is_plain_greedy and not self.stopping.banned
        return plain and not self.watched


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A candidate for the next token.

    Attributes:
        token: its id.
        text: its text, with its leading space; an incomplete character is U+FFFD.
        logprob: natural logarithm of its probability under the model.
    """

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a stream.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability under the model, before penalties, filters and temperature.
        finish_reason: why the stream ends with it; None if it continues.
        text: the text that this token completes, possibly empty. An incomplete character is held back, and so is a
            possible beginning of a stop string. The texts of all steps together are `Generation.text`.
        top_logprobs: the likeliest tokens of this step, the likeliest first; as many as `top_logprobs` requested.
        thinking: in a stream of `chat`, text of the model's reasoning; it is not part of `text`.
    """

    token: int
    logprob: float
    finish_reason: FinishReason | None
    text: str = ""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    thinking: str = ""


class Generation(list[int]):
    """The result of a generation: a list of token ids, with its text and the reason why it ended.

    Attributes:
        steps: log-probabilities of each token if `top_logprobs` requested them; else None.
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
    """The tokens of a generation, computed on demand: an iterator of `Step`.

    An unfinished stream blocks its runner for other threads. A call of the runner in the same thread ends the stream;
    continuing the stream then raises `BusyError`.

    Args:
        use: the exclusive use of the runner.
        steps: the steps.
    """

    def __init__(self, use: Use, steps: Generator[Step, None, None]) -> None:
        self._use, self._steps = use, steps
        use.closing(steps)

    def __next__(self) -> Step:
        """The next token; `BusyError` if the runner is in use, or another call has ended the stream."""
        self._use.resume()
        for step in self._steps:
            return step
        self._use.check()  # another thread may have ended it since the check above
        raise StopIteration

    def mapped(self, change: Callable[[Generator[Step, None, None]], Generator[Step, None, None]]) -> Stream:
        """Replaces this stream by one with transformed steps."""
        return Stream(self._use, change(self._steps))

    def close(self) -> None:
        """Ends the stream. Can be called more than once. The session keeps the tokens that were computed."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def stepwise(first: Callable[[], Logits], after: Callable[[int], Logits], request: Request) -> Source:
    """The source that computes one token per step.

    Args:
        first: returns the logits after the prompt.
        after: returns the logits after one more token.
    """
    logits = first()
    while True:
        token = request.sampler.sample(logits, request.stopping.banned)
        yield token, logits
        logits = after(token)


def tokens(source: Source, stopping: Stopping) -> Source:
    """The tokens of a source until the generation ends; a source that is not needed is never started."""
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
    """The `Step` of the token that was pushed last."""
    logprob = float(log_probs(logits[None], [token])[0])
    stopping = request.stopping
    return Step(token, logprob, stopping.reason, stopping.piece, _likeliest(token, logprob, logits, request))


def _likeliest(token: int, logprob: float, logits: Logits, request: Request) -> tuple[TokenLogprob, ...]:
    """The likeliest tokens of a step; ties go to the lower id."""
    count = min(request.alternatives or 0, len(logits))
    if not count:
        return ()
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    among = np.flatnonzero(logits >= bound)
    ids = among[np.argsort(-logits[among], kind="stable")][:count].tolist()
    bytes_of, shift = request.tokenizer().token_bytes, logprob - float(logits[token])  # log softmax is logit + shift
    return tuple(TokenLogprob(i, bytes_of(i).decode("utf-8", "replace"), float(logits[i]) + shift) for i in ids)


def collected(source: Source, request: Request, use: Use) -> Generation:
    """Runs a generation to its end."""
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
    """log softmax(logits)[i, ids[i]]: float32[n] from float32[n, vocab]; sums of exponentials in float64."""
    found = np.empty(len(logits), np.float32)
    for i, (row, token) in enumerate(zip(logits, ids, strict=True)):  # row by row: avoids a second [n, vocab] array
        top: Any = row.max()
        found[i] = row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
    return found
