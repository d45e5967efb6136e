"""What a generation is asked for, what comes out of it, and the loop between the two.

Runners stage, under `base.py`. Every way of computing tokens - anew for each one, cached, speculative, several in one
native call - is a source: an iterator of tokens, which computes the next one when it is asked and not before. So the
loop that reports and stops is written once, and a source that is closed early has computed nothing in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.runners.stopping import FinishReason, Stopping
from rlx.sampling import Sampler

Logits = npt.NDArray[np.float32]
Source = Iterator[tuple[int, Logits | None]]
"""Tokens with the logits each was chosen by, float32[vocab]; None where nobody asked for them."""


@dataclass
class Request:
    """One generation.

    Attributes:
        context: the prompt's ids.
        sampler: chooses the tokens.
        stopping: says when it is over.
        speculative: `prompt-lookup`, `mtp` or None.
        watched: whether someone looks at every token as it comes, or at its logits. If nobody does, and the sampler
            takes the likeliest, tokens may be computed several at a time.
    """

    context: list[int]
    sampler: Sampler
    stopping: Stopping
    speculative: str | None
    watched: bool

    @property
    def is_free(self) -> bool:
        """Whether each token but the last is the likeliest, and nobody looks at it before the next one is computed."""
        plain = self.sampler.opts.is_plain_greedy and not self.stopping.banned
        return plain and not self.watched


class Generation(list[int]):
    """The tokens of a generation: a list, and why it ended.

    Attributes:
        finish_reason: None only if it was cut off by an error.
        text: the text up to a stop string; None if none was asked for.
    """

    def __init__(self, tokens: Iterable[int] = (), stopping: Stopping | None = None) -> None:
        super().__init__(tokens)
        self._stopping = stopping

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stopping.reason if self._stopping else None

    @property
    def text(self) -> str | None:
        return self._stopping.text if self._stopping else None


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a stream.

    Attributes:
        token: its id.
        logprob: natural logarithm of the probability that the model gave it, before penalties, filters and temperature.
        finish_reason: why the stream ends with it; None if it goes on.
    """

    token: int
    logprob: float
    finish_reason: FinishReason | None


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
    with closing(source):  # type: ignore[type-var]
        while stopping.reason is None:
            token, logits = next(source)
            stopping.push(token)
            yield token, logits


def steps(source: Source, stopping: Stopping) -> Iterator[Step]:
    """As `tokens`, with log-probabilities."""
    with closing(tokens(source, stopping)) as chosen:  # type: ignore[type-var]
        for token, logits in chosen:
            assert logits is not None, "a watched request gets them"
            yield Step(token, float(log_probs(logits[None], [token])[0]), stopping.reason)


def log_probs(logits: Logits, ids: Iterable[int]) -> npt.NDArray[np.float32]:
    """log softmax(logits)[i, ids[i]]: float32[n] of float32[n, vocab]; sums of exponentials in float64."""
    found = np.empty(len(logits), np.float32)
    for i, (row, token) in enumerate(zip(logits, ids, strict=True)):  # a row at a time: no second [n, vocab]
        top: Any = row.max()
        found[i] = row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))
    return found
