"""From a path to tokens on the golden checkpoints, on the reference device: expected values by transformers.

What native code adds is tested where it stands; this holds the engine and the runners to the same figures without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.runners import CachedRunner, LmRunner, auto_runner
from rlx.store.cache import CompileCache

FAMILIES = {  # and the file of each; both files of a family are compared where its graph is tested
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4-moe", "llama", "qwen2", "qwen3"), "hf"),
    **dict.fromkeys(("qwen3moe", "qwen35"), "hf"),
    **dict.fromkeys(("qwen35moe", "gemma4-e2b"), "model-f16.gguf"),
}
#: One of each kind of cache: full, windows and shared, recurrent states; and experts.
QUICK = ("llama", "gemma3n", "qwen35", "gemma4-moe")
CASES = [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FAMILIES]
MAX_SEQ, TOLERANCE = 96, 3e-5  # of float32 against float32, and scores of Gemma 4 have no scale
BUCKETS = {"buckets": {"seq": [1, 32]}}


@pytest.fixture(scope="module")
def runner_of(goldens: Path) -> Iterator[Any]:
    """family -> its runner, opened once."""
    runners: dict[str, CachedRunner] = {}

    def opened(family: str) -> CachedRunner:
        if family not in runners:
            runners[family] = auto_runner(
                goldens / family / FAMILIES[family], device="reference", precision="exact", max_seq=MAX_SEQ,
                profile=BUCKETS, cache=CompileCache(policy="off"), compile_ahead=False,
            )  # fmt: skip
        return runners[family]

    yield opened
    for runner in runners.values():
        runner.close()


def golden(goldens: Path, family: str) -> dict[str, Any]:
    """The expected values; `positions` are those that have `logits`."""
    return {"positions": np.arange(48), **np.load(goldens / family / "golden.npz")}


def sure(expected: dict[str, Any]) -> int:
    """Greedy tokens before the first that is nearly tied."""
    ties = np.flatnonzero(expected["greedy_margin"] < 20 * TOLERANCE * np.abs(expected["logits"]).max())
    return int(ties[0]) if len(ties) else len(expected["greedy"])


def assert_close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("family", CASES)
def test_logits_by_every_way(goldens: Path, runner_of: Any, family: str) -> None:
    runner, expected = runner_of(family), golden(goldens, family)
    tokens, cut = expected["tokens"].tolist(), len(expected["tokens"]) // 3
    logits = dict(zip(expected["positions"].tolist(), expected["logits"], strict=True))
    assert_close(runner.predict_logits(tokens, all_positions=True)[list(logits)], expected["logits"])
    assert_close(runner.predict_logits(tokens), logits[len(tokens) - 1])
    assert_close(runner.prefill_logits(tokens[:cut]), logits[cut - 1])
    for at in range(cut, cut + 3):
        assert_close(runner.decode_logits(tokens[at]), logits[at])
        runner.predict_logits(tokens[:3])  # in between, it changes nothing


@pytest.mark.parametrize("family", CASES)
def test_greedy_tokens_are_those_of_transformers(goldens: Path, runner_of: Any, family: str) -> None:
    runner, expected = runner_of(family), golden(goldens, family)
    tokens, count = expected["tokens"].tolist(), sure(expected)
    assert count >= 3
    ids = runner.generate(tokens, count, stop_at_eog=False)
    assert ids == expected["greedy"][:count].tolist()
    assert LmRunner.generate(runner, tokens, min(count, 4), stop_at_eog=False) == ids[:4]
    seen: list[int] = []
    assert runner.generate(tokens, 16, lambda t: (seen.append(t), len(seen) < 3)[1]) == seen == ids[:3]
