"""Filters of sampling against their published definitions, written out token by token in Python floats."""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlx.sampling.filters import largest, min_p, top_n_sigma, top_p, typical_p, xtc_excluded

Array = np.ndarray[Any, Any]

logits_rows = arrays(
    np.float32, st.integers(1, 60), elements=st.floats(-20, 20, width=32).map(lambda v: round(v * 4) / 4)
)


def softmax(logits: Array) -> list[float]:
    values = [float(v) for v in logits]
    shares = [exp(v - max(values)) for v in values]
    return [share / sum(shares) for share in shares]


def logits_of(*probabilities: float) -> Array:
    return np.log(np.array(probabilities)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------- each by itself


@given(logits_rows, st.integers(1, 70))
def test_top_k_is_the_head_of_the_order(logits: Array, count: int) -> None:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert largest(logits, count).tolist() == sorted(order[:count])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["spread", "flat", "ties", "ends", "excluded"])
@pytest.mark.parametrize("count", [1, 5, 19, 20, 21, 300])
def test_top_k_of_a_long_row(kind: str, count: int, dtype: Any) -> None:
    """Rows of many chunks and a rest, with the largest in one chunk, in the rest, or everywhere."""
    random = np.random.default_rng(3)
    logits = {
        "spread": random.normal(size=5200),
        "flat": np.zeros(5200),
        "ties": random.integers(0, 9, 5200) * 1.0,
        "ends": np.where(np.arange(5200) % 5190 < 12, random.normal(size=5200) + 50, 0),
        "excluded": np.where(np.arange(5200) % 500 == 7, 1.0, -np.inf),
    }[kind].astype(dtype)
    order = np.lexsort((np.arange(len(logits)), -logits))
    assert largest(logits, count).tolist() == np.sort(order[:count]).tolist()


@given(logits_rows, st.floats(0, 0.999))
def test_top_p_is_the_shortest_head_that_reaches_p(logits: Array, share: float) -> None:
    shares = softmax(logits)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = top_p(logits, share).tolist()
    assert kept == sorted(order[: len(kept)])
    assert sum(shares[i] for i in kept) >= share - 1e-9
    assert len(kept) == 1 or sum(shares[i] for i in order[: len(kept) - 1]) < share + 1e-9


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (0.1, 1), (0.11, 2), (0.35, 4), (0.5, 5), (0.91, 10)])
def test_top_p_among_equals(share: float, count: int) -> None:
    assert top_p(np.full(10, 3, np.float32), share).tolist() == list(range(count))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999999, np.nextafter(1, 0)])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_top_p_of_a_long_row(share: float, scale: float) -> None:
    """The nucleus is sought among more and more tokens: a flat row needs nearly all of them."""
    logits = (scale * np.random.default_rng(1).normal(size=5000)).astype(np.float32)
    shares = np.sort(np.exp(logits.astype(np.float64) - float(logits.max())))[::-1]
    expected = int(np.argmax(shares.cumsum() >= share * shares.cumsum()[-1])) + 1
    assert abs(len(top_p(logits, share)) - expected) <= 1


@given(logits_rows, st.floats(0.001, 1))
def test_min_p_is_a_share_of_the_likeliest(logits: Array, share: float) -> None:
    ratios = [exp(float(v) - float(max(logits))) for v in logits]
    kept = set(min_p(logits, share).tolist())
    for i, ratio in enumerate(ratios):
        assert i in kept if ratio > share * (1 + 1e-9) else ratio > share * (1 - 1e-9) or i not in kept


@given(logits_rows, st.floats(0, 5))
def test_top_n_sigma_is_a_distance_from_the_largest(logits: Array, count: float) -> None:
    """Tang et al. 2024, equation 3: logits of at least max - n sigma."""
    values = [float(v) for v in logits]
    mean = sum(values) / len(values)
    border = max(values) - count * sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    kept = set(top_n_sigma(logits, count).tolist())
    for i, value in enumerate(values):
        assert i in kept if value > border + 1e-9 else value > border - 1e-9 or i not in kept


def typical_reference(logits: Array, mass: float) -> list[int]:
    """Meister et al. 2022, section 4: order by |H + ln p|, the shortest head that has the mass."""
    shares = softmax(logits)
    entropy = -sum(p * log(p) for p in shares if p > 0)
    order = sorted(range(len(shares)), key=lambda i: (round(abs(entropy + log(shares[i])), 12), i))
    total, kept = 0.0, []
    for i in order:
        kept.append(i)
        total += shares[i]
        if total >= mass:
            break
    return sorted(kept)


@given(logits_rows, st.floats(0, 0.999))
def test_typical_p_is_nearest_the_entropy(logits: Array, share: float) -> None:
    shares, kept = softmax(logits), typical_p(logits, share).tolist()
    entropy = -sum(p * log(p) for p in shares if p > 0)
    far = [abs(entropy + log(p)) for p in shares]
    outside = [far[i] for i in range(len(far)) if i not in kept]
    assert max(far[i] for i in kept) <= min(outside, default=np.inf) + 1e-9
    assert abs(len(kept) - len(typical_reference(logits, share))) <= 1  # a sum on the border may fall to either side


@pytest.mark.parametrize(
    ("threshold", "gone"),
    [(0.09, [0, 1, 3]), (0.15, [0, 1]), (0.25, [0]), (0.35, []), (0.5, []), (1.0, []), (0.0, [0, 1, 3, 4])],
)
def test_xtc_keeps_the_least_likely_of_the_top(threshold: float, gone: list[int]) -> None:
    shares = {0: 0.4, 1: 0.3, 2: 0.05, 3: 0.15, 4: 0.1}
    above = sorted((i for i in shares if shares[i] >= threshold), key=lambda i: -shares[i])
    assert xtc_excluded(logits_of(*shares.values()), threshold).tolist() == sorted(above[:-1]) == gone


# ---------------------------------------------------------------------------------------------------- of all


@given(
    logits_rows,
    st.lists(st.integers(0, 59)),
    st.integers(1, 70),
    st.floats(0, 0.99),
    st.floats(0.01, 1),
    st.floats(0, 4),
)
def test_filters_keep_the_likeliest_and_never_nothing(
    logits: Array, excluded: list[int], count: int, share: float, ratio: float, sigmas: float
) -> None:
    logits[[i for i in excluded if i < len(logits) - 1]] = -np.inf
    top = int(logits.argmax())
    found = [largest(logits, count), top_p(logits, share), min_p(logits, ratio), top_n_sigma(logits, sigmas)]
    assert all(top in places for places in found)
    for places in (*found, typical_p(logits, share)):
        assert len(places) > 0
        assert (np.diff(places) > 0).all()
        assert np.isfinite(logits[places]).any(), "a token that can be drawn is left"
    gone = xtc_excluded(logits, share)
    assert len(gone) < len(logits)
    assert np.isfinite(np.delete(logits, gone)).any()
