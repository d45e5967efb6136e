"""States of prompts through files, in models with every kind of state and with images: what is read gives the logits of
a sequence that computes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest

from rlx.engine.kv import disk_kv_cache
from rlx.engine.kv.disk_kv_cache import DiskKVCache
from rlx.engine.kv.prefix_store import PrefixStore
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.models.variants import EmbeddedRows
from rlx.passes.capabilities import Layouts
from rlx.store.key import CompileKey

Array = np.ndarray[Any, Any]

CLOSE = 2e-5  # of the largest logit: NumPy sums a call of other rows in another order
KINDS = {
    "full": ("full", "full"),
    "rings": ("ring", "ring"),
    "recurrent": ("conv", "delta"),
    "everything": hybrid.KINDS,
}
TEXT = np.random.default_rng(0).integers(0, hybrid.VOCAB, 300).tolist()
ROWS = np.random.default_rng(1).standard_normal((2, 12, hybrid.WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 16 positions, and always read: what the machine measures does not count."""
    monkeypatch.setattr(hybrid, "LAYOUTS", Layouts(page=16))
    monkeypatch.setattr(DiskKVCache, "_pays", lambda *args: True)


def opened(kinds: Sequence[str], folder: Path, model: str = "m", **options: Any) -> hybrid.InterpretedEngine:
    engine = hybrid.InterpretedEngine(hybrid.graph(kinds), embeds=EmbeddedRows((2, 1, 1)), kv_bytes=4 << 20, **options)
    sizes, has_slots = engine.pool.sizes, engine.pool.memory.has_slots
    store = PrefixStore(folder, page=sizes.page, page_bytes=sizes.page_bytes, has_states=has_slots)
    store.use(CompileKey("prefix", model))
    engine.pool.kept = DiskKVCache(engine.pool, store)
    return engine


def kept(engine: hybrid.InterpretedEngine) -> DiskKVCache:
    assert engine.pool.kept is not None
    return engine.pool.kept


def computed(
    engine: hybrid.InterpretedEngine, ids: Sequence[int], spans: PromptEmbeddings | None = None, *marks: int
) -> tuple[int, Array]:
    """How many positions were known, and the logits after all of them."""
    work = kept(engine).reading(ids, spans)
    for _ in work or ():
        pass
    sequence = engine.pool.open(ids, embeddings=spans)
    for mark in marks:
        sequence.mark(mark)
    known = len(sequence)
    engine.model_runner.reserve(sequence, ids[known:])
    *_, last = engine.model_runner.pieces(sequence, ids[known:])
    sequence.close()
    return known, last[0]


def alone(kinds: Sequence[str], ids: Sequence[int], spans: PromptEmbeddings | None, folder: Path) -> Array:
    engine = opened(kinds, folder)
    try:
        return computed(engine, ids, spans)[1]
    finally:
        engine.close()


def direct(work: Callable[[], Any]) -> Any:
    return work()


@pytest.mark.parametrize(("kinds", "with_image"), [*((kinds, False) for kinds in KINDS), ("everything", True)])
def test_every_kind_of_state_comes_back(kinds: str, with_image: bool, tmp_path: Path) -> None:
    graph = KINDS[kinds]
    spans = PromptEmbeddings((EmbeddedSpan(40, ROWS[0], b"one", (3, 4)),)) if with_image else None
    other = PromptEmbeddings((EmbeddedSpan(40, ROWS[1], b"two", (3, 4)),)) if with_image else None
    first, second = [*TEXT[:120], *TEXT[200:220]], [*TEXT[:120], *TEXT[230:260]]
    want = alone(graph, second, spans, tmp_path / "empty")
    engine = opened(graph, tmp_path / "kept")
    computed(engine, first, spans, 120)
    kept(engine).write_all(direct)
    from_memory = computed(engine, second, spans)
    engine.close()
    again = opened(graph, tmp_path / "kept", max_seq=200)
    known, found = computed(again, second, spans)
    assert (known, kept(again).hit, from_memory[0]) == (120, 120, 120)
    assert np.array_equal(found, from_memory[1]), "the same bits as from memory"
    assert np.abs(found - want).max() <= CLOSE * np.abs(want).max()
    if with_image:
        known, found = computed(again, second, other)
        assert known <= 40, "another image"
        want = alone(graph, second, other, tmp_path / "empty")
        assert np.abs(found - want).max() <= CLOSE * np.abs(want).max()
    again.close()


def test_a_reading_that_is_closed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.engine.kv.disk_kv_cache.PIECE_BYTES", 1)
    engine = opened(KINDS["everything"], tmp_path)
    computed(engine, TEXT[:120])
    kept(engine).write_all(direct)
    engine.close()
    again = opened(KINDS["everything"], tmp_path)
    work = kept(again).reading(TEXT[:130])
    assert work is not None
    next(work)
    assert again.pool.pages.used
    work.close()
    assert not again.pool.pages.used and len(again.pool._free_slots) == again.pool._slots
    assert computed(again, TEXT[:130])[0] == 120
    again.close()


def test_what_the_pool_has_evicted_is_not_written(tmp_path: Path) -> None:
    """A beginning that waits to be written is gone, and the rest of the pool is written all the same."""
    engine = opened(KINDS["full"], tmp_path)
    computed(engine, TEXT[:120])
    kept(engine).used_again(np.array(TEXT[:100], np.int64))
    engine.pool.index.clear()
    computed(engine, TEXT[150:250])
    kept(engine).write_all(direct)
    engine.close()
    again = opened(KINDS["full"], tmp_path)
    assert computed(again, TEXT[:130])[0] == 0
    assert computed(again, TEXT[150:260])[0] == 100
    again.close()


def test_a_full_queue_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not finished goes back to the front only where there is room for it."""
    monkeypatch.setattr(disk_kv_cache, "WAITING", 3)
    engine = opened(("full",), tmp_path)
    try:
        keeper = kept(engine)
        ids = [np.arange(at, at + disk_kv_cache.LONG, dtype=np.int64) for at in range(9)]
        for each in ids[:3]:
            keeper.ended(each)
        ended = ids[3:]

        def interrupted() -> bool:
            keeper.ended(ended.pop(0))  # a sequence ends while another one is written
            return False

        keeper.write_next(direct, interrupted)
        assert keeper._waiting[-1].keys[0] == ended[0][0] - 1
    finally:
        engine.close()
