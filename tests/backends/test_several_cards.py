"""Several cards compute the bits of one, over cards on paper (`paper_cards.py`)."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paper_cards
import pytest
from steps_ahead import noted_ahead
from weight_bytes import random_bytes

import rlx
from rlx.backends.cuda import build
from rlx.backends.cuda.agreed.steps import MOST_CARDS
from rlx.backends.cuda.backend import BACKEND, backend_of
from rlx.backends.cuda.driver import Card
from rlx.backends.cuda.memory import CardMemory, address, opened
from rlx.backends.cuda.program import Stream
from rlx.backends.memory import Grid
from rlx.errors import ArgumentError, DeviceError, ResourceError, TargetError
from rlx.ir import ops
from rlx.ir.dtypes import BF16, F16, F32, Q8_0, DType
from rlx.store.cache import CompileCache

OPTIONS: dict[str, Any] = {
    "precision": "exact", "max_seq": 64, "profile": {"buckets": {"seq": [1, 8]}}, "compile_ahead": False,
    "kv_bytes": 1 << 20,
}  # fmt: skip
IDS = [5, 9, 2, 7, 1, 30]


def cards_of() -> Callable[[], Sequence[Card]]:
    """Two cards, opened when they are asked for."""
    return functools.cache(functools.partial(opened, (0, 1)))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[paper_cards.PaperCards]:
    with paper_cards.computing(monkeypatch, 4) as found:
        yield found


# -- models ------------------------------------------------------------------------------------------------------------


def results(goldens: Path, family: str, device: str, batch: bool) -> list[Any]:
    """Logits of a prompt, tokens alone, which the card takes itself, and together."""
    options = {**OPTIONS, "device": device, "cache": CompileCache(policy="off")}
    with rlx.auto_runner(goldens / family / "hf", **options) as runner:
        found: list[Any] = [runner.predict_logits(IDS), runner.generate(IDS[:1], 3, stop_at_eog=False)]
        if batch:
            found.append(runner.generate_batch([IDS[:2], IDS[1:3]], 2, stop_at_eog=False))
        return found


@pytest.mark.parametrize(
    ("family", "device", "batch"),
    [
        ("llama", "cuda:1,0", False),
        pytest.param("llama", "cuda:2,2", True, marks=pytest.mark.slow),  # one card as two
        pytest.param("qwen3moe", "cuda:0,1,2,3", False, marks=pytest.mark.slow),  # more cards than key heads
    ],
)
def test_a_model_has_the_bits_of_one_card(
    cards: paper_cards.PaperCards, goldens: Path, family: str, device: str, batch: bool
) -> None:
    one, some, expected = (results(goldens, family, name, batch) for name in ("cuda", device, "reference"))
    for mine, other in zip(one, some, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))
    assert np.abs(some[0] - expected[0]).max() <= 1e-4 * np.abs(expected[0]).max()
    assert some[1:] == expected[1:]
    assert cards.used == 0, "everything is freed"


@pytest.mark.slow
def test_a_card_takes_the_tokens_of_a_batch_to_the_next_step(
    cards: paper_cards.PaperCards, goldens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of steps, drawn with the same random numbers; a step has begun before its tokens are looked at."""
    found, ahead = [], noted_ahead(monkeypatch)
    options = {**OPTIONS, "device": "cuda", "cache": CompileCache(policy="off")}
    sample = rlx.SampleOpts(temperature=0.8, top_k=40, top_p=0.95, seed=4)
    for native in (True, False):
        monkeypatch.setattr(type(BACKEND), "native_loops", native)
        with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
            found.append(runner.generate_batch([IDS[:4], IDS[1:3]], 4, stop_at_eog=False, sample=sample))
        assert (max(ahead, default=0) > 0) == native
        ahead.clear()
    assert found[0] == found[1]


@pytest.mark.parametrize("device", ["cuda", "cuda:0,1"])
def test_a_program_has_a_report(cards: paper_cards.PaperCards, goldens: Path, device: str) -> None:
    """What each group of fusions saves is found with the passes of the device."""
    options = {**OPTIONS, "precision": "auto", "device": device, "cache": CompileCache(policy="off"), "load": False}
    with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
        runner.compile(phase="decode")
        (program,) = runner.programs["decode"].report().data["programs"]
    assert "gated" in [row["group"] for row in program["groups"]]


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("level", [(8, 0), (9, 0)])
def test_linears(
    cards: paper_cards.PaperCards, level: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each card has some outputs of a matrix with whole tiles for all, else all of them."""
    monkeypatch.setattr(cards, "level", level)
    rng, graph, k = np.random.default_rng(rows), rlx.Graph("linears"), 64
    x, given = graph.input("x", [rlx.SEQ, k]), dict[str, Any]()
    values = rng.standard_normal((rows, k)).astype(np.float32)
    types: list[tuple[int, DType]] = [(64, Q8_0), (96, BF16), (40, F32)]
    for n, dtype in types:
        weight, bias = graph.weight(f"w{n}", [n, k], dtype), graph.weight(f"b{n}", [n], F32)
        graph.output(f"y{n}", ops.linear(x, weight) + bias)
        given[f"w{n}"] = random_bytes(dtype, n, k, rng) if dtype is Q8_0 else rng.standard_normal((n, k))
        given[f"b{n}"] = rng.standard_normal(n).astype(np.float32)
    found = []
    for device in ("cuda", "cuda:0,1", "reference"):
        with rlx.compile(graph, given, device=device, cache=CompileCache(policy="off"), precision="exact") as exe:
            found.append(exe(values))
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])
        np.testing.assert_allclose(found[0][name], found[2][name], atol=2e-4 * np.abs(found[2][name]).max())


@pytest.mark.parametrize("device", ["cuda", "cuda:0,1"])
def test_attention_of_sequences_of_one_and_of_many_rows(cards: paper_cards.PaperCards, device: str) -> None:
    """In one call: a prompt, a row whose positions blocks share, the rest of a prompt, a sequence without rows."""
    rng, graph, rows = np.random.default_rng(5), rlx.Graph("attention"), (20, 1, 5, 0)
    q, k, v = (graph.input(name, [rlx.SEQ, heads, 32]) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    keys, values = (
        ops.kv_write(graph.state(name, [2, rlx.CTX, 32], F16), x) for name, x in (("keys", k), ("values", v))
    )
    graph.output("y", ops.attention(q, keys, values, scale=0.2))
    options = {"bind": {"SEQ": (1, 200), "CTX": 192}, "segments": 4, "precision": "exact"}
    steps = []
    for some, past in (((0, 150, 30, 0), (0, 0, 0, 0)), (rows, (0, 150, 30, 0))):
        starts = np.cumsum((0, *some))[:4]
        table = np.stack([starts, some, past, (2, 0, 3, 1)], 1).astype(np.int32)
        given = {name: rng.standard_normal((sum(some), heads, 32)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        steps.append({**{name: x.astype(np.float32) for name, x in given.items()}, "segments": table})
    found = []
    for name in (device, "reference"):
        with rlx.compile(graph, device=name, cache=CompileCache(policy="off"), **options) as exe:
            found.append([exe(**step)["y"] for step in steps])
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5 * np.abs(other).max())


# -- memory ------------------------------------------------------------------------------------------------------------


def test_heads_of_a_cache_lie_on_several_cards(cards: paper_cards.PaperCards) -> None:
    """Whoever reads and writes it sees one cache. Each card has room for its heads only."""
    memory = CardMemory(cards_of())
    slots, heads, pages, nbytes, rng = 3, 4, 5, 16, np.random.default_rng(0)
    cache = memory.allocate_cache(slots, heads, pages * nbytes)
    assert cards.used == cache.nbytes == slots * heads * pages * nbytes
    values = rng.integers(0, 256, (slots, heads, pages, nbytes)).astype(np.uint8)
    cache.write(values)
    np.testing.assert_array_equal(cache.read(np.uint8, values.shape), values)
    for slot in range(slots):
        place = cache.part(slot * cache.nbytes // slots, cache.nbytes // slots)
        for card in range(2):
            first, head = 2 * card, pages * nbytes
            own = cards.see(address(place, card) + first * head)[: heads // 2 * head]
            np.testing.assert_array_equal(own, values[slot, first : first + 2].reshape(-1))
    grid = Grid(cache.part(cache.nbytes // slots, cache.nbytes // slots), heads, pages, nbytes)
    grid.copy(1, 4)
    values[1, :, 4] = values[1, :, 1]
    grid.discard([0, 1])
    values[1, :, :2] = 0
    np.testing.assert_array_equal(cache.read(np.uint8, values.shape), values)
    np.testing.assert_array_equal(grid.take([4, 2]), values[1][:, [4, 2]])
    cache.part(0, 100).copy_to(cache.part(2 * cache.nbytes // slots, 100))
    np.testing.assert_array_equal(cache.read()[2 * cache.nbytes // slots :][:100], values.reshape(-1)[:100])
    cache.close()
    assert cards.used == 0


def test_other_memory_is_the_same_on_each_card(cards: paper_cards.PaperCards) -> None:
    source = cards_of()
    memory = CardMemory(source)
    for buffer in (memory.allocate(64), memory.allocate_cache(1, 3, 64)):  # three heads have no halves
        values = np.arange(buffer.nbytes, dtype=np.uint8)
        buffer.write(values)
        for number, card in enumerate(source()):
            card.wait()
            np.testing.assert_array_equal(cards.see(address(buffer, number))[: buffer.nbytes], values)
        buffer.close()
    assert cards.used == 0


def test_what_cannot_be_allocated_on_one_card_is_freed_on_the_others(cards: paper_cards.PaperCards) -> None:
    source = cards_of()
    second, before = source()[1], cards.used
    second.lost = DeviceError("it fell from the bus")
    with pytest.raises(DeviceError, match="fell from the bus"):
        CardMemory(source).allocate(64)
    assert cards.used == before


def test_a_step_that_finds_no_memory_leaves_a_program_that_works(cards: paper_cards.PaperCards, goldens: Path) -> None:
    """More ranges of positions need more memory; once it is there, steps of any length run again."""
    options = {**OPTIONS, "device": "cuda", "cache": CompileCache(policy="off")}
    with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
        engine = runner._engine
        expected = engine.append(engine.open_sequence(), IDS[:1]).copy()
        (program,) = engine.tables["decode"].programs.values()
        assert any(kind == "per_range" for kind, _ in program._scratch_sizes)
        total, cards.total = cards.total, 0
        with pytest.raises(ResourceError, match="not enough memory"):
            program._reserve(8)
        with pytest.raises(ResourceError, match="not enough memory"):
            engine.append(engine.open_sequence(), IDS[:1])
        cards.total = total
        np.testing.assert_array_equal(engine.append(engine.open_sequence(), IDS[:1]), expected)


# -- meeting -----------------------------------------------------------------------------------------------------------


def meet(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]) -> list[Any]:
    """What begins the kernel on each of some cards."""
    backend = backend_of(numbers)
    target, memory = backend.target(), backend.memory
    context = build.Context(("CARD",), {}, target.features, layouts=target.layouts)
    kernel = build._meeting(context)
    assert kernel is not None
    module, stream = paper_cards.Module(build.entry("meet", [kernel], target.features)), Stream(backend.cards(), memory)
    for card in backend.cards():
        card.wait()
    extents = [cards.memory.base + (1 << 20) + 256 * i for i in range(len(numbers))]

    def begin(number: int) -> None:
        assert stream.meeting is not None
        cards.see(extents[number])[:4].view(np.int32)[:] = number
        lines = address(stream.meeting, number)
        module.run(cards.memory, [1, lines, lines + MOST_CARDS * 128, extents[number]], 1, 0)

    return [lambda number=number: begin(number) for number in range(len(numbers))]


def test_cards_wait_for_each_other(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """No card leaves a meeting before all have come, as often as they meet."""
    come, left, wrong = [0] * 4, [0] * 4, list[str]()

    def run(number: int) -> None:
        for _ in range(5):
            come[number] += 1
            kernels[number]()
            left[number] += 1
            if min(come) < left[number]:
                wrong.append(f"card {number} left meeting {left[number]} of {come}")

    kernels = meet(cards, monkeypatch, (0, 1, 2, 3))
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert left == [5] * 4 and not wrong


def test_meetings_are_measured(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    measured: Any = importlib.import_module("cards")
    monkeypatch.setattr(measured, "MEETINGS", 3)
    monkeypatch.setattr(measured, "REPEATS", 1)
    assert measured.meetings(backend_of((0, 1))) > 0


def test_a_card_that_does_not_come_is_not_waited_for_forever(
    cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_cards.simt.Clock, "tick", 10**10)
    kernels = meet(cards, monkeypatch, (0, 1))
    with pytest.raises(paper_cards.simt.Trap):
        kernels[0]()


def test_a_card_that_fails_ends_the_steps_of_all(
    cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = rlx.Graph("product")
    weight = graph.weight("w", [64, 64])
    graph.output("y", ops.softmax(ops.linear(graph.input("x", [rlx.SEQ, 64]), weight)))
    given, x = {"w": np.eye(64, dtype=np.float32)}, np.ones((2, 64), np.float32)
    with rlx.compile(graph, given, device="cuda:0,1", cache=CompileCache(policy="off")) as exe:
        np.testing.assert_allclose(exe(x)["y"], 1 / 64, rtol=1e-6)
        cards.fail(1)
        monkeypatch.setattr(paper_cards.simt.Clock, "tick", 10**10)
        with pytest.raises(DeviceError, match=r"the card refuses.*did not come to where they meet"):
            exe(x)
        with pytest.raises(DeviceError, match="the card refuses"):
            exe(x)


# -- what can go wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:0,1,2", "names no cards.*numbers of 1, 2, 4, 8 cards"),
        ("cuda:", "names no cards"),
        ("cuda:0;1", "names no cards"),
        ("cuda:0,9", "finds no card.*no card of this number"),
        ("cpu:0", "there is one device 'cpu'.*Leave out ':0'"),
        ("cudo:0", "device 'cudo:0' is not there.*cuda"),
        ("gpu", "device 'gpu' is not there.*mean 'cuda'"),
    ],
)
def test_names_of_cards(cards: paper_cards.PaperCards, device: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        rlx.backends.backend(device).target()


def test_cards_of_different_kinds(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "levels", {1: (8, 9)})
    with pytest.raises(TargetError, match=r"different kinds: sm_80, sm_89.*equal cards"):
        rlx.backends.backend("cuda:0,1").target()


def test_a_card_that_is_too_old(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "levels", {0: (7, 0), 1: (7, 5)})
    with pytest.raises(TargetError, match=r"is a card of sm_70.*Cards from sm_75 on serve"):
        rlx.backends.backend("cuda").target()
    assert rlx.backends.backend("cuda:1").target().level == "sm_75"


def test_a_card_runs_the_code_of_older_ones(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLX_TARGET, or `target`, chooses it; of newer ones the code can be looked at."""
    backend = rlx.backends.backend("cuda")
    own = backend.target()
    older, newer = backend.target("sm_75"), backend.target("sm_90a")
    assert older.backend is own.backend is backend and older.describe() == own.describe() | {
        "level": "sm_75", "ptx": "65", "card": "sm_80",
    }  # fmt: skip
    assert newer.backend is not backend and newer.describe()["driver"] == "0"
    monkeypatch.setenv("RLX_TARGET", "sm_75")
    assert backend.target() == older and backend.target("sm_80") == own and "sm_80" in backend.description()
    monkeypatch.setenv("RLX_TARGET", "avx2")
    assert backend.target() == own, "levels of other devices mean nothing"


def test_cards_without_a_way_between_them(cards: paper_cards.PaperCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "reach", False)
    with pytest.raises(TargetError, match="card 0 cannot use the memory of card 1"):
        rlx.backends.backend("cuda:0,1").target()


def test_the_second_card_alone(cards: paper_cards.PaperCards) -> None:
    backend = rlx.backends.backend("cuda:1")
    assert backend.name == "cuda:1" and rlx.backends.backend("CUDA:1") is backend
    assert backend.description().endswith("sm_80, CUDA 13.0, 4 cards")
    assert rlx.backends.backend("cuda:0") is rlx.backends.backend("cuda")
    assert backend.target().describe() != rlx.backends.backend("cuda").target().describe(), "code is loaded on a card"


def test_packed_weights_are_not_read(cards: paper_cards.PaperCards) -> None:
    buffer = CardMemory(cards_of()).allocate(64)
    buffer.block.differs = True
    with pytest.raises(ArgumentError, match=r"packed weights of several cards cannot be read.*keep_packed"):
        buffer.read()
