"""`rlx bench --rows`: steps of several sequences, each kind of work beside what it takes at least."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from rlx import demo
from rlx.cli.output import Bars, counted, table
from rlx.engine.engine import Engine
from rlx.engine.programs import reporting
from rlx.engine.programs.batch_steps import ROOM, BatchStep, batch_steps
from rlx.runners.auto import runner_class
from rlx.weights import open_weights

_HEADS = "kernel", "regions", "ms", "share", "prologue", "waiting", "least ms", "of", "reached"


_REST = {
    "uneven_ms": "regions slower than their median",
    "waking_ms": "waking and joining the workers",
    "choice_ms": "choice of tokens",
    "between_ms": "between steps",
}


class _Counts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers above 0, separated by commas."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        try:
            found = [int(part) for part in str(value).split(",")]
        except ValueError:
            found = [0]
        if min(found) < 1:
            self.fail(f"{value!r} is no list of numbers above 0, such as 1,8,32", param, ctx)
        return found


COUNTS = _Counts()


def bench_rows(
    model: str | None, rows: Sequence[int], depths: Sequence[int], as_json: bool, options: Mapping[str, Any]
) -> None:
    """Measures steps of so many sequences after so many tokens each, and shows them."""
    loader = open_weights(model if model is not None else demo.path(demo.TEXT))
    runner_class(loader)  # whether there is one
    with Bars("opening the model") as bars:
        engine = Engine.open(loader, max_seq=max(depths) + ROOM, progress=bars, **options)
        try:
            bars.waiting("measuring")
            peaks = reporting.arithmetic_peaks(engine)
            found = [_described(engine, step, peaks) for depth in depths for step in batch_steps(engine, rows, depth)]
            stats = engine.stats()
        finally:
            engine.close()
    result = {"threads": stats["threads"], "target": stats["target"], "peak_gop_per_s": peaks, "steps": found}
    click.echo(json.dumps(result)) if as_json else _show(result)


def _described(engine: Engine, step: BatchStep, peaks: Mapping[str, float]) -> dict[str, Any]:
    """A step as plain data, with the least time of each kind of work; rates are those of as many bytes as it reads."""
    moved = sum(kind.bytes for kind in step.kinds)
    bandwidth = reporting.read_bandwidth(engine, moved)
    kinds, least = [], 0.0
    for kind in step.kinds:
        bound, limit = kind.bound(bandwidth, peaks)
        least += bound
        kinds.append({
            "kernel": kind.label, "regions": kind.regions, "ms": kind.seconds * 1e3,
            "prologue_ms": kind.prologues * 1e3, "waiting_ms": kind.waits * 1e3, "least_ms": bound * 1e3,
            "limit": limit, "bytes": kind.bytes, "operations": dict(kind.operations),
        })  # fmt: skip
    rest = {name: getattr(step, name.removesuffix("_ms")) * 1e3 for name in _REST}
    times = {"rows": step.rows, "depth": step.depth, "ms": step.seconds * 1e3, **rest, "least_ms": least * 1e3}
    return {**times, "read_bytes": moved, "read_gb_per_s": bandwidth, "kernels": kinds}


def _show(result: Mapping[str, Any]) -> None:
    peaks = ", ".join(f"{kind} {rate:.0f}" for kind, rate in result["peak_gop_per_s"].items())
    click.echo(f"{counted(result['threads'], 'thread')}, {result['target']}; peaks in GOP/s: {peaks}")
    for step in result["steps"]:
        rows, ms = step["rows"], step["ms"]
        click.echo(f"\n{counted(rows, 'row')} at depth {step['depth']}: {ms:.2f} ms, {rows / ms * 1e3:.0f} tokens/s, "
                   f"{step['least_ms'] / ms:.0%} of the limit at {step['read_gb_per_s']:.1f} GB/s")  # fmt: skip
        lines = [_cells(row, ms) for row in step["kernels"]]
        for name, label in _REST.items():
            lines.append((label, "", f"{step[name]:.3f}", f"{step[name] / ms:.0%}", *[""] * 5))
        table(_HEADS, lines, right=[head for head in _HEADS[1:] if head != "of"])


def _cells(row: Mapping[str, Any], ms: float) -> tuple[str, ...]:
    """The line of a kind of work in a step of so many milliseconds."""
    parts = (f"{row[name]:.3f}" for name in ("prologue_ms", "waiting_ms", "least_ms"))
    times = f"{row['ms']:.3f}", f"{row['ms'] / ms:.0%}", *parts
    return row["kernel"], str(row["regions"]), *times, row["limit"], f"{row['least_ms'] / row['ms']:.0%}"
