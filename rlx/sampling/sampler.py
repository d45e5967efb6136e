"""The sampler: from logits to a token, as `SampleOpts` says.

Sampling stage, between the last row of logits and the next token. `penalties.py` changes logits, `filters.py` and
`mirostat.py` select tokens, and one uniform random number draws one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericalError, SamplingError
from rlx.sampling.filters import Floats, Logits, filters_of, tempered, weights, xtc_excluded
from rlx.sampling.masks import Constraint, masked
from rlx.sampling.mirostat import Mirostat
from rlx.sampling.options import SampleOpts
from rlx.sampling.penalties import Bias, Dry, penalize

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.intp]


class Sampler:
    """Chooses the tokens of one generation.

    The random number generator (PCG64) advances by one number per token, so that equal logits, options and seeds give
    equal tokens. Of equally likely tokens, that with the lowest id comes first.

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
        self.opts, self._constraint = opts, constraint
        self._filters, self._bias = filters_of(opts), Bias(opts.logit_bias)  # type: ignore[arg-type]
        self._mirostat = Mirostat(opts.mirostat_tau, opts.mirostat_eta) if opts.mirostat else None
        self._dry = Dry(opts, tokenizer) if opts.dry_multiplier else None
        self._recent = deque(history, _window(opts))

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.opts.seed))  # a greedy sampler needs none

    def sample(self, logits: Logits, banned: Collection[int] = ()) -> int:
        """Chooses the next token for `logits`, float[vocab], and appends it to the history.

        Args:
            banned: ids that are never chosen.

        Raises:
            NumericalError: a logit is NaN or +inf, or all are -inf. A single -inf excludes its token.
            SamplingError: bias, `banned` and the mask leave no token, or name one outside the vocabulary.
            GrammarError: the grammar is too complex at this place of the text.
        """
        token = self._likeliest(logits, banned) if self.opts.is_greedy else self._draw(logits, banned)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Appends `token` to the history as if it had been drawn: for callers of `distribution`, and for tokens that a
        grammar forces.

        With Mirostat this also updates the bound, by the surprise of `token` in the last distribution computed.
        """
        self._recent.append(token)
        if self._mirostat:
            self._mirostat.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    def distribution(self, logits: Logits, banned: Collection[int] = ()) -> tuple[Ids, Floats]:
        """Ids, ascending, and their probabilities in the next draw (float64, sum 1). Nothing is drawn.

        XTC applies at random; the probabilities average over both cases. With Mirostat they depend on its bound.
        """
        if self.opts.is_greedy:
            return np.array([self._likeliest(logits, banned)]), np.ones(1)
        ids, shares = self._shares(logits, banned)
        return np.arange(len(shares)) if ids is None else ids, shares / shares.sum()

    def copy(self) -> Sampler:
        """A copy with the same state, including the random number generator; for drafts that may be discarded."""
        other = object.__new__(Sampler)
        other.opts, other._filters, other._bias, other._dry = self.opts, self._filters, self._bias, self._dry
        other._random, other._recent = deepcopy(self._random), self._recent.copy()
        other._mirostat = self._mirostat.copy() if self._mirostat else None
        other._constraint = self._constraint.copy() if self._constraint is not None else None
        return other

    def _likeliest(self, logits: Logits, banned: Collection[int]) -> int:
        values = self._changed(logits, banned)
        token = int(values.argmax())  # the place of a NaN, if there is one
        _check_top(values[token], logits)
        return token

    def _draw(self, logits: Logits, banned: Collection[int]) -> int:
        ids, shares = self._shares(logits, banned)
        rising = shares.cumsum(out=shares)
        at = rising.searchsorted(self._random.random() * rising[-1], side="right")
        last = rising.searchsorted(rising[-1])  # where rounding must not go beyond: the last token that has a share
        place = int(min(at, last))
        return place if ids is None else int(ids[place])

    def _shares(self, logits: Logits, banned: Collection[int]) -> tuple[Ids | None, Floats]:
        """Ids that may be drawn, ascending, or None for all, and their probabilities up to a factor."""
        values, temperature = self._changed(logits, banned), self.opts.temperature
        _check_top(values.max(), logits)
        if self._mirostat:
            values = tempered(values, temperature)
            kept = self._mirostat.keep(values)
            return kept, weights(values[kept])
        ids, values = self._filtered(values)
        shares = weights(values, temperature)
        return ids, self._mixed(values, shares) if self.opts.xtc_probability else shares

    def _mixed(self, values: Logits, shares: Floats) -> Floats:
        """The mixture of the draws in which XTC applies and of those in which it does not."""
        gone, probability = xtc_excluded(values, self.opts.xtc_threshold), self.opts.xtc_probability
        left = np.delete(np.arange(len(values)), gone)
        without = weights(values[left], self.opts.temperature)
        shares *= (1 - probability) / shares.sum()
        shares[left] += without * (probability / without.sum())
        return shares

    def _filtered(self, values: Logits) -> tuple[Ids | None, Logits]:
        """The tokens that the filters keep: ascending ids, or None for all, and their logits."""
        ids: Ids | None = None
        for keep in self._filters:
            places = keep(values)
            ids, values = (places if ids is None else ids[places]), values[places]
        return ids, values

    def _changed(self, logits: Logits, banned: Collection[int]) -> Logits:
        """The logits after mask, bias, penalties and DRY; the same array if none of them applies."""
        opts = self.opts
        if self._constraint is not None and (words := self._constraint.mask()) is not None:
            logits = masked(logits, words)
        if not (opts.logit_bias or banned or self._recent):
            return logits
        values = logits.astype(np.float64)
        self._bias.add(values)
        values[[token for token in banned if token < len(values)]] = -np.inf
        recent = np.fromiter(self._recent, np.intp, len(self._recent))
        if opts.has_penalties:
            penalize(values, _last(recent, opts.repetition_window), opts)
        if self._dry:
            self._dry.penalize(values, _last(recent, opts.dry_penalty_last_n))
        return values


def _window(opts: SampleOpts) -> int | None:
    """How many tokens of the history are needed; None is all."""
    windows = [opts.repetition_window] if opts.has_penalties else []
    windows += [opts.dry_penalty_last_n] if opts.dry_multiplier else []
    bounded = [window for window in windows if window is not None]
    return max(bounded, default=0) if len(bounded) == len(windows) else None


def _last(recent: Ids, window: int | None) -> Ids:
    return recent if window is None else recent[max(len(recent) - window, 0) :]


def _check_top(top: Any, logits: Logits) -> None:
    """`SamplingError` if bias and bans exclude every token, `NumericalError` if a logit is NaN or infinite."""
    if isfinite(top):
        return
    if top == -np.inf and isfinite(logits.max()):
        hint = "ban fewer tokens: logit_bias of -inf and min_tokens do, also under a grammar"
        raise SamplingError("bias and bans exclude every token", where="sampling", hint=hint)
    raise NumericalError(
        f"the largest logit is {top}", where="sampling",
        hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
    )  # fmt: skip
