"""Options of `rlx compile` that choose programs and print what the compiler made of them.

The text goes to stdout, which program it is to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from rlx.cli.options import Command, Decorator, collected, open_plan, open_runner
from rlx.cli.output import Bars
from rlx.compiler.inspection import unknown
from rlx.engine.programs.specs import programs_of
from rlx.errors import ArgumentError
from rlx.passes import pipeline
from rlx.passes.effective import effective
from rlx.weights import WeightLoader

PHASES = ("prefill", "decode", "greedy", "batch", "tower")
# What --emit takes: IR after a pass, which needs no code to be made, or a form of the code.
_STAGES = {"ir": "graph", "fused": "fuse", "schedule": "memory"}
_CODE = ("python", "llvm", "asm")


def _rows(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """17 and 17-512 -> 17, a number of rows that only the programs meant take."""
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ((low, high) if dash else (low,))):
        raise click.BadParameter(f"{text!r} is neither a number of rows nor a range such as 17-512.")
    return int(low)


_OPTIONS: dict[str, Decorator] = {
    "phase": click.option("--phase", type=click.Choice(PHASES), help="Only the programs of this phase."),
    "rows": click.option(
        "--bucket", "rows", metavar="ROWS", callback=_rows, help="Only the programs for so many rows, such as 17-512."
    ),
    "explain": click.option(
        "--explain", is_flag=True, help="Print what each pass rewrote, and what its rules missed and why."
    ),
    "emit": click.option(
        "--emit",
        type=click.Choice([*_STAGES, *_CODE]),
        help="Print the decode program, or that of --phase and --bucket, in this form.",
    ),
    "kernel": click.option(
        "--kernel", metavar="NAME", help="With --emit python, llvm or asm: only the kernels with NAME in their names."
    ),
    "stop_after": click.option("--stop-after", metavar="PASS", help="Print the IR after this pass, and end."),
}


@dataclass(frozen=True)
class Shown:
    """Which programs are meant, and what of them is printed: the values of these options."""

    phase: str | None
    rows: int | None
    explain: bool
    emit: str | None
    kernel: str | None
    stop_after: str | None

    def check(self, **others: Any) -> None:
        """Raises `click.UsageError` for options that exclude each other; `others` are further ones, by their names."""
        ways = {"--explain": self.explain, "--emit": self.emit, "--stop-after": self.stop_after}
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise click.UsageError(f"Choose one of {' and '.join(given)}.")
        if self.kernel is not None and self.emit not in _CODE:
            raise click.UsageError(f"--kernel goes with --emit {', '.join(_CODE[:-1])} or {_CODE[-1]}.")
        for name, value in others.items():
            if value and given and not (name == "json" and self.explain):
                raise click.UsageError(f"{given[0]} and --{name} exclude each other.")

    @property
    def prints_text(self) -> bool:
        """Whether a text is printed in place of a line a program."""
        return bool(self.emit or self.stop_after)

    def programs(self, batch: int) -> dict[str, Any]:
        """As arguments of `CachedRunner.compile`. A text is that of the decode program if the options choose none."""
        phase = "decode" if self.prints_text and self.phase is None and self.rows is None else self.phase
        return {"batch": batch, "phase": phase, "rows": self.rows}

    def print_text(self, model: str | WeightLoader, engine: dict[str, Any], batch: int) -> None:
        """Prints what --emit or --stop-after ask for."""
        stage = self.stop_after or _STAGES.get(self.emit or "")
        if stage is not None:
            self._print_stage(model, engine, batch, stage)
        else:
            self._print_code(model, engine, batch)

    def _print_stage(self, model: str | WeightLoader, engine: dict[str, Any], batch: int, stage: str) -> None:
        """Runs the passes up to a stage, and prints what they made. No code is made, and nothing is stored."""
        with open_plan(model, engine) as plan:
            profile, target = plan.setup.profile, plan.setup.target
            for spec in programs_of(profile, **self.programs(batch)):
                _check_stage(stage, spec.phase)
                graph = spec.variant(plan.graph)
                stages = pipeline.stages(
                    graph,
                    effective(spec.options(profile), graph, target.capabilities),
                    passes=target.backend.passes(spec.phase),
                )
                text = next(str(result) for name, result in stages if name.split("-", 1)[1] == stage)
                _print(f"{spec.name} after {stage}" if stage != "graph" else f"{spec.name} before all passes", text)

    def _print_code(self, model: str | WeightLoader, engine: dict[str, Any], batch: int) -> None:
        """Prints a form of the code of programs, which are compiled if they are not in the cache."""
        with Bars("opening the model") as bars, open_runner(model, engine, bars, load=False) as runner:
            runner.compile(**self.programs(batch))
            bars.close()
            for program in runner.programs:
                forms: dict[str, Callable[[str | None], str]] = {
                    "python": program.source,
                    "llvm": program.llvm,
                    "asm": program.asm,
                }
                _print(f"{program.name} as {self.emit}", forms[str(self.emit)](self.kernel))


def shown_options(command: Command) -> Command:
    """Adds the options; the command gets them as the argument `shown`."""
    return collected(command, "shown", _OPTIONS, Shown)


def chosen_programs(command: Command) -> Command:
    """Adds --phase and --bucket; the command gets their values as `phase` and `rows`."""
    for name in ("rows", "phase"):
        command = _OPTIONS[name](command)
    return command


def _check_stage(stage: str, phase: str) -> None:
    """Raises `ArgumentError` unless the programs of a phase have the pass."""
    known = {name: ["graph", *pipeline.names(name)] for name in ("prefill", "decode", "batch")}
    others = [name for name, passes in known.items() if stage in passes]
    if stage not in known[phase] and others:
        hint = f"Programs of phase {others[0]} have it: add --phase {others[0]}."
        raise ArgumentError(f"{phase} programs have no pass {stage}", hint=hint)
    if stage not in known[phase]:
        raise unknown("pass", stage, known[phase])


def _print(title: str, text: str) -> None:
    click.echo(f"program {title}", err=True)
    click.echo(text, nl=not text.endswith("\n"))
