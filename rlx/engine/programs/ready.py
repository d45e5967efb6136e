"""The compiled or loaded programs of a model, for inspection: `runner.programs`.

Those of its vision tower are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, overload

from rlx.backends.device import Target
from rlx.compiler.compile import CompiledProgram
from rlx.compiler.inspection import Inspectable
from rlx.engine.programs.programs import TOWER, ProgramRecord, Programs
from rlx.env import size
from rlx.errors import ArgumentError
from rlx.notebook import table

if TYPE_CHECKING:
    from rlx.vision.tower import Tower, TowerProgram


class ReadyProgram(Inspectable):
    """A program of a runner, with `ir`, `source`, `llvm`, `asm` and `explain`: see `Inspectable`.

    Attributes:
        name: such as "prefill-17-512": phase, rows, and variants of inputs or outputs.
        record: its phase, bucket, sizes and digest.
    """

    def __init__(self, name: str, record: ProgramRecord, load: Callable[[], CompiledProgram], target: Target) -> None:
        self.name, self.record = name, record
        self._load, self._target = load, target

    @cached_property
    def _compiled(self) -> CompiledProgram:  # type: ignore[override]
        return self._load()

    def __repr__(self) -> str:
        return f"<Program {self.name}: {self.record.kernels} kernels, {self.record.digest[:12]}>"


class ReadyPrograms(Sequence[ReadyProgram]):
    """The programs of a model, in the order in which they were compiled or loaded.

    Example: `print(runner.programs["decode"].explain())`.
    """

    def __init__(self, programs: Sequence[ReadyProgram]) -> None:
        self._programs = tuple(programs)

    def __len__(self) -> int:
        return len(self._programs)

    @overload
    def __getitem__(self, which: int | str) -> ReadyProgram: ...
    @overload
    def __getitem__(self, which: slice) -> ReadyPrograms: ...
    def __getitem__(self, which: int | str | slice) -> ReadyProgram | ReadyPrograms:
        """By position, by name ("prefill-17-512"), or the first of a phase ("decode").

        Raises:
            ArgumentError: no program has this name or phase.
            IndexError: the position is out of range.
        """
        if isinstance(which, slice):
            return ReadyPrograms(self._programs[which])
        if isinstance(which, int):
            return self._programs[which]
        found = [p for p in self._programs if which in (p.name, p.record.phase)]
        if not found:
            has = ", ".join(p.name for p in self._programs) or "none"
            hint = f"The programs are: {has}. runner.compile() makes the missing ones."
            raise ArgumentError(f"no program is named {which!r}", hint=hint)
        return found[0]

    def _repr_html_(self) -> str:
        heads = ("name", "phase", "rows", "kernels", "code", "seconds", "from")
        rows = []
        for name, r in ((p.name, p.record) for p in self._programs):
            source = "cache" if r.cached else "compiled"
            rows.append((name, r.phase, r.rows, r.kernels, size(r.object_bytes), f"{r.seconds:.3f}", source))
        return table("programs", heads, rows)

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self._programs))}]"


def compile_tower(
    tower: Tower, rows: int | None, on_program: Callable[[ProgramRecord], None] | None
) -> list[ProgramRecord]:
    """Compiles the programs of a tower, or finds them in the compile cache.

    Args:
        rows: only programs that take this number of rows.
        on_program: called with the record of each.
    """
    records = []
    for program in tower.compile(rows):
        records.append(_record(program))
        if on_program:
            on_program(records[-1])
    return records


def ready_programs(programs: Programs, tower: Tower | None, target: Target) -> ReadyPrograms:
    """The programs of a model that were compiled or loaded so far, and those of its tower."""

    def seen(program: TowerProgram) -> ReadyProgram:
        return ReadyProgram(f"{TOWER}-{program.name}", _record(program), lambda: program.compiled, target)

    rows = list(programs.records.items())
    own = [ReadyProgram(spec.name, row, partial(programs.compile, spec), target) for spec, row in rows]
    return ReadyPrograms([*own, *map(seen, tower.programs.values() if tower else ())])


def _record(program: TowerProgram) -> ProgramRecord:
    found = program.compiled
    sizes = len(found.kernels), found.object_bytes, program.seconds
    return ProgramRecord(TOWER, program.bucket, *sizes, not program.reason, found.key.digest, program.reason)
