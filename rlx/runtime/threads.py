"""Worker threads that stay in native code, and the barrier they meet at.

Runtime: a compiled program is one native `step` function that every worker enters with its own index. The workers are
Python threads that call `rlx_worker` once, with the GIL released, and come back only when the pool closes. The loop and
the barrier are LLVM IR (`runtime_llvm`), compiled by the same target as every program and kept in the same store, so no
C compiler is needed and a warm start runs no LLVM pass.

Every wait is the same: look and pause for a few microseconds, then sleep in the kernel. A pure spin lets one worker
without a CPU stall all others, and yielding is no better: on a busy machine each `sched_yield` gives a neighbour a
whole time slice (two competing processes on two CPUs: 2 steps a second with either, 60 to 90 with sleep).
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import weakref
from types import TracebackType

import numpy as np

from rlx.codegen.target import cgroup_quota
from rlx.errors import ArgumentError, BusyError, CompileError, RlxError, TargetError
from rlx.runtime.memory import READ_LLVM, AlignedBuffer

MAX_WORKERS = 1024
SYMBOLS = ("rlx_barrier", "rlx_worker", "rlx_run", "rlx_read")

# How long a wait looks before it sleeps, in nanoseconds. A barrier: beyond the usual difference between workers, below
# the cost of waking (5 to 30 us). Idle: the time a caller needs between two steps without much work of its own.
BARRIER_SPIN = 10_000
IDLE_SPIN = 50_000

# The pool's memory. Words that different threads write lie 128 bytes apart: CPUs prefetch cache lines in pairs.
# size: { i32 n, i64 barrier spin, i64 idle spin }; epoch: signal { i32 value, i32 sleepers }, ptr job, ptr context;
# done, arrived: i32 counters; finished, generation: signals.
_LINE = 128
_OFFSET = {name: _LINE * i for i, name in enumerate(("size", "epoch", "done", "finished", "arrived", "generation"))}
POOL_BYTES = _LINE * len(_OFFSET)

_TEMPLATE = """; The worker loop of rlx.
target triple = "{triple}"

{declarations}
declare i32 @clock_gettime(i32, ptr)
declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)
declare i64 @llvm.vector.reduce.add.v8i64(<8 x i64>)

; Nanoseconds of the monotonic clock.
define internal i64 @now() nounwind {{
  %time = alloca {{ i64, i64 }}, align 8
  %rc = call i32 @clock_gettime(i32 {clock}, ptr %time)
  %seconds = load i64, ptr %time, align 8
  %rest.at = getelementptr inbounds i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at, align 8
  %whole = mul i64 %seconds, 1000000000
  %ns = add i64 %whole, %rest
  ret i64 %ns
}}

; Publish a value in a signal and wake who sleeps on it. seq_cst here and in @await: either the waiter sees the new
; value before it sleeps, or we see the sleeper.
define internal void @announce(ptr %signal, i32 %value) nounwind noinline {{
entry:
  store atomic i32 %value, ptr %signal seq_cst, align 8
{wake}
out:
  ret void
}}

; Wait until the signal's value is not %old and return it: look for %spin ns, then sleep.
define internal i32 @await(ptr %signal, i32 %old, i64 %spin) nounwind noinline {{
entry:
  br label %quick
quick:                                            ; a few looks before the clock is read at all
  %i = phi i32 [ 0, %entry ], [ %i.next, %quick.pause ]
  %value.quick = load atomic i32, ptr %signal acquire, align 8
  %came.quick = icmp ne i32 %value.quick, %old
  br i1 %came.quick, label %came, label %quick.pause
quick.pause:
  {pause}
  %i.next = add i32 %i, 1
  %quick.more = icmp ult i32 %i.next, 32
  br i1 %quick.more, label %quick, label %slow
slow:
  %start = call i64 @now()
  br label %look
look:
  %value.look = load atomic i32, ptr %signal acquire, align 8
  %came.look = icmp ne i32 %value.look, %old
  br i1 %came.look, label %came, label %look.pause
look.pause:
  {pause}
  %time = call i64 @now()
  %passed = sub i64 %time, %start
  %look.more = icmp ult i64 %passed, %spin
  br i1 %look.more, label %look, label %sleep
{sleep}
came:
  %value = load atomic i32, ptr %signal acquire, align 8
  ret i32 %value
}}

; All workers of the pool meet. The last to arrive opens the next generation.
define void @rlx_barrier(ptr %pool) nounwind {{
entry:
  %n = load i32, ptr %pool, align 8
  %alone = icmp eq i32 %n, 1
  br i1 %alone, label %out, label %arrive
arrive:
  %generation.at = getelementptr inbounds i8, ptr %pool, i64 {generation}
  %arrived.at = getelementptr inbounds i8, ptr %pool, i64 {arrived}
  %generation = load atomic i32, ptr %generation.at monotonic, align 8
  %before = atomicrmw add ptr %arrived.at, i32 1 acq_rel, align 8
  %here = add i32 %before, 1
  %last = icmp eq i32 %here, %n
  br i1 %last, label %open, label %stay
open:
  store atomic i32 0, ptr %arrived.at monotonic, align 8
  %next = add i32 %generation, 1
  call void @announce(ptr %generation.at, i32 %next)
  ret void
stay:
  %spin.at = getelementptr inbounds i8, ptr %pool, i64 8
  %spin = load i64, ptr %spin.at, align 8
  %opened = call i32 @await(ptr %generation.at, i32 %generation, i64 %spin)
  ret void
out:
  ret void
}}

; A worker's life: wait for the next epoch, do its share of the job, say so; a null job ends it.
define void @rlx_worker(ptr %pool, i64 %index) nounwind {{
entry:
  %n = load i32, ptr %pool, align 8
  %n.wide = zext i32 %n to i64
  %others.before = sub i32 %n, 2
  %spin.at = getelementptr inbounds i8, ptr %pool, i64 16
  %spin = load i64, ptr %spin.at, align 8
  %epoch.at = getelementptr inbounds i8, ptr %pool, i64 {epoch}
  %job.at = getelementptr inbounds i8, ptr %epoch.at, i64 8
  %context.at = getelementptr inbounds i8, ptr %epoch.at, i64 16
  %done.at = getelementptr inbounds i8, ptr %pool, i64 {done}
  %finished.at = getelementptr inbounds i8, ptr %pool, i64 {finished}
  br label %idle
idle:                                             ; however late it starts, a worker has seen epoch 0 and no other
  %seen = phi i32 [ 0, %entry ], [ %epoch, %work ], [ %epoch, %report ]
  %epoch = call i32 @await(ptr %epoch.at, i32 %seen, i64 %spin)
  %job = load ptr, ptr %job.at, align 8
  %stop = icmp eq ptr %job, null
  br i1 %stop, label %end, label %work
work:
  %context = load ptr, ptr %context.at, align 8
  call void %job(ptr %context, i64 %index, i64 %n.wide)
  %done.before = atomicrmw add ptr %done.at, i32 1 acq_rel, align 8
  %last = icmp eq i32 %done.before, %others.before
  br i1 %last, label %report, label %idle
report:
  call void @announce(ptr %finished.at, i32 %epoch)
  br label %idle
end:
  ret void
}}

; The main thread publishes a job, does worker 0's share and waits for the others. A null job stops the workers.
define void @rlx_run(ptr %pool, ptr %job, ptr %context) nounwind {{
entry:
  %n = load i32, ptr %pool, align 8
  %n.wide = zext i32 %n to i64
  %alone = icmp eq i32 %n, 1
  br i1 %alone, label %own, label %publish
own:
  call void %job(ptr %context, i64 0, i64 1)
  ret void
publish:
  %epoch.at = getelementptr inbounds i8, ptr %pool, i64 {epoch}
  %job.at = getelementptr inbounds i8, ptr %epoch.at, i64 8
  %context.at = getelementptr inbounds i8, ptr %epoch.at, i64 16
  %done.at = getelementptr inbounds i8, ptr %pool, i64 {done}
  %finished.at = getelementptr inbounds i8, ptr %pool, i64 {finished}
  %finished = load atomic i32, ptr %finished.at monotonic, align 8
  store ptr %job, ptr %job.at, align 8
  store ptr %context, ptr %context.at, align 8
  store atomic i32 0, ptr %done.at monotonic, align 8
  %epoch.old = load atomic i32, ptr %epoch.at monotonic, align 8
  %epoch = add i32 %epoch.old, 1
  call void @announce(ptr %epoch.at, i32 %epoch)
  %stop = icmp eq ptr %job, null
  br i1 %stop, label %out, label %share
share:
  call void %job(ptr %context, i64 0, i64 %n.wide)
  %spin.at = getelementptr inbounds i8, ptr %pool, i64 16
  %spin = load i64, ptr %spin.at, align 8
  %all = call i32 @await(ptr %finished.at, i32 %finished, i64 %spin)
  ret void
out:
  ret void
}}
{read}"""

_SLEEP_FUTEX = """sleep:
  %sleepers.at = getelementptr inbounds i8, ptr %signal, i64 4
  %asleep.before = atomicrmw add ptr %sleepers.at, i32 1 seq_cst, align 4
  br label %sleep.look
sleep.look:
  %value.sleep = load atomic i32, ptr %signal seq_cst, align 8
  %came.sleep = icmp ne i32 %value.sleep, %old
  br i1 %came.sleep, label %sleep.out, label %sleep.in
sleep.in:                                         ; FUTEX_WAIT_PRIVATE: the kernel looks at the value once more
  %expected = zext i32 %old to i64
  %slept = call i64 (i64, ...) @syscall(i64 {call}, ptr %signal, i64 128, i64 %expected, ptr null)
  br label %sleep.look
sleep.out:
  %asleep.after = atomicrmw sub ptr %sleepers.at, i32 1 seq_cst, align 4
  br label %came"""

_WAKE_FUTEX = """  %sleepers.at = getelementptr inbounds i8, ptr %signal, i64 4
  %asleep = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %wake, label %out
wake:                                             ; FUTEX_WAKE_PRIVATE, everyone
  %woke = call i64 (i64, ...) @syscall(i64 {call}, ptr %signal, i64 129, i64 2147483647)
  br label %out"""

_SLEEP_NAPS = """sleep:                                            ; no futex here: naps that grow to 2 ms
  %nap = phi i32 [ 1, %look.pause ], [ %nap.next, %sleep ]
  %napped = call i32 @usleep(i32 %nap)
  %nap.twice = shl i32 %nap, 1
  %nap.long = icmp ugt i32 %nap.twice, 2000
  %nap.next = select i1 %nap.long, i32 2000, i32 %nap.twice
  %value.sleep = load atomic i32, ptr %signal acquire, align 8
  %came.sleep = icmp ne i32 %value.sleep, %old
  br i1 %came.sleep, label %came, label %sleep"""

_WAKE_NAPS = "  br label %out"

_PAUSE = {"x86_64": "@llvm.x86.sse2.pause()", "aarch64": "@llvm.aarch64.hint(i32 1)"}
_MONOTONIC = {"linux": 1, "darwin": 6}  # CLOCK_MONOTONIC
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98}  # SYS_futex


def runtime_llvm(triple: str) -> str:
    """LLVM assembly of the functions in `SYMBOLS` for a target triple.

    Raises:
        TargetError: no worker loop is known for the triple's operating system.
    """
    arch, system = _parse(triple)
    pause, futex = _PAUSE.get(arch, ""), _FUTEX.get(arch) if system == "linux" else None
    wait = "declare i32 @usleep(i32)" if futex is None else "declare i64 @syscall(i64, ...)"
    hint = f"declare void {pause.replace('i32 1', 'i32 immarg')}" if pause else ""
    return _TEMPLATE.format(
        triple=triple,
        declarations=f"{wait}\n{hint}",
        clock=_MONOTONIC[system],
        pause=f"call void {pause}" if pause else "",
        sleep=_SLEEP_NAPS if futex is None else _SLEEP_FUTEX.format(call=futex),
        wake=_WAKE_NAPS if futex is None else _WAKE_FUTEX.format(call=futex),
        read=READ_LLVM,
        **_OFFSET,
    )


def _parse(triple: str) -> tuple[str, str]:
    """'x86_64-unknown-linux-gnu' -> ('x86_64', 'linux')."""
    arch, *rest = triple.split("-")
    words = {"linux": "linux", "darwin": "darwin", "macosx": "darwin"}
    found = [system for part in rest for word, system in words.items() if part.startswith(word)]
    if not found:
        raise TargetError(f"no worker loop for the triple {triple!r}", hint="rlx runs on Linux and macOS")
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch), found[0]


class RuntimeLibrary:
    """The compiled worker loop, loaded into this process.

    Args:
        object_bytes: object code of `runtime_llvm` for this machine.

    Attributes:
        symbols: the address of each function in `SYMBOLS`; programs import `rlx_barrier` from here.

    Raises:
        CompileError: the object does not load.
    """

    def __init__(self, object_bytes: bytes) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._jit = llvm.create_lljit_compiler()
        builder = llvm.JITLibraryBuilder().add_object_img(object_bytes).add_current_process()
        for name in SYMBOLS:
            builder.export_symbol(name)
        try:
            self._tracker = builder.link(self._jit, "rlx_runtime")
        except RuntimeError as error:
            raise CompileError(f"the worker loop does not load: {error}", hint="Run `rlx cache verify`") from error
        self.symbols = {name: int(self._tracker[name]) for name in SYMBOLS}
        pointer, index = ctypes.c_void_p, ctypes.c_int64
        self.run = ctypes.CFUNCTYPE(None, pointer, pointer, pointer)(self.symbols["rlx_run"])
        self.work = ctypes.CFUNCTYPE(None, pointer, index)(self.symbols["rlx_worker"])


class _Crew:
    """The threads and the memory of a pool. Apart from the pool, so that a forgotten pool is collected and stopped."""

    def __init__(self, n: int, library: RuntimeLibrary) -> None:
        self.n, self.library = n, library
        self.memory = AlignedBuffer(POOL_BYTES)
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.running = self.closed = False

    def start(self) -> None:
        """Fresh words at the same address, because programs hold it; fresh threads."""
        # With more workers than CPUs someone always waits for a CPU, and who spins keeps it from him.
        spins = (BARRIER_SPIN, IDLE_SPIN) if self.n <= usable_cpus() else (0, 0)
        words = struct.pack("<i4xqq", self.n, *spins).ljust(POOL_BYTES, b"\0")
        self.memory.view(np.uint8, POOL_BYTES)[:] = np.frombuffer(words, np.uint8)
        self.threads, self.running = [], True
        for index in range(1, self.n):
            self._start_worker(index)

    def _start_worker(self, index: int) -> None:
        arguments = (self.memory.address, index)
        thread = threading.Thread(target=self.library.work, args=arguments, name=f"rlx-worker-{index}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.halt()
            hint = "Use fewer threads (RLX_THREADS) or raise the limit on processes"
            raise RlxError(f"worker {index} of {self.n} does not start: {error}", hint=hint) from error
        self.threads.append(thread)

    def halt(self) -> None:
        """Stop the workers and wait for them."""
        if self.threads:
            self.library.run(self.memory.address, None, None)
        for thread in self.threads:
            thread.join()
        self.threads, self.running = [], False

    def close(self) -> None:
        with self.lock:
            if not self.closed:
                self.halt()
                self.closed = True
                self.memory.close()

    def forget(self) -> None:
        """In a forked child: the threads stayed behind, and one of them may have held the lock."""
        self.lock, self.threads, self.running = threading.Lock(), [], False


_CREWS: weakref.WeakSet[_Crew] = weakref.WeakSet()


def _forget_all() -> None:
    for crew in list(_CREWS):
        crew.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class WorkerPool:
    """`n` workers that run a native step together: the calling thread is worker 0, the others wait in native code.

    A step is `void step(ptr ctx, i64 worker, i64 n)`. Workers stop when the pool is closed or collected, and at exit.
    After a fork the child's pool starts its own workers at the next `run`, at the same `pool_address`.

    Args:
        n: number of workers, 1 to 1024.
        library: the loaded worker loop.

    Raises:
        ArgumentError: `n` is out of range.
        RlxError: the system gives no more threads.
    """

    def __init__(self, n: int, library: RuntimeLibrary) -> None:
        if type(n) is not int or not 1 <= n <= MAX_WORKERS:
            hint = f"Give a whole number from 1 to {MAX_WORKERS}"
            raise ArgumentError(f"{n!r} workers", where="WorkerPool", hint=hint)
        self.n, self.library = n, library
        self._crew = _Crew(n, library)
        self._crew.start()
        _CREWS.add(self._crew)
        self._finalizer = weakref.finalize(self, self._crew.close)

    @property
    def pool_address(self) -> int:
        """What programs pass to `rlx_barrier`; the same for the pool's whole life."""
        return self._crew.memory.address

    def run(self, fn_address: int, ctx_address: int) -> None:
        """Run `fn(ctx, worker, n)` on all workers and return when the last is done. Callers in other threads queue.

        Raises:
            ArgumentError: `fn_address` is null.
            BusyError: the pool is closed.
        """
        if not fn_address:
            raise ArgumentError("the address of the step is null", where="WorkerPool.run")
        crew = self._crew
        with crew.lock:
            if not crew.running:
                self._restart()
            self.library.run(crew.memory.address, fn_address, ctx_address)

    def _restart(self) -> None:
        if self._crew.closed:
            raise BusyError("this pool is closed", where="WorkerPool.run")
        self._crew.start()

    def close(self) -> None:
        """Stop the workers. A running step finishes first. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def usable_cpus() -> float:
    """Logical CPUs this process may use at a time: the smaller of its affinity and its cgroup quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(affinity, cgroup_quota())
