"""DRY against its author's procedure, and its sequence breakers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx import demo
from rlx.sampling import SampleOpts, Sampler
from rlx.sampling.penalties import Dry
from rlx.text import Tokenizer, load_tokenizer


def reference(history: list[int], multiplier: float, base: float, allowed: int, breakers: set[int]) -> dict[int, float]:
    """Token -> penalty, by the definition: every earlier place is extended backwards a token at a time."""
    lengths: dict[int, int] = {}
    if not history or history[-1] in breakers:
        return {}
    for place in range(len(history) - 1):
        length = 0
        while (
            place - length >= 0
            and history[place - length] == history[len(history) - 1 - length]
            and history[place - length] not in breakers
        ):
            length += 1
        following = history[place + 1]
        if length and following not in breakers:
            lengths[following] = max(lengths.get(following, 0), length)
    return {t: multiplier * base ** (n - allowed) for t, n in lengths.items() if n >= allowed}


def penalties(opts: SampleOpts, history: list[int], vocab: int = 8, **more: Any) -> dict[int, float]:
    """What DRY takes off, out of the log-probabilities of flat logits."""
    ids, shares = Sampler(opts, history, **more).distribution(np.zeros(vocab))
    off = np.log(shares.max()) - np.log(shares)
    return {int(i): float(p) for i, p in zip(ids, off, strict=True) if p > 1e-12}


@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.sampled_from([1.0, 1.3, 1.75]),
    st.integers(1, 4),
    st.sets(st.integers(0, 4), max_size=2),
)
def test_dry_equals_its_definition(history: list[int], base: float, allowed: int, breakers: set[int]) -> None:
    opts = SampleOpts(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed,
        dry_sequence_breakers=tuple((token,) for token in sorted(breakers)),
    )  # fmt: skip
    expected = reference(history, 0.8, base, allowed, breakers)
    found = Dry(opts).penalties(np.array(history, np.intp))
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_penalties_and_dry_have_windows_of_their_own() -> None:
    """History: a 4 before the window of 3 tokens, and a repetition that begins 6 tokens ago."""
    history = [4, 1, 2, 0, 1, 2]
    for window, last_n, off in ((3, 6, {0: 2, 1: 1, 2: 1}), (3, 2, {0: 1, 1: 1, 2: 1}), (1, 6, {0: 1, 2: 1})):
        opts = SampleOpts(
            presence_penalty=1, repetition_window=window, dry_multiplier=1, dry_base=1, dry_sequence_breakers=(),
            dry_penalty_last_n=last_n,
        )  # fmt: skip
        assert penalties(opts, history) == pytest.approx(off)


def test_a_long_loop_is_quick_and_finite() -> None:
    """Beyond some length nothing is to be gained: the penalty already exceeds every logit."""
    opts = SampleOpts(0, dry_multiplier=0.8, dry_sequence_breakers=())
    sampler = Sampler(opts, [3] * 5000)
    assert sampler.sample(np.array([0, 1, 2, 50, 1], np.float32)) == 2


def test_a_sequence_of_tokens_breaks_where_it_ends() -> None:
    opts = SampleOpts(dry_multiplier=1, dry_base=1, dry_allowed_length=2, dry_sequence_breakers=((6, 7),))
    repeated = [1, 2, 3, 0, 1, 2]
    assert set(penalties(opts, repeated)) == {3}
    assert penalties(opts, [1, 6, 7, 3, 0, 1, 6, 7]) == {}
    assert penalties(opts, [6, 7, 2, 3, 0, 6, 7, 2]) == {}, "one token behind the breaker is too short"
    assert set(penalties(opts, [6, 7, 1, 2, 3, 0, 6, 7, 1, 2])) == {3}
    assert set(penalties(opts, [7, 6, 3, 0, 7, 6])) == {3}, "the parts of a breaker are tokens like any other"


# ---------------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.path())


def test_a_text_is_every_token_that_contains_it(tokenizer: Tokenizer) -> None:
    found = tokenizer.tokens_with("\n")
    assert found == {i for i in range(tokenizer.vocab_size) if b"\n" in tokenizer.vocabulary.bytes_of(i)}
    assert len(found) >= 1


def test_a_text_breaks_repetitions(tokenizer: Tokenizer) -> None:
    def found(text: str, *breakers: str) -> list[str]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        opts = SampleOpts(dry_multiplier=1, dry_base=1, dry_allowed_length=3, dry_sequence_breakers=breakers)
        off = penalties(opts, ids, tokenizer.vocab_size, tokenizer=lambda: tokenizer)
        return [tokenizer.id_to_token(i) for i in off]

    text = "The fox ran.\nThe fox sat. Then he ran.\nThe fox"
    assert len(found(text)) == 1
    assert found(text, "\n") == found(text, "ran.\n") == [], "few tokens of it are behind the break"
    assert found(text, "zebra crossing") == found(text)
