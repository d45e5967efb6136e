"""The programs of one model: compiled on first use, and bound to its weights and to the states of its sequences.

Programs in memory stand in tables, one for each phase, with least-recently-used eviction and counters.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from rlx.backends.device import Workers
from rlx.backends.memory import Buffer
from rlx.backends.program import Observer, Program
from rlx.compiler.compile import CompiledProgram, Compiler, program_name
from rlx.compiler.state_memory import StateMemory
from rlx.engine.opening.setup import Setup
from rlx.engine.programs.ready import ProgramRecord, ReadyProgram, ReadyPrograms
from rlx.engine.programs.specs import ProgramSpec
from rlx.errors import ArgumentError, named_refusals
from rlx.ir import text as ir_text
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.passes.effective import effective
from rlx.passes.layout import FILE_LAYOUT, lookup_tables, packed_rows, weight_table
from rlx.passes.options import Options
from rlx.store.key import CompileKey


@dataclass
class TableStats:
    """Counters of a table.

    Attributes:
        hits, misses: requests whose program was in the table, and was not.
        compiles: misses that ran the compiler; the other misses were found in the compile cache.
        evictions: programs evicted for others.
        seconds: total time of the misses.
        code_bytes: total object code of the programs that the misses loaded.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    evictions: int = 0
    seconds: float = 0.0
    code_bytes: int = 0


@dataclass(frozen=True)
class Made:
    """A program after a miss, and what it cost."""

    program: Program
    compiled: bool
    seconds: float
    code_bytes: int


class ProgramTable:
    """Programs by key.

    Attributes:
        capacity: maximum number of programs; None for any number.
        stats: the counters.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.stats = TableStats()
        self._programs: OrderedDict[Any, Program] = OrderedDict()

    def get(self, key: Any, make: Callable[[Any], Made]) -> Program:
        """The program of a key; calls `make` on a miss."""
        if key in self._programs:
            self._programs.move_to_end(key)
            self.stats.hits += 1
            return self._programs[key]
        made = make(key)
        self._programs[key] = made.program
        self.stats.misses += 1
        self.stats.compiles += made.compiled
        self.stats.seconds += made.seconds
        self.stats.code_bytes += made.code_bytes
        self._evict()
        return made.program

    def __contains__(self, key: Any) -> bool:
        return key in self._programs

    def limit(self, capacity: int | None) -> None:
        """Sets the capacity; excess programs are evicted at once.

        Raises:
            ArgumentError: it is not above 0.
        """
        if capacity is not None and capacity <= 0:
            raise ArgumentError(f"the capacity is {capacity}", where="program table", hint="Give a number above 0.")
        self.capacity = capacity
        self._evict()

    def _evict(self) -> None:
        while self.capacity is not None and len(self._programs) > self.capacity:
            self._programs.popitem(last=False)[1].close()
            self.stats.evictions += 1

    @property
    def order(self) -> list[Any]:
        """The keys, the least recently used first."""
        return list(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(list(self._programs.values()))

    def clear(self) -> None:
        """Closes every program."""
        for program in self:
            program.close()
        self._programs.clear()


class Programs:
    """The native programs of a model, in one table per phase.

    Args:
        graph: the model, with symbolic sizes; its output "hidden" is dropped from programs that do not return it.
        setup: the compile profile and the folder of dumps.
        pool: returns the workers; called when a program is bound, so that they can be started late.
        addresses: returns the addresses of the weights by name; called when a program is bound, so that they can be
            loaded late.
        packed: names of tables that another graph of the model uses as matrices.

    Attributes:
        tables: "prefill", "decode" and "batch"; without a capacity at first.
        weights: memory layout of every weight, as in the manifest of each program that reads it.
        observer: makes what follows the steps of a program, for each that is made from then on.
    """

    observer: Callable[[CompiledProgram], Observer] | None = None

    def __init__(
        self,
        graph: Graph,
        setup: Setup,
        compiler: Compiler,
        pool: Callable[[], Workers],
        weights: Callable[[], Mapping[str, Buffer]],
        packed: tuple[str, ...] = (),
    ) -> None:
        self._graph, self._setup, self._compiler, self._pool = graph, setup, compiler, pool
        self._buffers = weights
        self._states: StateMemory | None = None
        self._variants: dict[ProgramSpec, Graph] = {}
        self._records: dict[ProgramSpec, ProgramRecord] = {}
        self.weights = weight_table(graph, compiler.target.capabilities.layouts, packed)
        # A program that only looks up a table finds it as the others of the model need it.
        tables = (name for name in lookup_tables(graph) if self.weights[name]["layout"] != FILE_LAYOUT)
        self._packed = tuple(sorted(tables))
        self._name = program_name(graph)
        self.tables = {phase: ProgramTable() for phase in ("prefill", "decode", "batch")}

    def __getitem__(self, spec: ProgramSpec) -> Program:
        """The program, bound and ready to run."""
        return self.tables[spec.phase].get(spec, self._make)

    @named_refusals()
    def _make(self, spec: ProgramSpec) -> Made:
        start, compiles = time.perf_counter(), len(self._compiler.compiled)
        program, code_bytes = self._instance(spec)
        if spec.verifies:
            then, more = self._instance(spec.advancing)
            program.lead(then)
            code_bytes += more
        fresh = len(self._compiler.compiled) != compiles
        return Made(program, fresh, time.perf_counter() - start, code_bytes)

    def _instance(self, spec: ProgramSpec) -> tuple[Program, int]:
        """A new instance of a program, and the bytes of its code."""
        compiled = self.compile(spec)
        program = compiled.instance(self._pool())
        program.bind(self._buffers())
        if self.observer is not None:
            program.observe(self.observer(compiled))
        if (states := self._states) is not None:
            program.bind(states.buffers)
            program.bind_slots({name: (states.buffers[name], stride) for name, stride in states.strides.items()})
        return program, compiled.object_bytes

    def _all(self) -> Iterator[Program]:
        return chain.from_iterable(self.tables.values())

    def bind(self, states: StateMemory) -> None:
        """Sets where the states lie, before the first program is made."""
        self._states = states

    def compile(self, spec: ProgramSpec) -> CompiledProgram:
        """The program's code, from the compile cache if possible."""
        return self._compiled(spec)[0]

    def _compiled(self, spec: ProgramSpec) -> tuple[CompiledProgram, ProgramRecord]:
        start, compiles = time.perf_counter(), len(self._compiler.compiled)
        dump = self._setup.dump_ir / spec.name if self._setup.dump_ir else None
        graph, options, key = self._asked(spec)
        compiled = self._compiler.program(graph, options, dump=dump, key=key)
        reason = next((each.reason for each in self._compiler.compiled[compiles:] if each.digest == key.digest), None)
        facts = len(compiled.kernels), compiled.object_bytes, time.perf_counter() - start, reason is None
        record = ProgramRecord(compiled.key.phase, spec.seq, *facts, compiled.key.digest, reason or "")
        self._records.setdefault(spec, record)
        return compiled, record

    def compile_missing(self, spec: ProgramSpec) -> None:
        """Compiles a program unless the compile cache has it; loads nothing."""
        if not self._compiler.cache.has(self._asked(spec)[-1]):
            self.compile(spec)

    def lowering(self, spec: ProgramSpec) -> tuple[Graph, Options]:
        """The graph and the options that a program is made of, as far as the target permits them."""
        graph, options, _ = self._asked(spec)
        return graph, effective(options, graph, self._compiler.target.capabilities)

    def _asked(self, spec: ProgramSpec) -> tuple[Graph, Options, CompileKey]:
        """The compiler's arguments for a spec: graph, options and compile key."""
        graph, options = self._variant(spec), spec.options(self._setup.profile, self._packed)
        return graph, options, self._compiler.program_key(graph, options, self._name)

    def _variant(self, spec: ProgramSpec) -> Graph:
        """The graph of a spec, one object for all specs that have the same: its text is then made once."""
        if spec.form not in self._variants:
            self._variants[spec.form] = spec.variant(self._graph)
        return self._variants[spec.form]

    def ready(self) -> ReadyPrograms:
        """The programs that were compiled or loaded so far, for inspection."""
        target, rows = self._compiler.target, list(self._records.items())
        return ReadyPrograms([ReadyProgram(w.name, row, partial(self.compile, w), target) for w, row in rows])

    def prepare(
        self, table: Iterable[ProgramSpec], on_program: Callable[[ProgramRecord], None] | None = None
    ) -> list[ProgramRecord]:
        """Compiles the programs or finds them in the cache, and the packers of their weights; loads none of them."""
        records = []
        for spec in table:
            records.append(self._compiled(spec)[1])
            if on_program:
                on_program(records[-1])
        packed = {DTYPES[row["dtype"]] for row in packed_rows(self.weights).values()}
        self._compiler.backend.prepare_packing(packed, self._compiler)
        self._compiler.backend.prepare_choosing(self._compiler)
        return records

    def final_graph(self, spec: ProgramSpec) -> Graph:
        """The graph after all passes, with the node numbers that the manifest uses."""
        return ir_text.loads(self.compile(spec).final)

    @property
    def arena_bytes(self) -> int:
        """Total arena size of the programs in bytes."""
        return sum(p.arena_bytes + (p.then.arena_bytes if p.then else 0) for p in self._all())

    def close(self) -> None:
        for table in self.tables.values():
            table.clear()
