"""Compiling ahead: what is compiled in the background, when it waits, how it ends. Nothing here measures time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.engine.programs.background import BackgroundCompiler, CompileAheadWarning
from rlx.store.cache import CompileCache
from rlx.store.store import Store

pytestmark = pytest.mark.any_machine

Events = list[tuple[str, int, int]]
PROFILE = {"buckets": {"seq": [1, 32]}}
SECONDS = 60  # after which a wait has failed, also on a busy machine


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
