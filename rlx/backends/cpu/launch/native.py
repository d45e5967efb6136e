"""A native program: object code, its manifest, and its memory. Bound once; then each step is one native call."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from rlx.backends.cpu.context import CONTEXT, FIXED, VARYING
from rlx.backends.cpu.launch.clocks import ClockLog
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.threads import WorkerPool
from rlx.backends.cpu.work_stealing import counter_bytes
from rlx.backends.host import HOST, AlignedBuffer, address
from rlx.backends.memory import Buffer
from rlx.backends.program import Program, StepLog, TokenRun, tell_log

_NO_SLOTS = -1, -1
_NOWHERE = np.zeros(64, np.int64)  # dummy memory for inputs and symbols that a program lacks


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

    def repeat(self, run: TokenRun) -> list[int]:
        """As `Program.repeat`, in one native call."""
        if any(observer.each_step for observer in self.observers):
            return super().repeat(run)
        self.prepare(run.extents)
        found, stops = array("i", bytes(4 * run.count)), array("i", run.stops)
        plan = self.plan(run, stops, found.buffer_info()[0])
        with logged({self: run.count, **({native(run.first): 1} if run.first else {})}):
            start = time.perf_counter()
            done = self.pool.repeat(plan.buffer_info()[0])
            seconds = time.perf_counter() - start
        self.tell(seconds, done)
        return found[:done].tolist()

    def plan(self, run: TokenRun, stops: array[int], found: int = 0) -> array[int]:
        """The plan of a run, see `context.PLAN`. `stops` must outlive it; `found`: address for the tokens."""
        varying = {
            "rows": run.rows,
            "stops": stops.buffer_info()[0],
            "stop_count": len(stops),
            "found": found,
            "count": run.count,
            "nanoseconds": int(run.seconds * 1e9),
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
