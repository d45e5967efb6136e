"""The programs of a vision tower among those of its model: compiled with them, and inspected like them.

Runners stage, under the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.device import Target
from rlx.engine.programs.ready import ProgramRecord, ReadyProgram
from rlx.vision.tower import Tower, TowerProgram

TOWER = "tower"  # as a phase


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


def ready_programs(tower: Tower, target: Target) -> list[ReadyProgram]:
    """The programs of a tower that were compiled or loaded so far."""

    def ready(program: TowerProgram) -> ReadyProgram:
        return ReadyProgram(f"{TOWER}-{program.name}", _record(program), lambda: program.compiled, target)

    return [ready(program) for program in tower.programs.values()]


def _record(program: TowerProgram) -> ProgramRecord:
    found = program.compiled
    sizes = len(found.kernels), found.object_bytes, program.seconds
    return ProgramRecord(TOWER, program.bucket, *sizes, not program.reason, found.key.digest, program.reason)
