"""The programs of one model: the spec of each, the choice of one for a call, and those in memory.

A spec says how many rows and past positions a program takes, and which inputs and outputs it has. `Bucketing` finds the
spec of a call by its rows and past positions; docs/caches.md defines the cache modes and lists what each of them
compiles. A program is compiled on first use, and bound to the model's weights and to the states of its sequences. Those
in memory stand in tables, one for each phase, with least-recently-used eviction and counters.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from rlx import ir
from rlx.arguments import whole
from rlx.backends import backend
from rlx.backends.device import Backend, Workers
from rlx.backends.memory import Buffer
from rlx.backends.program import Observer, Program
from rlx.closing import on_error
from rlx.compiler.compile import CompiledProgram, Compiler, program_name
from rlx.compiler.state_memory import StateMemory
from rlx.engine.opening.options import BATCH
from rlx.engine.opening.setup import Setup
from rlx.engine.programs.host import Host
from rlx.errors import ArgumentError, named_refusals
from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.models import variants
from rlx.models.variants import EmbeddedRows, Features, LowRank
from rlx.passes.effective import effective
from rlx.passes.layout import FILE_LAYOUT, lookup_tables, weight_table
from rlx.passes.options import MAX_PAST, Options, phase
from rlx.profile import CompileProfile
from rlx.store.key import CompileKey, range_text

Range = tuple[int, int]

LOGITS, HIDDEN = "logits", "hidden"  # output names; "hidden" is the hidden state that the head multiplies


@dataclass(frozen=True)
class ProgramSpec:
    """The spec of one program.

    Attributes:
        seq: (smallest, largest) number of rows.
        returns: "last", the logits of the last row; "all", those of every row; "chosen", those of the rows
            `logit_rows`, of a program whose rows belong to several sequences; "tokens", the likeliest token after every
            row, as output "token" i32 [rows].
        hidden: whether it also returns the hidden states before the head, for every row; or what a draft head reads in
            their place.
        past: (smallest, largest) number of past positions; None for any.
        embeds: how rows may take the place of token embeddings; None: there are no such rows.
        bias: number of heads of an attention bias that replaces the causal mask, 1 if all heads share it; 0: no bias.
        adapters: the low-rank changes that rows may have; None: no row has one.
        drafts: "" if no row may be rejected; "verify" if some may: it then leaves the recurrent states and writes new
            ones beside them; "verify again", a second program of that kind, for runs that alternate between two slots;
            "advance", it only updates the recurrent states, by the accepted rows of a verifying program.
    """

    seq: Range
    returns: str = "last"
    hidden: bool | Features = False
    past: Range | None = None
    embeds: EmbeddedRows | None = None
    bias: int = 0
    drafts: str = ""
    adapters: LowRank | None = None

    @cached_property
    def phase(self) -> str:
        return phase(self.seq, self.returns == "chosen")

    @property
    def kind(self) -> str:
        """The phase, or "greedy"."""
        return "greedy" if self.returns == "tokens" else self.phase

    @property
    def verifies(self) -> bool:
        """Whether rows may be rejected."""
        return self.drafts.startswith("verify")

    @property
    def name(self) -> str:
        """Name of the folder for dumps."""
        parts = (
            f"past-{self.past[0]}-{self.past[1]}" if self.past else "",
            {"all": "all", "tokens": "greedy"}.get(self.returns, ""),
            "hidden" if self.hidden is True else "features" * bool(self.hidden),
            self.embeds.name if self.embeds else "",
            f"bias-{self.bias}" if self.bias else "",
            self.drafts.replace(" ", "-"),
            "adapters" if self.adapters else "",
        )
        return "-".join([f"{self.phase}-{self.seq[0]}-{self.seq[1]}", *filter(None, parts)])

    def options(self, profile: CompileProfile, packed: tuple[str, ...] = ()) -> Options:
        """The compiler's options under a profile.

        Args:
            packed: names of tables that another graph of the model uses as matrices.
        """
        return profile.options(
            self.seq,
            all_rows=self.returns in ("all", "tokens"),
            segments=self.returns == "chosen",
            symbols=(("PAST_SEQ", self.past),) if self.past else (),
            whole=(HIDDEN,),
            packed=packed,
            paged=True,
        )

    @property
    def advancing(self) -> ProgramSpec:
        """The spec of the program that updates the recurrent states after this verifying program."""
        return ProgramSpec((1, self.seq[1]), "all", drafts="advance")

    @cached_property
    def form(self) -> ProgramSpec:
        """The spec without what its graph does not depend on: the numbers of rows and of past positions."""
        returns = "tokens" if self.returns == "tokens" else "last"
        drafts = "verify" if self.verifies else self.drafts
        return replace(self, seq=(0, 0), past=None, returns=returns, drafts=drafts)

    def variant(self, graph: Graph) -> Graph:
        """The model's graph with the inputs and outputs of this spec."""
        if self.drafts == "advance":
            return variants.advancing(graph)
        graph = variants.with_features(graph, self.hidden) if isinstance(self.hidden, Features) else graph
        outputs = {name: node for name, node in graph.outputs.items() if self.hidden or name != HIDDEN}
        if self.returns == "tokens":
            outputs["token"] = ops.pick(outputs.pop(LOGITS))
        graph = graph.replace(outputs=outputs)
        graph = variants.verifying(graph) if self.verifies else graph
        graph = variants.with_embedded_rows(graph, self.embeds) if self.embeds else graph
        graph = variants.with_adapters(graph, self.adapters) if self.adapters else graph
        return variants.with_bias(graph, self.bias) if self.bias else graph


DECODE, GREEDY = ProgramSpec((1, 1)), ProgramSpec((1, 1), "tokens")


_spec = lru_cache(ProgramSpec)  # called for every step; most steps repeat the spec of the last one


@dataclass(frozen=True)
class Bucketing:
    """How programs are specialized, for calls of several rows (prefill) and of one row (decode).

    Attributes:
        ranges: (smallest, largest) row count of each bucket.
        max_seq: maximum number of positions of a sequence.
        prefill: "buckets": one program for each of `ranges`; "exact": one for each number of rows, as a constant;
            "dynamic": one for all numbers of rows.
        decode: "dynamic": one program for every past; "buckets": one for each power of two, to which the past is
            rounded up, as far as `max_past`; "exact": one for each past, as a constant.
        max_past: the largest past with a bucket for decode; the dynamic program runs beyond it.
        batch_rows: those of the device, see `Backend`.
    """

    ranges: tuple[Range, ...]
    max_seq: int = MAX_PAST
    prefill: str = "buckets"
    decode: str = "dynamic"
    max_past: int = 0
    batch_rows: tuple[int, ...] = Backend.batch_rows

    def spec(
        self,
        rows: int,
        past: int,
        all_rows: bool = False,
        hidden: bool | Features = False,
        verifies: bool = False,
        embeds: EmbeddedRows | None = None,
        bias: int = 0,
        adapters: LowRank | None = None,
    ) -> ProgramSpec:
        """The spec of the program for a call of `rows` rows after `past` positions.

        Args:
            all_rows: whether the logits of all rows are asked for. If there are several, the program is that of a
                bucket in every mode: only scoring and verifying request them.
            hidden, embeds, bias, adapters: as in `ProgramSpec`.
            verifies: whether rows may be rejected.
        """
        if rows == 1 and self.decode == "dynamic" and not (bias or embeds):  # quick, for every token
            return _spec(self.one, "last", hidden, adapters=adapters)
        every = all_rows and rows > 1
        returns = "all" if every else "last"
        bounds = self.past(past) if rows == 1 else None
        if bias:  # its memory grows with the past, so the past is bounded
            bounds = (0, past_bucket(self.max_seq)[1])
        seq = self.bucket(rows) if every or self.prefill == "buckets" else self.rows(rows)
        return _spec(seq, returns, hidden, bounds, embeds, bias, "verify" if every and verifies else "", adapters)

    @cached_property
    def one(self) -> Range:
        """The range of a single row."""
        return self.bucket(1)

    def bucket(self, rows: int) -> Range:
        """The range that contains `rows`."""
        return next(bounds for bounds in self.ranges if bounds[0] <= rows <= bounds[1])

    def segments(self, rows: int, embeds: EmbeddedRows | None = None, adapters: LowRank | None = None) -> ProgramSpec:
        """The spec of the program for a call of rows that belong to several sequences; arguments as of `spec`."""
        seq = next(bounds for bounds in self.segment_ranges if rows <= bounds[1])
        return _spec(seq, "chosen", embeds=embeds, adapters=adapters)

    @property
    def segment_ranges(self) -> tuple[Range, ...]:
        """(smallest, largest) row count of each program for rows of several sequences."""
        most = self.ranges[-1][1]
        ends = [*(rows for rows in self.batch_rows if rows < most), max(most, 2)]
        return tuple(zip([2, *(end + 1 for end in ends[:-1])], ends, strict=True))

    def rows(self, rows: int) -> Range:
        """Range of SEQ of the program for a call of `rows` rows."""
        if rows == 1 or self.prefill == "buckets":
            return self.bucket(rows)
        return (rows, rows) if self.prefill == "exact" else (2, self.ranges[-1][1])

    def past(self, past: int) -> Range | None:
        """Range of PAST_SEQ of the program for a call of one row after `past` positions; None for any."""
        if self.decode == "dynamic":
            return None
        if self.decode == "exact":
            return (past, past)
        return past_bucket(past) if past <= self.max_past else None


def bucketing_of(profile: CompileProfile, max_seq: int = MAX_PAST) -> Bucketing:
    """How programs of a profile are specialized for its device."""
    return Bucketing(profile.ranges, max_seq, batch_rows=backend(profile.device).batch_rows)


def past_bucket(past: int) -> Range:
    """The bucket of a past: 0..1, 2, 3..4, 5..8, 9..16 and so on."""
    high = 1 << (past - 1).bit_length() if past > 1 else 1
    return (high // 2 + 1 if high > 1 else 0, high)


def past_buckets(max_past: int) -> int:
    """Number of buckets up to a past."""
    return past_bucket(max_past)[1].bit_length()


def batch_programs(sequences: int, bucketing: Bucketing) -> list[ProgramSpec]:
    """Specs of the programs that batches of up to `sequences` sequences need besides the single-sequence programs.

    Steps of several sequences may have any number of rows: short prompts share one.

    Raises:
        ArgumentError: the number is below 1.
    """
    several = whole("batch", sequences, 1, MAX_PAST) > 1
    return [bucketing.segments(rows) for _, rows in bucketing.segment_ranges] if several else []


def expected_programs(chosen: Any, setup: Setup) -> list[ProgramSpec]:
    """The programs that are compiled ahead, in order.

    Args:
        chosen: `compile_ahead` of `Engine.open`. True means: long prompts, single tokens, then the other buckets.
            "batch": those of steps of several requests, too. None means none.

    Raises:
        ArgumentError: `chosen` has another type, or a count is not a whole number above 0.
    """
    if setup.cache.policy == "readonly":  # nothing may be compiled
        return []
    bucketing, most = bucketing_of(setup.profile), setup.cache.capacity  # more programs would evict each other
    if chosen is None or chosen is False:
        return []
    if chosen is True or chosen == BATCH:
        one, *more = setup.profile.buckets
        batch = batch_programs(2, bucketing) if chosen == BATCH else []
        alone = [ProgramSpec(bucketing.bucket(rows)) for rows in [*more[-1:], one, *reversed(more[:-1])]]
        return [*alone[:2], *batch, *alone[2:], GREEDY][:most]
    if not isinstance(chosen, list | tuple):
        hint = f"give True, False, {BATCH!r}, or the row counts of the calls, such as [30, 1]"
        raise ArgumentError(f"compile_ahead is {chosen!r}", hint=hint)
    rows = [whole("compile_ahead", rows, 1, MAX_PAST) for rows in chosen][:most]
    return [*dict.fromkeys(ProgramSpec(bucketing.bucket(min(n, setup.profile.buckets[-1]))) for n in rows)]


def programs_of(
    profile: CompileProfile, batch: int = 1, phase: str | None = None, rows: int | None = None
) -> list[ProgramSpec]:
    """Specs of the programs that `compile` makes for a model.

    Args:
        batch: maximum number of sequences in a batch.
        phase: "prefill", "decode", "greedy" or "batch"; all by default.
        rows: only programs that accept this number of rows; all by default.

    Raises:
        ArgumentError: no program matches.
    """
    table = [*map(ProgramSpec, profile.ranges), GREEDY, *batch_programs(batch, bucketing_of(profile))]
    of_phase = [w for w in table if phase in (None, w.kind)]
    least = None if rows is None else whole("rows", rows, 1, MAX_PAST)
    found = [w for w in of_phase if least is None or w.seq[0] <= least <= w.seq[1]]
    if not found:
        has = ", ".join(f"{w.kind} {w.seq[0]}-{w.seq[1]}" for w in of_phase or table)
        what = f"takes {rows} rows" if of_phase else f"is of phase {phase!r}"
        raise ArgumentError(f"no program {what}", hint=f"The programs are: {has}.")
    return found


TOWER = "tower"  # as a phase


@dataclass(frozen=True)
class ProgramRecord:
    """Facts about a program that is ready to run.

    Attributes:
        phase: "prefill", "decode" or "batch"; "greedy" is a decode step that returns the likeliest token and no logits;
            "verify" checks several drafts; "tower" is a program of the vision tower.
        bucket: smallest and largest number of rows in a call.
        kernels: number of kernels.
        object_bytes: size of its code.
        seconds: time to compile or load it.
        cached: whether it was found in the compile cache.
        digest: of its compile key, as `rlx cache` shows it.
        reason: why it was compiled; "" if it was in the cache.
    """

    phase: str
    bucket: tuple[int, int]
    kernels: int
    object_bytes: int
    seconds: float
    cached: bool
    digest: str
    reason: str = ""

    @property
    def rows(self) -> str:
        """The bucket as "1" or "17-512"."""
        return range_text(self.bucket)


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


class ProgramTable:
    """Programs by spec.

    Attributes:
        capacity: maximum number of programs; None for any number.
        stats: the counters.
        programs: the programs, the least recently used first.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.stats = TableStats()
        self.programs: OrderedDict[ProgramSpec, Program] = OrderedDict()

    def add(self, spec: ProgramSpec, program: Program, compiled: bool, seconds: float, code_bytes: int) -> Program:
        """Adds a program after a miss, and what it cost."""
        self.programs[spec] = program
        self.stats.misses += 1
        self.stats.compiles += compiled
        self.stats.seconds += seconds
        self.stats.code_bytes += code_bytes
        self._evict()
        return program

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
        while self.capacity is not None and len(self.programs) > self.capacity:
            self.programs.popitem(last=False)[1].close()
            self.stats.evictions += 1

    def clear(self) -> None:
        """Closes every program."""
        for program in self.programs.values():
            program.close()
        self.programs.clear()


class Programs:
    """The native programs of a model, in one table per phase.

    Args:
        graph: the model, with symbolic sizes; its output "hidden" is dropped from programs that do not return it.
        setup: the compile profile and the folder of dumps.
        pool: returns the workers; called when a program is bound, so that they can be started late.
        addresses: returns the addresses of the weights by name; called when a program is bound, so that they can be
            loaded late.
        packed: names of tables that another graph of the model uses as matrices.
        placed: a variant of the model -> the same, in which the host computes parts.
        host: computes them; None if there are none.

    Attributes:
        graph: the model.
        tables: "prefill", "decode" and "batch"; without a capacity at first.
        records: facts about each program that was compiled or loaded so far.
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
        placed: Callable[[Graph], Graph] = lambda graph: graph,
        host: Host | None = None,
    ) -> None:
        self.graph, self._setup, self._compiler, self._pool = graph, setup, compiler, pool
        self._buffers, self._placed, self._host = weights, placed, host
        self._states: StateMemory | None = None
        self._variants: dict[ProgramSpec, Graph] = {}
        self.records: dict[ProgramSpec, ProgramRecord] = {}
        own = placed(graph)
        self.weights = weight_table(own, compiler.target.capabilities.layouts, packed)
        # A program that only looks up a table finds it as the others of the model need it.
        tables = (name for name in lookup_tables(own) if self.weights[name]["layout"] != FILE_LAYOUT)
        self._packed = tuple(sorted(tables))
        self._name = program_name(graph)
        self.tables = {phase: ProgramTable() for phase in ("prefill", "decode", "batch")}

    def __getitem__(self, spec: ProgramSpec) -> Program:
        """The program, bound and ready to run."""
        table = self.tables[spec.phase]
        if (program := table.programs.get(spec)) is None:
            return self._make(spec, table)
        table.programs.move_to_end(spec)
        table.stats.hits += 1
        return program

    @named_refusals()
    def _make(self, spec: ProgramSpec, table: ProgramTable) -> Program:
        """A program, which the table gets."""
        start, compiles = time.perf_counter(), len(self._compiler.compiled)
        program, code_bytes = self._instance(spec)
        if spec.verifies:
            with on_error(program.close):
                then, more = self._instance(spec.advancing)
            program.lead(then)
            code_bytes += more
        fresh = len(self._compiler.compiled) != compiles
        return table.add(spec, program, fresh, time.perf_counter() - start, code_bytes)

    def _instance(self, spec: ProgramSpec) -> tuple[Program, int]:
        """A new instance of a program, and the bytes of its code."""
        compiled = self.compile(spec)
        called = () if self._host is None else self._host.called(compiled)  # it may fail: first, so that nothing leaks
        program = compiled.instance(self._pool())
        program.bind(self._buffers())
        program.called = called
        if self.observer is not None:
            program.observe(self.observer(compiled))
        if (states := self._states) is not None:
            program.bind(states.buffers)
            program.bind_slots({name: (states.buffers[name], stride) for name, stride in states.strides.items()})
        return program, compiled.object_bytes

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
        if self._host is not None:
            self._host.compile(compiled)
        facts = len(compiled.kernels), compiled.object_bytes, time.perf_counter() - start, reason is None
        record = ProgramRecord(compiled.key.phase, spec.seq, *facts, compiled.key.digest, reason or "")
        self.records.setdefault(spec, record)
        return compiled, record

    def compile_missing(self, spec: ProgramSpec) -> None:
        """Compiles a program unless the compile cache has it; loads nothing.

        What the host computes has entries of its own in the cache, which only the program itself tells.
        """
        if self._host is not None or not self._compiler.cache.has(self._asked(spec)[-1]):
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
            self._variants[spec.form] = self._placed(spec.variant(self.graph))
        return self._variants[spec.form]

    def prepare(
        self, table: Iterable[ProgramSpec], on_program: Callable[[ProgramRecord], None] | None = None
    ) -> list[ProgramRecord]:
        """Compiles the programs or finds them in the cache, and the packers of their weights; loads none of them."""
        records = []
        for spec in table:
            records.append(self._compiled(spec)[1])
            if on_program:
                on_program(records[-1])
        self._compiler.prepare_packing(self.weights)
        if self._host is not None:
            self._host.prepare()
        self._compiler.backend.prepare_choosing(self._compiler)
        return records

    def final_graph(self, spec: ProgramSpec) -> Graph:
        """The graph after all passes, with the node numbers that the manifest uses."""
        return ir.text.loads(self.compile(spec).final)

    @property
    def arena_bytes(self) -> int:
        """Total arena size of the programs in bytes."""
        every = [program for table in self.tables.values() for program in [*table.programs.values()]]
        return sum(p.arena_bytes + (p.then.arena_bytes if p.then else 0) for p in every)

    def close(self) -> None:
        for table in self.tables.values():
            table.clear()
