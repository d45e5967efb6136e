"""`rlx bench --compare FILE`: an earlier measurement beside this one, and what of the difference is noise.

A figure is measured several times. Two figures differ by noise if the ranges of their runs overlap. A measurement names
its conditions; those that differ are shown, because they may be the reason.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rlx import json_file
from rlx.cli.output import table
from rlx.compiler.tuned import machine
from rlx.engine.engine import Engine
from rlx.errors import ArgumentError
from rlx.store.key import versions

SLOWER = 3
"""Exit code where `--at-least` is not reached."""

NOISE = "noise"
_CONDITIONS = ("model", "conditions", "machine", "versions")
_PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Figure:
    """A figure of two measurements.

    Attributes:
        name: of the task or kernel.
        unit: of the values.
        old, new: the medians.
        is_noise: whether the ranges of their runs overlap.
        more_is_better: whether it is a rate, not a time.
    """

    name: str
    unit: str
    old: float
    new: float
    is_noise: bool
    more_is_better: bool

    @property
    def ratio(self) -> float:
        """How many times as fast the new one is."""
        return self.new / self.old if self.more_is_better else self.old / self.new

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "name": self.name, "unit": self.unit, "old": self.old, "new": self.new, "times_as_fast": self.ratio,
            "noise": self.is_noise,
        }  # fmt: skip


def about(engine: Engine, prompt: int, generate: int, repeat: int) -> dict[str, Any]:
    """Model, conditions, machine and versions of a measurement."""
    stats, path = engine.stats(), engine.weights.loader.path
    described = engine._compiler.target.describe()
    return {
        "model": {"name": path.name, "bytes": path.stat().st_size if path.is_file() else None,
                  "parameters": stats["parameters"]},
        "conditions": {"prompt": prompt, "generate": generate, "repeat": repeat, "threads": stats["threads"],
                       "precision": stats["precision"], "kv_dtype": stats["kv_dtype"], "profile": stats["profile"]},
        "machine": {"cpu": machine(), "cpus": os.cpu_count(), "target": stats["target"],
                    "features": described.get("features", ""), "system": platform.platform()},
        "versions": {name: value for name, value in versions().items() if value},
    }  # fmt: skip


def earlier(path: str) -> Mapping[str, Any]:
    """The measurement in a file that `rlx bench --json` wrote.

    Raises:
        ArgumentError: it cannot be read, or holds something else.
    """
    found = json_file.read_object(Path(path), ArgumentError)
    try:
        for phase in _PHASES:
            _range(found[phase]["runs"])
            for row in found[f"{phase}_kernels"]:
                _range(row["ms_range"])
                float(row["ms"]), str(row["kernel"])
        if not all(isinstance(found[each], dict) for each in _CONDITIONS):
            raise TypeError("conditions")
    except (KeyError, TypeError, ValueError) as error:
        hint = "Write one: rlx bench MODEL --json > FILE"
        raise ArgumentError("this is no measurement of this version of rlx bench", where=path, hint=hint) from error
    return found


def _range(values: Any) -> tuple[float, float]:
    numbers = [float(value) for value in values]
    return min(numbers), max(numbers)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The conditions that differ: "machine cpu: A, now B"."""
    found = []
    for part in _CONDITIONS:
        for name in {**old[part], **new[part]}:
            before, now = old[part].get(name), new[part].get(name)
            if before != now:
                found.append(f"{part} {name}: {_brief(before)}, now {_brief(now)}")
    return found


def _brief(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def figures(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Figure]:
    """The figures that both have measured: tasks first, then kernels by phase."""
    for phase in _PHASES:
        yield _figure(phase, "tokens/s", old[phase], new[phase], "tokens_per_s", "runs", more=True)
    if "image" in old and "image" in new:
        yield _figure("image", "ms", old["image"], new["image"], "encode_ms", "encode_ms_runs", more=False)
    for phase in _PHASES[::-1]:
        before = {row["kernel"]: row for row in old[f"{phase}_kernels"]}
        for row in new[f"{phase}_kernels"]:
            if row["kernel"] in before:
                name = f"{phase}: {row['kernel']}"
                yield _figure(name, "ms", before[row["kernel"]], row, "ms", "ms_range", more=False)


def _figure(
    name: str, unit: str, old: Mapping[str, Any], new: Mapping[str, Any], value: str, runs: str, *, more: bool
) -> Figure:
    (low, high), (least, most) = _range(old[runs]), _range(new[runs])
    return Figure(name, unit, old[value], new[value], low <= most and least <= high, more)


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison as plain JSON data."""
    return {"differences": differences(old, new), "figures": [each.as_dict() for each in figures(old, new)]}


def show(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Prints the comparison; warns on stderr of conditions that differ."""
    for each in differences(old, new):
        click.echo(f"Warning: {each}", err=True)
    rows = [
        (
            each.name,
            each.unit,
            f"{each.old:.4g}",
            f"{each.new:.4g}",
            f"{each.ratio:.2f}x",
            NOISE if each.is_noise else "",
        )
        for each in figures(old, new)
    ]
    click.echo("\nbeside the earlier measurement:")
    table(("task or kernel", "unit", "old", "new", "speed", ""), rows, right=("old", "new", "speed"))
    gone = {row["kernel"] for phase in _PHASES for row in old[f"{phase}_kernels"]}
    here = {row["kernel"] for phase in _PHASES for row in new[f"{phase}_kernels"]}
    for what, names in (("only before", gone - here), ("only now", here - gone)):
        if names:
            click.echo(f"{what}: {', '.join(sorted(names))}")


def too_slow(old: Mapping[str, Any], new: Mapping[str, Any], least: float) -> list[Figure]:
    """The tasks that are slower than `least` times the earlier speed, by more than noise."""
    tasks = (each for each in figures(old, new) if ":" not in each.name)
    return [each for each in tasks if each.ratio < least and not each.is_noise]
