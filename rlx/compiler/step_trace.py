"""Steps of programs in a trace: each step with its regions, and what each worker did in them.

Runtime stage, beside `compile.py`, which imports it while a trace is recorded. An observer then takes the clocks that
each step of a program writes. Names are those of `rlx compile --explain`: regions have the names of their
values, kernels their symbols. The category is the kind of work of `rlx bench`.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx import ir
from rlx.backends.device import Workers
from rlx.backends.program import Observer, Program, StepClocks, StepLog
from rlx.ir.graph import Graph
from rlx.tracing import THREADS, WORKERS, Slice, Trace

if TYPE_CHECKING:
    from rlx.compiler.compile import CompiledProgram

SHORT = 200  # nanoseconds: shorter waits are not shown
_NAMES = 3  # most values in the name of a region
_BYTES = 500  # of a step in memory, besides its clocks


@dataclass(frozen=True)
class _Mark:
    """The meaning of a mark of `StepClocks`: name and kind of its slices, and the beginning of their arguments."""

    name: str
    kind: str
    args: str


@dataclass(frozen=True)
class Names:
    """The names of the slices of a program.

    Attributes:
        program: its name.
        regions: (name, arguments) of each.
        marks: those of each region, in order.
    """

    program: str
    regions: tuple[tuple[str, str], ...]
    marks: tuple[_Mark, ...]

    @staticmethod
    def of(name: str, manifest: Mapping[str, Any], graph: Graph) -> Names:
        """The names of a program, whose manifest has the numbers of the graph's nodes."""
        nodes, values = graph.nodes(), graph.names()
        regions, marks = [], []
        for number, (prologue, calls) in enumerate(zip(manifest["prologues"], manifest["regions"], strict=True)):
            computed = [values[nodes[node]] for node, _ in calls]
            regions.append((_joined(computed), json.dumps({"region": number, "values": computed})))
            before = {"region": number, "values": [values[nodes[node]] for node, _ in prologue]}
            kernels = " + ".join(dict.fromkeys(symbol for _, symbol in prologue))
            marks.append(_Mark(f"prologue: {kernels}", "prologue", json.dumps(before)[:-1]))
            for (node, symbol), value in zip(calls, computed, strict=True):
                args = json.dumps({"value": value, "region": number})[:-1]
                marks.append(_Mark(symbol, ir.costs.kind_of(nodes[node]), args))
        return Names(name, tuple(regions), tuple(marks))


def _joined(values: list[str]) -> str:
    more = f" and {len(values) - _NAMES} more" if len(values) > _NAMES else ""
    return ", ".join(values[:_NAMES]) + more


@dataclass
class _Known:
    """The facts of a program for its slices; its name and its graph are read when they are needed."""

    name: str
    manifest: Mapping[str, Any]
    graph: Callable[[], Graph]
    pool: int

    @cached_property
    def names(self) -> Names:
        return Names.of(self.name, self.manifest, self.graph())


@dataclass
class Recorder(Observer):
    """Adds the steps of one program to a trace."""

    trace: Trace
    known: _Known
    logs: bool = field(default=True, init=False)

    def after(self, program: Program, seconds: float, steps: int) -> None:
        return

    def logged(self, program: Program, log: StepLog) -> None:
        if self.trace.is_full or not log.steps:
            return
        every, workers = self.trace.detail == "kernels", len(program.times)
        for worker in range(workers if every else 0):
            self.trace.name_track(WORKERS, self.known.pool + worker, f"worker {worker}")
        thread, extents = self.trace.here(), dict(program.extents)
        self.trace.later(lambda: self._slices(log.read(), thread, extents, every), log.nbytes + _BYTES)

    def _slices(self, found: StepClocks, thread: int, extents: dict[str, int], every: bool) -> Iterator[Slice]:
        bounds = found.bounds()
        self.trace.steps += int((bounds[:, -1] - bounds[:, 0]).sum())
        names = self.known.names
        for i, at in enumerate(bounds.tolist()):
            past = extents.get("PAST_SEQ")
            sizes = extents if past is None or not i else {**extents, "PAST_SEQ": past + i}
            yield Slice(THREADS, thread, names.program, "step", at[0], at[-1], json.dumps(sizes))
            if not every:
                continue
            for (name, args), start, end in zip(names.regions, at, at[1:], strict=False):
                yield Slice(THREADS, thread, name, "region", start, end, args)
            for worker, own in enumerate(found.marks[i].tolist()):
                yield from self._work(self.known.pool + worker, own, at[0], at[-1])

    def _work(self, track: int, marks: list[list[int]], start: int, end: int) -> Iterator[Slice]:
        """The slices of a worker in a step: its work and its waits."""
        at = start
        for (begin, done, units), mark in _in_order(marks, self.known.names.marks):
            if begin - at > SHORT:
                yield Slice(WORKERS, track, "wait", "wait", at, begin)
            yield Slice(WORKERS, track, mark.name, mark.kind, begin, done, f'{mark.args}, "units": {units}}}')
            at = max(at, done)
        if end - at > SHORT:
            yield Slice(WORKERS, track, "wait", "wait", at, end)


def _in_order(marks: list[list[int]], names: Iterable[_Mark]) -> list[tuple[list[int], _Mark]]:
    """The marks with work, by their begins; a prologue lies within the call that needed it first."""
    found = [(mark, name) for mark, name in zip(marks, names, strict=True) if mark[0]]
    return sorted(found, key=lambda each: (each[0][0], -each[0][1]))


# -- which programs are recorded ---------------------------------------------------------------------------------------

_recorders: weakref.WeakKeyDictionary[Program, Recorder] = weakref.WeakKeyDictionary()
_pools: weakref.WeakKeyDictionary[Workers, int] = weakref.WeakKeyDictionary()
_POOL = 10_000  # tracks of one pool of workers
_numbers = itertools.count()  # not the number of pools: that falls when one ends


def record(program: Program, compiled: CompiledProgram, workers: Workers, trace: Trace) -> None:
    """Adds the steps of a program to a trace, until `stop`.

    Args:
        compiled: what it is an instance of.
        workers: those that run it.
    """
    pool = _pools.setdefault(workers, 1 + _POOL * next(_numbers))
    known = _Known(program.name, program.manifest, lambda: ir.text.loads(compiled.final), pool)
    _recorders[program] = recorder = Recorder(trace, known)
    program.observe(recorder)


def stop() -> None:
    """Records no program any more."""
    for program, recorder in list(_recorders.items()):
        program.ignore(recorder)
    _recorders.clear()
