"""The programs of one model: compiled when they are first wanted, bound to its weights and to the session's states.

Runners stage, under the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlx.ir import text as ir_text
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.passes.layout import MATRIX_LAYOUT
from rlx.runners.setup import Setup
from rlx.runtime.compile import CompiledProgram, Compiler
from rlx.runtime.native import NativeProgram
from rlx.runtime.threads import WorkerPool

HIDDEN = "hidden"  # the output that the head multiplies


@dataclass(frozen=True)
class Wanted:
    """Which of a model's programs a call needs.

    Attributes:
        seq: (smallest, largest) number of rows.
        all_rows: whether the logits of every row are wanted, not those of the last one only.
        hidden: whether what the head multiplies is wanted, of every row.
    """

    seq: tuple[int, int]
    all_rows: bool = False
    hidden: bool = False

    @property
    def name(self) -> str:
        """For a folder of dumps."""
        phase = "decode" if self.seq == (1, 1) else "prefill"
        return f"{phase}-{self.seq[0]}-{self.seq[1]}" + "-all" * self.all_rows + "-hidden" * self.hidden


@dataclass(frozen=True)
class ProgramRecord:
    """One line about a program that is ready to run."""

    phase: str
    bucket: tuple[int, int]
    kernels: int
    object_bytes: int
    seconds: float
    cached: bool
    digest: str


class Programs:
    """A table of native programs.

    Args:
        graph: the model, symbolic; its output "hidden" is only there where it is wanted.
        setup: the compile profile and the folder of dumps.
        addresses: where the weights are, by name; asked for when a program is bound, so they may be loaded late.
        packed: tables that another graph of the model multiplies.
    """

    def __init__(
        self,
        graph: Graph,
        setup: Setup,
        compiler: Compiler,
        pool: WorkerPool,
        addresses: Callable[[], Mapping[str, int]],
        packed: tuple[str, ...] = (),
    ) -> None:
        self._graph, self._setup, self._compiler, self._pool = graph, setup, compiler, pool
        self._weights, self._packed, self._states = addresses, packed, dict[str, int]()
        self._programs: dict[Wanted, NativeProgram] = {}

    def __getitem__(self, wanted: Wanted) -> NativeProgram:
        """The program, bound and ready to run."""
        if wanted not in self._programs:
            program = self.compile(wanted).instance(self._pool)
            program.bind(self._weights())
            program.bind(self._states)
            self._programs[wanted] = program
        return self._programs[wanted]

    def bind(self, states: Mapping[str, int]) -> None:
        """From now on every program works on the states at these addresses."""
        self._states = dict(states)
        for program in self._programs.values():
            program.bind(self._states)

    def compile(self, wanted: Wanted) -> CompiledProgram:
        """The program's code, from the cache if it is there."""
        setup = self._setup
        options = setup.profile.options(wanted.seq, all_rows=wanted.all_rows, whole=(HIDDEN,), packed=self._packed)
        outputs = {name: node for name, node in self._graph.outputs.items() if wanted.hidden or name != HIDDEN}
        dump = setup.dump_ir / wanted.name if setup.dump_ir else None
        return self._compiler.program(self._graph.replace(outputs=outputs), options, dump=dump)

    def prepare(
        self, table: Iterable[Wanted], on_program: Callable[[ProgramRecord], None] | None = None
    ) -> list[ProgramRecord]:
        """Compiles the programs or finds them in the cache, and what packs their weights; loads none of them."""
        records, packed = [], set[str]()
        for wanted in table:
            start, compiles = time.perf_counter(), self._compiler.cache.stats.compiles
            compiled = self.compile(wanted)
            weights = compiled.manifest["weights"].values()
            packed |= {row["dtype"] for row in weights if row["layout"] == MATRIX_LAYOUT}
            seconds, cached = time.perf_counter() - start, self._compiler.cache.stats.compiles == compiles
            records.append(_record(wanted, compiled, seconds, cached))
            if on_program:
                on_program(records[-1])
        for dtype in packed:
            self._compiler.packer(DTYPES[dtype])
        return records

    def final_graph(self, wanted: Wanted) -> Graph:
        """The graph after all passes, whose node numbers the manifest uses."""
        return ir_text.loads(self.compile(wanted).final)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the programs' own memory."""
        return sum(p.arena_bytes for p in self._programs.values())

    def close(self) -> None:
        for program in self._programs.values():
            program.close()
        self._programs.clear()


def _record(wanted: Wanted, compiled: CompiledProgram, seconds: float, cached: bool) -> ProgramRecord:
    phase, digest = compiled.manifest["phase"], compiled.key.digest
    return ProgramRecord(phase, wanted.seq, len(compiled.kernels), compiled.object_bytes, seconds, cached, digest)
