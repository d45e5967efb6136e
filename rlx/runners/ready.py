"""The programs of a model that are ready to run, to look into: `runner.programs`.

Runners stage, beside `programs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from rlx.codegen.target import Target
from rlx.errors import ArgumentError
from rlx.runtime.compile import CompiledProgram
from rlx.runtime.inspection import Inspectable


@dataclass(frozen=True)
class ProgramRecord:
    """One line about a program that is ready to run.

    Attributes:
        phase: prefill, decode or batch; greedy is a decode step that gives the likeliest token and no logits, and
            verify one over several guessed tokens.
        bucket: smallest and largest number of rows that a call of it takes.
        kernels: how many kernels it has.
        object_bytes: size of its code.
        seconds: time to compile or load it.
        cached: whether it was found in the compile cache.
        digest: of its key, as `rlx cache` shows it.
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
        low, high = self.bucket
        return str(low) if low == high else f"{low}-{high}"


class ReadyProgram(Inspectable):
    """A program of a runner, with `ir`, `source`, `llvm`, `asm` and `explain`: see `Inspectable`.

    Attributes:
        name: of the program, such as "prefill-17-512": its phase, its rows, and what else it takes or gives.
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
    """Programs in the order in which they were made.

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
            ArgumentError: no program that is ready is called so.
            IndexError: there are fewer.
        """
        if isinstance(which, slice):
            return ReadyPrograms(self._programs[which])
        if isinstance(which, int):
            return self._programs[which]
        found = [p for p in self._programs if which in (p.name, p.record.phase)]
        if not found:
            has = ", ".join(p.name for p in self._programs) or "none"
            hint = f"Ready are: {has}. runner.compile() makes the rest."
            raise ArgumentError(f"no program that is ready is called {which!r}", hint=hint)
        return found[0]

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self._programs))}]"
