"""Perplexity and KL divergence: against plain definitions, and against the logits of transformers on a golden file."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rlx.engine.engine import Engine
from rlx.errors import ArgumentError, PromptError
from rlx.runners.perplexity import Scores, Window, compare, halved_windows, score, sliding_windows

PAIR = {"buckets": {"seq": [1, 32]}}
EXACT = 1e-4  # of a mean in nats: f32 arithmetic against transformers' in f32


def probabilities(row: list[float]) -> list[float]:
    weights = [math.exp(x - max(row)) for x in row]
    return [w / math.fsum(weights) for w in weights]


def scored(windows: list[Window]) -> list[int]:
    return [token for window in windows for token in window.ids[-window.scored :]]


# -- windows ------------------------------------------


@pytest.mark.parametrize("prefix", [(), (1,)])
@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 2), (5, 1), (5, 3), (40, 7), (2, 2)])
def test_sliding_windows_score_every_token_once(length: int, stride: int, prefix: tuple[int, ...]) -> None:
    ids = list(range(10, 31))
    found = sliding_windows(ids, length, stride, prefix)
    whole = ids if prefix else ids[1:]
    if stride == length and not prefix:  # side by side: the first token of a window has nothing before it
        whole = [token for i, token in enumerate(ids) if i % length]
    assert scored(found) == whole
    assert all(len(window.ids) <= length and tuple(window.ids[: len(prefix)]) == prefix for window in found)
    assert all(window.scored < len(window.ids) for window in found)


def test_tokens_have_what_the_stride_leaves_before_them() -> None:
    first, *others = sliding_windows(list(range(100)), 20, 5)
    assert first == Window(list(range(20)), 19)
    assert all(len(window.ids) - window.scored >= 15 for window in others)


def test_halved_windows_are_those_of_llama_cpp() -> None:
    """Whole windows side by side with BOS in the first place; of n tokens the last n - 1 - n // 2 count."""
    found = halved_windows(list(range(100, 125)), 8, (1,))
    assert [window.ids for window in found] == [[1, *range(s + 1, s + 8)] for s in (100, 108, 116)]
    assert scored(found) == [105, 106, 107, 113, 114, 115, 121, 122, 123]


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (8, 9), (8, 0)])
def test_windows_that_cannot_be_are_refused(length: int, stride: int) -> None:
    with pytest.raises(ArgumentError):
        sliding_windows([1, 2, 3], length, stride)


def test_halves_need_something_to_halve() -> None:
    with pytest.raises(ArgumentError, match="at least 4"):
        halved_windows([1, 2, 3], 3)


# -- sums ------------------------------------------


def test_losses_and_divergences_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(1)
    logits, base = (rng.normal(0, 3, (5, 11)).astype(np.float32) for _ in range(2))
    ids = [3, 0, 10, 7, 7]
    losses, base_losses, divergences, same = compare(logits, base, ids)
    for i, token in enumerate(ids):
        q, p = probabilities(logits[i].tolist()), probabilities(base[i].tolist())
        assert losses[i] == pytest.approx(-math.log(q[token]), abs=1e-12)
        assert base_losses[i] == pytest.approx(-math.log(p[token]), abs=1e-12)
        assert divergences[i] == pytest.approx(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        assert same[i] == (q.index(max(q)) == p.index(max(p)))


def test_equal_logits_have_no_divergence_and_large_ones_do_not_overflow() -> None:
    logits = np.array([[1000.0, 1000.0], [5.0, -5.0]], np.float32)
    losses, _, divergences, same = compare(logits, logits, [1, 0])
    assert losses[0] == pytest.approx(math.log(2)) and divergences.tolist() == [0, 0] and same.all()


def test_the_summary_is_that_of_the_numbers() -> None:
    kl = np.arange(100) / 100.0
    found = Scores(np.log([2.0, 8.0]), np.log([2.0, 2.0]), kl, np.arange(100) % 4 > 0).as_dict()
    assert (found["tokens"], found["perplexity"], found["base_perplexity"]) == (2, pytest.approx(4), pytest.approx(2))
    assert found["error"] == pytest.approx(4 * math.log(2))  # the standard error of ln 2 and ln 8 is ln 2
    expected = {"mean": 0.495, "median": 0.495, "p99": 0.9801, "max": 0.99, "same_top": 0.75}
    assert {name: found["kl"][name] for name in expected} == pytest.approx(expected)


# -- a model ------------------------------------------


def test_a_golden_model_scores_what_the_logits_of_transformers_say(goldens: Path) -> None:
    golden = np.load(goldens / "llama" / "golden.npz")
    ids = golden["tokens"].tolist()
    rows = [(at, row) for at, row in zip(golden["positions"].tolist(), golden["logits"], strict=True) if at < 47]
    expected = {at: -math.log(probabilities(row.tolist())[ids[at + 1]]) for at, row in rows}
    seen: list[int] = []
    with closing(Engine.open(goldens / "llama" / "hf", max_seq=48, precision="exact", profile=PAIR)) as engine:
        whole = score(engine, [Window(ids, 47)], on_tokens=seen.append)
        pieces = score(engine, sliding_windows(ids, 32, 16), rows=1)
    assert {at: whole.losses[at] for at in expected} == pytest.approx(expected, abs=EXACT) and seen == [32, 47]
    assert pieces.losses[:31] == pytest.approx(whole.losses[:31], abs=EXACT), "the first window sees the same"
    assert len(pieces.losses) == 47 and not pieces.divergences.size and "kl" not in pieces.as_dict()


def test_a_text_without_a_token_to_score_is_refused() -> None:
    with pytest.raises(PromptError, match="no token to score"):
        score(None, [])  # type: ignore[arg-type]
