"""The sampling filters, which select the tokens that may be drawn: one small function each.

Sampling stage, under `sampler.py`. A filter gets the logits of the remaining tokens: floating point, in ascending order
of token ids, without NaN and +inf. It returns the indices that it keeps, ascending, at least one. Of equal logits the
first is preferred. Probabilities and surprises are computed in float64 for any type of logits. Filters that only need
the order make no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.sampling.options import SampleOpts

Places = npt.NDArray[np.intp]
Logits = npt.NDArray[np.floating[Any]]
Floats = npt.NDArray[np.float64]
Filter = Callable[[Logits], Places]

_CHUNK = 256  # logits per chunk; the maxima of chunks are compared first
_FIRST_GUESS = 128  # tokens that are first searched for the nucleus


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


def tempered(logits: Logits, temperature: float = 1.0) -> Floats:
    """(logits - max) / temperature, float64: a new array, which the caller may change in place."""
    below: Floats = np.subtract(logits, logits.max(), dtype=np.float64)
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
            below /= temperature
    return below


def weights(logits: Logits, temperature: float = 1.0) -> Floats:
    """Unnormalized probabilities, float64: softmax(logits / temperature), scaled so that the largest is 1."""
    found = tempered(logits, temperature)
    np.exp(found, out=found)  # in place: the pages of another array would cost more than the exponentials
    return found


def log_shares(logits: Logits) -> Floats:
    """log softmax(logits), float64; -inf for a probability of 0."""
    found = tempered(logits)
    found -= log(np.exp(found).sum())
    return found


def largest(logits: Logits, count: int) -> Places:
    """Top-k: the indices of the `count` largest logits."""
    if count >= len(logits):
        return np.arange(len(logits))
    if count < len(logits) // _CHUNK:
        # `count` chunks have a logit as large as the border, so whatever is smaller is not among the largest.
        chunks = logits[: len(logits) // _CHUNK * _CHUNK].reshape(-1, _CHUNK)
        places = np.flatnonzero(logits >= _nth_largest(chunks.max(axis=1), count))
        return places[_largest(logits[places], count)]
    return _largest(logits, count)


def _largest(logits: Logits, count: int) -> Places:
    border = _nth_largest(logits, count)
    kept = logits > border
    kept[np.flatnonzero(logits == border)[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _nth_largest(values: Logits, count: int) -> Any:
    return np.partition(values, len(values) - count)[-count]


def top_p(logits: Logits, share: float) -> Places:
    """The nucleus: the smallest set of the likeliest tokens whose probabilities sum to at least `share`."""
    target, count = share * weights(logits).sum(), _FIRST_GUESS
    while True:
        places = largest(logits, count)
        found = logits[places]
        shares = weights(np.sort(found)[::-1]).cumsum()
        if shares[-1] >= target or count >= len(logits):
            size = int(shares.searchsorted(target)) + 1
            return places[largest(found, size)]
        count *= 32


def min_p(logits: Logits, share: float) -> Places:
    """Tokens that are at least `share` times as likely as the likeliest."""
    border = np.float64(logits.max()) + log(share)
    return np.flatnonzero(logits >= border)


def top_n_sigma(logits: Logits, count: float) -> Places:
    """Logits within `count` standard deviations of the largest (Tang et al. 2024).

    The standard deviation is that of the population of finite logits.
    """
    finite = logits[logits > -np.inf]
    border = np.float64(logits.max()) - count * finite.std(dtype=np.float64)
    return np.flatnonzero(logits >= border)


def typical_p(logits: Logits, share: float) -> Places:
    """The smallest set of the most typical tokens whose probabilities sum to at least `share` (Meister et al. 2022).

    A token is the more typical, the nearer its surprise (-ln p) is to the entropy, which is the expected surprise.
    """
    logs = log_shares(logits)
    shares = np.exp(logs)
    entropy = -np.dot(shares, np.where(shares > 0, logs, 0))
    order = np.abs(logs + entropy).argsort(kind="stable")
    size = int(shares[order].cumsum().searchsorted(share)) + 1
    return np.sort(order[:size])


def xtc_excluded(logits: Logits, threshold: float) -> Places:
    """The tokens that XTC removes: all with a probability of at least `threshold`, except the least likely of them.

    With fewer than two such tokens it removes none. Of equal ones the last counts as the least likely. Definition: the
    pull request of its author, oobabooga/text-generation-webui 6335.
    """
    shares = weights(logits)
    above = np.flatnonzero((shares >= threshold * shares.sum()) & (shares > 0))
    if len(above) < 2:
        return above[:0]
    least = len(above) - 1 - int(logits[above][::-1].argmin())
    return np.delete(above, least)
