"""Compiling ahead: what is compiled in the background, when it waits, how it ends. Nothing here measures time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.compiler.compile import Compiler
from rlx.engine.model_runner import Batch, Segment
from rlx.engine.programs.background import FIRST, BackgroundCompiler, CompileAheadWarning
from rlx.errors import ArgumentError, BusyError
from rlx.store.cache import CompileCache
from rlx.store.store import Store

pytestmark = pytest.mark.any_machine

Events = list[tuple[str, int, int]]
PROFILE = {"buckets": {"seq": [1, 32]}}
SECONDS = 3  # after which a wait has failed


class Runner:
    """An owner that is busy when a test says so, and a job of three kernels that reports each."""

    def __init__(self) -> None:
        self.busy, self.done, self.events = False, list[int](), Events()
        self.at = {kernel: threading.Event() for kernel in range(3)}
        self.looked = threading.Event()
        self.ahead = BackgroundCompiler(lambda *event: self.events.append(event))
        self.ahead.is_busy = self.is_busy

    def is_busy(self) -> bool:
        self.looked.set()
        return self.busy

    def job(self) -> None:
        with self.ahead.compiling("program"):
            for kernel in range(3):
                self.ahead.tell("compiling the program", kernel, 3)
                self.done.append(kernel)
                self.at[kernel].set()

    def looks_again(self) -> None:
        """Waits until the thread has asked twice more whether the runner is busy: it is held up."""
        for _ in range(2):
            self.looked.clear()
            assert self.looked.wait(SECONDS)


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.busy = False
    made.ahead.close()


def test_it_waits_while_the_runner_is_in_use(runner: Runner) -> None:
    runner.busy = True
    runner.ahead.start({"job": runner.job})
    runner.looks_again()
    assert runner.done == []
    runner.busy = False
    runner.ahead.wait()
    assert runner.done == [0, 1, 2]
    assert runner.events == [], "nobody waited, so nobody is told"


def test_it_works_on_for_a_call_that_waits_for_it(runner: Runner) -> None:
    begun, busy = threading.Event(), threading.Event()

    def job() -> None:
        with runner.ahead.compiling("program"):
            begun.set()
            assert busy.wait(SECONDS)
            runner.job()

    runner.ahead.start({"job": job})
    assert begun.wait(SECONDS)
    runner.busy = True
    busy.set()
    runner.looks_again()
    assert (runner.done, runner.events) == ([], []), "it is held up before the first kernel"
    with runner.ahead.compiling("program"):  # as a call does, in the thread of the test
        runner.ahead.wait()
    assert runner.done == [0, 1, 2]
    assert runner.events == [("compiling the program", kernel, 3) for kernel in range(3)]


def test_it_works_on_where_a_call_does_without_a_program(runner: Runner) -> None:
    runner.busy = True
    runner.ahead.start({"job": runner.job})
    assert not runner.ahead.is_pending("another")
    runner.looks_again()
    assert runner.done == [] and not runner.ahead.is_complete
    assert runner.ahead.is_pending("job")
    runner.ahead.wait()
    assert runner.done == [0, 1, 2] and runner.events == [], "nobody waits for it"
    assert runner.ahead.is_complete and not runner.ahead.is_pending("job")


def test_several_requests_do_without_a_program_that_is_not_compiled(demo_model: Path) -> None:
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4]]
    with rlx.auto_runner(demo_model, compile_ahead=False, max_seq=64) as runner:
        engine, rows = runner._engine, []
        for pending in (True, False):
            sequences = [engine.open_sequence(shared=False) for _ in prompts]
            batch = Batch([Segment(s, ids) for s, ids in zip(sequences, prompts, strict=True)])
            engine.model_runner.is_pending = lambda spec, pending=pending: pending
            rows.append(engine.step(batch))
            assert [len(s) for s in sequences] == [3, 1, 4]
            assert ("batch" in {p.record.phase for p in runner.programs}) != pending
        for one, other in zip(*rows, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_a_call_for_another_program_is_not_told(runner: Runner) -> None:
    with runner.ahead.compiling("another program"):
        runner.ahead.start({"job": runner.job})
        runner.ahead.wait()
    assert runner.events == []


def test_closing_ends_it_before_the_next_kernel(runner: Runner) -> None:
    runner.busy = True
    later: list[int] = []
    runner.ahead.start({"job": runner.job, "later": lambda: later.append(1)})
    runner.looks_again()
    runner.ahead.close()
    assert (runner.done, later) == ([], [])
    runner.ahead.close()
    runner.ahead.start({"job": runner.job})
    assert runner.done == [], "a closed one starts nothing"


def test_it_ends_with_the_calls_of_a_runner_that_closes(runner: Runner) -> None:
    """Not after them: `close` first waits for the call that is computed, which may be compiling, too."""
    runner.busy = True
    runner.ahead.start({"job": runner.job})
    runner.looks_again()
    runner.ahead.is_over = lambda: True
    waiting = threading.Thread(target=runner.ahead.wait)
    waiting.start()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and runner.done == []


def test_a_failure_is_a_warning_and_the_next_job_runs(runner: Runner) -> None:
    def fail() -> None:
        raise ValueError("no such kernel")

    with pytest.warns(CompileAheadWarning, match="repeated when the program is needed: no such kernel"):
        runner.ahead.start({"fail": fail, "job": runner.job})
        runner.ahead.wait()
    assert runner.done == [0, 1, 2]


# -- with a model ---------------------------------------------------------------------------------------------------


def titles(runner: Any) -> set[tuple[str, str]]:
    """Phase and rows of the programs that were compiled."""
    words = (made.title.split() for made in runner.stats()["compiled"])
    return {(each[-5], each[-4]) for each in words if each[0] == "program"}


def opened(model: Path, cache: CompileCache, ahead: Any) -> Any:
    return rlx.auto_runner(model, threads=1, max_seq=48, profile=PROFILE, cache=cache, compile_ahead=ahead)


@pytest.mark.parametrize(("ahead", "count"), [(True, 3), ("batch", 5)])
def test_programs_are_compiled_before_anyone_asks(ahead: Any, count: int, demo_model: Path, tmp_path: Path) -> None:
    cache = CompileCache(store=Store(tmp_path / "cache"))
    with opened(demo_model, cache, ahead) as runner:
        runner._engine.ahead.wait()
        made = runner.stats()["compiled"]
        answer = runner.generate([1, 2, 3], 4)
        runner.generate([1, 2, 3], 4, lambda token: None)
        if ahead == "batch":
            runner.generate_batch([[1, 2, 3], [4, 5] * 6], 4)
        assert runner.stats()["compiled"] == made, "nothing is left to compile"
        assert len([each for each in made if each.title.startswith("program")]) == count
    with opened(demo_model, CompileCache(store=Store(tmp_path / "cache")), ahead) as again:
        again._engine.ahead.wait()
        assert again.stats()["compiled"] == []
        assert again.stats()["cache"].hits_disk == 3, "the worker loop, packing, choice: programs are not loaded ahead"
        assert again.generate([1, 2, 3], 4) == answer


def test_a_generation_meets_what_is_being_compiled(demo_model: Path, tmp_path: Path) -> None:
    """Whoever comes first: each program is compiled once, and the tokens are those of a runner that does not."""
    with opened(demo_model, CompileCache(store=Store(tmp_path / "a")), [3, 1]) as runner:
        tokens = runner.generate([1, 2, 3], 4, lambda token: None)
        runner._engine.ahead.wait()
        made = [each.title for each in runner.stats()["compiled"]]
        assert len(made) == len(set(made))
    with opened(demo_model, CompileCache(store=Store(tmp_path / "a")), False) as runner:
        assert runner.generate([1, 2, 3], 4, lambda token: None) == tokens
        assert runner.stats()["compiled"] == []


def test_a_call_meets_the_choice_of_tokens_that_is_being_compiled(tmp_path: Path) -> None:
    """The thread is held up inside of the compile that the call waits for: the call lets it go on."""
    ahead, begun, held_up = BackgroundCompiler(None), threading.Event(), threading.Event()
    compiler = Compiler(None, CompileCache(store=Store(tmp_path)), ahead.tell, ahead.compiling)
    choose = partial(compiler.backend.prepare_choosing, compiler)

    def is_busy() -> bool:
        if begun.is_set():
            held_up.set()
        return begun.is_set()

    def job() -> None:
        begun.set()
        choose()

    ahead.is_busy = is_busy
    ahead.start({"job": job})
    assert held_up.wait(60)
    call = threading.Thread(target=choose, daemon=True)
    call.start()
    call.join(60)
    try:
        assert not call.is_alive()
    finally:
        ahead.close()


def test_off_and_readonly_compile_nothing(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    usual = BackgroundCompiler.start

    def start(self: BackgroundCompiler, jobs: Mapping[Any, Any]) -> None:
        usual(self, jobs)
        started.append(len(jobs))

    monkeypatch.setattr(BackgroundCompiler, "start", start)
    store = Store(tmp_path / "cache")
    opened(demo_model, CompileCache(store=store), False).close()
    monkeypatch.setenv("RLX_COMPILE_AHEAD", "0")
    opened(demo_model, CompileCache(store=store), None).close()
    opened(demo_model, CompileCache(store=store, policy="readonly"), True).close()
    assert started == [0, 0, 0]
    monkeypatch.setenv("RLX_COMPILE_AHEAD", "1")
    opened(demo_model, CompileCache(store=store), None).close()
    assert started[-1] == 4


def test_no_more_are_compiled_than_the_cache_keeps(demo_model: Path) -> None:
    with opened(demo_model, CompileCache(capacity=1, policy="off"), [1, 32]) as runner:
        runner._engine.ahead.wait()
        assert titles(runner) == {("decode", "1-1")}


@pytest.mark.parametrize("wrong", ["yes", 3, [0], [1.5], [True]])
def test_other_values_are_refused(demo_model: Path, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="compile_ahead"):
        opened(demo_model, CompileCache(policy="off"), wrong)


def end_of_process(code: str, tmp_path: Path, demo_model: Path) -> subprocess.CompletedProcess[str]:
    head = (
        "import sys, rlx\n"
        "from rlx.store.cache import CompileCache\nfrom rlx.store.store import Store\n"
        f"runner = rlx.auto_runner({str(demo_model)!r}, threads=1, max_seq=48, compile_ahead=True,"
        f" cache=CompileCache(store=Store({str(tmp_path / 'cache')!r})))\n"
    )
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=300)


ENDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "the script ends": ("", (0,)),
    "an error": ("raise SystemExit(3)", (3,)),
    "an interrupt": ("import signal; signal.raise_signal(signal.SIGINT)", (-2, 1, 130)),  # Python's, which differ
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_while_it_compiles(how: str, demo_model: Path, tmp_path: Path) -> None:
    code, expected = ENDS[how]
    done = end_of_process(code, tmp_path, demo_model)
    assert done.returncode in expected, done.stderr
    assert done.stderr == "" or (how == "an interrupt" and done.stderr.endswith("KeyboardInterrupt\n"))


def test_a_stream_that_goes_on_keeps_the_runner_busy(demo_model: Path, tmp_path: Path) -> None:
    cache = CompileCache(store=Store(tmp_path / "cache"))
    with opened(demo_model, cache, False) as runner:
        busy: Callable[[], bool] = runner._engine.ahead.is_busy

        def seen() -> bool:
            found: list[bool] = []
            thread = threading.Thread(target=lambda: found.append(busy()))
            thread.start()
            thread.join()
            return found[0]

        assert not seen()
        stream = runner.stream([1, 2, 3], 4)
        next(stream)
        assert seen()
        list(stream)
        assert not seen()


def test_closing_a_runner_ends_the_compile_that_a_call_waits_for(demo_model: Path, tmp_path: Path) -> None:
    inside, closed, errors = threading.Event(), threading.Event(), list[BaseException]()

    def progress(what: str, done: int, total: int) -> None:
        if "program" in what:
            inside.set()
            assert closed.wait(SECONDS)

    runner = rlx.auto_runner(
        demo_model, threads=1, max_seq=48, profile=PROFILE, progress=progress, compile_ahead=False,
        cache=CompileCache(store=Store(tmp_path / "cache")),
    )  # fmt: skip

    def generate() -> None:
        try:
            runner.generate([1, 2, 3], 4)
        except BusyError as error:
            errors.append(error)

    generating, closing = threading.Thread(target=generate), threading.Thread(target=runner.close)
    generating.start()
    assert inside.wait(SECONDS)
    closing.start()
    while not runner._loop.is_closed:
        closing.join(0.01)
    closed.set()
    for thread in (generating, closing):
        thread.join(SECONDS)
    assert len(errors) == 1
    assert not [entry for entry in Store(tmp_path / "cache").entries() if entry.key and entry.key.phase == "prefill"]


def test_it_is_ready_when_the_first_programs_are_there(runner: Runner) -> None:
    """Those of prompts and of single tokens, and the choice of tokens: others may follow."""
    assert runner.ahead.is_ready, "nothing is compiled ahead"
    begun, go = [threading.Event() for _ in range(FIRST + 1)], [threading.Event() for _ in range(FIRST + 1)]

    def job(number: int) -> None:
        begun[number].set()
        assert go[number].wait(SECONDS)

    runner.ahead.start({number: partial(job, number) for number in range(FIRST + 1)})
    for number, ready in enumerate((*[False] * FIRST, True)):
        assert begun[number].wait(SECONDS) and runner.ahead.is_ready is ready
        go[number].set()
    runner.ahead.wait()
    assert runner.ahead.is_ready
