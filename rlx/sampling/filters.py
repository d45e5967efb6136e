"""The sampling filters, which select the tokens that may be drawn: one small function each.

Sampling stage, under `choice.py`. A filter gets the values of the remaining tokens, in ascending order of token ids,
without NaN and +inf. It returns the indices that it keeps, ascending, at least one. Of equal values the first is
preferred. `exp` is one of our own, whose results have sums without rounding, in whatever order: every device computes
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import factorial, log
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.sampling.options import SampleOpts

Places = npt.NDArray[np.intp]
Logits = npt.NDArray[np.floating[Any]]
Floats = npt.NDArray[np.float64]
Filter = Callable[[Logits], Places]

#: Constants of `exp`. LN2_HIGH has so few bits that its products with exponents are exact. ROUND added to a number
#: leaves its nearest integer in the low bits.
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
ROUND, EXP_LEAST = 1.5 * 2.0**52, -708.0
#: GRID added to a number from 0 to 1 leaves the nearest multiple of 2^-34: 2^19 of these have a sum without rounding.
GRID = 1.5 * 2.0**18
#: Intervals of values in which `_first` sums, for each 1.0 and altogether.
PER_NAT, INTERVALS = 32.0, 1024
EXP_TERMS = tuple(1 / factorial(power) for power in range(13, 1, -1))


def filters_of(opts: SampleOpts) -> tuple[Filter, ...]:
    """The filters that the options turn on, in the order in which they run."""
    filters = (
        (partial(top_n_sigma, count=opts.top_n_sigma), opts.top_n_sigma > 0),
        (partial(largest, count=opts.top_k), opts.top_k > 0),
        (partial(typical_p, share=opts.typical_p), opts.typical_p < 1),
        (partial(top_p, share=opts.top_p), opts.top_p < 1),
        (partial(min_p, share=opts.min_p), opts.min_p > 0),
    )
    return tuple(keep for keep, is_on in filters if is_on)


def exp(x: Floats) -> Floats:
    """e^x for x <= 0, to the nearest multiple of 2^-34.

    Only additions and multiplications, each rounded: x = n ln 2 + r, a polynomial for e^r, times 2^n.
    """
    y = np.maximum(x, EXP_LEAST)
    n = (y * LOG2_E + ROUND) - ROUND
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p = np.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        p = p * r + term
    p = (r * r * p + r) + 1.0
    return (np.where(x >= EXP_LEAST, np.ldexp(p, n.astype(np.int32)), 0.0) + GRID) - GRID


def total(values: Floats) -> np.float64:
    """The sum of at least one value, from the first to the last."""
    return np.float64(values.cumsum()[-1])


def tempered(values: Logits, temperature: float = 1.0) -> Floats:
    """(values - max) / temperature."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        return np.asarray(np.subtract(values, values.max(), dtype=np.float64) / temperature)


def weights(values: Logits, temperature: float = 1.0) -> Floats:
    """Unnormalized probabilities: softmax(values / temperature), scaled so that the largest is 1."""
    return exp(tempered(values, temperature))


def _first(keys: Floats, masses: Floats, share: float) -> Places:
    """The smallest set of the smallest keys that has at least a share of all masses.

    Masses are summed by intervals of keys, which are not negative, then in the interval in which the share is reached.
    """
    intervals = np.minimum(keys * PER_NAT, INTERVALS - 1).astype(np.intp)
    rising = np.bincount(intervals, masses, INTERVALS).cumsum()
    target = max(share * rising[-1], np.nextafter(0, 1))  # one mass at least
    at = min(int(rising.searchsorted(target)), INTERVALS - 1)
    inside = np.flatnonzero(intervals == at)
    order = inside[keys[inside].argsort(kind="stable")]
    sums = np.append(rising[at - 1] if at else 0.0, masses[order]).cumsum()[1:]
    return np.sort(np.append(np.flatnonzero(intervals < at), order[: int(sums.searchsorted(target)) + 1]))


def largest(values: Logits, count: int) -> Places:
    """Top-k: the indices of the `count` largest values."""
    if count >= len(values):
        return np.arange(len(values))
    border = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > border)
    return np.sort(np.append(above, np.flatnonzero(values == border)[: count - len(above)]))


def top_p(values: Logits, share: float) -> Places:
    """The nucleus: the smallest set of the likeliest tokens whose probabilities sum to at least `share`."""
    below = tempered(values)
    return _first(-below, exp(below), share)


def min_p(values: Logits, share: float) -> Places:
    """Tokens that are at least `share` times as likely as the likeliest."""
    return np.flatnonzero(values >= np.float64(values.max()) + log(share))


def top_n_sigma(values: Logits, count: float) -> Places:
    """Values within `count` standard deviations of the largest (Tang et al. 2024).

    The standard deviation is that of the population of finite values.
    """
    finite = values[values > -np.inf].astype(np.float64)
    apart = finite - total(finite) / len(finite)
    return np.flatnonzero(values >= np.float64(values.max()) - count * np.sqrt(total(apart * apart) / len(finite)))


def typical_p(values: Logits, share: float) -> Places:
    """The smallest set of the most typical tokens whose probabilities sum to at least `share` (Meister et al. 2022).

    A token is the more typical, the nearer its surprise (-ln p) is to the entropy, the expected surprise. So it is the
    nearer, the nearer its value is to the expected value.
    """
    below = tempered(values)
    masses = exp(below)
    expected = total(masses * np.where(masses > 0, below, 0)) / total(masses)
    return _first(np.abs(below - expected), masses, share)


def xtc_excluded(values: Logits, threshold: float) -> Places:
    """The tokens that XTC removes: all with a probability of at least `threshold`, except the least likely of them.

    With fewer than two such tokens it removes none. Of equal ones the last counts as the least likely. Definition: the
    pull request of its author, oobabooga/text-generation-webui 6335.
    """
    masses = weights(values)
    above = np.flatnonzero((masses >= threshold * total(masses)) & (masses > 0))
    if len(above) < 2:
        return above[:0]
    least = len(above) - 1 - int(values[above][::-1].argmin())
    return np.delete(above, least)
