"""A native program: object code, its manifest, and its memory. Bound once; then each step is one native call."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.cpu.launch.loop_jobs import FIXED, VARYING
from rlx.backends.cpu.launch.threads import WorkerPool
from rlx.backends.cpu.work_stealing import counter_bytes
from rlx.backends.memory import AlignedBuffer
from rlx.errors import ArgumentError, CompileError
from rlx.ir import dims
from rlx.ir.dtypes import DTYPES

Observer = Callable[["NativeProgram", Mapping[str, int], float, int], None]

_names = itertools.count()
_NOWHERE = np.zeros(64, np.int64)  # dummy memory for inputs and symbols that a program lacks


class NativeCode:
    """Object code loaded into this process. The code is freed with this object.

    Args:
        objects: object files, which may call each other.
        symbols: functions that Python calls.

    Raises:
        CompileError: the objects do not load.
    """

    def __init__(self, objects: Iterable[bytes], symbols: list[str]) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        builder = llvm.JITLibraryBuilder().add_current_process()
        for code in objects:
            builder.add_object_img(code)
        for symbol in symbols:
            builder.export_symbol(symbol)
        # JITLink places an object's sections side by side. LLVM's older loader may map them more than 2 GiB apart when
        # a model fills the address space, and then aborts the process.
        self._jit = llvm.create_lljit_compiler(use_jit_link=True)
        try:
            self._tracker = builder.link(self._jit, f"rlx{next(_names)}")
        except RuntimeError as error:
            raise CompileError(f"object code does not load: {error}", hint="Run `rlx cache verify`.") from error
        self.addresses = {symbol: int(self._tracker[symbol]) for symbol in symbols}


class NativeProgram:
    """One instance of a compiled program, ready to run once its weights and states are bound.

    Args:
        code, manifest: output of the linker (`rlx.backends.cpu.link`); several instances share them.
        pool: the workers that run it.

    Attributes:
        then: a follow-up program that reads results of this one.
        closed: whether its memory was released.
        observer: called after steps with the program, their symbol values, their total seconds and their number; see
            `rlx.runtime.debug`.
        finish: called when the program is closed.
    """

    then: NativeProgram | None = None
    closed = False
    observer: Observer | None = None
    finish: Callable[[], object] | None = None

    def __init__(self, code: NativeCode, manifest: Mapping[str, Any], pool: WorkerPool) -> None:
        self.manifest, self.pool = manifest, pool
        self._code = code
        self.arena_bytes: int = manifest["arena"] + pool.n * manifest["private"]
        self.arena = AlignedBuffer(self.arena_bytes, huge=True)  # followed by the scratch memory of each worker
        regions = manifest["regions"]
        self._args = np.zeros(max(1, len(manifest["args"])), np.uint64)
        self._extents = np.zeros(max(1, len(manifest["symbols"])), np.int64)
        self._limits = [(symbol, *manifest["bounds"][symbol]) for symbol in manifest["symbols"]]
        self._counters = AlignedBuffer(counter_bytes(manifest))
        self._taken = self._counters.view(np.int64, self._counters.nbytes // 8)
        self.times = np.zeros((pool.n, len(regions) + 1), np.int64)
        self._context = self._make_context()
        self._unbound = self._place_arena()
        self._positions = self._by_name()
        self._step, self._context_address = self._code.addresses["step"], self._context.ctypes.data
        shapes = {row: tuple(map(dims.parse_dim, manifest["outputs"][row]["shape"])) for row in manifest["outputs"]}
        # For each result its shape and the symbols in it; and a cache of its views, by the values of these symbols.
        self._shapes = {name: (shape, sorted(set().union(*map(dims.symbols, shape)))) for name, shape in shapes.items()}
        self._views: dict[tuple[Any, ...], np.ndarray] = {}
        self._plans: dict[tuple[Any, ...], list[int]] = {}  # plans of `repeat`, by carried value and first program
        self.inputs = {name: self._view(row, self._most(row)) for name, row in manifest["inputs"].items()}

    def _make_context(self) -> np.ndarray:
        phase = self.pool.library.symbols["rlx_phase"]
        tables = [self._args.ctypes.data, self._extents.ctypes.data, self._counters.address]
        return np.array([*tables, self.pool.pool_address, phase, self.times.ctypes.data], np.uint64)

    def _place_arena(self) -> set[str]:
        """Sets the addresses inside the arena; returns the names that must still be bound."""
        bases = {"arena": self.arena.address, "private": self.arena.address + self.manifest["arena"]}
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

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Sets the addresses of weights and states; ignores names that the program does not use."""
        for name, address in addresses.items():
            for i in self._positions.get(name, ()):
                self._args[i] = address
            self._unbound.discard(name)
        if self.then:
            self.then.bind(addresses)

    def lead(self, then: NativeProgram) -> None:
        """Makes `then` the follow-up program: its states are results of this program with the same names."""
        then.bind({name: self.result(name) for name in self.manifest["outputs"]})
        self.then = then

    def run(self, **extents: int) -> None:
        """Runs one step on all workers. The caller writes `inputs`, reads `output` and keeps symbols in bounds.

        Raises:
            ArgumentError: a weight or state is not bound, or a symbol is missing or out of bounds.
        """
        self.prepare(extents)
        self._taken.fill(0)
        start = time.perf_counter() if self.observer else 0.0
        self.pool.share(self._step, self._context_address)
        if self.observer:
            self.observer(self, extents, time.perf_counter() - start, 1)

    def repeat(
        self,
        count: int,
        rows: int,
        stops: Sequence[int],
        seconds: float,
        extents: Mapping[str, int],
        *,
        carried: tuple[str, str] | None = None,
        first: NativeProgram | None = None,
    ) -> list[int]:
        """Runs steps of one row in one native call; each step takes the token that the step before chose.

        For programs whose output `token` i32[1] becomes the input `tokens`. The first token, and its position if there
        is an input `positions`, are in `inputs`. PAST_SEQ and the position grow by one per step.

        Args:
            count: maximum number of steps.
            rows: number of rows of the embedding table; a token id beyond it ends the run.
            stops: token ids that end the run.
            seconds: time limit; the run ends after the current step.
            extents: symbol values of the first step.
            carried: an output of a step, and the input of the next step that receives it.
            first: a program with the same outputs for the first step, which may have several rows: its inputs are set
                and it is `prepared`. `extents` and the position are then those of its last row.

        Returns:
            The tokens found, 1 to `count`.

        Raises:
            ArgumentError: as `run`.
        """
        self.prepare(extents)
        found, ends = array("i", bytes(4 * count)), array("i", stops)
        plan = self.plan(found.buffer_info()[0], count, rows, ends, seconds, carried=carried, first=first)
        start = time.perf_counter() if self.observer else 0.0
        done = self.pool.repeat(plan.buffer_info()[0])
        if self.observer:
            self.observer(self, extents, time.perf_counter() - start, done)
        return found[:done].tolist()

    def plan(
        self,
        found: int,
        count: int,
        rows: int,
        stops: array[int],
        seconds: float,
        *,
        carried: tuple[str, str] | None = None,
        first: NativeProgram | None = None,
    ) -> array[int]:
        """The plan of `repeat`: `rlx.backends.cpu.launch.loop_jobs.PLAN`; `found` is the address for the tokens."""
        varying = {
            "rows": rows,
            "stops": stops.buffer_info()[0],
            "stop_count": len(stops),
            "found": found,
            "count": count,
            "nanoseconds": int(seconds * 1e9),
        }
        return array("Q", (*self._fixed_plan(carried, first), *map(varying.__getitem__, VARYING)))

    def _fixed_plan(self, carried: tuple[str, str] | None, first: NativeProgram | None) -> list[int]:
        """The part of a plan that all runs share: the values of `FIXED`."""
        key = carried, first
        if key not in self._plans:
            of_first = (first or self)._step_fields(carried)
            plan = {
                **self._step_fields(carried),
                **{f"first_{name}": value for name, value in of_first.items()},
                "past": self.extent("PAST_SEQ"),
                "position": self.input("positions"),
                "token": self.input("tokens"),
                "operand": self.input(carried[1]) if carried else 0,
                "carried_bytes": self.output(carried[0]).nbytes if carried else 0,
            }
            self._plans[key] = [plan[name] for name in FIXED]
        return self._plans[key]

    def _step_fields(self, carried: tuple[str, str] | None) -> dict[str, int]:
        """The job of a step and the addresses of its results: the values of `STEP` by name."""
        result = self.result(carried[0]) if carried else 0
        return {**self.job(), "chosen": self.result("token"), "result": result}

    def job(self) -> dict[str, int]:
        """The job of a step for `rlx_share`, and the counters that must be zero before it."""
        return {
            "job": self._step,
            "context": self._context_address,
            "counters": self._counters.address,
            "counter_bytes": self._counters.nbytes,
        }

    def extent(self, symbol: str) -> int:
        """Address of a symbol's value; dummy memory if the program does not have the symbol."""
        symbols = self.manifest["symbols"]
        return (self._extents[symbols.index(symbol) :] if symbol in symbols else _NOWHERE).ctypes.data

    def input(self, name: str) -> int:
        """Address of an input; dummy memory for a few tokens if the program does not have it."""
        return int(self.inputs.get(name, _NOWHERE).ctypes.data)

    def result(self, name: str) -> int:
        """Address of a result."""
        return int(self.arena.address + self.manifest["outputs"][name]["offset"])

    def check_bound(self, name: Callable[[str], str] = str) -> None:
        """Raises an `ArgumentError` if weights have no values; `name` turns their names into those the caller uses."""
        if self._unbound:
            names = ", ".join(sorted(map(name, self._unbound))[:5])
            hint = "Give them when compiling (bind=...), with bind(), or with the call."
            raise ArgumentError(f"weights have no values: {names}", where=f"program {self.name}", hint=hint)

    def prepare(self, extents: Mapping[str, int]) -> None:
        """Checks that everything is bound, and writes the symbol values; `ArgumentError` as `run`."""
        self.check_bound()
        for i, (symbol, low, high) in enumerate(self._limits):
            if not low <= extents.get(symbol, -1) <= high:
                found = extents.get(symbol, "nothing")
                raise ArgumentError(f"{symbol} must lie in {low}..{high}, found {found}", where=f"program {self.name}")
            self._extents[i] = extents[symbol]

    @property
    def name(self) -> str:
        return f"{self.manifest['name']}/{self.manifest['phase']}"

    def output(self, name: str, **extents: int) -> np.ndarray:
        """A view of a result in the arena, valid until the next step."""
        shape, symbols = self._shapes[name]
        key = (name, *[extents.get(symbol) for symbol in symbols])
        if key not in self._views:
            sizes = tuple(dims.value(d, extents) for d in shape)
            self._views[key] = self._view(self.manifest["outputs"][name], sizes)
        return self._views[key]

    def _most(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        limits = {s: (low, high) for s, (low, high) in self.manifest["bounds"].items()}
        return tuple(dims.bounds(dims.parse_dim(d), limits)[1] for d in row["shape"])

    def _view(self, row: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
        return self.arena.view(DTYPES[row["dtype"]].numpy or "uint8", shape, row["offset"])

    def close(self) -> None:
        if self.then:
            self.then.close()
        self.closed = True
        if self.finish:
            self.finish()
        self.arena.close()
        self._counters.close()
