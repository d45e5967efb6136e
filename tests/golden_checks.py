"""What an open runner computes beside the golden file of its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def golden(goldens: Path, family: str) -> dict[str, Any]:
    """The golden file of a family; `positions` are those of its logits."""
    return {"positions": np.arange(48), **np.load(goldens / family / "golden.npz")}


def error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Largest difference as a share of the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_golden(runner: Any, expected: dict[str, Any], tolerance: float, greedy: int) -> None:
    """Holds logits of a prompt at once, of a shorter one and of the token after it, and greedy tokens without ties.

    Args:
        tolerance: of logits, as a share of the largest.
        greedy: most tokens to generate.
    """
    tokens, cut = expected["tokens"].tolist(), len(expected["tokens"]) // 3
    logits = dict(zip(expected["positions"].tolist(), expected["logits"], strict=True))
    close = tolerance * np.abs(expected["logits"]).max()
    assert np.abs(runner.predict_logits(tokens, all_positions=True)[list(logits)] - expected["logits"]).max() <= close
    if cut in logits and cut - 1 in logits:
        assert np.abs(runner.prefill_logits(tokens[:cut]) - logits[cut - 1]).max() <= close
        assert np.abs(runner.decode_logits(tokens[cut]) - logits[cut]).max() <= close
    ties = np.flatnonzero(expected["greedy_margin"] < 20 * close)
    count = min(greedy, int(ties[0]) if len(ties) else greedy)
    assert runner.generate(tokens, count, stop_at_eog=False) == expected["greedy"][:count].tolist()
