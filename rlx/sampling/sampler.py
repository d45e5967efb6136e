"""From logits to a token: the sampler that follows `SampleOpts`.

Sampling stage, between the last row of logits and the next token. `penalties.py` changes logits, `filters.py` and
`mirostat.py` say which tokens are left, and one uniform random number a token picks among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericalError, SamplingError
from rlx.sampling.filters import Floats, Logits, filters_of, tempered, weights, xtc_excluded
from rlx.sampling.mirostat import Mirostat
from rlx.sampling.options import SampleOpts
from rlx.sampling.penalties import Dry, add_bias, penalize

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.intp]


class Sampler:
    """Chooses the tokens of one generation.

    The generator of random numbers (PCG64) advances by one number from token to token: equal logits, options and seed
    give equal tokens, and two draws of one sampler are independent. Ties are broken by the id, the lowest first.

    Args:
        opts: the options.
        history: tokens before the first draw (the prompt), for the penalties and DRY.
        tokenizer: called for the tokenizer where DRY has sequence breakers that are texts.

    Raises:
        SamplingError: `opts` is something else, or it needs a tokenizer and there is none.
    """

    def __init__(
        self, opts: SampleOpts, history: Iterable[int] = (), tokenizer: Callable[[], Tokenizer] | None = None
    ) -> None:
        if not isinstance(opts, SampleOpts):
            hint = "SampleOpts.greedy() is the default"  # type: ignore[unreachable]
            raise SamplingError(f"found {opts!r}, expected a SampleOpts", where="sample", hint=hint)
        self.opts = opts
        self._random = np.random.Generator(np.random.PCG64(opts.seed))
        self._filters = filters_of(opts)
        self._mirostat = Mirostat(opts.mirostat_tau, opts.mirostat_eta) if opts.mirostat else None
        self._dry = Dry(opts, tokenizer) if opts.dry_multiplier else None
        self._recent = deque(history, _window(opts))

    def sample(self, logits: Logits, banned: Collection[int] = ()) -> int:
        """The next token for `logits`, float[vocab]; it joins the history.

        Args:
            banned: ids that are not to be chosen, whatever their logits.

        Raises:
            NumericalError: a NaN or +inf among the logits, or nothing but -inf. A single -inf excludes its token.
            SamplingError: bias and `banned` leave no token, or name one outside the vocabulary.
        """
        token = self._likeliest(logits, banned) if self.opts.is_greedy else self._draw(logits, banned)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Takes `token` into the history as if it had been drawn, for who draws from `distribution` or has a draft.

        With Mirostat it moves the bound too, by the surprise of `token` in the distribution that was computed last.
        """
        self._recent.append(token)
        if self._mirostat:
            self._mirostat.accept(token)

    def distribution(self, logits: Logits, banned: Collection[int] = ()) -> tuple[Ids, Floats]:
        """Ascending ids and their probabilities (float64, sum 1) as the next draw sees them; it draws nothing.

        XTC acts in some draws only: the probabilities are those over both cases. With Mirostat they depend on its
        bound, which moves from token to token.
        """
        if self.opts.is_greedy:
            return np.array([self._likeliest(logits, banned)]), np.ones(1)
        ids, shares = self._shares(logits, banned)
        return np.arange(len(shares)) if ids is None else ids, shares / shares.sum()

    def copy(self) -> Sampler:
        """Another sampler that goes on from the same state, random numbers included; for drafts that may be dropped."""
        other = object.__new__(Sampler)
        other.opts, other._filters, other._dry = self.opts, self._filters, self._dry
        other._random, other._recent = deepcopy(self._random), self._recent.copy()
        other._mirostat = self._mirostat.copy() if self._mirostat else None
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
        """Over the draws in which XTC leaves out the top choices, and those in which it does not."""
        gone, probability = xtc_excluded(values, self.opts.xtc_threshold), self.opts.xtc_probability
        left = np.delete(np.arange(len(values)), gone)
        without = weights(values[left], self.opts.temperature)
        shares *= (1 - probability) / shares.sum()
        shares[left] += without * (probability / without.sum())
        return shares

    def _filtered(self, values: Logits) -> tuple[Ids | None, Logits]:
        """What the filters leave: ascending ids, or None for all, and their logits."""
        ids: Ids | None = None
        for keep in self._filters:
            places = keep(values)
            ids, values = (places if ids is None else ids[places]), values[places]
        return ids, values

    def _changed(self, logits: Logits, banned: Collection[int]) -> Logits:
        """The logits after bias, penalties and DRY; the same array where none of them has anything to do."""
        opts = self.opts
        if not (opts.logit_bias or banned or self._recent):
            return logits
        values = logits.astype(np.float64)
        add_bias(values, opts.logit_bias)  # type: ignore[arg-type]
        values[[token for token in banned if token < len(values)]] = -np.inf
        recent = np.fromiter(self._recent, np.intp, len(self._recent))
        if opts.has_penalties:
            penalize(values, _last(recent, opts.repetition_window), opts)
        if self._dry:
            self._dry.penalize(values, _last(recent, opts.dry_penalty_last_n))
        return values


def _window(opts: SampleOpts) -> int | None:
    """How much of the history is looked at; None is all of it."""
    windows = [opts.repetition_window] if opts.has_penalties else []
    windows += [opts.dry_penalty_last_n] if opts.dry_multiplier else []
    bounded = [window for window in windows if window is not None]
    return max(bounded, default=0) if len(bounded) == len(windows) else None


def _last(recent: Ids, window: int | None) -> Ids:
    return recent if window is None else recent[max(len(recent) - window, 0) :]


def _check_top(top: Any, logits: Logits) -> None:
    """`SamplingError` if bias and bans leave no token, `NumericalError` if the model's arithmetic is broken."""
    if isfinite(top):
        return
    if top == -np.inf and isfinite(logits.max()):
        hint = "ban fewer tokens: logit_bias of -inf and min_tokens do"
        raise SamplingError("no token is left to choose", where="sampling", hint=hint)
    raise NumericalError(
        f"the largest logit is {top}", where="sampling",
        hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
    )  # fmt: skip
