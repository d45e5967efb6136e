"""What can go wrong with a card has a name, and nothing hangs: over a driver on paper."""

from __future__ import annotations

import threading
from ctypes import c_void_p
from typing import Any

import numpy as np
import pytest
from paper_driver import PaperDriver

from rlx.backends.cpu.loops import python_form
from rlx.backends.cuda import driver, layouts, packing
from rlx.backends.cuda.build import build_program
from rlx.backends.cuda.driver import Card
from rlx.backends.cuda.kernels import pack as kernels
from rlx.backends.cuda.memory import CardMemory, address
from rlx.backends.cuda.program import CardProgram, Stream
from rlx.backends.cuda.steps import CardCode
from rlx.backends.cuda.target import named
from rlx.backends.memory import Grid
from rlx.errors import CompileError, DeviceError, ResourceError, TargetError
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import DType
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.options import Options


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperDriver:
    found = PaperDriver()
    monkeypatch.setattr(driver, "_library", lambda: found)
    monkeypatch.setattr(driver, "_quick", lambda: found)
    monkeypatch.setattr(driver, "WAIT_SECONDS", 0.15)
    return found


def _run(paper: PaperDriver, dtype: DType, arguments: list[int], threads: int) -> None:
    """The kernel that packs, in Python."""
    raw, scratch, out, *numbers, units = arguments
    assert threads >= units
    memory = [paper.see(at) if at else np.zeros(1, np.uint8) for at in (raw, scratch, out)]
    with np.errstate(all="ignore"):
        python_form(kernels.pack(dtype))(*memory, *numbers, 0, units)


@pytest.mark.parametrize("dtype", layouts.TYPES, ids=str)
def test_the_card_packs_every_type(paper: PaperDriver, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces, into memory that was used before."""
    n, k = 37, 256 if dtype.block > 64 else 96 if dtype.block == 32 else 64 if dtype.block > 1 else 40
    monkeypatch.setattr(packing, "_PIECE", 16 * dtype.row_bytes(k))
    raw = np.random.default_rng(n).integers(0, 256, dtype.size((n, k)), dtype=np.uint8)
    paper.kernels[dtype.name.encode()] = lambda arguments, threads: _run(paper, dtype, arguments, threads)
    card = Card()
    ring, memory = packing.Ring(card), CardMemory(lambda: [card])
    loaded = driver.Loaded(card, dtype.name.encode(), "pack")
    with np.errstate(all="ignore"):
        expected = layouts.pack(dtype, raw, n, k)
    target = memory.allocate(len(expected))
    target.write(np.full(len(expected), 77, np.uint8))
    packing.packing(dtype, [ring], lambda: [loaded], layouts.LAYOUTS)(raw, target, n, k)
    with np.errstate(all="ignore"):
        used, found = layouts.unpack(dtype, expected, n, k), layouts.unpack(dtype, target.read(), n, k)
    np.testing.assert_array_equal(found, used)
    assert paper.calls.count("cuLaunchKernelEx") == 3
    ring.close()
    target.close()
    assert paper.used == 0


def test_a_card_that_does_not_answer(paper: PaperDriver) -> None:
    card = Card()
    memory = CardMemory(lambda: [card])
    buffer, event = memory.allocate(64), card.event()
    paper.hangs = True
    with pytest.raises(DeviceError, match=r"the card has not answered for 0 s.*start this process again"):
        buffer.read()
    before = len(paper.calls)
    for again in (card.wait, lambda: card.allocate(64), lambda: card.wait_for(event)):
        with pytest.raises(DeviceError, match="has not answered"):
            again()  # it stays lost: nobody waits twice
    buffer.close()
    card.forget_event(event)
    card.unload(c_void_p(1))
    assert not paper.calls[before:]


@pytest.mark.parametrize("code", driver._LOST)
def test_a_card_that_is_lost(paper: PaperDriver, code: int) -> None:
    card = Card()
    place = card.allocate(64)
    paper.fails["query"] = code
    with pytest.raises(DeviceError, match=rf"the card refuses a step: CUDA_ERROR_{code}"):
        card.wait()
    with pytest.raises(DeviceError, match=f"CUDA_ERROR_{code}"):
        card.send(place, place, 1)
    card.free(place)
    assert paper.used == 64


def test_memory_that_is_short(paper: PaperDriver) -> None:
    """Somebody else took it: who asked is told, and the card goes on."""
    card = Card()
    with pytest.raises(ResourceError, match="not enough memory for 2048 MiB"):
        card.allocate(2 << 30)
    card.free(card.allocate(64))
    assert paper.used == 0


@pytest.mark.parametrize("code", driver._NO_CARD)
def test_no_card(code: int) -> None:
    found = driver.no_card(PaperDriver(), code)
    assert isinstance(found, TargetError) and f"CUDA_ERROR_{code}" in str(found) and 'Choose device="cpu"' in str(found)


def test_a_card_that_another_program_uses_alone(paper: PaperDriver) -> None:
    paper.fails["cuDevicePrimaryCtxRetain"] = 46
    with pytest.raises(DeviceError, match="Another program uses the card alone"):
        Card()


def test_code_that_the_driver_refuses(paper: PaperDriver) -> None:
    paper.fails["cuLinkAddData_v2"] = 222
    with pytest.raises(CompileError, match=r"PTX 7.8, sm_90; the driver's CUDA is 13.0.*CUDA_ERROR_222"):
        driver.link(".version 7.8\n.target sm_90\n")


def test_waiting_asks_natively(paper: PaperDriver) -> None:
    """A wait asks the driver many times for one call of Python, and ends as soon as it is done."""
    card, answers = Card(), iter([600] * 500)
    query: Any = type(paper.cuEventQuery)(lambda _: next(answers, 0))
    paper.cuEventQuery = query
    card.wait()
    assert next(answers, None) is None


def test_only_its_own_thread_adds_to_a_record(paper: PaperDriver) -> None:
    card, others = Card(), list[threading.Thread]()
    place = card.allocate(8)

    def begin() -> None:
        others.append(threading.Thread(target=card.zero, args=(place, 8)))
        others[0].start()
        others[0].join(0.1)
        card.copy(place, place, 8)

    card.recorded(begin)
    others[0].join()
    used = [call for call in paper.calls if call in ("cuStreamEndCapture", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async")]
    assert used[-3:] == ["cuMemcpyDtoDAsync_v2", "cuStreamEndCapture", "cuMemsetD8Async"]


def test_a_page_is_copied_at_once(paper: PaperDriver) -> None:
    card = Card()
    memory = CardMemory(lambda: [card])
    values = np.arange(3 * 5 * 8, dtype=np.uint8).reshape(3, 5, 8)
    buffer = memory.adopt(values.reshape(-1))
    Grid(buffer, 3, 5, 8).copy(1, 4)
    values[:, 4] = values[:, 1]
    np.testing.assert_array_equal(buffer.read(np.uint8, (3, 5, 8)), values)
    assert paper.calls.count("cuMemcpy2DAsync_v2") == 1
    buffer.close()


def test_an_address_of_a_released_buffer(paper: PaperDriver) -> None:
    card = Card()
    buffer = CardMemory(lambda: [card]).allocate(8)
    assert address(buffer)
    buffer.close()
    with pytest.raises(Exception, match="this buffer is closed"):
        address(buffer)


@pytest.mark.parametrize("way", ["run", "begin"])
def test_a_step_that_only_begins_waits_for_its_inputs(paper: PaperDriver, way: str) -> None:
    """Whoever reads its results waits for them; who runs it waits for its kernels."""
    graph = Graph("twice")
    x = graph.input("x", [SEQ, 4])
    graph.output("y", x + x)
    card, level = Card(), named("sm_90")
    lowered = pipeline.lower(graph, Options(precision="exact", seq=(2, 8), all_rows=True).effective(level.capabilities))
    built = build_program(lowered, level, lambda done, total: None, lambda text: b"code")
    paper.kernels[b"code"] = lambda arguments, threads: None
    code = CardCode([card], built.manifest, built.files.__getitem__)
    memory = CardMemory(lambda: [card])
    program = CardProgram(code, built.manifest, memory, Stream([card], memory))
    before = len(paper.calls)
    getattr(program, way)(SEQ=3)
    order = [call for call in paper.calls[before:] if call in ("cuLaunchKernelEx", "cuEventRecordWithFlags", "query")]
    expected = ["cuLaunchKernelEx", "cuEventRecordWithFlags", "query"]
    assert order == (expected if way == "run" else [expected[1], expected[0], expected[2]])
    program.close()
    del code, program
