"""Images in sequences of models with every kind of state: however a prompt was computed, shared, cut, saved or gone on
from, its logits are those of one pass over it in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest

from rlx.engine.kv import sequence as sequence_module
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.engine.kv.sequence import Sequence as PoolSequence
from rlx.engine.kv.snapshot import Snapshot
from rlx.errors import PromptError
from rlx.models import variants
from rlx.models.variants import EmbeddedRows
from rlx.passes.capabilities import Layouts

Array = np.ndarray[Any, Any]

CEILING = 2e-5  # of the largest logit: float32 through four layers
PLACEHOLDER = 1 << 20  # no row of the table
SECTIONS = (2, 1, 1)  # pair 1 turns by the row, pair 2 by the column
CASES = {
    "causal": (("full", "ring"), EmbeddedRows()),
    "components": (("full", "full"), EmbeddedRows(SECTIONS)),
    "recurrent": (("conv", "full", "delta"), EmbeddedRows(SECTIONS)),
    "all-layers": (("ring", "full"), EmbeddedRows(two_way="all")),
    "sliding-layers": (("full", "ring", "full"), EmbeddedRows(two_way="sliding")),
    "everything": (hybrid.KINDS, EmbeddedRows(SECTIONS, "sliding")),
}
RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, hybrid.VOCAB, 200).tolist()


def image(name: str, rows: int = 3, columns: int = 4) -> tuple[bytes, tuple[int, int], Array]:
    """A digest, a grid and rows."""
    seed = int.from_bytes(name.encode(), "little")
    values = np.random.default_rng(seed).standard_normal((rows * columns, hybrid.WIDTH)).astype(np.float32)
    return name.encode(), (rows, columns), values


A, B, FLAT = image("a"), image("b", 5, 2), image("c", 1, 7)


def prompt(*parts: int | tuple[bytes, tuple[int, int], Array], at: int = 0) -> tuple[list[int], PromptEmbeddings]:
    """Ids and spans: a number is so many ids of text, from `at` on."""
    ids, spans = list[int](), list[EmbeddedSpan]()
    for part in parts:
        if isinstance(part, int):
            ids += TEXT[at : at + part]
            at += part
        else:
            digest, grid, rows = part
            spans.append(EmbeddedSpan(len(ids), rows, digest, grid, True))
            ids += [PLACEHOLDER] * len(rows)
    return ids, PromptEmbeddings(tuple(spans))


PROMPTS = {
    "inside": prompt(5, A, 9),
    "first": prompt(A, 3, B, 4),
    "adjacent": prompt(2, B, A, FLAT, 3),
    "last": prompt(30, A),
}


def expected(case: str, ids: Sequence[int], spans: Sequence[EmbeddedSpan]) -> Array:
    """The logits after every id, from inputs that are written position by position."""
    kinds, kind = CASES[case]
    n, at = len(ids), 0
    rows, index = np.zeros((n, hybrid.WIDTH), np.float32), np.full(n, -1, np.int32)
    places, visible = np.zeros((n, 3), np.int32), np.arange(n, dtype=np.int32)
    by_start, i = {span.start: span for span in spans}, 0
    while i < n:
        span = by_start.get(i)
        if span is None:
            places[i] = at
            at, i = at + 1, i + 1
            continue
        assert span.grid is not None
        count = len(span.rows)
        own = [(at, at + k // span.grid[1], at + k % span.grid[1]) for k in range(count)]
        places[i : i + count] = own if kind.sections else np.arange(at, at + count)[:, None]
        rows[i : i + count], index[i : i + count], visible[i : i + count] = (
            span.rows,
            range(i, i + count),
            i + count - 1,
        )
        at, i = places[i : i + count].max() + 1, i + count
    inputs: dict[str, Array] = {"rows": rows, "row_index": index}
    inputs |= {"positions": places if kind.sections else places[:, 0]}
    inputs |= {"visible": visible} if kind.two_way != "none" else {}
    graph = variants.with_embedded_rows(hybrid.graph(kinds), kind)
    return hybrid.reference(graph, [0 if k >= hybrid.VOCAB else k for k in ids], **inputs)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of 64 positions, and a checkpoint every 24."""
    monkeypatch.setattr(hybrid, "LAYOUTS", Layouts(page=16))
    monkeypatch.setattr(sequence_module, "SPACING", 24)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def engine(case: str) -> Iterator[hybrid.InterpretedEngine]:
    made = opened(case)
    yield made
    made.close()


def opened(case: str) -> hybrid.InterpretedEngine:
    kinds, kind = CASES[case]
    return hybrid.InterpretedEngine(hybrid.graph(kinds), embeds=kind)


def begun(engine: hybrid.InterpretedEngine, ids: list[int], spans: PromptEmbeddings) -> PoolSequence:
    """A sequence that is the current one of the engine, as `Engine.open_sequence` makes it."""
    kind = engine.model_runner.limits.embeds
    engine._sequence = engine.pool.open(ids, embeddings=spans.fitting(bool(kind.sections), kind.two_way != "none"))
    return engine._sequence


def agrees(found: Array, want: Array) -> bool:
    found = np.atleast_2d(found)
    return bool(np.abs(found - want[-len(found) :]).max() <= CEILING * np.abs(want).max())


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_with_images(case: str, name: str, engine: hybrid.InterpretedEngine) -> None:
    """At every position, then token by token, drafts that are verified, and a native run."""
    ids, spans = PROMPTS[name]
    whole = [*ids, *TEXT[100:112]]
    want = expected(case, whole, spans.spans)
    begun(engine, [], spans)
    assert agrees(engine.forward(ids, all_rows=True), want[: len(ids)])
    for token in whole[len(ids) : -8]:
        assert agrees(engine.forward([token]), want[: engine.past])
    assert agrees(engine.verify(whole[-8:-4]), want[:-4])
    engine.trim(len(whole) - 6)
    assert agrees(engine.forward(whole[-6:-1]), want[:-1])
    found = engine.greedy(whole[-1], 3)
    assert agrees(engine.forward(found[-1:]), expected(case, [*whole, *found], spans.spans))


@pytest.mark.parametrize("name", ["inside", "first", "adjacent"])
def test_going_back_to_any_position(case: str, name: str, engine: hybrid.InterpretedEngine) -> None:
    """Also into an image: the rows that are left then make a smaller one, and text goes on behind it."""
    ids, spans = PROMPTS[name]
    for length in range(1, len(ids), 3):
        begun(engine, ids, spans)
        engine.forward(ids[engine.past :])
        engine.trim(length)
        kept = tuple(span.cut(length) for span in spans.spans if span.start < length)
        assert agrees(engine.forward(TEXT[150:153]), expected(case, [*ids[:length], *TEXT[150:153]], kept))
        engine.current.close()
    begun(engine, ids, spans)
    assert agrees(engine.forward(ids[engine.past :]), expected(case, ids, spans.spans)), "what was shared is right"


def test_a_second_question_computes_its_own_rows(case: str, engine: hybrid.InterpretedEngine) -> None:
    """After one image and after two; the logits are those of computing all of it."""
    first, second = prompt(4, A, 6), prompt(4, A, 9, at=0)
    second = [*second[0][:16], *TEXT[60:69]], second[1]
    for (ids, spans), known in ((first, 0), (second, 16)):
        begun(engine, ids, spans)
        assert engine.past == known
        before = engine.rows
        assert agrees(engine.forward(ids[engine.past :]), expected(case, ids, spans.spans))
        assert engine.rows - before == len(ids) - known
        engine.current.close()
    for known, words in ((18, TEXT[70:75]), (28, TEXT[80:88])):
        ids, spans = prompt(4, A, 2, B)
        ids += words
        sequence = begun(engine, ids, spans)
        assert engine.past == (known if known == 28 or not sequence.memory.has_slot else 16)
        assert agrees(engine.forward(ids[engine.past :]), expected(case, ids, spans.spans))
        sequence.close()


def test_other_images_share_nothing(case: str, engine: hybrid.InterpretedEngine) -> None:
    """Equal ids are not enough; nor is an equal image that was cut, where its rows see each other."""
    ids, spans = prompt(4, A, 6)
    begun(engine, ids, spans)
    engine.forward(ids)
    engine.current.close()
    other = prompt(4, image("z"), 6)
    begun(engine, *other)
    assert engine.past <= 4
    assert agrees(engine.forward(ids[engine.past :]), expected(case, ids, other[1].spans))
    begun(engine, ids, spans)
    engine.forward(ids[engine.past :])
    engine.trim(9)
    engine.forward([*TEXT[:30]])
    engine.current.close()
    begun(engine, ids, spans)
    assert agrees(engine.forward(ids[engine.past :]), expected(case, ids, spans.spans))


def test_snapshots_hold_images(case: str, engine: hybrid.InterpretedEngine, tmp_path: Path) -> None:
    """In a file, too; positions go on, and going back into an image computes it again."""
    ids, spans = PROMPTS["first"]
    begun(engine, ids, spans)
    engine.forward(ids)
    engine.snapshot().save(tmp_path / "s")
    other = opened(case)
    snapshot = Snapshot.load(tmp_path / "s")
    other.restore(snapshot)
    assert snapshot.nbytes == engine.snapshot().nbytes
    assert agrees(other.forward(TEXT[:3]), expected(case, [*ids, *TEXT[:3]], spans.spans))
    other.restore(snapshot)
    other.trim(20)
    kept = tuple(span.cut(20) for span in spans.spans)
    other.current.discard()
    begun(other, [], PromptEmbeddings(()))
    other.restore(snapshot)
    other.trim(20)
    assert agrees(other.forward(TEXT[:3]), expected(case, [*ids[:20], *TEXT[:3]], kept))
    other.close()


class Stop(KeyboardInterrupt):
    pass


def test_an_interrupt_keeps_the_images_to_come(case: str, engine: hybrid.InterpretedEngine) -> None:
    ids, spans = PROMPTS["adjacent"]
    begun(engine, [], spans)
    engine.forward(ids[:2])

    def stop() -> None:
        raise Stop

    engine.after = stop
    with pytest.raises(Stop):
        engine.forward(ids[2:])
    engine.after = lambda: None
    assert engine.past == 2
    assert agrees(engine.forward(ids[2:]), expected(case, ids, spans.spans))


# ---------------------------------------------------------------------------------------------------- bad input


def test_images_whose_rows_see_each_other_are_not_cut() -> None:
    engine = opened("all-layers")
    _, spans = prompt(2, image("large", 4, 5), 3)
    spans.check_calls(20)
    with pytest.raises(PromptError, match="has 20 rows, which see each other, and a call holds 16"):
        spans.check_calls(16)
    ids, spans = PROMPTS["inside"]
    begun(engine, [], spans)
    with pytest.raises(PromptError, match="the ids end at position 9, inside of rows that see each other"):
        engine.forward(ids[:9])
    assert engine.past == 0
    assert agrees(engine.forward(ids), expected("all-layers", ids, spans.spans))
    engine.close()


def test_spans_that_do_not_fit() -> None:
    _, _, rows = A
    for spans, match in (
        ((EmbeddedSpan(3, rows), EmbeddedSpan(14, rows)), "span 1: it starts at 14, before position 15"),
        ((EmbeddedSpan(3, rows[:0]),), r"expected rows float32 \[n, hidden\], found float32 \[0, 16\]"),
        ((EmbeddedSpan(3, rows.astype(np.float64)),), "expected rows float32"),
    ):
        with pytest.raises(PromptError, match=match):
            PromptEmbeddings(spans)
    wrong = PromptEmbeddings((EmbeddedSpan(0, rows, b"a", (5, 2)),))
    with pytest.raises(PromptError, match="a grid of 5 x 2 has 10 rows, found 12"):
        wrong.fitting(True, True)
    with pytest.raises(PromptError, match="its rows have 16 elements, those of the model 20"):
        wrong.check_width((20,))
