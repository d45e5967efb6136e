"""The worker loop: nobody passes a phase early, every step is done once, pools come and go."""

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

# ctx = { microseconds }, then for each worker 128 bytes with how often it came and how often it left. Worker 0 waits,
# for ten seconds at most, until the others came; these leave late by some microseconds.
STEPS = """
declare i32 @usleep(i32)
define void @meet(ptr %ctx, i64 %worker, i64 %n) {
entry:
  %late = load i32, ptr %ctx
  %offset = mul i64 %worker, 128
  %mine.offset = add i64 %offset, 128
  %mine = getelementptr i8, ptr %ctx, i64 %mine.offset
  %before = load i64, ptr %mine
  %now = add i64 %before, 1
  store atomic i64 %now, ptr %mine release, align 8
  %main = icmp eq i64 %worker, 0
  br i1 %main, label %next, label %sleep
sleep:
  %slept = call i32 @usleep(i32 %late)
  br label %out
next:
  %other = phi i64 [ 1, %entry ], [ %other.next, %came ]
  %tries = phi i64 [ 0, %entry ], [ %tries.now, %came ]
  %more = icmp ult i64 %other, %n
  br i1 %more, label %look, label %out
look:
  %tries.now = phi i64 [ %tries, %next ], [ %tries.next, %wait ]
  %other.offset = mul i64 %other, 128
  %at.offset = add i64 %other.offset, 128
  %other.at = getelementptr i8, ptr %ctx, i64 %at.offset
  %found = load atomic i64, ptr %other.at acquire, align 8
  %is.here = icmp eq i64 %found, %now
  br i1 %is.here, label %came, label %wait
wait:
  %waited = call i32 @usleep(i32 10)
  %tries.next = add i64 %tries.now, 1
  %enough = icmp ugt i64 %tries.next, 1000000
  br i1 %enough, label %out, label %look
came:
  %other.next = add i64 %other, 1
  br label %next
out:
  %left.at = getelementptr i8, ptr %mine, i64 8
  %left.before = load i64, ptr %left.at
  %left = add i64 %left.before, 1
  store i64 %left, ptr %left.at
  ret void
}

; ctx = { pool, phase function, phases, microseconds, units, round, errors, 0 }, then per phase { next, done } and
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
"""

Step = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(scope="module")
def library() -> RuntimeLibrary:
    target = Target.host()
    return RuntimeLibrary(compile_module(runtime_llvm(target.triple, platform.current().waits), target).code)


@pytest.fixture(scope="module")
def steps() -> NativeCode:
    return NativeCode([compile_module(STEPS, Target.host()).code], ["meet", "phases"])


class Meeting:
    """The memory of the `meet` step."""

    def __init__(self, pool: WorkerPool, steps: NativeCode, late: int = 0) -> None:
        self.buffer = AlignedBuffer(128 * (pool.n + 1))
        self.words = self.buffer.view(np.int64, (pool.n + 1, 16))
        self.words[0, 0] = late
        self.pool, self.step = pool, steps.addresses["meet"]

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.pool.share(self.step, self.buffer.address)

    @property
    def counters(self) -> list[list[int]]:
        """How often each worker came, and how often it left."""
        return [list(map(int, self.words[1:, column])) for column in range(2)]


class Phases:
    """The memory of the `phases` step."""

    def __init__(self, pool: WorkerPool, steps: NativeCode, phases: int, units: int) -> None:
        self.buffer = AlignedBuffer(8 * (8 + phases * (units + 2)))
        self.head = self.buffer.view(np.int64, 8)
        self.rows = self.buffer.view(np.int64, (phases, units + 2), 64)
        self.head[:5] = pool.pool_address, pool.library.symbols["rlx_phase"], phases, 0, units
        self.pool, self.step = pool, steps.addresses["phases"]

    def run(self) -> bool:
        """One round; whether every unit was done once, none before its time."""
        self.head[5] += 1
        self.rows[:, :2] = 0
        self.pool.share(self.step, self.buffer.address)
        return bool((self.rows[:, 2:] == self.head[5]).all()) and self.head[6] == 0


def python_step(function: Callable[[int, int, int], None]) -> tuple[object, int]:
    """A step in Python: (what must stay alive, its address)."""
    step = Step(lambda ctx, worker, n: function(ctx or 0, worker, n))
    return step, ctypes.cast(step, ctypes.c_void_p).value or 0


# ---------------------------------------------------------------------------------------------------- meetings


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("spin", [0, 1_000_000_000])
def test_a_late_worker_is_waited_for_asleep_and_awake(
    n: int, spin: int, library: RuntimeLibrary, steps: NativeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STEP_SPIN", spin)
    monkeypatch.setattr(native, "IDLE_SPIN", spin)
    monkeypatch.setattr(native, "usable_cpus", lambda: n)
    with WorkerPool(n, library) as pool:
        step = Meeting(pool, steps, late=300)
        for count in range(1, 101):
            step.run()
            assert step.counters == [[count] * n] * 2


# ---------------------------------------------------------------------------------------------------- phases


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_unit_of_every_phase_is_done_once_and_in_order(
    n: int, library: RuntimeLibrary, steps: NativeCode
) -> None:
    with WorkerPool(n, library) as pool:
        step = Phases(pool, steps, phases=60, units=7)
        assert all(step.run() for _ in range(100))


# ---------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_worker_runs_every_job_once(n: int, library: RuntimeLibrary) -> None:
    calls: list[tuple[int, int, int]] = []

    def note(context: int, worker: int, total: int) -> None:
        calls.append((context, worker, total))
        end = time.monotonic() + 10
        while not worker and len(calls) < n and time.monotonic() < end:
            time.sleep(0)  # worker 0 lets the others come

    _step, address = python_step(note)
    with WorkerPool(n, library) as pool:
        for context in range(1, 101):
            pool.share(address, context)
            assert sorted(calls) == [(context, worker, n) for worker in range(n)]
            calls.clear()


@pytest.mark.parametrize("idle", [0.0, 0.001, 0.02])
def test_workers_wake_from_every_depth_of_idleness(idle: float, library: RuntimeLibrary, steps: NativeCode) -> None:
    with WorkerPool(2, library) as pool:
        step = Meeting(pool, steps)
        for _ in range(15):
            time.sleep(idle)
            step.run()
        assert step.counters == [[15, 15]] * 2


def test_callers_in_several_threads_queue(library: RuntimeLibrary, steps: NativeCode) -> None:
    with WorkerPool(2, library) as pool:
        step = Meeting(pool, steps)
        callers = [threading.Thread(target=step.run, args=[100]) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert step.counters == [[400, 400]] * 2


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
        step, address = Meeting(pool, steps), pool.pool_address
        step.run()
        child = os.fork()
        if not child:
            step.run()
            good = step.counters == [[2, 2]] * 2 and pool.pool_address == address
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        step.run()
        assert step.counters == [[2, 2]] * 2


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
