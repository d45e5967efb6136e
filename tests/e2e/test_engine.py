"""The native engine on the golden checkpoints: sessions, chunks, levels, threads, profiles. Expected logits by
transformers and llama.cpp; the engine's ways to one position are held to each other as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import error, golden

import rlx
from rlx.errors import PromptError
from rlx.store.cache import CompileCache
from rlx.store.store import Store, default_root
from tests.single_sequence import SingleEngine

Array = np.ndarray[Any, Any]

LADDER = {"buckets": {"seq": [1, 4, 16]}}  # small, so that a prompt of 48 runs in chunks
PAIR = {"buckets": {"seq": [1, 32]}}
GOLDEN = 2e-4  # of the largest logit: what exact precision may differ from transformers
SAME = 1e-6  # the same number by another way


def slow(value: str) -> Any:
    """A case that repeats another one for one more model."""
    return pytest.param(value, marks=pytest.mark.slow)


def from_16th(rows: Array, expected: dict[str, Array]) -> tuple[Array, Array]:
    """Those of the logits after the 16th token and all later ones that the golden has, and the golden's."""
    at = expected["positions"] >= 15
    return rows[expected["positions"][at] - 15], expected["logits"][at]


@pytest.fixture(scope="module")
def expected(goldens: Path) -> dict[str, Array]:
    return golden(goldens, "gemma3")


@pytest.fixture(scope="module")
def tokens(expected: dict[str, Array]) -> list[int]:
    found: list[int] = expected["tokens"].tolist()
    return found


@pytest.fixture(scope="module")
def gemma(goldens: Path) -> Iterator[SingleEngine]:
    """Gemma 3 has everything: windows of 16 and whole layers, two ropes, norms on both sides."""
    engine = SingleEngine.open(goldens / "gemma3" / "model-f16.gguf", precision="exact", profile=LADDER, max_seq=96)
    yield engine
    engine.close()


@pytest.fixture
def engine(gemma: SingleEngine) -> Iterator[SingleEngine]:
    gemma.reset()
    yield gemma
    gemma.reset()


# ---------------------------------------------------------------------------------------------------- chunks


def test_the_context_may_be_filled_to_the_last_position_and_no_further(engine: SingleEngine, tokens: list[int]) -> None:
    engine.forward(tokens)
    with pytest.raises(PromptError, match=r"49 tokens after 48 do not fit the context of 96\. Shorten"):
        engine.forward([1] * 49)
    assert engine.past == 48
    full = engine.forward(tokens)
    assert engine.past == 96
    with pytest.raises(PromptError, match="1 tokens after 96"):
        engine.forward([1])
    engine.reset()
    assert error(full, engine.forward(tokens * 2)) <= SAME


# ---------------------------------------------------------------------------------------------------- machines


# Largest error against an f32 cache, as a share of the largest logit; docs/caches.md has the measured ones.
KV_CEILINGS = {"f32": 0.0, "f16": 1e-3, "q4_0": 0.5}


def test_kv_types_stay_within_their_errors(goldens: Path) -> None:
    expected = golden(goldens, "qwen3")
    tokens = expected["tokens"].tolist()
    found, sizes = {}, {}
    for dtype in KV_CEILINGS:
        path = goldens / "qwen3" / "model-f16.gguf"
        engine = SingleEngine.open(path, precision="exact", kv_dtype=dtype, profile=PAIR, max_seq=96)
        assert engine.stats()["kv_dtype"] == dtype
        rows = [engine.forward(tokens[:16]), *(engine.forward([token]) for token in tokens[16:])]
        found[dtype], sizes[dtype] = np.stack(rows), engine.stats()["kv_bytes"]
        engine.close()
    assert error(*from_16th(found["f32"], expected)) <= GOLDEN
    for dtype, ceiling in KV_CEILINGS.items():
        assert error(found[dtype], found["f32"]) <= ceiling
    errors = [error(found[dtype], found["f32"]) for dtype in ("q4_0", "f16", "f32")]
    assert errors == sorted(set(errors), reverse=True), "they are no f32 in disguise"
    assert [sizes["f32"] * bits // 32 for bits in (16, 4.5)] == [sizes["f16"], sizes["q4_0"]]


@pytest.mark.parametrize("family", ["gemma3", "qwen35", slow("gemma4-k256")])
def test_greedy_tokens_in_native_runs(goldens: Path, family: str) -> None:
    """As many as the context has room for, through rings that wrap; then to a stop id; and the session goes on."""
    (path,) = (goldens / family).glob("*.gguf")
    engine = SingleEngine.open(path, max_seq=80, profile=PAIR, threads=2, deterministic=True)
    prompt = [3, 9, 27, 81, 11]
    first, want = int(engine.forward(prompt).argmax()), []
    for _ in range(75):
        want.append(int(engine.forward([want[-1] if want else first]).argmax()))
    engine.reset()
    engine.forward(prompt)
    found = engine.greedy(engine.current, first, 1000)
    assert 1 <= len(found) <= 32
    while engine.past < 80:
        found += engine.greedy(engine.current, found[-1], 1000)
    assert found == want
    assert engine.ids == [*prompt, first, *want[:-1]]
    engine.trim(79)
    assert engine.forward([want[-2]]).argmax() == want[-1]
    engine.trim(5)
    end, found = want.index(want[20]), [first]
    while len(found) < 75 and found[-1] != want[20]:
        found += engine.greedy(engine.current, found[-1], 75, [-1, want[20]])
    assert found[1:] == want[: end + 1]
    engine.close()


@pytest.mark.parametrize("family", [slow("gemma3"), slow("gemma4-e2b"), "qwen35moe"])
def test_who_computes_what_changes_no_bit(goldens: Path, family: str) -> None:
    """Small work in regions of its own, and as a prologue that each of several workers computes for itself."""
    found = []
    for fusion, threads in ((False, 1), (True, 1), (True, 3)):
        profile = {**PAIR, "fusion": {"prologue": fusion}}
        path = goldens / family / "model-f16.gguf"
        with rlx.auto_runner(path, max_seq=96, profile=profile, threads=threads) as runner:
            tokens = range(3, 19)
            found.append([runner.prefill_logits(tokens), *map(runner.decode_logits, tokens)])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


# ---------------------------------------------------------------------------------------------------- cache


def test_a_cache_of_one_program_works(goldens: Path, expected: dict[str, Array]) -> None:
    """Programs leave the cache while they are in use, and come back from the store."""
    tokens = expected["tokens"].tolist()
    cache = CompileCache(capacity=1, store=Store(default_root()))
    path = goldens / "gemma3" / "model-f16.gguf"
    with rlx.auto_runner(path, max_seq=96, precision="exact", profile=LADDER, cache=cache) as runner:
        for _ in range(2):
            assert error(runner.predict_logits(tokens, all_positions=True), expected["logits"]) <= GOLDEN
            assert runner.generate(tokens[:19], 3, stop_at_eog=False)
        stats = runner.stats()["cache"]
        assert len(cache) == 1
        assert stats.evictions >= 4
        assert stats.compiles + stats.hits_disk == stats.misses + stats.hits_disk >= 5
        again = [record.cached for record in runner.compile()]
        assert again == [True] * 4, "decode has a program that gives logits and one that gives the likeliest token"
        assert error(runner.predict_logits(tokens), expected["logits"][-1]) <= GOLDEN
