"""Several cards compute the bits of one: one card taken as two, or those that RLX_TEST_CARDS names, such as "0,1".

Skipped where there is no card; `make test-cuda` runs it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import check_golden, golden

import rlx
from rlx.engine.kv.snapshot import Snapshot
from rlx.store.cache import CompileCache
from rlx.store.store import Store

pytestmark = pytest.mark.skipif("cuda" not in rlx.devices(), reason="this machine has no card")

CARDS = f"cuda:{os.environ.get('RLX_TEST_CARDS', '0,0')}"
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "gemma3", "gemma3n", "qwen3moe", "gpt-oss", "deepseek-v3", "qwen35"), "hf"),
    "gemma4-moe": "hf", "nemotron-h": "hf", "llama-k256": "model-Q4_K_M.gguf",
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "precision": "exact", "max_seq": 192, "profile": {"buckets": {"seq": [1, 32, 128]}}, "compile_ahead": False,
}  # fmt: skip
SAMPLE = rlx.SampleOpts(temperature=0.9, top_k=20, seed=4)
IDS = [3 + i * i % 29 for i in range(100)]


def opened(goldens: Path, family: str, device: str, **more: Any) -> Any:
    cache = CompileCache(policy="off")
    return rlx.auto_runner(goldens / family / FAMILIES[family], **{**OPTIONS, "cache": cache, **more}, device=device)


def of_all(runner: Any) -> list[Any]:
    """Logits of few and of many rows, tokens alone, together, after a shared beginning, and sampled."""
    found: list[Any] = [runner.predict_logits(IDS[:count], all_positions=True) for count in (1, 30, 100)]
    found.append(runner.generate(IDS[:40], 40, stop_at_eog=False))
    found.append(runner.generate([*IDS[:40], 7, 8], 6, stop_at_eog=False))
    found.append(runner.generate_batch([IDS[:24], IDS, IDS[3:20], IDS[:1]], 6, stop_at_eog=False))
    found.append(runner.generate(IDS[:9], 9, stop_at_eog=False, sample=SAMPLE))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_one_card(goldens: Path, family: str) -> None:
    found = []
    for device in ("cuda", CARDS):
        with opened(goldens, family, device) as runner:
            found.append(of_all(runner))
    for one, some in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(some))


@pytest.mark.parametrize("family", ["llama", "qwen3moe", "deepseek-v3"])
def test_goldens(goldens: Path, family: str) -> None:
    with opened(goldens, family, CARDS) as runner:
        check_golden(runner, golden(goldens, family), 2e-4, greedy=8)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35"])
@pytest.mark.parametrize("more", [{}, {"kv_dtype": "q8_0"}], ids=["f32", "q8_0"])
def test_snapshots_go_from_one_card_to_several_and_back(
    goldens: Path, family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    with opened(goldens, family, "cuda", **more) as one, opened(goldens, family, CARDS, **more) as some:
        expected = one.generate(IDS[:60], 8, stop_at_eog=False)
        for source, target in ((one, some), (some, one)):
            source.prefill_logits(IDS[:33])
            source.snapshot().save(tmp_path / "snapshot")
            target.restore(Snapshot.load(tmp_path / "snapshot"))
            assert target.generate(IDS[:60], 8, stop_at_eog=False) == expected


def test_two_models_at_once(goldens: Path) -> None:
    """Steps of two models begin in the same order on all cards."""
    with opened(goldens, "llama", CARDS) as first, opened(goldens, "qwen3", CARDS) as second:
        expected = [runner.generate(IDS[:20], 30, stop_at_eog=False) for runner in (first, second)]
        asked = rlx.Request(IDS[:20], 30, stop_at_eog=False)
        handles = [runner.submit(asked) for runner in (first, second) for _ in range(3)]
        found = [handle.result() for handle in handles]
    assert found == [expected[0]] * 3 + [expected[1]] * 3


def test_packed_weights_are_not_kept(goldens: Path, tmp_path: Path) -> None:
    with pytest.raises(rlx.errors.ArgumentError, match="packed weights of several cards cannot be read"):
        opened(goldens, "llama", CARDS, keep_packed=True, cache=CompileCache(store=Store(tmp_path)))
