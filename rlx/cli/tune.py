"""`rlx tune`: measures the machine-dependent numbers in kernels."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any

import click

from rlx import backends, env
from rlx.backends.device import Outcome, Row, Target
from rlx.cli.command import Command
from rlx.cli.options import some_engine_options
from rlx.cli.output import Bars, counted, printable, table
from rlx.compiler.compile import Compiler, worker_count
from rlx.compiler.tuned import Measured, find, keep, path, remove
from rlx.errors import CacheError
from rlx.platform import cpu_count
from rlx.store.cache import CompileCache
from rlx.store.store import Store, default_root


@click.command(cls=Command)
@click.option("--show", is_flag=True, help="Show the present numbers without measuring.")
@click.option("--reset", is_flag=True, help="Delete the measured numbers of all targets.")
@click.option("--dry-run", is_flag=True, help="Measure without storing the result.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Workers; the physical cores by default.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    default=45.0,
    show_default=True,
    help="Approximate duration.",
)
@some_engine_options("device")
def tune(show: bool, reset: bool, dry_run: bool, threads: int | None, seconds: float, engine: dict[str, Any]) -> None:
    """Adapt the kernels to this machine: measure variants, keep the fastest.

    The best values of a few numbers in the kernels of linear layers, such as how far ahead weights are prefetched,
    depend on the machine. They are measured for the target (RLX_TARGET) and kept in the cache's folder. They change
    speed and never a result; programs made with other numbers are compiled again. Let nothing else run meanwhile.
    """
    if show + reset + dry_run > 1:
        raise click.UsageError("--show, --reset and --dry-run exclude each other.")
    if not isfinite(seconds):
        raise click.UsageError(f"--seconds is {seconds}, expected a number")
    target = backends.backend(engine["device"]).target()
    if show:
        _show(target)
    elif reset:
        _reset()
    else:
        _tune(target, threads, seconds, dry_run)


def _tune(target: Target, threads: int | None, seconds: float, dry_run: bool) -> None:
    store, workers = None if dry_run else _writable(), worker_count(threads)
    _warn_if_busy()
    outcome = _measure(target, workers, seconds)
    heads = "number", "value", "speed", "time", ""
    table(heads, map(_cells, outcome.rows), right=heads[1:4])
    if outcome.skipped:
        click.echo(f"not measured for lack of time: {', '.join(outcome.skipped)}; --seconds gives more", err=True)
    if store is None:
        click.echo("nothing is kept (--dry-run)")
        return
    date = datetime.date.today().isoformat()
    path = keep(store, target, Measured(outcome.tuning, date, workers))
    click.echo(f"{_changes(outcome.tuning, target)}; kept in {printable(str(path))}")


def _measure(target: Target, workers: int, seconds: float) -> Outcome:
    candidates = CompileCache(capacity=1024, policy="off")  # nobody else can use their code
    with Bars() as bars, contextlib.closing(Compiler(target).workers(workers)) as pool:
        builders = partial(Compiler, cache=candidates)
        return target.backend.tune(target, pool, builders, seconds, partial(bars, "measuring"))


def _cells(row: Row) -> tuple[str, ...]:
    mark = "chosen" if row.chosen else ""
    return row.name, str(row.value), f"{row.speed:.1f} {row.unit}", f"{row.ratio - 1:+.1%}", mark


def _show(target: Target) -> None:
    store = CompileCache.default().store
    found = find(store, target) if store is not None else None
    default = target.backend.default_tuning(target)
    force = found.tuning if found else default
    heads = "number", "in force", "default"
    table(heads, [(name, str(force[name]), str(default[name])) for name in default], right=heads[1:])
    if found and store is not None:
        when, where = printable(found.date), printable(str(path(store, target)))
        click.echo(f"target {target.level}: measured on {when} with {counted(found.threads, 'thread')}, in {where}")
    elif store is None:
        click.echo(f"target {target.level}: the defaults, because RLX_CACHE is off")
    else:
        click.echo(f"target {target.level}: the defaults; `rlx tune` measures")


def _reset() -> None:
    click.echo("removed what was measured" if remove(_writable()) else "nothing was measured")


def _writable() -> Store:
    """The store, if the cache policy allows writing to it.

    Raises:
        CacheError: it does not.
    """
    policy = env.cache_policy()
    if policy in ("off", "readonly"):
        hint = "--dry-run measures and keeps nothing."
        raise CacheError(f"the cache's folder may not be written: its policy is {policy}", where="RLX_CACHE", hint=hint)
    return Store(default_root())


def _warn_if_busy() -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5 * cpu_count():
        click.echo(f"Warning: the machine is busy (load {load:.1f}): only large gains can be told from noise", err=True)


def _changes(tuning: Mapping[str, int], target: Target) -> str:
    """The numbers that differ from the defaults, in one line."""
    default = target.backend.default_tuning(target)
    changed = [f"{name} {value}" for name, value in tuning.items() if value != default[name]]
    return (
        f"faster than the defaults: {', '.join(changed)}"
        if changed
        else "nothing is faster than the defaults by more than the noise"
    )
