"""The same bits of a row, whatever else is computed with it: every family, with `deterministic`.

The reference is one token at a time, by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.golden_files import FILES, QUANTIZED

from rlx.engine.kv.sequence import Sequence as TokenSequence
from rlx.engine.model_runner import Segment
from rlx.profile import CompileProfile
from tests.single_sequence import SingleEngine

Array = np.ndarray[Any, Any]
Rows = dict[int, Array]  # position -> the logits after it

LENGTH = 300  # more than a piece of attention, a window and a chunk of any kind
#: Few buckets, so that little is compiled; all files that are only read are the goldens of `tests/data`.
PROFILE: dict[str, Any] = {"buckets": {"seq": [1, 32]}, "precision": {"deterministic": True}}
MODELS = [(family, files[0]) for family, files in FILES.items()]
MODELS += [(family, f"model-{dtypes[0]}.gguf") for family, dtypes in QUANTIZED.items()]
#: At lower levels, too.
EVERYWHERE = ("qwen35-k256",)
#: Of the others all kernels are in these: every kind of state, experts, 4 bits, windows, softcaps.
QUICK = ("gemma2", "llama-k256", "qwen35-k256", "gemma4-moe", "gemma3n")


def model_path(goldens: Path, family: str, file: str) -> Path:
    """The file or folder of a golden model."""
    return goldens / family / file


def opened(path: Path, threads: int) -> SingleEngine:
    return SingleEngine.open(path, threads=threads, max_seq=LENGTH + 40, profile=CompileProfile.load(PROFILE))


def ids_of(engine: SingleEngine) -> list[int]:
    return np.random.default_rng(7).integers(0, engine.config.vocab_size // 2, LENGTH).tolist()


def in_chunks(engine: SingleEngine, ids: Sequence[int], sizes: Sequence[int], all_rows: bool = False) -> Rows:
    """The ids in calls of these sizes, over and over."""
    found: Rows = {}
    while (at := engine.past) < len(ids):
        part = ids[at : at + sizes[len(found) % len(sizes)]]
        rows = engine.forward(part, all_rows=all_rows)
        found |= dict(enumerate(rows, at)) if all_rows else {at + len(part) - 1: rows}
    return found


def with_drafts(engine: SingleEngine, ids: Sequence[int]) -> Rows:
    """Four rows at a time, of which some are wrong guesses that are taken back."""
    found: Rows = {}
    while (at := engine.past) < len(ids):
        right = min(1 + at % 4, len(ids) - at)
        rows = engine.verify([*ids[at : at + right], *[(token + 1) % 7 for token in ids[: 4 - right]]])
        found |= dict(enumerate(rows[:right], at))
        engine.trim(at + right)
    return found


def appended(engine: SingleEngine, sequence: TokenSequence, tokens: Sequence[int]) -> Rows:
    """The logits after each of the tokens, by position."""
    at = len(sequence)
    (rows,) = engine.step([Segment(sequence, tokens, "all")])
    assert rows is not None
    return dict(enumerate(rows, at))


def after_a_hit(engine: SingleEngine, ids: Sequence[int]) -> Rows:
    """A prompt that shares 200 tokens with one that was computed before, and not the rest."""
    with closing(engine.open_sequence(shared=False)) as before:
        appended(engine, before, [*ids[:200], *ids[10:90]])
    with closing(engine.open_sequence(ids)) as sequence:
        assert len(sequence) >= 64, "a hit"
        return appended(engine, sequence, ids[len(sequence) :])


def after_a_miss(engine: SingleEngine, ids: Sequence[int]) -> Rows:
    """The same prompt, computed anew."""
    with closing(engine.open_sequence(ids, shared=False)) as sequence:
        assert len(sequence) == 0, "a miss"
        return appended(engine, sequence, ids)


def in_a_batch(engine: SingleEngine, ids: Sequence[int]) -> Rows:
    """A step at a time, beside the steps, chunks and drafts of others, which are at other positions."""
    first = LENGTH - 12
    with (
        closing(engine.open_sequence(shared=False)) as own,
        closing(engine.open_sequence(shared=False)) as steps,
        closing(engine.open_sequence(shared=False)) as chunks,
        closing(engine.open_sequence(shared=False)) as drafts,
    ):
        found = appended(engine, own, ids[:first])
        appended(engine, steps, ids[5:20])
        appended(engine, drafts, ids[9:270])
        for at in range(first, LENGTH):
            beside = [
                Segment(steps, [at % 50]),
                Segment(chunks, ids[at : at + 5], "none"),
                Segment(drafts, ids[at : at + 3], "all", drafts=True),
            ]
            *_, row = engine.step([*beside[at % 3 :], Segment(own, [ids[at]])])
            assert row is not None
            found[at] = row
            drafts.rewind(len(drafts) - 2)
    return found


WAYS: dict[str, Callable[[SingleEngine, Sequence[int]], Rows]] = {
    "a prompt": lambda engine, ids: in_chunks(engine, ids, (LENGTH,)),
    "all rows": lambda engine, ids: in_chunks(engine, ids, (LENGTH,), all_rows=True),
    "chunks": lambda engine, ids: in_chunks(engine, ids, (7, 1, 19, 2, 32)),
    "drafts": with_drafts,
    "a hit": after_a_hit,
    "a miss": after_a_miss,
    "a batch": in_a_batch,
}


@pytest.fixture(
    params=[
        pytest.param(model, marks=() if model[0] in EVERYWHERE else mark, id="-".join(model))
        for model in MODELS
        for mark in (pytest.mark.any_machine if model[0] in QUICK else pytest.mark.slow,)
    ]
)
def model(request: pytest.FixtureRequest, goldens: Path) -> Path:
    return model_path(goldens, *request.param)


def expect(found: Rows, want: Rows, what: str) -> None:
    """Every row that was found has the bits that are wanted."""
    different = [at for at, row in found.items() if not np.array_equal(row, want[at])]
    assert not different, f"{what}: {len(different)} of {len(found)} rows differ, the first at {different[0]}"


@pytest.mark.filterwarnings("ignore:.*threads are slower")
def test_same_bits(model: Path) -> None:
    with closing(opened(model, 1)) as engine:
        assert engine.stats()["deterministic"] is True
        ids = ids_of(engine)
        want = in_chunks(engine, ids, (1,))
        for name, way in WAYS.items():
            engine.reset()
            expect(way(engine, ids), want, name)
    for threads in (2, 3, 4):  # each a restart, too
        with closing(opened(model, threads)) as engine:
            expect(in_chunks(engine, ids, (LENGTH,), all_rows=True), want, f"{threads} threads")
            engine.reset()
            expect(in_chunks(engine, ids[:290], (289, 1)), want, f"a step of {threads} threads")
