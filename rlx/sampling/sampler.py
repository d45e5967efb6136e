"""The sampler: the state of one generation's choices, from `SampleOpts` to what a device is told for each token.

Sampling stage, between the engine, which has the logits, and `choice.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from functools import cached_property
from math import isfinite
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from rlx.errors import SamplingError
from rlx.sampling.choice import (
    LEAST_SHARE,
    UNIFORM,
    Choice,
    Chosen,
    Ids,
    Words,
    changed,
    choose,
    refuse,
    shares_of,
    surprises,
)
from rlx.sampling.filters import Floats, Logits
from rlx.sampling.options import SampleOpts
from rlx.sampling.penalties import Penalties, Tokenizer


class Constraint(Protocol):
    """A limit on the tokens of one answer; `rlx.grammar.Constraint` implements it."""

    def mask(self) -> Words | None:
        """int32[ceil(vocab / 32)]: bit i % 32 of word i // 32 says whether id i may come next. None: any may."""
        ...

    def accept(self, token: int) -> None:
        """Goes on with a token."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next; `[]` if there is a choice."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        ...

    def copy(self) -> Self: ...


class Sampler:
    """Chooses the tokens of one generation.

    `choice` says how the next token is chosen, a device chooses it, and `advance` goes on with it. `sample` does all
    three in NumPy. The random number generator (PCG64) advances by one number per token, so that equal logits, options
    and seeds give equal tokens. Of equally likely tokens, that with the lowest id comes first.

    Args:
        opts: the options.
        history: tokens before the first draw (the prompt), for the penalties and DRY.
        tokenizer: called for the tokenizer if DRY has sequence breakers that are texts.
        constraint: what the tokens may be. Its mask comes before bias and penalties, so that nothing else can be drawn.

    Raises:
        SamplingError: `opts` is no `SampleOpts`, or it needs a tokenizer and there is none.
    """

    def __init__(
        self,
        opts: SampleOpts,
        history: Iterable[int] = (),
        tokenizer: Callable[[], Tokenizer] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        if not isinstance(opts, SampleOpts):
            hint = "SampleOpts.greedy() is the default"  # type: ignore[unreachable]
            raise SamplingError(f"found {opts!r}, expected a SampleOpts", where="sample", hint=hint)
        self.opts, self._constraint, self._choice = opts, constraint, Choice(opts)
        self._draws = not opts.is_greedy
        self._tokenizer = tokenizer
        if opts.dry_multiplier:  # a text without a tokenizer is refused now
            _ = self._penalties
        self._recent = deque(history, opts.window)
        self._bound = 2 * opts.mirostat_tau  # of the surprise, in bits
        self._surprises: Floats | None = None  # of the last distribution, with Mirostat

    @cached_property
    def _penalties(self) -> Penalties:
        return Penalties(self.opts, self._tokenizer)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.opts.seed))  # a greedy sampler needs none

    def choice(self, vocab: int, banned: Collection[int] = (), *, draws: bool = True) -> Choice:
        """How the next token is chosen from logits, float[vocab]; valid until the next call.

        Args:
            banned: ids that are never chosen.
            draws: whether it takes a random number.

        Raises:
            SamplingError: the bias names an id outside the vocabulary.
            GrammarError: the grammar is too complex at this place of the text.
        """
        choice = self._choice
        choice.mask = None if self._constraint is None else self._constraint.mask()
        if self._recent or banned or self.opts.logit_bias:
            choice.changes = self._penalties.changes(self._recent, banned, vocab)
        else:
            choice.changes = None
        if self.opts.mirostat:
            choice.numbers[LEAST_SHARE] = np.exp2(-self._bound)
        if draws and self._draws:
            choice.numbers[UNIFORM] = self._random.random()
        return choice

    def advance(self, chosen: Chosen, logits: npt.ArrayLike) -> int:
        """Goes on with what was chosen by the last `choice` from `logits`; the token.

        Raises:
            NumericalError: a logit is NaN or +inf, or all are -inf. A single -inf excludes its token.
            SamplingError: bias, `banned` and the mask leave no token.
        """
        if chosen.token < 0:
            refuse(logits, self._choice)
        if self.opts.mirostat and self._draws:
            self._adapt(chosen.surprise)
        self._recent.append(chosen.token)
        if self._constraint is not None:
            self._constraint.accept(chosen.token)
        return chosen.token

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on more than logits and a random number: on the tokens before it, or on a bias."""
        opts = self.opts
        changes = opts.logit_bias or opts.has_penalties or opts.dry_multiplier or opts.mirostat
        return self._constraint is not None or bool(changes)

    def ahead(self, vocab: int, count: int) -> tuple[Choice, Floats]:
        """How the next tokens are chosen if it does not look back, and the random number of each. None is taken yet."""
        choice, generator = self.choice(vocab, draws=False), self._random.bit_generator
        state = generator.state
        numbers = self._random.random(count)
        generator.state = state
        return choice, numbers

    def take(self, tokens: Collection[int]) -> None:
        """Goes on with tokens that were chosen as `ahead` says."""
        self._random.random(len(tokens))
        self._recent.extend(tokens)

    def sample(self, logits: Logits, banned: Collection[int] = ()) -> int:
        """Chooses the next token for `logits`, float[vocab], and appends it to the history.

        Args:
            banned: ids that are never chosen.

        Raises:
            NumericalError, SamplingError, GrammarError: as `choice` and `advance`.
        """
        return self.advance(choose(logits, self.choice(len(logits), banned)), logits)

    def accept(self, token: int) -> None:
        """Appends `token` to the history as if it had been drawn: for callers of `distribution`, and for tokens that a
        grammar forces.

        With Mirostat, the first call after `distribution` also updates the bound, by the surprise of `token` there.
        """
        surprises, self._surprises = self._surprises, None
        if surprises is not None and token < len(surprises):
            self._adapt(float(surprises[token]))
        self._recent.append(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    def distribution(self, logits: Logits, banned: Collection[int] = ()) -> tuple[Ids, Floats]:
        """Ids, ascending, and their probabilities in the next draw (float64, sum 1). Nothing is drawn.

        XTC applies at random; the probabilities average over both cases. With Mirostat they depend on its bound.
        """
        choice = self.choice(len(logits), banned, draws=False)
        values = changed(logits, choice)
        if not (isfinite(logits.max()) and isfinite(values.max())):
            refuse(logits, choice)
        if not self._draws:
            return np.array([values.argmax()]), np.ones(1)
        if self.opts.mirostat:
            self._surprises = surprises(values, choice)
        ids, shares = shares_of(values, choice)
        return ids, shares / shares.sum()

    def copy(self) -> Sampler:
        """A copy with the same state, including the random number generator; for drafts that may be discarded."""
        other = object.__new__(Sampler)
        other.__dict__.update(self.__dict__, _choice=Choice(self.opts), _recent=self._recent.copy())
        other._random = deepcopy(self._random)
        other._constraint = self._constraint.copy() if self._constraint is not None else None
        return other

    def _adapt(self, surprise: float) -> None:
        """Updates Mirostat's bound by the surprise of the token that was drawn."""
        if isfinite(surprise):
            self._bound -= self.opts.mirostat_eta * (surprise - self.opts.mirostat_tau)
