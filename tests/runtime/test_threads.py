"""The worker loop: nobody passes a barrier or a phase early, every step is done once, pools come and go."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator

import llvmlite.binding as llvm
import numpy as np
import pytest

from rlx import platform
from rlx.backends.cpu.launch import native
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.loop import runtime_llvm
from rlx.backends.cpu.launch.native import RuntimeLibrary, WorkerPool
from rlx.backends.cpu.llvm import compile_module
from rlx.backends.cpu.target import Target
from rlx.backends.host import AlignedBuffer
from rlx.errors import RlxError

# ctx = { pool, barrier, rounds, microseconds, counters } with one i64 counter and one i64 error count a worker, 128
# bytes apart. In each round a worker raises its counter, meets the others, counts counters that are not at this round,
# and meets the others again. Worker `round % n` comes late by some microseconds.
STEPS = """
declare i32 @usleep(i32)
define void @rounds(ptr %ctx, i64 %worker, i64 %n) {
entry:
  %pool = load ptr, ptr %ctx
  %barrier.at = getelementptr i8, ptr %ctx, i64 8
  %barrier = load ptr, ptr %barrier.at
  %rounds.at = getelementptr i8, ptr %ctx, i64 16
  %rounds = load i64, ptr %rounds.at
  %late.at = getelementptr i8, ptr %ctx, i64 24
  %late = load i32, ptr %late.at
  %counters = getelementptr i8, ptr %ctx, i64 128
  %mine.offset = mul i64 %worker, 128
  %mine = getelementptr i8, ptr %counters, i64 %mine.offset
  %errors = getelementptr i8, ptr %mine, i64 8
  %start = load i64, ptr %mine
  br label %round
round:
  %r = phi i64 [ 0, %entry ], [ %r.next, %next ]
  %who = urem i64 %r, %n
  %is.late = icmp eq i64 %who, %worker
  %wants.late = icmp ne i32 %late, 0
  %sleeps = and i1 %is.late, %wants.late
  br i1 %sleeps, label %sleep, label %count
sleep:
  %slept = call i32 @usleep(i32 %late)
  br label %count
count:
  %r.next = add i64 %r, 1
  %value = add i64 %start, %r.next
  store i64 %value, ptr %mine
  call void %barrier(ptr %pool)
  br label %check
check:
  %other = phi i64 [ 0, %count ], [ %other.next, %check ]
  %other.offset = mul i64 %other, 128
  %other.at = getelementptr i8, ptr %counters, i64 %other.offset
  %found = load i64, ptr %other.at
  %wrong = icmp ne i64 %found, %value
  %add = zext i1 %wrong to i64
  %errors.old = load i64, ptr %errors
  %errors.new = add i64 %errors.old, %add
  store i64 %errors.new, ptr %errors
  %other.next = add i64 %other, 1
  %more = icmp ult i64 %other.next, %n
  br i1 %more, label %check, label %next
next:
  call void %barrier(ptr %pool)
  %again = icmp ult i64 %r.next, %rounds
  br i1 %again, label %round, label %end
end:
  ret void
}

; ctx = { pool, phase function, phases, microseconds, units, round, errors, entries }, then per phase { next, done } and
; a cell a unit. A unit raises its cell to the round's number, after a look at all cells of the phase before. Worker 0
; is late in each unit by some microseconds.
define void @phases(ptr %ctx, i64 %worker, i64 %n) {
entry:
  %pool = load ptr, ptr %ctx
  %phase.at = getelementptr i64, ptr %ctx, i64 1
  %phase = load ptr, ptr %phase.at
  %phases.at = getelementptr i64, ptr %ctx, i64 2
  %phases = load i64, ptr %phases.at
  %late.at = getelementptr i64, ptr %ctx, i64 3
  %late = load i32, ptr %late.at
  %units.at = getelementptr i64, ptr %ctx, i64 4
  %units = load i64, ptr %units.at
  %round.at = getelementptr i64, ptr %ctx, i64 5
  %round = load i64, ptr %round.at
  %errors = getelementptr i64, ptr %ctx, i64 6
  %entries = getelementptr i64, ptr %ctx, i64 7
  %entered = atomicrmw add ptr %entries, i64 1 monotonic
  %main = icmp eq i64 %worker, 0
  %wants.late = icmp ne i32 %late, 0
  %sleeps = and i1 %main, %wants.late
  %stride = add i64 %units, 2
  br label %loop
loop:
  %p = phi i64 [ 0, %entry ], [ %p.next, %next ]
  %before = sub i64 %p, 1
  %skip = mul i64 %p, %stride
  %first = add i64 %skip, 8
  %claimed = getelementptr i64, ptr %ctx, i64 %first
  %done = getelementptr i64, ptr %claimed, i64 1
  %cells = getelementptr i64, ptr %claimed, i64 2
  %back = sub i64 0, %stride
  %cells.before = getelementptr i64, ptr %cells, i64 %back
  br label %fetch
fetch:
  %count = phi i64 [ 0, %loop ], [ %count.next, %do ]
  %unit = atomicrmw add ptr %claimed, i64 1 monotonic
  %have = icmp ult i64 %unit, %units
  br i1 %have, label %work, label %end.phase
work:
  br i1 %sleeps, label %sleep, label %look
sleep:
  %slept = call i32 @usleep(i32 %late)
  br label %look
look:
  %first.phase = icmp eq i64 %p, 0
  br i1 %first.phase, label %do, label %check
check:
  %c = phi i64 [ 0, %look ], [ %c.next, %check ]
  %cell.at = getelementptr i64, ptr %cells.before, i64 %c
  %cell = load i64, ptr %cell.at
  %wrong = icmp ne i64 %cell, %round
  %add = zext i1 %wrong to i64
  %old = atomicrmw add ptr %errors, i64 %add monotonic
  %c.next = add i64 %c, 1
  %more = icmp ult i64 %c.next, %units
  br i1 %more, label %check, label %do
do:
  %mine.at = getelementptr i64, ptr %cells, i64 %unit
  %mine = load i64, ptr %mine.at
  %raised = add i64 %mine, 1
  store i64 %raised, ptr %mine.at
  %count.next = add i64 %count, 1
  br label %fetch
end.phase:
  %go = call i1 %phase(ptr %pool, ptr %done, i64 %count, i64 %units, i64 %worker)
  br i1 %go, label %next, label %out
next:
  %p.next = add i64 %p, 1
  %again = icmp ult i64 %p.next, %phases
  br i1 %again, label %loop, label %out
out:
  ret void
}
define i1 @no_phase(ptr %pool, ptr %done, i64 %mine, i64 %total, i64 %worker) { ret i1 true }
define void @no_barrier(ptr %pool) { ret void }
define void @rlx_nothing(ptr %ctx, i64 %worker, i64 %n) { ret void }
"""

Step = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(scope="module")
def library() -> RuntimeLibrary:
    target = Target.host()
    return RuntimeLibrary(compile_module(runtime_llvm(target.triple, platform.current().waits), target).code)


@pytest.fixture(scope="module")
def steps() -> NativeCode:
    return NativeCode(
        [compile_module(STEPS, Target.host()).code], ["rounds", "no_barrier", "phases", "no_phase", "rlx_nothing"]
    )


class Rounds:
    """The memory of the `rounds` step."""

    def __init__(self, pool: WorkerPool, steps: NativeCode, rounds: int, late: int = 0, barrier: int = 0) -> None:
        self.buffer = AlignedBuffer(128 * (pool.n + 1))
        self.words = self.buffer.view(np.int64, (pool.n + 1, 16))
        self.words[0, :4] = pool.pool_address, barrier or pool.library.symbols["rlx_barrier"], rounds, late
        self.pool, self.step = pool, steps.addresses["rounds"]

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.pool.run(self.step, self.buffer.address)

    @property
    def counters(self) -> list[int]:
        return [int(count) for count in self.words[1:, 0]]

    @property
    def errors(self) -> int:
        return int(self.words[1:, 1].sum())


class Phases:
    """The memory of the `phases` step."""

    def __init__(
        self, pool: WorkerPool, steps: NativeCode, phases: int, units: int, late: int = 0, phase: int = 0
    ) -> None:
        self.buffer = AlignedBuffer(8 * (8 + phases * (units + 2)))
        self.head = self.buffer.view(np.int64, 8)
        self.rows = self.buffer.view(np.int64, (phases, units + 2), 64)
        self.head[:5] = pool.pool_address, phase or pool.library.symbols["rlx_phase"], phases, late, units
        self.pool, self.step = pool, steps.addresses["phases"]

    def run(self, how: Callable[[int, int], None]) -> bool:
        """One round; whether every unit was done once, none before its time."""
        self.head[5] += 1
        self.rows[:, :2] = 0
        how(self.step, self.buffer.address)
        return bool((self.rows[:, 2:] == self.head[5]).all()) and self.head[6] == 0

    @property
    def entries(self) -> int:
        """How often a worker entered."""
        return int(self.head[7])


def python_step(function: Callable[[int, int, int], None]) -> tuple[object, int]:
    """A step in Python: (what must stay alive, its address)."""
    step = Step(lambda ctx, worker, n: function(ctx or 0, worker, n))
    return step, ctypes.cast(step, ctypes.c_void_p).value or 0


# ---------------------------------------------------------------------------------------------------- barrier


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_no_worker_passes_a_barrier_early(n: int, library: RuntimeLibrary, steps: NativeCode) -> None:
    with WorkerPool(n, library) as pool:
        step = Rounds(pool, steps, 2000 if n <= 2 else 300)
        for _ in range(10):
            step.run()
        assert step.errors == 0
        assert step.counters == [10 * step.words[0, 2]] * n


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("spin", [0, 1_000_000_000])
def test_a_late_worker_is_waited_for_asleep_and_awake(
    n: int, spin: int, library: RuntimeLibrary, steps: NativeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STEP_SPIN", spin)
    monkeypatch.setattr(native, "IDLE_SPIN", spin)
    monkeypatch.setattr(native, "usable_cpus", lambda: n)
    with WorkerPool(n, library) as pool:
        step = Rounds(pool, steps, 20, late=300)
        for _ in range(5):
            step.run()
        assert step.errors == 0
        assert step.counters == [100] * n


# ---------------------------------------------------------------------------------------------------- phases


@pytest.mark.parametrize("how", ["share", "run"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_unit_of_every_phase_is_done_once_and_in_order(
    n: int, how: str, library: RuntimeLibrary, steps: NativeCode
) -> None:
    with WorkerPool(n, library) as pool:
        step = Phases(pool, steps, phases=60, units=7)
        assert all(step.run(getattr(pool, how)) for _ in range(100))


# ---------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_worker_runs_every_job_once(n: int, library: RuntimeLibrary) -> None:
    calls: list[tuple[int, int, int]] = []
    _step, address = python_step(lambda ctx, worker, total: calls.append((ctx, worker, total)))
    with WorkerPool(n, library) as pool:
        for context in range(1, 101):
            pool.run(address, context)
            assert sorted(calls) == [(context, worker, n) for worker in range(n)]
            calls.clear()


@pytest.mark.parametrize("idle", [0.0, 0.001, 0.02])
def test_workers_wake_from_every_depth_of_idleness(idle: float, library: RuntimeLibrary, steps: NativeCode) -> None:
    with WorkerPool(2, library) as pool:
        step = Rounds(pool, steps, 2)
        for _ in range(15):
            time.sleep(idle)
            step.run()
        assert (step.errors, step.counters) == (0, [30, 30])


def test_callers_in_several_threads_queue(library: RuntimeLibrary, steps: NativeCode) -> None:
    with WorkerPool(2, library) as pool:
        step = Rounds(pool, steps, 3)
        callers = [threading.Thread(target=step.run, args=[100]) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert (step.errors, step.counters) == (0, [1200, 1200])


# ---------------------------------------------------------------------------------------------------- life


@pytest.fixture
def no_new_threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.usefixtures("no_new_threads")
def test_when_the_system_gives_no_more_threads(library: RuntimeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name == "rlx-worker-2":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RlxError, match=r"worker 2 of 4 does not start.*RLX_THREADS"):
        WorkerPool(4, library)


def test_a_forked_child_has_workers_of_its_own(library: RuntimeLibrary, steps: NativeCode) -> None:
    with WorkerPool(2, library) as pool:
        step, address = Rounds(pool, steps, 10), pool.pool_address
        step.run()
        child = os.fork()
        if not child:
            step.run()
            good = step.counters == [20, 20] and not step.errors and pool.pool_address == address
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        step.run()
        assert (step.errors, step.counters) == (0, [20, 20])


# ---------------------------------------------------------------------------------------------------- text


PLACES = [
    ("x86_64-unknown-linux-gnu", "futex", "syscall"),
    ("aarch64-unknown-linux-gnu", "futex", "syscall"),
    ("riscv64-unknown-linux-gnu", "naps", "thrd_sleep"),
    ("s390x-unknown-linux-gnu", "futex", "thrd_sleep"),  # no number of the call is known
    ("arm64-apple-darwin24", "ulock", "___ulock_wait"),
    ("x86_64-pc-windows-msvc-elf", "address", "WaitOnAddress"),
]


@pytest.mark.parametrize(("triple", "how", "call"), PLACES)
def test_the_worker_loop_is_valid_for_other_machines(triple: str, how: str, call: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(runtime_llvm(triple, how))
    module.verify()
    assembly = llvm.Target.from_triple(triple).create_target_machine(reloc="pic").emit_assembly(module)
    assert all(name in assembly for name in native.SYMBOLS)
    calls = {"syscall", "thrd_sleep", "___ulock_wait", "WaitOnAddress"}
    assert {name for name in calls if re.search(rf"(?<!\w){name}\b", assembly)} == {call}
