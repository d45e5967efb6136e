"""Whole models with caches of blocks: text close to that of f32 caches, and sessions that go back, copy and restore."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import demo
from rlx.errors import ArgumentError
from tests.single_sequence import SingleEngine

PROMPT = "Once upon a time there was"
PAIR = {"buckets": {"seq": [1, 32]}}


def opened(dtype: str, max_seq: int) -> rlx.LmRunner:
    return rlx.auto_runner(demo.path(), precision="exact", kv_dtype=dtype, max_seq=max_seq, profile=PAIR)


def logits(dtype: str, ids: list[int]) -> np.ndarray:
    """Of the last rows of the trained demo model: a prefill of the first half, a decode of the rest."""
    with opened(dtype, len(ids)) as runner:
        half = len(ids) // 2
        return np.stack([runner.prefill_logits(ids[:half]), *(runner.decode_logits(token) for token in ids[half:])])


@pytest.mark.slow
def test_a_trained_model_writes_on_as_with_f32() -> None:
    with opened("f32", 200) as runner:
        ids = runner.tokenizer.encode(PROMPT)
        ids += list(runner.generate(ids, 200 - len(ids), stop_at_eog=False))
    want = logits("f32", ids)
    for dtype, ceiling, same in (("q8_0", 0.02, 0.97), ("q4_0", 0.25, 0.8)):
        found = logits(dtype, ids)
        assert 0 < np.abs(found - want).max() <= ceiling * np.abs(want).max()
        assert (found.argmax(-1) == want.argmax(-1)).mean() >= same, dtype


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "q4_0"), ("gemma3", "q8_0")])
def test_sessions_go_back_and_are_copied(goldens: Path, family: str, dtype: str) -> None:
    """The bits of a session that never left its path; Gemma's windows are rings."""
    path = goldens / family / "model-f16.gguf"
    ids = np.random.default_rng(4).integers(3, 200, 90).tolist()

    def opened(max_seq: int) -> SingleEngine:
        return SingleEngine.open(path, precision="exact", kv_dtype=dtype, max_seq=max_seq, profile=PAIR)

    engine, other = opened(128), opened(112)
    engine.forward(ids[:70])
    snapshot = engine.snapshot()
    assert {a.dtype for a in snapshot.arrays.values()} == {np.dtype("uint8")}
    straight = [engine.forward([token]) for token in ids[70:]]
    engine.trim(70)
    assert np.array_equal(engine.forward([ids[70]]), straight[0])
    engine.restore(snapshot)
    other.restore(snapshot)
    for token, want in zip(ids[70:], straight, strict=True):
        assert np.array_equal(engine.forward([token]), want)
        assert np.array_equal(other.forward([token]), want)
    wrong = SingleEngine.open(path, precision="exact", kv_dtype="f16", max_seq=128)
    with pytest.raises(ArgumentError, match=rf"the snapshot has (full|ring) {dtype} .*, the session (full|ring) f16"):
        wrong.restore(snapshot)
    for opened_one in (engine, other, wrong):
        opened_one.close()
