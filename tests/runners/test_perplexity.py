"""Perplexity and KL divergence: against plain definitions, and against the logits of transformers on a golden file."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rlx.engine.engine import Engine
from rlx.errors import ArgumentError
from rlx.runners.perplexity import Window, compare, halved_windows, score, sliding_windows

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


def test_halved_windows_are_those_of_llama_cpp() -> None:
    """Whole windows side by side with BOS in the first place; of n tokens the last n - 1 - n // 2 count."""
    found = halved_windows(list(range(100, 125)), 8, (1,))
    assert [window.ids for window in found] == [[1, *range(s + 1, s + 8)] for s in (100, 108, 116)]
    assert scored(found) == [105, 106, 107, 113, 114, 115, 121, 122, 123]


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (8, 9), (8, 0)])
def test_windows_that_cannot_be_are_refused(length: int, stride: int) -> None:
    with pytest.raises(ArgumentError):
        sliding_windows([1, 2, 3], length, stride)


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
