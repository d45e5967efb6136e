"""The choice of a token: what a device is told beside the logits of a row, and what it then does, in NumPy.

Sampling stage: `sampler.py` makes choices, and devices carry them out. The function `choose` here is their meaning:
every device finds the same tokens. For devices without a chooser of their own the host chooses (`choose_rows`). It
looks at few of a row's logits: with top-k, and without randomness, only tokens count that may be among the largest. Of
some sets of tokens, those with the largest maxima have one each that is at least the least of these maxima: so tokens
below this border are too small, unless a change raises them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log, log2
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from rlx.errors import NumericalError, SamplingError
from rlx.sampling.filters import Floats, Logits, exp, filters_of, tempered, total, weights, xtc_excluded
from rlx.sampling.options import SampleOpts

Words = npt.NDArray[np.int32]
Ids = npt.NDArray[np.intp]

#: The numbers of a choice that a device reads, float64, in this order: options, then the logarithm of `min_p`, a random
#: number in [0, 1), and the smallest probability that Mirostat keeps.
NUMBERS = (
    "temperature", "top_n_sigma", "top_k", "typical_p", "top_p", "xtc_probability", "xtc_threshold",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "mirostat", "log_min_p", "uniform", "least_share",
)  # fmt: skip
LOG_MIN_P, UNIFORM, LEAST_SHARE = range(len(NUMBERS) - 3, len(NUMBERS))


class Changes(NamedTuple):
    """Changes of logits, which apply in order: a penalty for repetition where the count is above 0, else an addition.

    Attributes:
        ids: of tokens; those outside the vocabulary are left out.
        counts: how often the token occurs in the window of the penalties, or 0.
        amounts: what is added to its logit.
    """

    ids: npt.NDArray[np.int32]
    counts: Floats
    amounts: Floats


@dataclass(slots=True)
class Choice:
    """How a token is chosen from a row of logits.

    Attributes:
        opts: the options.
        numbers: what a device reads of them, see `NUMBERS`.
        mask: int32 words whose bit i % 32 of word i // 32 says whether token i may be chosen; None: any may. It comes
            first.
        changes: of the logits; they come after the mask.
    """

    opts: SampleOpts
    mask: Words | None = None
    changes: Changes | None = None
    numbers: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = np.zeros(len(NUMBERS))
        self.numbers[:LOG_MIN_P] = [getattr(self.opts, name) for name in NUMBERS[:LOG_MIN_P]]
        self.numbers[LOG_MIN_P] = log(self.opts.min_p) if self.opts.min_p else -np.inf


class Chosen(NamedTuple):
    """A token chosen from a row.

    Attributes:
        token: its id; -1 if no token can be chosen: `refuse` says why.
        is_finite: whether all logits of the row are finite. One of -inf excludes its token.
        surprise: -log2 of the token's probability under Mirostat, before any token is removed; else 0.
    """

    token: int
    is_finite: bool
    surprise: float = 0.0


def choose(logits: Logits, choice: Choice) -> Chosen:
    """Chooses a token from a row of logits, [vocab]."""
    is_finite = bool(np.isfinite(logits).all())
    values = changed(logits, choice)
    if not (np.isfinite(logits.max()) and np.isfinite(values.max())):
        return Chosen(-1, is_finite)
    if choice.opts.is_greedy:
        return Chosen(int(values.argmax()), is_finite)
    ids, shares = shares_of(values, choice)
    rising = shares.cumsum()
    at = rising.searchsorted(choice.numbers[UNIFORM] * rising[-1], side="right")
    last = rising.searchsorted(rising[-1])  # where rounding must not go beyond: the last token that has a share
    token = int(ids[min(at, last)])
    return Chosen(token, is_finite, float(surprises(values, choice)[token]) if choice.opts.mirostat else 0.0)


#: Chooses a token from each of some rows, float32[vocab], as `choose`. They lie where the device's programs leave them,
#: or on the host.
Choose = Callable[[Sequence[Any], Sequence[Choice]], list[Chosen]]

#: The choice of the likeliest token.
LIKELIEST = Choice(SampleOpts.greedy())


def masked(logits: Logits, words: Words) -> Logits:
    """The logits, [vocab], with -inf where the bit of an id is 0: a new array.

    Example:
        >>> masked(np.float32([1, 2, 3]), np.int32([0b101]))
        array([  1., -inf,   3.], dtype=float32)
    """
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits))
    return np.where(allowed, logits, np.asarray(-np.inf, logits.dtype))


def changed(logits: Logits, choice: Choice) -> Floats:
    """The logits after the mask and the changes, float64."""
    values: Floats = (logits if choice.mask is None else masked(logits, choice.mask)).astype(np.float64)
    opts, changes = choice.opts, choice.changes
    for token, count, amount in zip(*(each.tolist() for each in changes), strict=True) if changes else ():
        if 0 <= token < len(values):
            value = float(values[token])
            if count:
                scaled = value / opts.repetition_penalty if value > 0 else value * opts.repetition_penalty
                value = scaled - count * opts.frequency_penalty - opts.presence_penalty
            values[token] = value + amount
    return values


def shares_of(values: Floats, choice: Choice) -> tuple[Ids, Floats]:
    """The ids that may be drawn, ascending, and their probabilities up to a factor.

    With XTC these are of the mixture of the draws in which it applies and of those in which it does not.
    """
    opts, ids = choice.opts, np.arange(len(values))
    if opts.mirostat:
        masses = weights(values, opts.temperature)
        ids = np.flatnonzero(masses >= choice.numbers[LEAST_SHARE] * total(masses))
        ids = ids if len(ids) else np.array([masses.argmax()])
        return ids, masses[ids]
    for keep in filters_of(opts):
        ids = ids[keep(values[ids])]
    kept = values[ids]
    shares = weights(kept, opts.temperature)
    if opts.xtc_probability:
        left = np.delete(np.arange(len(kept)), xtc_excluded(kept, opts.xtc_threshold))
        without = weights(kept[left], opts.temperature)
        shares *= (1 - opts.xtc_probability) / total(shares)
        shares[left] += without * (opts.xtc_probability / total(without))
    return ids, shares


def surprises(values: Floats, choice: Choice) -> Floats:
    """The surprise of each token in bits, after the temperature."""
    below = tempered(values, choice.opts.temperature)
    found: Floats = surprise(below, float(total(exp(below))))
    return found


def surprise(below: Any, everything: float) -> Any:
    """The surprise in bits of a token, or of tokens, whose value is so far below the largest.

    Args:
        everything: the sum of all weights.
    """
    return log2(everything) - below * _BITS


_BITS = 1 / float(np.log(2))


def refuse(row: npt.ArrayLike, choice: Choice) -> NoReturn:
    """The error for a row of logits from which no token can be chosen.

    Raises:
        NumericalError: a logit is NaN or +inf, or all are -inf.
        SamplingError: mask, bias and bans leave no token.
    """
    logits = np.asarray(row)
    with np.errstate(invalid="ignore"):
        top = logits.max()
        if np.isfinite(top):
            top = changed(logits, choice).max()
            if top == -np.inf:
                hint = "ban fewer tokens: logit_bias of -inf and min_tokens do, also under a grammar"
                raise SamplingError("bias and bans exclude every token", where="sampling", hint=hint)
    raise NumericalError(
        f"the largest logit is {top}", where="sampling",
        hint="the weights or the arithmetic are broken: check the file, or try precision='exact'",
    )  # fmt: skip


# -- the choice of tokens by the host ---------------------------------------------------------------------------------

_BLOCK = 64  # tokens of a set


def choose_rows(rows: Sequence[npt.ArrayLike], choices: Sequence[Choice]) -> list[Chosen]:
    """See `Choose`."""
    return [_chosen(np.asarray(row), choice) for row, choice in zip(rows, choices, strict=True)]


def _chosen(logits: npt.NDArray[np.float32], choice: Choice) -> Chosen:
    opts, changes = choice.opts, choice.changes
    row = logits if choice.mask is None else masked(logits, choice.mask)
    if opts.is_greedy and not changes:
        token = int(row.argmax())
        is_finite = bool(np.isfinite(logits).all())
        return Chosen(token, is_finite) if is_finite and np.isfinite(row[token]) else choose(logits, choice)
    ids = _useful(row, choice)
    if ids is None or not np.isfinite(logits.max()):
        return choose(logits, choice)
    few = Choice(opts, changes=changes and _renumbered(changes, ids))
    few.numbers = choice.numbers
    found = choose(logits[ids], few)
    return Chosen(int(ids[found.token]), bool(np.isfinite(logits).all()), found.surprise)


def _useful(row: npt.NDArray[np.float32], choice: Choice) -> npt.NDArray[np.intp] | None:
    """The tokens that may be chosen, ascending, if they are known to be few."""
    opts, changes = choice.opts, choice.changes
    count = 1 if opts.is_greedy else 0 if opts.mirostat or opts.top_n_sigma else opts.top_k
    need, width = count + (len(changes.ids) if changes else 0), len(row) // _BLOCK
    if not count or need > width:
        return None
    border = np.partition(row[: width * _BLOCK].reshape(_BLOCK, width).max(0), -need)[-need]
    if not np.isfinite(border):
        return None
    ids = np.flatnonzero(row >= border)
    if changes:
        own = changes.ids[(changes.ids >= 0) & (changes.ids < len(row))]
        ids = np.union1d(ids, own[np.isfinite(row[own])])  # the mask excludes the others
    return ids.astype(np.intp)


def _renumbered(changes: Changes, ids: npt.NDArray[np.intp]) -> Changes:
    """Changes of tokens that are named by their places among some, -1 for those that are not there."""
    places = np.minimum(np.searchsorted(ids, changes.ids), len(ids) - 1)
    return changes._replace(ids=np.where(ids[places] == changes.ids, places, -1).astype(np.int32))
