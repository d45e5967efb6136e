"""Which tokens may be drawn: the filters of sampling, one small function each.

Sampling stage, under `sampler.py`. A filter takes the logits of the tokens that are left, floating point, in ascending
order of their ids and free of NaN and +inf, and returns the places that it keeps, ascending and never none. Equal
logits are told apart by their places, the first one first. Shares and surprises are computed in float64 whatever the
type of the logits, and a filter that looks only at the order copies nothing.
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

_CHUNK = 256  # logits whose largest is looked at first
_FIRST_GUESS = 128  # tokens among which the nucleus is sought first


def filters_of(opts: SampleOpts) -> tuple[Filter, ...]:
    """The filters that are on, in their order."""
    filters = (
        (partial(top_n_sigma, count=opts.top_n_sigma), opts.top_n_sigma > 0),
        (partial(largest, count=opts.top_k), opts.top_k > 0),
        (partial(typical_p, share=opts.typical_p), opts.typical_p < 1),
        (partial(top_p, share=opts.top_p), opts.top_p < 1),
        (partial(min_p, share=opts.min_p), opts.min_p > 0),
    )
    return tuple(keep for keep, is_on in filters if is_on)


def tempered(logits: Logits, temperature: float = 1.0) -> Floats:
    """How far each is from the largest, over the temperature: a new array, which its user may work on in place."""
    below: Floats = np.subtract(logits, logits.max(), dtype=np.float64)
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
            below /= temperature
    return below


def weights(logits: Logits, temperature: float = 1.0) -> Floats:
    """Shares up to a factor, float64: softmax(logits / temperature) in which the likeliest is 1."""
    found = tempered(logits, temperature)
    np.exp(found, out=found)  # in place: the pages of another array would cost more than the exponentials
    return found


def log_shares(logits: Logits) -> Floats:
    """The logarithm of the softmax, float64; -inf where the share is 0."""
    found = tempered(logits)
    found -= log(np.exp(found).sum())
    return found


def largest(logits: Logits, count: int) -> Places:
    """Top-k: the `count` largest."""
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
    """The nucleus: the fewest of the largest that together have at least `share`; at least one."""
    wanted, count = share * weights(logits).sum(), _FIRST_GUESS
    while True:
        places = largest(logits, count)
        found = logits[places]
        shares = weights(np.sort(found)[::-1]).cumsum()
        if shares[-1] >= wanted or count >= len(logits):
            size = int(shares.searchsorted(wanted)) + 1
            return places[largest(found, size)]
        count *= 32


def min_p(logits: Logits, share: float) -> Places:
    """What is at least `share` times as likely as the likeliest."""
    border = np.float64(logits.max()) + log(share)
    return np.flatnonzero(logits >= border)


def top_n_sigma(logits: Logits, count: float) -> Places:
    """What lies within `count` standard deviations of the largest (Tang et al. 2024); what is -inf does not count.

    The deviation is that of the logits as a population.
    """
    finite = logits[logits > -np.inf]
    border = np.float64(logits.max()) - count * finite.std(dtype=np.float64)
    return np.flatnonzero(logits >= border)


def typical_p(logits: Logits, share: float) -> Places:
    """The fewest of the most typical that together have at least `share`; at least one (Meister et al. 2022).

    Typical is a token whose surprise, -ln p, is near the entropy, which is the surprise to be expected.
    """
    logs = log_shares(logits)
    shares = np.exp(logs)
    entropy = -np.dot(shares, np.where(shares > 0, logs, 0))
    order = np.abs(logs + entropy).argsort(kind="stable")
    size = int(shares[order].cumsum().searchsorted(share)) + 1
    return np.sort(order[:size])


def xtc_excluded(logits: Logits, threshold: float) -> Places:
    """What XTC leaves out when it acts: of the tokens with a share of at least `threshold` all but the least likely.

    Nothing if there are not two of them. The last is the least likely of equals. Definition: the pull request of its
    author, oobabooga/text-generation-webui 6335.
    """
    shares = weights(logits)
    above = np.flatnonzero((shares >= threshold * shares.sum()) & (shares > 0))
    if len(above) < 2:
        return above[:0]
    least = len(above) - 1 - int(logits[above][::-1].argmin())
    return np.delete(above, least)
