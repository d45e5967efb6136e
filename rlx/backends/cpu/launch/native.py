"""A native program, and the worker threads that run it, which stay in native code.

CPU backend: a compiled program is object code, its manifest, and its memory. It is bound once; then each step is one
native `step` function that workers enter with their index. The workers are Python threads that call `rlx_worker` once,
with the GIL released, and return only when the pool closes. The loop inside, and the waits between workers, are LLVM IR
in `rlx.backends.cpu.launch.loop`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from rlx import platform
from rlx.backends.cpu.context import CLOSED, CONTEXT, FIXED, OFFSETS, POOL_BYTES, SYMBOLS, VARYING
from rlx.backends.cpu.launch.clocks import ClockLog
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.work_stealing import counter_bytes
from rlx.backends.host import HOST, AlignedBuffer, address
from rlx.backends.memory import Buffer
from rlx.backends.program import Program, StepLog, TokenRun, TokenSteps, tell_log
from rlx.closing import Closing
from rlx.errors import ArgumentError, BusyError, ResourceError
from rlx.platform import MAX_WORKERS, usable_cpus

_NO_SLOTS = -1, -1
_NOWHERE = np.zeros(64, np.int64)  # dummy memory for inputs and symbols that a program lacks

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
        symbols: the address of each function in `SYMBOLS`; programs import `rlx_phase` from here.

    Raises:
        CompileError: the object does not load.
    """

    def __init__(self, object_bytes: bytes, imports: Mapping[str, int] | None = None) -> None:
        imports = platform.current().symbols() if imports is None else imports
        self._code = NativeCode([object_bytes], SYMBOLS, "the worker loop", imports)
        self.symbols = self._code.addresses
        pointer, index = ctypes.c_void_p, ctypes.c_int64
        self.repeat = ctypes.CFUNCTYPE(index, pointer, pointer)(self.symbols["rlx_repeat"])
        self.cycles = ctypes.CFUNCTYPE(index)(self.symbols["rlx_cycles"])
        self.drafts = ctypes.CFUNCTYPE(index, pointer, pointer)(self.symbols["rlx_drafts"])
        self.share = ctypes.CFUNCTYPE(None, pointer, pointer, pointer)(self.symbols["rlx_share"])
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
            self.library.share(self.memory.address, None, None)
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
    After a fork the child's pool starts new workers at the next step, at the same `pool_address`.

    Args:
        n: number of workers, 1 to 1024.
        library: the loaded worker loop.

    Attributes:
        pool_address: what programs pass to `rlx_phase`; constant for the pool's life.

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


class NativeProgram(Program):
    """One instance of a compiled program, ready to run once its weights and states are bound.

    Args:
        code, manifest: output of the linker (`rlx.backends.cpu.link`); several instances share them.
        pool: the workers that run it.
    """

    def __init__(self, code: NativeCode, manifest: Mapping[str, Any], pool: WorkerPool) -> None:
        super().__init__(manifest, pool.n, HOST)
        self.pool = pool
        self._code = code
        self._args = np.zeros(max(1, len(manifest["args"])), np.uint64)
        self._counters = AlignedBuffer(counter_bytes(manifest))
        self._taken = self._counters.view(np.int64, self._counters.nbytes // 8)
        self._context = self._make_context()
        self._unbound = self._place_arena()
        self._positions = self._by_name()
        self._step, self._context_address = self._code.addresses["step"], self._context.ctypes.data
        self._log: ClockLog | None = None
        self._plans: dict[tuple[Any, ...], list[int]] = {}  # plans of `repeat`, by carried value and first program

    def _make_context(self) -> np.ndarray:
        values = {
            "args": self._args.ctypes.data,
            "extents": self.symbols.ctypes.data,
            "counters": self._counters.address,
            "pool": self.pool.pool_address,
            "phase": self.pool.library.symbols["rlx_phase"],
            "times": self.times.ctypes.data,
        }
        return np.array([values.get(name, 0) for name in CONTEXT], np.uint64)

    def _place_arena(self) -> set[str]:
        """Sets the addresses inside the arena; returns the names that must still be bound."""
        arena = address(self.arena)
        bases = {"arena": arena, "private": arena + self.manifest["arena"]}
        for i, (kind, where) in enumerate(self.manifest["args"]):
            if kind in bases:
                self._args[i] = bases[kind] + where
        return {str(where) for kind, where in self.manifest["args"] if kind not in bases}

    def _by_name(self) -> dict[str, list[int]]:
        table: dict[str, list[int]] = {}
        for i, (kind, where) in enumerate(self.manifest["args"]):
            if kind in ("weight", "state"):
                table.setdefault(where, []).append(i)
        return table

    def bind(self, buffers: Mapping[str, Buffer]) -> None:
        for name in self._positions.keys() & buffers.keys():
            self._args[self._positions[name]] = address(buffers[name])
        super().bind(buffers)

    def bind_slots(self, states: Mapping[str, tuple[Buffer, int]]) -> None:
        rows = [
            (i, address(buffer), nbytes, written)
            for name, (buffer, nbytes) in states.items()
            for written, place in enumerate((name, f"{name}'"))
            for i in self._positions.get(place, ())
        ]
        # Rows of the argument table that change with the slot: which, by which of the two slots, their place in slot 0.
        self._slot_rows, self._slot_columns = (np.array([row[at] for row in rows], np.intp) for at in (0, 3))
        self._slot_starts, self._slot_bytes = (np.array([row[at] for row in rows], np.uint64) for at in (1, 2))
        self._slots = _NO_SLOTS
        super().bind_slots(states)

    def select_slot(self, slot: int, written: int | None = None) -> None:
        chosen = slot, slot if written is None else written
        if self._slots != chosen:  # mostly it is the same from step to step
            self._slots = _NO_SLOTS
            slots = np.array(chosen, np.uint64)
            self._args[self._slot_rows] = self._slot_starts + slots[self._slot_columns] * self._slot_bytes
            self._slots = chosen
        if self.then:
            self.then.select_slot(slot, written)

    def launch(self) -> None:
        self._taken.fill(0)
        if self._log is None:
            self.pool.share(self._step, self._context_address)
            return
        with self._log.logged(1):
            self.pool.share(self._step, self._context_address)

    def record(self, logs: bool) -> None:
        self._log = ClockLog(self.manifest, self.times, self._context, self.pool.library.cycles) if logs else None

    @property
    def log(self) -> StepLog | None:
        return None if self._log is None else self._log.last

    def steps(self, run: TokenRun) -> TokenSteps:
        if len(run.ends) > 1 or run.draws or any(observer.each_step for observer in self.observers):
            return super().steps(run)
        return _NativeSteps(self, run)

    def looped(self, run: TokenRun, count: int, seconds: float) -> list[int]:
        """The tokens of up to `count` steps of a run of one row, in one native call; it is prepared."""
        found, stops = array("i", bytes(4 * count)), array("i", run.ends[0].stops)
        plan = self.plan(run, stops, found.buffer_info()[0], count, seconds)
        with logged({self: count, **({native(run.first): 1} if run.first else {})}):
            start = time.perf_counter()
            done = self.pool.repeat(plan.buffer_info()[0])
            spent = time.perf_counter() - start
        self.tell(spent, done)
        return found[:done].tolist()

    def plan(self, run: TokenRun, stops: array[int], found: int, count: int, seconds: float) -> array[int]:
        """The plan of up to `count` steps of a run, see `context.PLAN`.

        Args:
            stops: must outlive it.
            found: address for the tokens.
            seconds: time limit; the run ends after the current step.
        """
        varying = {
            "rows": run.ids,
            "stops": stops.buffer_info()[0],
            "stop_count": len(stops),
            "found": found,
            "count": count,
            "nanoseconds": int(min(max(0.0, seconds), 1e6) * 1e9),
        }
        return array("Q", (*self._fixed_plan(run.carried, run.first), *map(varying.__getitem__, VARYING)))

    def _fixed_plan(self, carried: tuple[str, str] | None, first: Program | None) -> list[int]:
        """The part of a plan that all runs share: the values of `FIXED`."""
        key = carried, first
        if key not in self._plans:
            of_first = native(first or self)._step_fields(carried)
            plan = {
                **self._step_fields(carried),
                **{f"first_{name}": value for name, value in of_first.items()},
                "past": self.extent("PAST_SEQ"),
                "position": self.input("positions"),
                "token": self.input("tokens"),
                "operand": self.input(carried[1]) if carried else 0,
                "carried_bytes": self.result(carried[0]).nbytes if carried else 0,
            }
            self._plans[key] = [plan[name] for name in FIXED]
        return self._plans[key]

    def _step_fields(self, carried: tuple[str, str] | None) -> dict[str, int]:
        """The function of a step and the addresses of its results: the values of `STEP` by name."""
        result = address(self.result(carried[0])) if carried else 0
        return {**self.call(), "chosen": address(self.result("token")), "result": result}

    def call(self) -> dict[str, int]:
        """The function of a step for `rlx_share`, and the counters that must be zero before it."""
        return {
            "function": self._step,
            "context": self._context_address,
            "counters": self._counters.address,
            "counter_bytes": self._counters.nbytes,
        }

    def extent(self, symbol: str) -> int:
        """Address of a symbol's value; dummy memory if the program does not have the symbol."""
        symbols = self.manifest["symbols"]
        return (self.symbols[symbols.index(symbol) :] if symbol in symbols else _NOWHERE).ctypes.data

    def input(self, name: str) -> int:
        """Address of an input; dummy memory for a few tokens if the program does not have it."""
        return int(self.inputs.get(name, _NOWHERE).ctypes.data)

    def close(self) -> None:
        super().close()
        self._counters.close()


class _NativeSteps(TokenSteps):
    """The steps of a run of one row: native code runs all that may be begun."""

    def take(self, ahead: int, seconds: float = inf) -> list[list[int]]:
        start, run, program = time.perf_counter(), self._run, native(self._program)
        found = program.looped(run, min(ahead, run.count - self._taken), seconds)
        last, self._run = run.first if len(found) == 1 and run.first else program, replace(run, first=None)
        self._env["PAST_SEQ"] = self._env.get("PAST_SEQ", 0) + len(found) - 1
        self._taken += len(found) - 1
        self._note(found[-1:])
        if self.alive:
            self._feed(found[-1:], last)
            program.prepare(self._env)
        self.seconds = (time.perf_counter() - start) / len(found)
        return [[token] for token in found]


def native(program: Program) -> NativeProgram:
    """A program of this backend, for what runs several of them in one call."""
    assert isinstance(program, NativeProgram)
    return program


@contextmanager
def logged(steps: Mapping[NativeProgram, int]) -> Iterator[None]:
    """Logs the clocks of programs that run in the `with` block, where they are recorded; then tells who observes them.

    Args:
        steps: about how many of each program.
    """
    with ExitStack() as stack:
        logs = [(program, program._log, count) for program, count in steps.items()]
        for _, log, count in logs:
            if log is not None:
                stack.enter_context(log.logged(count))
        yield
    for program, log, _ in logs:
        if log is not None and log.last is not None:
            tell_log(program, log.last)
