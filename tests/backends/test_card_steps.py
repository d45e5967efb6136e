"""Steps of a program of a card over a driver on paper: what is launched, and how little Python does for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest
from paper_driver import PaperDriver

import rlx
from rlx.backends.cuda import build, clocks, driver, target
from rlx.backends.cuda.agreed import loop as loops
from rlx.backends.cuda.backend import BACKEND
from rlx.backends.cuda.chooser import Chooser
from rlx.backends.cuda.code import THREADS
from rlx.backends.cuda.driver import Card, Loaded
from rlx.backends.cuda.memory import CardMemory
from rlx.backends.cuda.packing import Ring
from rlx.backends.cuda.program import CardProgram, Stream
from rlx.backends.cuda.steps import Blocks, CardCode
from rlx.backends.program import Draws, RowEnd, TokenRun
from rlx.errors import DeviceError, ResourceError
from rlx.ir import dims, ops
from rlx.passes import pipeline
from rlx.passes.options import Options
from rlx.sampling.choice import UNIFORM, Choice
from rlx.sampling.options import SampleOpts

REGIONS = 20


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The arguments of each kernel that is launched, after its number of threads."""
    found, paper = list[list[int]](), PaperDriver()
    paper.kernels[b"code"] = lambda arguments, threads: found.append([threads, *arguments])
    monkeypatch.setattr(driver, "_library", lambda: paper)
    monkeypatch.setattr(driver, "_quick", lambda: paper)
    monkeypatch.setattr(build.ptx, "compiled", lambda modules, level, version: list(modules))
    return found


@pytest.fixture
def program(launched: list[list[int]]) -> Iterator[CardProgram]:
    """Two chains of softmax over [SEQ, 300]: a region is a kernel of each."""
    graph = rlx.Graph("steps")
    for name in "xy":
        value = graph.input(name, [rlx.SEQ, 300])
        for _ in range(REGIONS):
            value = ops.softmax(value)
        graph.output(f"{name}.end", value)
    options = Options(precision="exact", seq=(1, 128), all_rows=True)
    lowered = pipeline.lower(graph, options, passes=BACKEND.passes(options.phase))
    built = build.build_program(lowered, target.named("sm_90"), lambda done, total: None, lambda text: b"code")
    card = Card()
    code, memory = CardCode([card], built.manifest, built.files.__getitem__), CardMemory(lambda: [card])
    found = CardProgram(code, built.manifest, memory, Stream([card], memory))
    yield found
    found.close()
    card.lost = DeviceError("the test is over")  # its code is not unloaded by another test's driver


def test_each_length_has_its_blocks(program: CardProgram, launched: list[list[int]]) -> None:
    """The two kernels of a launch are told where their blocks end: a block for a row here. Each has two addresses."""
    for rows in (3, 128, 1, 77, 3):
        launched.clear()
        program.run(SEQ=rows)
        assert len(launched) == REGIONS
        assert all((each[0], each[1], each[4]) == (THREADS * 2 * rows, rows, 2 * rows) for each in launched)


def test_each_length_has_its_kernel() -> None:
    """Products of many rows have kernels for some numbers of rows; one of them runs."""
    graph = rlx.Graph("products")
    x = graph.input("x", [rlx.SEQ, 64])
    graph.output("y", ops.linear(x, graph.weight("w", [8192, 64])))
    lowered = pipeline.lower(graph, Options(seq=(65, 512), all_rows=True), passes=BACKEND.passes("prefill"))
    built = build.build_program(lowered, target.named("sm_90a"), lambda done, total: None, None)
    _, *products = (row["kernels"] for row in built.manifest["launches"])  # after that of the parts of x
    blocks = [
        Blocks(dims.parse_dim(count), *more) for ((count, *more),) in ([k["blocks"] for k in p] for p in products)
    ]
    assert len(blocks) > 3
    for rows in range(65, 513):
        extents = {"SEQ": rows}
        (each,) = (each for each in blocks if each.value(extents))
        assert each.value(extents) == -(-rows // each.per) * 64 and each.least <= rows <= each.most


def test_a_launch_takes_few_calls_of_python(program: CardProgram) -> None:
    program.run(SEQ=5)
    program.extents, calls = {"SEQ": 6}, 0
    counts = program._begin(1)

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call" and not frame.f_code.co_filename.endswith("paper_driver.py")

    sys.setprofile(count)
    try:
        program._begin_on(program._steps, counts, range(REGIONS))
    finally:
        sys.setprofile(None)
    assert calls < 8 * REGIONS, "what is launched is ready, but for numbers of blocks"


def test_memory_for_more_ranges_of_positions_is_new(program: CardProgram, launched: list[list[int]]) -> None:
    program.run(SEQ=4)
    program._reserve(8)
    (steps,) = program._steps
    assert not steps._calls and not steps._records, "what is ready names the old memory"
    program.run(SEQ=4)
    assert len(launched) == 2 * REGIONS


@pytest.mark.parametrize("level", target.LEVELS)
def test_each_card_has_a_peak(level: str, launched: list[list[int]]) -> None:
    found = clocks.peaks(Card(), level)
    assert found.keys() == {"bf16", "f32"} and np.isfinite([*found.values()]).all()


@pytest.mark.parametrize("count", [1, 2])
def test_a_loop_draws_without_the_host(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is followed by the kernels that choose its token, and by the one that takes it to the next step.

    Of several cards each chooses it.
    """
    paper, ran = PaperDriver(), list[str]()
    monkeypatch.setattr(driver, "_library", lambda: paper)
    monkeypatch.setattr(driver, "_quick", lambda: paper)
    monkeypatch.setattr(build.ptx, "compiled", lambda modules, level, version: list(modules))

    def kernel(name: str) -> Loaded:
        paper.kernels[name.encode()] = lambda arguments, threads: run(name, arguments)
        return Loaded(cards[0], name.encode(), name)

    def run(name: str, arguments: list[int]) -> None:
        ran.append(name)
        if name == "advance":
            head = paper.see(arguments[1])[: loops.HEAD_BYTES].view(np.int32)
            found = paper.see(arguments[2])[: 4 * loops.STEPS].view(np.int32)
            found[head[loops.DONE]] = 7 + head[loops.DONE] if finds else -1
            head[loops.DONE] += 1

    def link(text: str) -> bytes:
        return next((name for name in ("advance", "meet") if f"@{name}(" in text), "step").encode()

    def done(steps: int) -> bool:
        """Whether each card has done so many steps, in their order."""
        found = [name for name in ran if name != "meet"]
        return found == once * steps if count == 1 else sorted(found) == sorted(once * steps * count)

    cards, finds = [Card() for _ in range(count)], True
    memory = CardMemory(lambda: cards)  # type: ignore[arg-type]
    for name in ("step", "advance", "meet"):
        kernel(name)
    graph = rlx.Graph("loop")
    table = graph.weight("table", [64, 32])
    graph.output("logits", ops.embedding(table, graph.input("tokens", [1], "i32"), scale=1.0))
    options = Options(precision="exact", seq=(1, 1))
    lowered = pipeline.lower(graph, options, passes=BACKEND.passes(options.phase))
    built = build.build_program(lowered, target.named("sm_90", tuple(range(count))), lambda done, total: None, link)
    code = CardCode(cards, built.manifest, built.files.__getitem__)
    program = CardProgram(code, built.manifest, memory, Stream(cards, memory))
    program.bind({name: memory.allocate(1 << 16) for name in built.manifest["weights"]})
    chooser = Chooser(cards, memory, lambda: [list(map(kernel, ("look", "weigh", "draw")))] * count, overlaps=True)
    choice = Choice(SampleOpts(temperature=1.0, top_k=5, seed=1))
    draws = Draws(chooser, [choice], np.linspace(0.1, 0.9, 4)[:, None], "logits")
    run_of = TokenRun([RowEnd(4)], 64, {}, draws=draws)
    steps, once = program.steps(run_of), ["step", "look", "weigh", "draw", "advance"]
    assert steps.take(2) == [[7]] and done(2), "the card has a step to do while the host looks at the first"
    assert choice.numbers[UNIFORM] == 0.1, "the card takes the other numbers itself"
    assert steps.take(2) == [[8]] and done(3) and steps.ahead == 1
    assert steps.take(0) == [[9]] and done(3) and not steps.ahead
    assert program.repeat(replace(run_of, ends=[RowEnd(3)]), 9.0) == [7, 8, 9]
    finds = False
    assert program.repeat(run_of, 9.0)[0] == -1, "the host looks at the step"
    chooser.close()
    program.close()
    for card in cards:
        card.lost = DeviceError("the test is over")


@pytest.mark.parametrize("function", ["cuMemAllocHost_v2", "cuEventCreate"])
def test_a_program_that_finds_no_memory(program: CardProgram, function: str) -> None:
    """Nothing of it is left."""
    code, paper = program._steps[0]._code, driver._library()
    memory, before = program.arena.memory, paper.used
    paper.fails[function] = 2
    with pytest.raises(ResourceError, match="not enough memory"):
        CardProgram(code, program.manifest, memory, Stream([code.cards[0]], memory))
    del paper.fails[function]
    assert paper.used == before
    CardProgram(code, program.manifest, memory, Stream([code.cards[0]], memory)).close()
    assert paper.used == before


def test_a_ring_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no place whose memory is freed."""
    paper = PaperDriver(total=24 << 20)
    monkeypatch.setattr(driver, "_library", lambda: paper)
    monkeypatch.setattr(driver, "_quick", lambda: paper)
    ring = Ring(Card())
    ring.place("piece", 10)
    with pytest.raises(ResourceError, match="not enough memory"):
        ring.place("piece", 32 << 20)
    assert paper.used == 0 and paper.see(ring.place("piece", 10)).nbytes >= 10
    ring.close()
    assert paper.used == 0
