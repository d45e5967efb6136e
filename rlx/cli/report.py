"""`rlx report MODEL`: one HTML file that shows what the compiler made of a model, and where the time goes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from rlx.cli.command import Command
from rlx.cli.compile import chosen_programs, model_source
from rlx.cli.inspect import describe
from rlx.cli.main import Mistake
from rlx.cli.options import engine_options, model_argument, named, open_engine
from rlx.cli.output import Bars, counted, size
from rlx.engine.programs.programs import TOWER, programs_of
from rlx.engine.programs.reporting import measure_programs, program_sources
from rlx.errors import RlxError
from rlx.report.page import ReportPage, make_page, unwritable
from rlx.report.source import Problem, Source, Subject
from rlx.weights import WeightLoader, open_weights


@click.command(cls=Command)
@model_argument
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="The file to write.",
)
@click.option("--measure", is_flag=True, help="Also run and time the programs, and measure the limits of the machine.")
@click.option(
    "--prompt",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    metavar="N",
    help="With --measure: tokens before the measured token.",
)
@click.option("--shape", metavar="NAME", help="The shape of a published model, such as qwen3-0.6b, instead of MODEL.")
@click.option(
    "--weights", metavar="TYPE", help="With a config.json or --shape: the type of the weights, such as Q4_K_M or BF16."
)
@click.option(
    "--batch", type=click.IntRange(1), default=1, metavar="N", help="Also the programs for batches of N sequences."
)
@chosen_programs
@engine_options
def report(model: str | None, out: Path, shape: str | None, weights: str | None, **options: Any) -> None:
    """Write one HTML page about MODEL, by default the demo model.

    It shows the graph, every pass with what it changed, fusions that were missed and why, the regions of a step, the
    kernels down to the assembly, and the memory. With --measure it shows times, the limits of the machine and where
    workers wait. The page needs no network. Of a model that does not compile it shows everything up to the error.
    """
    choices = _Choices(**options)
    if choices.measure and (shape is not None or weights is not None):
        raise click.UsageError("--measure runs the model; --shape and --weights name one without its weights")
    _check_writable(out)
    source = model_source(model, choices.engine, shape, weights)
    again = "" if shape or weights else shlex.join(["rlx", "report", *([model] if model else []), "--measure"])
    with Bars("opening the model") as bars:
        page, problem = _make(source, again, choices, bars)
    page.write(out)
    programs = len(page.data["programs"])
    click.echo(f"{out}: {counted(programs, 'program')}, {size(len(page.html.encode()))}", err=True)
    if problem is not None:
        raise Mistake(f"{problem.message} The report shows how far it came.")


@dataclass(frozen=True)
class _Choices:
    """The options of the command, but for those that name the model."""

    measure: bool
    prompt: int
    batch: int
    phase: str | None
    rows: int | None
    engine: dict[str, Any]


def _check_writable(out: Path) -> None:
    """Raises `OutputError` where the file cannot be written, before anything is compiled."""
    if out.is_dir():
        raise unwritable(out, IsADirectoryError(21, "it is a directory"))
    if not out.expanduser().absolute().parent.is_dir():
        raise unwritable(out, FileNotFoundError(2, "its folder does not exist"))


def _make(source: str | WeightLoader, command: str, choices: _Choices, bars: Bars) -> tuple[ReportPage, Problem | None]:
    """The page, which shows the command for one with times, and the first error that is in it."""
    name = Path(named(source)).name or named(source)
    subject, sources, loader = Subject(name), list[Source](), None
    try:
        loader = open_weights(source) if isinstance(source, str) else source
        facts = describe(loader)
        subject = Subject(name, _facts(facts), facts["formats"], command=command)
        subject, sources = _programs(loader, subject, choices, bars)
    except RlxError as error:
        if loader is not None:
            loader.close()
        elif not Path(named(source)).exists():
            raise  # there is no model, so there is nothing to report
        subject = replace(subject, command="", problem=Problem("open", type(error).__name__, str(error)))
    bars.waiting("writing the report")
    page = make_page(subject, sources)
    return page, next(filter(None, [subject.problem, *(each.problem for each in sources)]), None)


def _programs(loader: WeightLoader, subject: Subject, choices: _Choices, bars: Bars) -> tuple[Subject, list[Source]]:
    """Opens the model; the subject with the machine's limits, if they are measured, and the sources of its programs."""
    with open_engine(loader, bars, load=False, **choices.engine) as engine:
        only_tower = choices.phase == TOWER
        specs = [] if only_tower else programs_of(engine.profile, choices.batch, choices.phase, choices.rows)
        if only_tower:
            engine.vision.required()
        told = lambda name: bars.waiting(f"compiling {name}")  # noqa: E731
        sources = program_sources(engine, specs, choices.rows, choices.phase in (None, TOWER), told)
        if not choices.measure:
            return subject, sources
        good = {source.name for source in sources if source.problem is None}
        try:
            bars.waiting("measuring")
            engine.load()
            bars.close()  # nothing else runs when the clock does
            machine, times = measure_programs(engine, [spec for spec in specs if spec.name in good], choices.prompt)
        except RlxError as error:
            return replace(subject, problem=Problem("measure", type(error).__name__, str(error))), sources
        return replace(subject, machine=machine), [replace(each, times=times.get(each.name)) for each in sources]


def _facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts that `rlx inspect` shows of the model, as (name, value)."""
    rows = [("file", Path(facts["path"]).name), ("parameters", f"{facts['parameters']:,}")]
    rows.append(("weights", f"{counted(facts['tensors'], 'tensor')}, {size(facts['bytes'])}"))
    formats = ", ".join(f"{row['dtype']} {size(row['bytes'])}" for row in facts["formats"])
    rows.append(("formats", formats))
    config = facts.get("config", {})
    shown = ("arch", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_size", "context", "experts")
    names = {"arch": "architecture", "kv_heads": "key heads", "head_dim": "head size", "vocab_size": "vocabulary"}
    return rows + [(names.get(key, key), f"{config[key]}") for key in shown if key in config]
