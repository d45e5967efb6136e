"""The programs that steps of several sequences need, besides those of a single one.

Runners stage, under the engine.
"""

from __future__ import annotations

from rlx.engine.programs.bucketing import Bucketing
from rlx.engine.programs.program_spec import GREEDY, ProgramSpec
from rlx.errors import ArgumentError
from rlx.profile import CompileProfile


def batch_programs(sequences: int, bucketing: Bucketing) -> list[ProgramSpec]:
    """Specs of the programs that batches of up to `sequences` sequences need besides the single-sequence programs.

    Steps of several sequences may have any number of rows: short prompts share one.

    Raises:
        ArgumentError: the number is below 1.
    """
    if sequences < 1:
        raise ArgumentError(f"a batch of {sequences} sequences", where="batch", hint="Give a number of at least 1.")
    return [bucketing.segments(rows) for _, rows in bucketing.segment_ranges] if sequences > 1 else []


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
    table = [*map(ProgramSpec, profile.ranges), GREEDY, *batch_programs(batch, Bucketing(profile.ranges))]
    of_phase = [w for w in table if phase in (None, w.kind)]
    found = [w for w in of_phase if rows is None or w.seq[0] <= rows <= w.seq[1]]
    if not found:
        has = ", ".join(f"{w.kind} {w.seq[0]}-{w.seq[1]}" for w in of_phase or table)
        what = f"takes {rows} rows" if of_phase else f"is of phase {phase!r}"
        raise ArgumentError(f"no program {what}", hint=f"The programs are: {has}.")
    return found
