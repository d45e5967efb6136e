"""The choice of tokens by the host: the tokens of the meaning, from few of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlx.sampling.choice import UNIFORM, Changes, Choice, choose, choose_rows
from rlx.sampling.options import SampleOpts

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"top_k": 20, "top_p": 0.95, "temperature": 0.7}, {"top_k": 3, "min_p": 0.1},
    {"top_k": 40, "typical_p": 0.8}, {"top_k": 50, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"top_p": 0.9}, {"top_k": 400}, {"top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "changed", "broken", "excluded"])
def test_same_tokens(options: dict[str, Any], kind: str) -> None:
    rng = np.random.default_rng(3)
    for vocab in (40, 1000, 5003):
        logits = rng.standard_normal(vocab).astype(np.float32) * 3
        mask, changes = None, None
        if kind == "ties":
            logits = np.round(logits)
        if kind == "masked":
            mask = rng.integers(-(2**31), 2**31, -(-vocab // 32)).astype(np.int32)
        if kind == "changed":
            ids = rng.integers(-3, vocab + 3, 12).astype(np.int32)
            changes = Changes(ids, rng.integers(0, 3, 12).astype(np.float64), rng.standard_normal(12) * 4)
            logits[ids[ids < vocab][0]] = -np.inf
        if kind == "broken":
            logits[vocab // 2] = np.nan
        if kind == "excluded":
            mask = np.zeros(-(-vocab // 32), np.int32)
        choices = [Choice(SampleOpts(seed=1, **options), mask, changes) for _ in range(8)]
        for choice in choices:
            choice.numbers[UNIFORM] = rng.random()
        assert choose_rows([logits] * 8, choices) == [choose(logits, choice) for choice in choices]
