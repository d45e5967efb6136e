"""benchmarks/perplexity.py: its sums against a plain definition, and what auto precision costs the demo model."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import rlx

FOLDER = Path(__file__).parent.parent / "benchmarks"
AUTO_CHANGE = 0.002  # of the perplexity, the most that faster arithmetic may cost
KNOWN = 3.0  # perplexity of a text that a model knows; of one that it does not, thousands


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = __import__("perplexity")
    assert isinstance(found, ModuleType)
    return found


def test_losses_are_negative_logs_of_probabilities(script: ModuleType) -> None:
    logits = np.array([[0.0, math.log(3.0)], [1000.0, 1000.0], [5.0, -5.0]], np.float32)
    np.testing.assert_allclose(script.losses(logits, [0, 1, 0]), [math.log(4 / 3), math.log(2)], rtol=1e-6)
    assert script.Score(np.log([2.0, 8.0])).perplexity == pytest.approx(4.0)


def test_every_token_is_in_one_window(script: ModuleType) -> None:
    ids = list(range(10, 20))
    assert list(script.windows(ids, 4, ())) == [ids[:4], ids[4:8], ids[8:]]
    assert list(script.windows(ids, 4, (1,))) == [[1, *ids[:3]], [1, *ids[3:6]], [1, *ids[6:9]], [1, ids[9]]]
    assert list(script.windows(ids[:5], 4, ())) == [ids[:4]]  # a window of one token has nothing to score


def test_auto_precision_costs_the_demo_model_little(script: ModuleType, demo_model: Path) -> None:
    text = script.held_out_stories(count=4)
    exact, auto = (script.score(str(demo_model), text, mode, 256, 1) for mode in script.PRECISIONS)
    assert len(exact.losses) == len(auto.losses) > 500
    assert exact.perplexity < KNOWN
    assert not np.array_equal(exact.losses, auto.losses)
    assert abs(auto.perplexity / exact.perplexity - 1) < AUTO_CHANGE


def test_a_text_without_a_token_to_score_is_refused(script: ModuleType, demo_model: Path) -> None:
    with pytest.raises(rlx.RlxError, match="has 0 tokens"):
        script.score(str(demo_model), "", "auto", 64, 1)
