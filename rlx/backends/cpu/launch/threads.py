"""Worker threads that stay in native code.

CPU backend: a compiled program is one native `step` function that workers enter with their index. The workers are
Python threads that call `rlx_worker` once, with the GIL released, and return only when the pool closes. The loop
inside, and the waits between workers, are LLVM IR in `rlx.backends.cpu.launch.loop`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx import platform
from rlx.backends.cpu.context import CLOSED, OFFSETS, POOL_BYTES, SYMBOLS
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.host import AlignedBuffer
from rlx.closing import Closing
from rlx.errors import ArgumentError, BusyError, ResourceError
from rlx.platform import MAX_WORKERS, usable_cpus

# How long a wait spins before it sleeps, in nanoseconds. In a step: more than the usual difference between workers,
# less than the cost of waking (5 to 30 us). Idle: the time between two steps of a caller, such as 50 us between tokens,
# 250 us between two requests, and more on a busy machine: a worker that went to sleep may miss half of a short step.
STEP_SPIN = 10_000
IDLE_SPIN = 300_000


class RuntimeLibrary:
    """The compiled worker loop, loaded into this process.

    Args:
        object_bytes: object code of `runtime_llvm` for this machine.
        imports: addresses of functions of the system; by default those that the platform names.

    Attributes:
        symbols: the address of each function in `SYMBOLS`; programs import `rlx_phase` and `rlx_barrier` from here.

    Raises:
        CompileError: the object does not load.
    """

    def __init__(self, object_bytes: bytes, imports: Mapping[str, int] | None = None) -> None:
        imports = platform.current().symbols() if imports is None else imports
        self._code = NativeCode([object_bytes], SYMBOLS, "the worker loop", imports)
        self.symbols = self._code.addresses
        pointer, index = ctypes.c_void_p, ctypes.c_int64
        start = ctypes.CFUNCTYPE(None, pointer, pointer, pointer)
        self.repeat = ctypes.CFUNCTYPE(index, pointer, pointer)(self.symbols["rlx_repeat"])
        self.cycles = ctypes.CFUNCTYPE(index)(self.symbols["rlx_cycles"])
        self.drafts = ctypes.CFUNCTYPE(index, pointer, pointer)(self.symbols["rlx_drafts"])
        self.run, self.share = start(self.symbols["rlx_run"]), start(self.symbols["rlx_share"])
        self.work = ctypes.CFUNCTYPE(None, pointer, index)(self.symbols["rlx_worker"])


class _Crew:
    """The threads and the memory of a pool. Separate from the pool, so that an unused pool is collected and stopped."""

    def __init__(self, n: int, library: RuntimeLibrary) -> None:
        self.n, self.library = n, library
        self.memory = AlignedBuffer(POOL_BYTES)
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.running = self.closed = False

    def start(self) -> None:
        """Resets the words at the same address, which programs hold, and starts new threads."""
        # With more workers than CPUs some worker always waits for a CPU; a spinning worker would block it.
        spins = (STEP_SPIN, IDLE_SPIN) if self.n <= usable_cpus() else (0, 0)
        words = np.zeros(POOL_BYTES // 8, np.int64)
        words[:3] = self.n, *spins
        words[OFFSETS["gate"] // 8] = CLOSED
        self.memory.view(np.int64, words.shape)[:] = words
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
            hint = "Use fewer threads (--threads, RLX_THREADS), or raise the limit on processes (`ulimit -u`)"
            raise ResourceError(f"worker {index} of {self.n} does not start: {error}", hint=hint) from error
        self.threads.append(thread)

    def halt(self) -> None:
        """Stops the workers and waits for them."""
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
        """For a forked child: the threads do not exist there, and one of them may have held the lock."""
        self.lock, self.threads, self.running = threading.Lock(), [], False


_CREWS: weakref.WeakSet[_Crew] = weakref.WeakSet()


def _forget_all() -> None:
    for crew in list(_CREWS):
        crew.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class WorkerPool(Closing):
    """`n` workers that run a native step together: the calling thread is worker 0, the others wait in native code.

    A step is `void step(ptr ctx, i64 worker, i64 n)`. Workers stop when the pool is closed or collected, and at exit.
    After a fork the child's pool starts new workers at the next `run`, at the same `pool_address`.

    Args:
        n: number of workers, 1 to 1024.
        library: the loaded worker loop.

    Attributes:
        pool_address: what programs pass to `rlx_phase` and `rlx_barrier`; constant for the pool's life.

    Raises:
        ArgumentError: `n` is out of range.
        ResourceError: the system starts no more threads.
    """

    def __init__(self, n: int, library: RuntimeLibrary) -> None:
        if type(n) is not int or not 1 <= n <= MAX_WORKERS:
            hint = f"Give a whole number from 1 to {MAX_WORKERS}"
            raise ArgumentError(f"{n!r} workers", where="WorkerPool", hint=hint)
        self.n, self.library = n, library
        self._crew = _Crew(n, library)
        self.pool_address = self._crew.memory.address
        self._crew.start()
        _CREWS.add(self._crew)
        self._finalizer = weakref.finalize(self, self._crew.close)

    def run(self, fn_address: int, ctx_address: int) -> None:
        """Runs `fn(ctx, worker, n)` once on each worker and returns when the last is done.

        For steps with a fixed share per worker, or that use `rlx_barrier`. Callers in other threads queue.

        Raises:
            ArgumentError: `fn_address` is null.
            BusyError: the pool is closed.
        """
        self._call(self.library.run, fn_address, ctx_address)

    def share(self, fn_address: int, ctx_address: int) -> None:
        """Runs `fn(ctx, 0, n)` here while free workers join; returns when all of them are done.

        For steps that take their work from counters and end their phases with `rlx_phase`: a worker may join late,
        never, or more than once, so a worker without a CPU delays nobody. Callers in other threads queue.

        Raises:
            ArgumentError: `fn_address` is null.
            BusyError: the pool is closed.
        """
        self._call(self.library.share, fn_address, ctx_address)

    def repeat(self, plan_address: int) -> int:
        """Runs a step repeatedly, as `share` does; each takes the token that the step before chose.

        The plan is an array of 8-byte fields, `context.PLAN`. Returns the number of steps done.

        Raises:
            BusyError: the pool is closed.
        """
        return int(self._call(self.library.repeat, plan_address))

    def drafts(self, plan_address: int) -> int:
        """Runs verifying steps of a model alternating with drafts of its MTP head.

        The plan is an array of 8-byte fields, `context.DRAFTS_PLAN`. Returns the number of tokens found.

        Raises:
            BusyError: the pool is closed.
        """
        return int(self._call(self.library.drafts, plan_address))

    def _call(self, native: Callable[..., Any], address: int, *context: int) -> Any:
        """Calls a native function of the pool, for one caller at a time; starts the workers if necessary."""
        if not address:
            raise ArgumentError("the address of the step is null", where="WorkerPool")
        with self._crew.lock:
            if not self._crew.running:
                self._restart()
            return native(self.pool_address, address, *context)

    def _restart(self) -> None:
        if self._crew.closed:
            raise BusyError("this pool is closed", where="WorkerPool")
        self._crew.start()

    def close(self) -> None:
        """Stops the workers, after the running step. Can be called more than once."""
        self._finalizer()
