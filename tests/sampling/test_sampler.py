"""Sampling against written-out formulas and counted draws."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from math import inf, log2, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlx.errors import NumericalError, SamplingError
from rlx.sampling import SampleOpts, Sampler

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
        ({"temperature": 10**400}, "temperature is 1000000"),
        ({"logit_bias": {2: 10**400}}, "logit_bias of token 2 is 1000000"),
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
        ({"typical_p": 1.5}, r"typical_p is 1\.5, expected 0 to 1"),
        ({"top_n_sigma": -1}, "top_n_sigma is -1, expected a finite number of at least 0"),
        ({"frequency_penalty": inf}, "frequency_penalty is inf, expected a finite number"),
        ({"presence_penalty": nan}, "presence_penalty is nan, expected a finite number"),
        ({"xtc_probability": 2}, "xtc_probability is 2, expected 0 to 1"),
        ({"xtc_threshold": -1}, "xtc_threshold is -1, expected 0 to 1"),
        ({"dry_multiplier": -1}, "dry_multiplier is -1, expected a finite number of at least 0"),
        ({"dry_base": 0.5}, r"dry_base is 0\.5, expected a finite number of at least 1"),
        ({"dry_allowed_length": 0}, "dry_allowed_length is 0, expected 1 to"),
        ({"dry_penalty_last_n": -1}, "dry_penalty_last_n is -1, expected 0 to"),
        ({"dry_sequence_breakers": "\n"}, r"dry_sequence_breakers is '\\n', expected a sequence of texts"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers holds '', expected a text or a sequence of ids"),
        ({"dry_sequence_breakers": [()]}, r"dry_sequence_breakers holds \(\)"),
        ({"dry_sequence_breakers": [[1, -2]]}, r"dry_sequence_breakers holds \[1, -2\]"),
        ({"mirostat": 1}, "mirostat is 1, expected 0 or 2"),
        ({"mirostat": 3}, "mirostat is 3, expected 0 to 2"),
        ({"mirostat_tau": -1}, "mirostat_tau is -1, expected a finite number of at least 0"),
        ({"mirostat_eta": None}, "mirostat_eta is None, expected a number"),
        ({"logit_bias": 3}, "logit_bias is 3, expected ids and numbers"),
        ({"logit_bias": [3]}, "logit_bias is .*, expected ids and numbers"),
        ({"logit_bias": {-1: 0}}, "logit_bias names the token -1, expected an id"),
        ({"logit_bias": {"a": 0}}, "logit_bias names the token 'a', expected an id"),
        ({"logit_bias": {2: inf}}, "logit_bias of token 2 is inf, expected a finite number or -inf"),
        ({"logit_bias": {2: nan}}, "logit_bias of token 2 is nan"),
        ({"logit_bias": {2: "x"}}, "logit_bias of token 2 is 'x'"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingError, match=said):
        SampleOpts(**options)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0, "top_k": 3, "mirostat": 2, "xtc_probability": 1}, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0, "frequency_penalty": 0.1}, False),
        ({"temperature": 0, "presence_penalty": -0.1}, False),
        ({"temperature": 0, "dry_multiplier": 0.8}, False),
        ({"temperature": 0, "logit_bias": {1: 1}}, False),
    ],
)
def test_plain_greedy_is_the_argmax_of_the_model(options: dict[str, Any], plain: bool) -> None:
    assert SampleOpts(**options).is_plain_greedy is plain


# ---------------------------------------------------------------------------------------------------- filters


def test_filters_look_at_the_distribution_before_the_temperature() -> None:
    """With the temperature first, a flat distribution would let top-p keep more."""
    logits = logits_of(0.7, 0.2, 0.1)
    assert kept(logits, temperature=50.0, top_p=0.6) == [0]
    assert kept(logits, temperature=50.0, min_p=0.5) == [0]


def test_the_penalty_divides_positive_logits_and_multiplies_others() -> None:
    sampler = Sampler(SampleOpts(repetition_penalty=2.0), history=[0, 1, 0])
    _, got = sampler.distribution(np.array([3, -3, 1], np.float32))
    expected = np.exp([1.5, -6, 1])
    np.testing.assert_allclose(got, expected / expected.sum(), atol=1e-9)


def test_frequency_and_presence_count_the_window() -> None:
    opts = SampleOpts(frequency_penalty=0.5, presence_penalty=0.25, repetition_window=4)
    _, got = Sampler(opts, history=[3, 0, 1, 0, 0]).distribution(np.array([3, 2, 1, 0], np.float32))
    expected = np.exp([3 - 3 * 0.5 - 0.25, 2 - 0.5 - 0.25, 1, 0])
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-9)


def test_bias_is_added_before_the_penalties_and_the_filters() -> None:
    opts = SampleOpts(repetition_penalty=2, logit_bias={0: 5.0, 2: -inf}, top_k=2)
    ids, got = Sampler(opts, history=[0]).distribution(np.array([-1.0, 1.0, 9.0, 0.0]))
    expected = np.exp([(-1 + 5) / 2, 1])
    assert ids.tolist() == [0, 1]
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-9)


def test_filters_see_what_those_before_them_left() -> None:
    """Top-n-sigma, top-k, typical, top-p, min-p: each pair in an order in which the other one gives something else."""
    logits = np.log([0.3, 0.25, 0.25, 0.2])
    assert kept(logits, top_k=2, min_p=0.9) == [0]
    peaked = logits_of(0.3, *[0.01] * 70)
    assert 0 not in kept(peaked, typical_p=0.5)
    assert kept(peaked, typical_p=0.5, top_k=2) == [0]  # of two tokens, 0.3 and 0.01, the likely one is the typical
    assert 0 not in kept(peaked, typical_p=0.5, min_p=0.5)  # min-p looks at the likeliest of what is left


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
    # Weights of up to 40 tokens are multiples of 2^-34, and the largest is 1.
    np.testing.assert_allclose(got, [expected[i] for i in ids.tolist()], rtol=1e-9, atol=41 * 2**-35)


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


# ---------------------------------------------------------------------------------------------------- XTC


def test_xtc_is_the_mixture_of_both_cases() -> None:
    logits, opts = logits_of(0.4, 0.3, 0.2, 0.1), SampleOpts(xtc_probability=0.25, xtc_threshold=0.15)
    ids, got = Sampler(opts).distribution(logits)
    plain, without = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0, 0, 0.2, 0.1]) / 0.3
    assert ids.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(got, 0.75 * plain + 0.25 * without, rtol=1e-6)


def test_xtc_draws_follow_the_procedure() -> None:
    """Against the definition with its coin: with the probability the top choices are left out, then a draw."""
    shares, opts = np.array([0.4, 0.3, 0.2, 0.1]), SampleOpts(xtc_probability=0.5, xtc_threshold=0.15, seed=2)
    random, logits = np.random.default_rng(9), np.log(shares)
    heads = int((random.random(6_000) < 0.5).sum())
    expected = random.multinomial(heads, shares * [0, 0, 1, 1] / 0.3) + random.multinomial(6_000 - heads, shares)
    sampler = Sampler(opts)
    counts = np.bincount([sampler.sample(logits) for _ in range(6_000)], minlength=4)
    # two samples of equal size: chi-square with three degrees of freedom, whose 99.9th percentile is below that of four
    assert float(((counts - expected) ** 2 / (counts + expected)).sum()) < CHI_SQUARE_999[4]


# ---------------------------------------------------------------------------------------------------- Mirostat


def mirostat_reference(logits: np.ndarray[Any, Any], tokens: list[int], tau: float, eta: float) -> list[list[int]]:
    """Basu et al. 2021, algorithm 2: what may be drawn before each of `tokens`."""
    shares = np.exp(logits) / np.exp(logits).sum()
    bound, found = 2 * tau, []
    for token in tokens:
        left = [i for i, p in enumerate(shares) if -log2(p) <= bound] or [int(shares.argmax())]
        found.append(left)
        assert token in left
        bound -= eta * (-log2(shares[token]) - tau)
    return found


@pytest.mark.parametrize(("tau", "eta"), [(1.0, 0.5), (3.0, 0.1), (2.0, 1.0)])
def test_mirostat_follows_its_algorithm(tau: float, eta: float) -> None:
    logits = np.random.default_rng(4).normal(size=50) * 5
    sampler = Sampler(SampleOpts(mirostat=2, mirostat_tau=tau, mirostat_eta=eta, seed=1))
    sets, tokens = [], []
    for _ in range(40):
        ids, probabilities = sampler.distribution(logits)
        assert probabilities.sum() == pytest.approx(1)
        sets.append(ids.tolist())
        tokens.append(sampler.sample(logits))
    assert sets == mirostat_reference(logits, tokens, tau, eta)
    assert len({len(each) for each in sets}) > 1, "the bound moves"


def test_mirostat_sees_the_temperature_and_takes_the_place_of_the_filters() -> None:
    logits = np.log([0.5, 0.25, 0.25])
    opts = SampleOpts(0.5, top_k=1, xtc_probability=1, mirostat=2, mirostat_tau=1.3)
    ids, got = Sampler(opts).distribution(logits)
    np.testing.assert_allclose(got, np.array([4, 1, 1]) / 6, rtol=1e-9)
    assert Sampler(SampleOpts(0.5, mirostat=2, mirostat_tau=0.5)).distribution(logits)[0].tolist() == [0]  # 0.585 bits
    assert ids.tolist() == [0, 1, 2]  # 2.585 bits, below the bound of 2.6


# ---------------------------------------------------------------------------------------------------- state


EVERYTHING = SampleOpts(
    0.9, 40, 0.98, 0.001, 1.1, 7, None, typical_p=0.99, top_n_sigma=4, frequency_penalty=0.1, presence_penalty=0.1,
    xtc_probability=0.3, xtc_threshold=0.05, dry_multiplier=0.8, dry_sequence_breakers=((3,), (4, 5)),
    logit_bias={2: -inf, 9: 0.5},
)  # fmt: skip
STATEFUL = [
    EVERYTHING,
    SampleOpts(seed=1, mirostat=2, mirostat_tau=2.0),
    SampleOpts(seed=3),
    SampleOpts(0, 0, 1, 0, 1.3),
]


def rows(count: int, size: int = 60) -> np.ndarray[Any, Any]:
    return (3 * np.random.default_rng(8).normal(size=(count, size))).astype(np.float32)


@pytest.mark.parametrize("opts", STATEFUL)
def test_accepting_is_drawing_without_the_draw(opts: SampleOpts) -> None:
    one, two = Sampler(opts, [1, 2, 3]), Sampler(opts, [1, 2, 3])
    for row in rows(20):
        token = one.sample(row)
        two.distribution(row)
        two.accept(token)
    row = rows(21)[20]
    for a, b in zip(one.distribution(row), two.distribution(row), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_seed_means_the_same_tokens_everywhere() -> None:
    """PCG64 and the chain are fixed: a change of either changes what users have noted down."""
    sampler = Sampler(SampleOpts(0.8, 20, 0.95, seed=42))
    drawn = [sampler.sample(row) for row in np.tile(np.linspace(-4, 4, 64, dtype=np.float32), (16, 1))]
    assert hashlib.sha256(bytes(drawn)).hexdigest()[:8] == "8f045468", drawn


# ---------------------------------------------------------------------------------------------------- draws, the ends


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
