"""Sampling against written-out formulas and counted draws."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlx.errors import NumericalError, SamplingError
from rlx.runners.sampling import SampleOpts, Sampler

# The 99.9th percentile of the chi-square distribution (standard tables): degrees of freedom -> value.
CHI_SQUARE_999 = {4: 18.467, 9: 27.877}


def logits_of(*probabilities: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.log(np.array(probabilities)).astype(np.float32)


def kept(logits: np.ndarray[Any, Any], **options: Any) -> list[int]:
    return Sampler(SampleOpts(**options)).distribution(logits)[0].tolist()


def reference(logits: np.ndarray[Any, Any], opts: SampleOpts, history: list[int]) -> dict[int, float]:
    """The chain token by token, in Python floats: id -> probability."""
    values = {i: float(v) for i, v in enumerate(logits)}
    window = history if opts.repetition_window is None else history[len(history) - opts.repetition_window :]
    for i in set(window):
        values[i] = values[i] / opts.repetition_penalty if values[i] > 0 else values[i] * opts.repetition_penalty
    order = sorted(values, key=lambda i: (-values[i], i))
    if opts.top_k:
        order = order[: opts.top_k]
    weights = [float(np.exp(values[i] - values[order[0]])) for i in order]
    if opts.top_p < 1:
        reached = np.cumsum(weights) >= opts.top_p * np.sum(weights)
        order = order[: int(np.argmax(reached)) + 1]
    order = [i for i in order if np.exp(values[i] - values[order[0]]) >= opts.min_p * (1 - 1e-12)]
    weights = [float(np.exp((values[i] - values[order[0]]) / opts.temperature)) for i in order]
    return {i: w / sum(weights) for i, w in zip(order, weights, strict=True)}


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected a finite number of at least 0"),
        ({"temperature": nan}, "temperature is nan"),
        ({"temperature": inf}, "temperature is inf, expected a finite number"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"temperature": None}, "temperature is None, expected a number"),
        ({"top_k": -1}, "top_k is -1, expected 0 to"),
        ({"top_k": 2.0}, r"top_k is 2\.0, expected a whole number"),
        ({"top_k": True}, "top_k is True, expected a whole number"),
        ({"top_p": 1.01}, r"top_p is 1\.01, expected 0 to 1"),
        ({"top_p": -0.5}, r"top_p is -0\.5, expected 0 to 1"),
        ({"min_p": 2}, "min_p is 2, expected 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.*1 is off"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1, expected a finite number of at least 0"),
        ({"seed": -1}, "seed is -1, expected 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.5}, r"seed is 1\.5, expected a whole number or None"),
        ({"repetition_window": -1}, "repetition_window is -1"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingError, match=said):
        SampleOpts(**options)


def test_numpy_numbers_are_numbers() -> None:
    opts = SampleOpts(np.float32(0.5), np.int64(3), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert opts == SampleOpts(0.5, 3, seed=2**64 - 1)
    assert type(opts.top_k) is int


def test_the_order_of_the_arguments_is_public() -> None:
    assert SampleOpts(0.7, 40, 0.9, 0.05, 1.1, 3) == SampleOpts(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=3
    )


# ---------------------------------------------------------------------------------------------------- filters


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert Sampler(SampleOpts.greedy()).sample(np.array([1, 5, 2, 5], np.float32)) == 1
    assert Sampler(SampleOpts(temperature=0, top_p=0.5, seed=1)).sample(np.array([0, 1, 2], np.float32)) == 2


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2], np.float32)
    assert [kept(logits, top_k=k) for k in (1, 2, 3, 4)] == [[1], [1, 3], [1, 2, 3], [1, 2, 3, 4]]
    assert kept(logits, top_k=6) == kept(logits, top_k=99) == kept(logits, top_k=0) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("p", "ids"), [(0.0, [1]), (0.4, [1]), (0.5, [1]), (0.51, [1, 2]), (0.81, [0, 1, 2])])
def test_top_p_keeps_the_token_that_reaches_p(p: float, ids: list[int]) -> None:
    assert kept(np.log([0.15, 0.5, 0.3, 0.05]), top_p=p) == ids


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = logits_of(0.5, 0.26, 0.24)
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.4) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


def test_filters_look_at_the_distribution_before_the_temperature() -> None:
    """With the temperature first, a flat distribution would let top-p keep more."""
    logits = logits_of(0.7, 0.2, 0.1)
    assert kept(logits, temperature=50.0, top_p=0.6) == [0]
    assert kept(logits, temperature=50.0, min_p=0.5) == [0]


def test_top_p_counts_what_top_k_left() -> None:
    assert kept(logits_of(0.3, 0.25, 0.25, 0.2), top_k=2, top_p=0.5) == [0]
    assert kept(logits_of(0.3, 0.25, 0.25, 0.2), top_p=0.5) == [0, 1]


def test_temperature_scales_the_logits() -> None:
    logits = np.array([2, 1, 0], np.float32)
    for temperature in (0.25, 1.0, 3.0):
        _, got = Sampler(SampleOpts(temperature)).distribution(logits)
        expected = np.exp(np.array([2, 1, 0]) / temperature)
        np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-12)
    _, got = Sampler(SampleOpts(1e-320)).distribution(logits)
    assert got.tolist() == [1, 0, 0]


def test_the_penalty_divides_positive_logits_and_multiplies_others() -> None:
    sampler = Sampler(SampleOpts(repetition_penalty=2.0), history=[0, 1, 0])
    _, got = sampler.distribution(np.array([3, -3, 1], np.float32))
    expected = np.exp([1.5, -6, 1])
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-12)


def test_the_penalty_changes_greedy_choices_too_and_sees_its_own_tokens() -> None:
    sampler = Sampler(SampleOpts(temperature=0, repetition_penalty=2.0))
    logits = np.array([1.0, 3.0, 2.9, 0.5], np.float32)
    assert [sampler.sample(logits) for _ in range(4)] == [1, 2, 1, 1]  # both are halved then, and 1 stays ahead
    assert logits.tolist() == np.array([1.0, 3.0, 2.9, 0.5], np.float32).tolist()


@pytest.mark.parametrize(("window", "first"), [(0, 0), (1, 0), (2, 1), (None, 1)])
def test_the_penalty_looks_back_a_window(window: int | None, first: int) -> None:
    opts = SampleOpts(0, repetition_penalty=10, repetition_window=window)
    assert Sampler(opts, history=[0, 2]).sample(np.array([5, 4, 0], np.float32)) == first


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32).map(lambda v: round(v * 4) / 4)),
    st.builds(
        SampleOpts,
        st.floats(0.1, 5),
        st.integers(0, 45),
        st.floats(0, 1),
        st.floats(0, 1),
        st.floats(0.5, 2),
        repetition_window=st.integers(1, 5) | st.none(),
    ),
    st.lists(st.integers(0, 39), max_size=8),
)
def test_the_chain_equals_the_written_out_one(
    logits: np.ndarray[Any, Any], opts: SampleOpts, history: list[int]
) -> None:
    history = [i % len(logits) for i in history]
    ids, got = Sampler(opts, history).distribution(logits)
    expected = reference(logits, opts, history)
    if set(ids.tolist()) != set(expected):  # a sum or a ratio that lies on the border may fall to either side
        assert abs(len(ids) - len(expected)) <= 1
        return
    np.testing.assert_allclose(got, [expected[i] for i in ids.tolist()], rtol=1e-9, atol=1e-300)


# ---------------------------------------------------------------------------------------------------- draws


def chi_square(counts: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.02, 0.3, 0.05, 0.13, 0.08, 0.2, 0.01, 0.11, 0.06, 0.04])
    sampler = Sampler(SampleOpts(seed=11))
    logits = np.log(probabilities) + 7
    counts = np.bincount([sampler.sample(logits) for _ in range(20_000)], minlength=10)
    assert chi_square(counts, probabilities) < CHI_SQUARE_999[9]
    assert chi_square(counts, np.full(10, 0.1)) > CHI_SQUARE_999[9]  # the test can tell


def test_successive_draws_are_independent() -> None:
    """A generator seeded anew for each token would draw the same uniform number every time."""
    sampler = Sampler(SampleOpts(seed=5))
    logits = np.zeros(5)
    drawn = [sampler.sample(logits) for _ in range(10_000)]
    pairs = np.bincount([5 * a + b for a, b in pairwise(drawn)], minlength=25).reshape(5, 5)
    for row in pairs:
        assert chi_square(row, np.full(5, 0.2)) < CHI_SQUARE_999[4]


def test_a_seed_decides_every_draw() -> None:
    logits = np.zeros(1000)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SampleOpts(seed=seed))
        return [sampler.sample(logits) for _ in range(8)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(None) != draws(None)


def test_excluded_tokens_are_never_drawn() -> None:
    sampler = Sampler(SampleOpts(seed=0))
    logits = np.array([-inf, 0, -inf, 0, -inf], np.float32)
    assert {sampler.sample(logits) for _ in range(200)} == {1, 3}


class Uniform:
    """Stands in for the generator: always the same number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.249, 1), (0.25, 3), (np.nextafter(1, 0), 3)])
def test_the_ends_of_the_unit_interval_hit_tokens_that_have_a_share(uniform: float, token: int) -> None:
    sampler = Sampler(SampleOpts())
    sampler._random = Uniform(uniform)  # type: ignore[assignment]
    assert sampler.sample(np.array([-inf, 0, -inf, np.log(3), -inf])) == token


# ---------------------------------------------------------------------------------------------------- bad logits


@pytest.mark.parametrize("opts", [SampleOpts.greedy(), SampleOpts(seed=1), SampleOpts(top_k=2, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize("bad", [[0, nan, 1], [nan, nan, nan], [0, inf, 1], [-inf, -inf, -inf]])
def test_broken_logits_are_an_error(opts: SampleOpts, bad: list[float]) -> None:
    with pytest.raises(NumericalError, match="largest logit is"):
        Sampler(opts).sample(np.array(bad, np.float32))
