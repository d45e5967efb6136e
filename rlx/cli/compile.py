"""`rlx compile`: compiles programs ahead of a model's first use, checks that a profile fits, prints what was compiled.

The text goes to stdout, which program it is to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from rlx.cli.command import Command, json_option
from rlx.cli.options import (
    Decorator,
    Function,
    collected,
    engine_options,
    model_argument,
    model_path,
    named,
    open_plan,
    open_runner,
    read_profile,
)
from rlx.cli.output import Bars, counted, size
from rlx.compiler.inspection import unknown
from rlx.engine.opening.setup import family_without_model
from rlx.engine.programs.programs import ProgramRecord, programs_of
from rlx.errors import ArgumentError
from rlx.export.convert import header_of_config, header_of_shape
from rlx.models.shapes import USUAL
from rlx.passes import pipeline
from rlx.passes.effective import effective
from rlx.store.key import range_text
from rlx.weights import WeightLoader
from rlx.weights.locate import models_in

PHASES = ("prefill", "decode", "greedy", "batch", "tower")
# What --emit takes: IR after a pass, which needs no code to be made, or a form of the code.
_STAGES = {"ir": "graph", "fused": "fuse", "schedule": "memory"}
_CODE = ("python", "llvm", "asm", "ptx", "sass")


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
        "--kernel", metavar="NAME", help="With --emit python or other code: only the kernels with NAME in their names."
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
        modes = [name for name, value in ways.items() if value]
        if len(modes) > 1:
            raise click.UsageError(f"Choose one of {' and '.join(modes)}.")
        if self.kernel is not None and self.emit not in _CODE:
            raise click.UsageError(f"--kernel goes with --emit {', '.join(_CODE[:-1])} or {_CODE[-1]}.")
        for name, value in others.items():
            if value and modes and not (name == "json" and self.explain):
                raise click.UsageError(f"{modes[0]} and --{name} exclude each other.")

    @property
    def prints_text(self) -> bool:
        """Whether a text is printed in place of a line a program."""
        return bool(self.emit or self.stop_after)

    def programs(self, batch: int) -> dict[str, Any]:
        """As arguments of `Model.compile`. A text is that of the decode program if the options choose none."""
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
                graph = plan.cpu_experts.placed(spec.variant(plan.graph))
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
                    "ptx": partial(program.asm, form="ptx"),
                    "sass": partial(program.asm, form="sass"),
                }
                _print(f"{program.name} as {self.emit}", forms[str(self.emit)](self.kernel))


def shown_options(command: Function) -> Function:
    """Adds the options; the command gets them as the argument `shown`."""
    return collected(command, "shown", _OPTIONS, Shown)


def chosen_programs(command: Function) -> Function:
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


CONFIG = "config.json"


@click.command(name="compile", cls=Command)
@model_argument
@engine_options
@click.option("--shape", metavar="NAME", help="The shape of a published model, such as qwen3-0.6b, instead of MODEL.")
@click.option(
    "--weights",
    metavar="TYPE",
    help="With a config.json or --shape: the type of the weights, such as Q4_K_M, Q8_0 or BF16.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Also compile the programs for batches of up to N sequences (generate_batch).",
)
@click.option("--check", is_flag=True, help="Only check that profile and options fit the model.")
@shown_options
@json_option
def compile_(
    model: str | None,
    engine: dict[str, Any],
    shape: str | None,
    weights: str | None,
    batch: int,
    check: bool,
    shown: Shown,
    as_json: bool,
) -> None:
    """Compile the programs of MODEL ahead of its first run.

    Without MODEL it is the one that the profile names (`model = "FILE"`), else the one beside the profile, else the
    demo model, or for a profile of another family the shape of a published model. A config.json, or a directory with
    one and no weights, compiles ahead of the download: with --weights TYPE the programs of a GGUF file of that type,
    without it those of the safetensors checkpoint. For --shape the type is Q4_K_M unless --weights names another.

    Prints a line a program: phase, rows it takes, seconds, kernels, size, whether it was compiled or in the cache, and
    its digest for `rlx cache inspect`; under it why it was compiled. The options must be those of the later run,
    because they change the code.

    --explain, --emit and --stop-after print what the compiler did and made, for a terminal or a pipe.
    """
    shown.check(json=as_json, check=check)
    source = model_source(model, engine, shape, weights)
    if shown.prints_text:
        shown.print_text(source, engine, batch)
    elif check:
        _check(source, engine, shown.programs(batch), as_json)
    else:
        _compile(source, engine, batch, shown, as_json)


def model_source(
    model: str | None, engine: dict[str, Any], shape: str | None, weights: str | None
) -> str | WeightLoader:
    """The model to compile: its path, or a header without weights."""
    if shape is not None and model is not None:
        raise click.UsageError(f"--shape {shape} takes the place of a MODEL, and {model} is one")
    shape = shape or (_usual_shape(engine) if model is None else None)
    if shape is not None:
        return header_of_shape(shape, weights)
    path = model_path(model, engine, tell_demo=True)
    config = _config_alone(path)
    if config is not None:
        return header_of_config(config, weights)
    if weights is not None:
        raise click.UsageError(f"--weights {weights} is for a config.json or --shape; {path} has weights")
    return path


def _usual_shape(engine: dict[str, Any]) -> str | None:
    """The shape to compile for a profile of a family of which there is no model; None where there is one."""
    profile = read_profile(engine)
    family = family_without_model(None, profile)
    if profile is None or family is None:
        return None
    shape = USUAL[family]
    click.echo(f"model: the shape {shape} ({profile.source} is for '{family}' and nothing names a model)", err=True)
    return shape


def _config_alone(name: str) -> Path | None:
    """The configuration to compile without weights: a JSON file that is no index, or one alone in a directory."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path / CONFIG if (path / CONFIG).is_file() and not models_in(path) else None
    return path if path.suffix == ".json" and not path.name.endswith(".index.json") and path.is_file() else None


def _compile(model: str | WeightLoader, engine: dict[str, Any], batch: int, shown: Shown, as_json: bool) -> None:
    start = time.perf_counter()
    with Bars("opening the model") as bars, open_runner(model, engine, bars, load=False) as runner:
        bars.waiting("compiling")

        def show(record: ProgramRecord) -> None:
            bars.pause()
            click.echo(_line(record))
            if record.reason:
                click.echo(f"  {record.reason}")
            bars.waiting("compiling")

        records = list(runner.compile(None if as_json else show, **shown.programs(batch)))
        bars.pause()
        ready = zip(runner.programs, records, strict=True) if shown.explain else ()
        reports = [replace(program.explain(), phase=record.phase) for program, record in ready]
        source = runner.stats()["profile"]
    seconds = time.perf_counter() - start
    compiled = sum(not record.cached for record in records)
    if as_json:
        found = {"model": named(model), "profile": source, "seconds": seconds, "compiled": compiled}
        more = [{"explain": report.as_dict()} for report in reports] or [{}] * len(records)
        rows = [asdict(record) | extra for record, extra in zip(records, more, strict=True)]
        click.echo(json.dumps({**found, "programs": rows}))
    else:
        for report in reports:
            click.echo(f"\n{report}", nl=False)
        by = f", by {source}" if source else ""
        click.echo(f"{counted(len(records), 'program')}, {compiled} compiled, in {seconds:.2f} s{by}", err=True)


def _line(record: ProgramRecord) -> str:
    origin = "cached" if record.cached else "compiled"
    figures = f"{record.seconds:8.3f} s  {record.kernels:4d} kernels  {size(record.object_bytes):>7}"
    return f"{record.phase:8}{record.rows:>10}{figures}  {origin:8}  {record.digest[:12]}"


def _check(model: str | WeightLoader, engine: dict[str, Any], programs: dict[str, Any], as_json: bool) -> None:
    """Raises an error for what does not fit; otherwise prints a line per program that would be compiled."""
    with open_plan(model, engine) as plan:
        setup = plan.setup
        specs = programs_of(setup.profile, **programs)
        rows = [(spec.kind, spec.seq, spec.options(setup.profile).precision) for spec in specs]
    facts = {"target": setup.target.level, "kv_dtype": setup.kv_type.name, "threads": setup.threads}
    source = str(setup.source) if setup.source else None
    if as_json:
        found = [dict(zip(("phase", "bucket", "precision"), row, strict=True)) for row in rows]
        click.echo(json.dumps({"model": named(model), "profile": source, **facts, "programs": found}))
        return
    for kind, bucket, precision in rows:
        click.echo(f"{kind:8}{range_text(bucket):>10}  {precision}")
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    click.echo(f"{source or 'no profile; the defaults'}: fits {named(model)}; {said}", err=True)
