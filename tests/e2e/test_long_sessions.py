"""Compiled models with sliding windows and with recurrent layers, over sessions longer than their rings: every way to a
position against one pass of the interpreter over all ids, in float64 and through caches that hold everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import error

import rlx
from rlx import models
from rlx.engine.programs.programs import DECODE
from rlx.ir import dims, interp
from rlx.ir.dtypes import F32
from rlx.runners import Model
from rlx.weights import ModelWeights, open_weights
from tests.single_sequence import SingleEngine

Array = np.ndarray[Any, Any]

LENGTH = 200
SAME = 2e-5  # of the largest logit: float32 through a few layers, over many tokens
LADDER = {"buckets": {"seq": [1, 16]}}
OTHER = {"buckets": {"seq": [1, 50]}}
FAMILIES = {"gemma3": {"full", "ring"}, "qwen35": {"full", "recurrent"}}
IDS: list[int] = np.random.default_rng(5).integers(3, 500, LENGTH).tolist()


def interpreted(path: Path, ids: list[int]) -> Array:
    """The logits after every id."""
    with open_weights(path) as loader:
        config = models.config_from(loader.format, loader.metadata, loader.tensors.__contains__, where=loader.path)
        weights = ModelWeights(loader, config.arch)
        for view in models.views(config, weights.has):
            weights.define(*view)
        graph = models.build(config, weights, F32)
        names = graph.leaves("weight").keys() - graph.constants.keys()
        feeds: dict[str, Array] = {name: config.value(name, weights.array(name)) for name in names}
    env = {"SEQ": len(ids), "PAST_SEQ": 0, "CTX": len(ids), "WINDOW_CTX": len(ids)}
    feeds |= {name: np.zeros([dims.value(d, env) for d in s.shape]) for name, s in graph.leaves("state").items()}
    feeds |= {"tokens": np.array(ids, np.int32), "positions": np.arange(len(ids), dtype=np.int32)}
    return interp.run(graph, feeds, env, dtype=np.float64)[0]["logits"]


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    path: Path
    engine: SingleEngine
    expected: Array


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: pytest.FixtureRequest, goldens: Path) -> Iterator[Family]:
    path = goldens / request.param / "model-f16.gguf"
    engine = SingleEngine.open(path, precision="exact", profile=LADDER, max_seq=240)
    yield Family(request.param, path, engine, interpreted(path, IDS))
    engine.close()


@pytest.fixture
def family(opened: Family) -> Family:
    opened.engine.reset()
    return opened


def goes_on(family: Family, engine: SingleEngine, count: int = 5) -> bool:
    """Whether the next ids give the logits that follow a session of the first ids."""
    past = engine.past
    assert engine.ids == IDS[:past]
    found = engine.forward(IDS[past : past + count])
    return error(found, family.expected[past + count - 1]) <= SAME


def talk(engine: SingleEngine, prompt: int, length: int) -> None:
    engine.forward(IDS[:prompt])
    for token in IDS[prompt:length]:
        engine.forward([token])


@pytest.mark.parametrize("split", [[LENGTH], [1] * LENGTH, [37, 1, 1, 16, 5, 80, 3, 57]], ids=["one", "decode", "odd"])
def test_the_whole_way(family: Family, split: list[int]) -> None:
    assert {state.kind for state in family.engine.pool.memory.table.values()} == FAMILIES[family.name]
    rows, at = [], 0
    for count in split:
        rows.append(family.engine.forward(IDS[at : at + count], all_rows=True))
        at += count
    assert error(np.concatenate([np.atleast_2d(r) for r in rows]), family.expected) <= SAME


@pytest.mark.parametrize("length", [0, 60, 61, 100, 149])
def test_trim(family: Family, length: int) -> None:
    talk(family.engine, 60, 150)
    family.engine.trim(length)
    assert goes_on(family, family.engine)
    family.engine.trim(length)
    assert goes_on(family, family.engine, 1)


def poison(engine: SingleEngine, kind: str, start: int, stop: int) -> None:
    """Puts NaN in the places of positions, as a broken step would."""
    memory, sequence = engine.pool.memory, engine.current
    first, last = start // memory.page, -(-stop // memory.page)
    for name, state in memory.table.items():
        if state.kind == kind:
            heads, _, head_dim = state.shape
            full = name in memory.full
            places = sequence.pages[first:last] if full else memory.ring_pages(first * memory.page, stop)
            values = np.full((heads, stop - start, head_dim), np.nan, np.float32)
            memory.write(name, places, 0 if full else sequence.memory.slot, start, values)


def test_what_was_cut_is_not_read(family: Family) -> None:
    """NaN times a weight of 0 would be NaN."""
    talk(family.engine, 110, 150)
    for kind in FAMILIES[family.name] - {"recurrent"}:
        poison(family.engine, kind, 110, 150)
    family.engine.trim(110)
    assert goes_on(family, family.engine)


@pytest.mark.parametrize("length", [7, 150])
def test_snapshots_go_to_other_engines(family: Family, length: int) -> None:
    talk(family.engine, 5, length)
    snapshot = family.engine.snapshot()
    assert goes_on(family, family.engine)
    other = SingleEngine.open(family.path, precision="exact", profile=OTHER, max_seq=220)
    other.restore(snapshot)
    assert goes_on(family, other, 30)
    other.trim(length // 2)
    assert goes_on(family, other, 30)
    family.engine.restore(snapshot)
    assert goes_on(family, family.engine)
    assert snapshot.nbytes <= 4 * length + sum(
        state.dtype.size(
            state.shape if state.kind == "recurrent" else (state.shape[0], min(length, state.shape[1]), state.shape[2])
        )
        for state in family.engine.pool.memory.table.values()
    )
    other.close()


def test_runners_keep_their_session(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside `predict_logits`, and after a Ctrl-C that comes when a step has run but does not count yet."""
    with rlx.auto_runner(family.path, precision="exact", profile=LADDER, max_seq=240) as runner:
        assert isinstance(runner, Model)
        runner.prefill_logits(IDS[:70])
        for at in range(70, 76):
            assert error(runner.predict_logits(IDS[:20]), family.expected[19]) <= SAME
            assert error(runner.decode_logits(IDS[at]), family.expected[at]) <= SAME
        engine: Any = runner._engine
        program = engine._programs[DECODE]
        run = program.run

        def interrupted(**env: int) -> None:
            run(**env)
            raise KeyboardInterrupt

        monkeypatch.setattr(program, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.decode_logits(7)
        monkeypatch.setattr(program, "run", run)
        assert runner.past_seq == 76
        assert error(runner.decode_logits(IDS[76]), family.expected[76]) <= SAME
        runner.reset()
        assert error(runner.prefill_logits(IDS[:10]), family.expected[9]) <= SAME


def test_windows_bound_the_memory(goldens: Path) -> None:
    """Gemma 3's sliding layers hold their window and a call's rows, whatever the context."""
    sizes = {}
    for max_seq in (240, 4080):
        path = goldens / "gemma3" / "model-f16.gguf"
        engine = SingleEngine.open(path, kv_dtype="f16", profile=LADDER, max_seq=max_seq, load=False)
        config = engine.config
        token = 2 * 2 * config.each[0].kv_heads * config.each[0].head_dim  # K and V, f16
        sliding = sum(window is not None for window in config.windows)
        assert 0 < sliding < config.layers
        pages = -(-max_seq // 64) * 64
        one = engine.pool.sizes.sequence_bytes(max_seq)
        assert one == token * (sliding * 128 + (config.layers - sliding) * pages)
        sizes[max_seq] = engine.stats()["kv_bytes"]
        engine.close()
    assert sizes[4080] < 17 * sizes[240]
