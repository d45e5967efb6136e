"""Batches, compiled: segments of several sequences, over slots and over pages, against each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from compiled import levels
from pooled import Pool
from runners import hybrid

from rlx.backends import backend
from rlx.backends.cpu.layouts import PAGE
from rlx.backends.program import RowEnd, TokenRun
from rlx.compiler.executable import compile
from rlx.errors import ArgumentError
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ, value
from rlx.ir.dtypes import BF16, F32, I32, KV_DTYPES, Q4_0, DType
from rlx.ir.graph import Graph
from rlx.models import variants
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.store.cache import CompileCache

Array = np.ndarray[Any, Any]

LENGTHS = (150, 33, 70, 7, 21)
SLOTS = (3, 0, 5, 1, 2)
CEILING = 2e-5  # of the largest logit: float32 through a few layers
MOST_ROWS = 40
WINDOW_CTX = {"CTX": 160, "WINDOW_CTX": 128}


class Step:
    """The rows of a step: for each of some sequences the positions from `past` on, and gaps that belong to none."""

    def __init__(self, parts: Sequence[tuple[int, int, int]], slots: Sequence[int] = SLOTS) -> None:
        self.parts = parts  # sequence, past, rows
        self.segments: list[tuple[int, int, int, int]] = []
        at = 0
        for number, (i, past, rows) in enumerate(parts):
            at += number % 2  # a row of no segment, which is computed by the ops that know no segments
            self.segments.append((at, rows, past, slots[i]))
            at += rows
        self.rows = at

    def put(self, values: Sequence[Array]) -> Array:
        """The rows of all sequences, each [length, ...], in the places of their segments."""
        out = np.zeros((self.rows, *values[0].shape[1:]), values[0].dtype)
        for (i, past, rows), (first, *_) in zip(self.parts, self.segments, strict=True):
            out[first : first + rows] = values[i][past : past + rows]
        return out

    def taken(self, result: Array) -> Iterator[tuple[int, int, Array]]:
        """(sequence, past, its rows of a result)."""
        for (i, past, rows), (first, *_) in zip(self.parts, self.segments, strict=True):
            yield i, past, result[first : first + rows]


def steps(lengths: Sequence[int], most: int = MOST_ROWS, seed: int = 11) -> Iterator[Step]:
    """Steps through all sequences: single rows, rows of drafts, chunks, in any order; some segments have no rows."""
    at, rng = [0] * len(lengths), np.random.default_rng(seed)
    while live := [i for i, length in enumerate(lengths) if at[i] < length]:
        parts, room = [], most
        for i in rng.permutation(live)[: rng.integers(1, len(live) + 1)].tolist():
            rows = min(int(rng.choice([0, 1, 1, 4, 18, 33])), lengths[i] - at[i], room - 1)
            if rows >= 0:
                parts.append((i, at[i], rows))
                at[i] += rows
                room -= rows + 1
        if sum(rows for *_, rows in parts):
            yield Step(parts)


def texts(vocab: int) -> list[Array]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, vocab, length).astype(np.int32) for length in LENGTHS]


def check(found: Array, want: Array) -> None:
    assert np.abs(found - want).max(initial=0) <= CEILING * np.abs(want).max(initial=1)


def test_every_kind_of_state_in_slots(cache: CompileCache) -> None:
    """Against float64 over each whole text."""
    graph = hybrid.graph()
    weights = {name: w.astype(np.float32) for name, w in hybrid.weights(graph).items()}
    ids, bind = texts(hybrid.VOCAB), {**WINDOW_CTX, **weights, "SEQ": (1, MOST_ROWS)}
    wants, positions = [hybrid.reference(graph, one) for one in ids], [np.arange(n, dtype=np.int32) for n in LENGTHS]
    with compile(graph, bind, segments=6, threads=2, cache=cache) as batch:
        for _ in range(2):  # recurrent states begin anew
            batch.reset()
            for step in steps(LENGTHS):
                given = {"tokens": step.put(ids), "positions": step.put(positions)}
                found = batch(**given, segments=np.array(step.segments, np.int32))["logits"]
                for i, past, rows in step.taken(found):
                    check(rows, wants[i][past : past + len(rows)])


@pytest.mark.parametrize("level", [*levels(), "reference", "verified"])
def test_every_kind_of_state_over_a_pool(level: str, cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of one sequence and of several work on the same pages, in any order, and on the same slots."""
    if level == "verified":
        monkeypatch.setenv("RLX_VERIFY", "1")
        level = "native"
    graph = hybrid.graph()
    ids, rng = texts(hybrid.VOCAB), np.random.default_rng(8)
    wants, positions = [hybrid.reference(graph, one) for one in ids], [np.arange(n, dtype=np.int32) for n in LENGTHS]
    page = (backend(level) if level == "reference" else backend()).target().capabilities.layouts.page
    count = 20 * PAGE // page
    tables = page_tables(LENGTHS, page, count, rng)
    options = {"target": level, "cache": cache, "pages": count, "slots": 6, "window_ctx": 128}
    with Pool(graph, hybrid.weights(graph), **options) as pool:
        batch = pool.program((2, MOST_ROWS), segments=True)
        single, chunk = pool.program((1, 1)), pool.program((2, MOST_ROWS), all_rows=True)
        for number, step in enumerate(steps(LENGTHS)):
            inputs = {"tokens": step.put(ids), "positions": step.put(positions)}
            if number % 3 == 2 or step.rows == 1:
                for i, past, rows in [(i, past, rows) for i, past, rows in step.parts if rows]:
                    program = single if rows == 1 else chunk
                    program.select_slot(SLOTS[i])
                    own = {"tokens": ids[i][past:][:rows], "positions": range(past, past + rows), "pages": tables[i]}
                    found = pool.run(program, own, SEQ=rows, PAST_SEQ=past, PAGES=tables.shape[1])["logits"]
                    check(found, wants[i][past : past + rows])
                continue
            chosen = [first + r for first, rows, *_ in step.segments for r in range(rows)][::-2]
            inputs |= {"segments": step.segments, "pages": tables[[i for i, *_ in step.parts]], "logit_rows": chosen}
            sizes = {"SEQ": step.rows, "SEGMENTS": len(step.parts), "PAGES": tables.shape[1], "OUTS": len(chosen)}
            check(pool.run(batch, inputs, **sizes)["logits"], step.put(wants)[chosen])


def attention_graph(dtype: DType, window: int | None = None, pictures: bool = False) -> Graph:
    graph = Graph("attention")
    q, k, v = (graph.input(name, [SEQ, heads, 32]) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    keys = ops.kv_write(graph.state("keys", [2, CTX, 32], dtype), k)
    values = ops.kv_write(graph.state("values", [2, CTX, 32], dtype), v)
    visible = graph.input("visible", [SEQ], I32) if pictures else None
    sinks = graph.constant("sinks", np.array([3, 0, -2, 12])) if window else None
    graph.output("y", ops.attention(q, keys, values, scale=0.2, window=window, visible=visible, sinks=sinks))
    return graph


KINDS_OF_ATTENTION = [
    *((dtype, None, False) for dtype in KV_DTYPES),
    (KV_DTYPES[0], 100, True),
]


@pytest.mark.parametrize(("dtype", "window", "pictures"), KINDS_OF_ATTENTION, ids=str)
def test_caches_of_every_type(dtype: DType, window: int | None, pictures: bool, cache: CompileCache) -> None:
    check_bits(attention_graph(dtype, window, pictures), pictures, cache)


def check_bits(graph: Graph, pictures: bool, cache: CompileCache, **options: Any) -> None:
    """The bits of each segment are those of a call of its own over a contiguous cache.

    The longest text is long enough for single rows whose positions are split into ranges, whose sums meet in scratch
    memory of the segment. Rows of pictures see a few later positions, as far as the segment has them.
    """
    rng, lengths = np.random.default_rng(6), (700, 40, 170)
    weights = {name: rng.standard_normal((16, 128)) for name in graph.leaves("weight")}
    shapes = {"q": 4, "k": 2, "v": 2}
    rows = {n: [rng.standard_normal((m, heads, 32)).astype(np.float32) for m in lengths] for n, heads in shapes.items()}
    rows |= {"visible": [np.arange(m, dtype=np.int32) // 12 * 12 + 11 for m in lengths]} if pictures else {}
    tables, found = page_tables(lengths, PAGE, 20, rng), [np.zeros((m, 128), np.float32) for m in lengths]
    taken = []
    with Pool(graph, weights, cache=cache, pages=20) as pool:
        batch = pool.program((1, MOST_ROWS), segments=True, all_rows=True, **options)
        for step in steps(lengths, seed=4):
            inputs = {name: step.put(values) for name, values in rows.items()}
            inputs |= {"segments": step.segments, "pages": tables[[i for i, *_ in step.parts]]}
            sizes = {"SEQ": step.rows, "SEGMENTS": len(step.parts), "PAGES": tables.shape[1]}
            for i, past, part in step.taken(pool.run(batch, inputs, **sizes)["y"]):
                found[i][past : past + len(part)] = part
            taken += step.parts
    options |= {"all_rows": True, "paged": False}
    with Pool(graph, weights, cache=cache, pages=11) as pool:
        single, several = (pool.program(seq, **options) for seq in ((1, 1), (2, MOST_ROWS)))
        for i, past, count in sorted(part for part in taken if part[2]):
            own = {name: values[i][past : past + count] for name, values in rows.items()}
            want = pool.run(single if count == 1 else several, own, SEQ=count, PAST_SEQ=past)["y"]
            np.testing.assert_array_equal(found[i][past : past + count], want)
    assert sum(count == 1 and past > 300 for _, past, count in taken) > 2


@pytest.mark.parametrize(
    "dtype", [pytest.param(t, id=str(t), marks=[] if t in (F32, BF16, Q4_0) else pytest.mark.slow) for t in KV_DTYPES]
)
def test_sequences_that_share_pages(dtype: DType, cache: CompileCache) -> None:
    """Rows that are computed together over the pages they share have the bits that they have alone."""
    check_shared(attention_graph(dtype), cache)


def check_shared(graph: Graph, cache: CompileCache, **options: Any) -> None:
    """Sequences with their first pages in common, in other orders, with one row each, beside some that have none.

    Some are long enough for positions in pieces, which meet in scratch memory.
    """
    rng, lengths, common = np.random.default_rng(7), (700, 650, 400, 380, 330, 150, 90), (0, 9, 5, 5, 4, 1, 0)
    weights = {name: rng.standard_normal((16, 128)) for name in graph.leaves("weight")}
    shapes = {"q": 4, "k": 2, "v": 2}
    rows = {n: [rng.standard_normal((m, heads, 32)).astype(np.float32) for m in lengths] for n, heads in shapes.items()}
    tables = page_tables(lengths, PAGE, 60, rng)
    for i, pages in enumerate(common):
        tables[i, :pages] = tables[0, :pages]
        for name in "kv":
            rows[name][i][: pages * PAGE] = rows[name][0][: pages * PAGE]
    options |= {"all_rows": True}
    with Pool(graph, weights, cache=cache, pages=60) as pool:
        fill, single = pool.program((2, 700), **options), pool.program((1, 1), **options)
        batch = pool.program((1, MOST_ROWS), segments=True, **options)
        width = {"PAGES": tables.shape[1]}
        for i, length in enumerate(lengths):
            own = {name: values[i] for name, values in rows.items()} | {"pages": tables[i]}
            pool.run(fill, own, SEQ=length, PAST_SEQ=0, **width)
        for _ in range(12):
            order = rng.permutation(len(lengths))[: rng.integers(2, len(lengths) + 1)]
            order = np.sort(order) if rng.integers(2) else order
            step = Step([(i, int(rng.integers(common[i] * PAGE, lengths[i] - 5)), int(rng.choice([1, 1, 1, 4])))
                         for i in order.tolist()], range(7))  # fmt: skip
            inputs = {name: step.put(values) for name, values in rows.items()}
            inputs |= {"segments": step.segments, "pages": tables[order]}
            found = pool.run(batch, inputs, SEQ=step.rows, SEGMENTS=len(order), **width)["y"].copy()
            for i, past, got in step.taken(found):
                if len(got) == 1:
                    own = {name: values[i][past : past + 1] for name, values in rows.items()} | {"pages": tables[i]}
                    want = pool.run(single, own, SEQ=1, PAST_SEQ=past, **width)["y"]
                    np.testing.assert_array_equal(got, want)


def page_tables(lengths: Sequence[int], page: int, pages: int, rng: np.random.Generator) -> Array:
    """Page tables for sequences of these lengths: pages anywhere in the pool, and -1 for those that none needs."""
    free = rng.permutation(pages).tolist()
    counts = [-(-length // page) for length in lengths]
    return np.array([[free.pop() for _ in range(n)] + [-1] * (max(counts) - n) for n in counts], np.int32)


def test_the_compiled_graph_means_the_same(cache: CompileCache) -> None:
    """The graph after all passes, interpreted over slots and pages, gives the logits of the graph as it was built."""
    graph, lengths = hybrid.graph(window=70), LENGTHS[1:]
    weights, rng = hybrid.weights(graph), np.random.default_rng(1)
    final: list[Any] = []
    options = Options("exact", (1, MOST_ROWS), segments=True, paged=True)
    pipeline.lower(graph, options, lambda _, stage: final.append(stage))
    batch = next(g for g in reversed(final) if isinstance(g, Graph))
    assert batch.phase == "batch"
    ids = texts(hybrid.VOCAB)[1:]
    wants, positions = [hybrid.reference(graph, one) for one in ids], [np.arange(n, dtype=np.int32) for n in lengths]
    page = options.capabilities.layouts.page
    tables = page_tables(lengths, page, 18, rng)
    env = {"SLOTS": 6, "CTX": 18 * page, "WINDOW_CTX": 128, "PAGES": tables.shape[1]}
    states = {n: np.zeros([value(d, env) for d in leaf.shape]) for n, leaf in batch.leaves("state").items()}
    for step in steps(lengths):
        chosen = np.array([first + r for first, rows, *_ in step.segments for r in range(rows)])
        feeds = {"tokens": step.put(ids), "positions": step.put(positions), "logit_rows": chosen}
        feeds |= {"segments": np.array(step.segments), "pages": tables[[i for i, *_ in step.parts]]}
        sizes = {"SEQ": step.rows, "SEGMENTS": len(step.parts), "OUTS": len(chosen)}
        outputs, states = interp.run(batch, {**weights, **states, **feeds}, {**env, **sizes}, dtype=np.float64)
        np.testing.assert_allclose(outputs["logits"], step.put(wants)[chosen], rtol=1e-9, atol=1e-9)


def test_a_native_run_of_many_tokens(cache: CompileCache) -> None:
    """The page table is filled for the whole run; each token is the likeliest after those before."""
    graph = hybrid.graph()
    greedy = graph.replace(outputs={"token": ops.pick(graph.outputs["logits"])})
    with Pool(graph, hybrid.weights(graph), cache=cache, pages=9, slots=4, window_ctx=128) as pool:
        program = pool.program((1, 1), greedy)
        for slot, table in ((2, [7, 1, 4]), (0, [0, 8, 3])):  # a second one, in another slot
            program.select_slot(slot)
            for name, value in {"tokens": [5 + slot], "positions": [0], "pages": table}.items():
                program.inputs[name][: len(value)] = value
            extents = {**pool.extents, "PAST_SEQ": 0, "PAGES": 3}
            found = program.repeat(TokenRun([RowEnd(149)], hybrid.VOCAB, extents), 60.0)
            want = hybrid.reference(graph, [5 + slot, *found])
            assert len(found) == 149
            np.testing.assert_array_equal(found, want.argmax(-1)[:-1])


def test_drafts_of_several_sequences(cache: CompileCache) -> None:
    """Rows of which some are rejected: recurrent states are written to a second slot, then advanced by the others."""
    graph, rng, lengths = hybrid.graph(("full", "conv", "delta")), np.random.default_rng(3), (60, 50, 40)
    slots, spare = [0, 1, 2], [3, 4, 5]
    ids = [rng.integers(0, hybrid.VOCAB, n).astype(np.int32) for n in lengths]
    wants, positions = [hybrid.reference(graph, one) for one in ids], [np.arange(n, dtype=np.int32) for n in lengths]
    tables = page_tables(lengths, PAGE, 3, rng)
    with Pool(graph, hybrid.weights(graph), cache=cache, pages=3, slots=6, window_ctx=128) as pool:
        verify = pool.program((1, MOST_ROWS), variants.verifying(graph), segments=True, all_rows=True)
        verify.lead(pool.program((1, MOST_ROWS), variants.advancing(graph), segments=True, all_rows=True))
        at = [0] * 3
        while live := [i for i in range(3) if at[i] < lengths[i]]:
            counts = [min(int(rng.integers(1, 9)), lengths[i] - at[i]) for i in live]
            kept = [int(rng.integers(1, n + 1)) for n in counts]
            step = Step([(i, at[i], n) for i, n in zip(live, counts, strict=True)], slots)
            drafts = [one.copy() for one in ids]
            for i, n, right in zip(live, counts, kept, strict=True):
                drafts[i][at[i] + right : at[i] + n] += 1  # those that are rejected
                drafts[i] %= hybrid.VOCAB
            table = [[*segment, spare[i]] for segment, i in zip(step.segments, live, strict=True)]
            inputs = {"tokens": step.put(drafts), "positions": step.put(positions)}
            inputs |= {"segments": table, "pages": tables[live]}
            found = pool.run(verify, inputs, SEQ=step.rows, SEGMENTS=len(live), PAGES=1)["logits"]
            assert verify.then is not None
            accepted = [[first, right, *rest] for (first, _, *rest), right in zip(table, kept, strict=True)]
            pool.run(verify.then, {"segments": accepted}, SEQ=step.rows, SEGMENTS=len(live))
            for (i, past, rows), right in zip(step.taken(found), kept, strict=True):
                check(rows[:right], wants[i][past : past + right])
                at[i] += right
                slots[i], spare[i] = spare[i], slots[i]


def test_wrong_segments(cache: CompileCache) -> None:
    graph = hybrid.graph(kinds=("full",))
    weights = {name: w.astype(np.float32) for name, w in hybrid.weights(graph).items()}
    with compile(graph, {"CTX": 16, **weights}, segments=2, threads=1, cache=cache) as exe:
        three = {"tokens": [1, 2, 3], "positions": [0, 0, 1]}
        good = [[0, 1, 15, 1], [1, 2, 3, 0]]
        for row, column, wrong, match in (
            (0, 3, 0, "slots"),
            (0, 3, 2, "slots"),
            (1, 3, -1, "slots"),
            (0, 2, 16, "do not fit a cache"),
            (1, 2, 15, "do not fit a cache"),
            (0, 2, -1, "do not fit a cache"),
            (1, 1, 3, "not free rows"),
            (1, 0, 0, "not free rows"),
            (0, 0, -1, "not free rows"),
            (0, 1, -1, "not free rows"),
        ):
            segments = np.array(good)
            segments[row, column] = wrong
            with pytest.raises(ArgumentError, match=match):
                exe(**three, segments=segments)
        with pytest.raises(ArgumentError, match="missing: segments"):
            exe(**three)
        exe(**three, segments=good)
    for count in (0, "two"):
        with pytest.raises(ArgumentError, match="segments"):
            compile(graph, weights, segments=count, cache=cache)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="rows and no other"):
        Options(seq=(4, 4), segments=True)
