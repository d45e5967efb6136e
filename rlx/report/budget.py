"""Where the time of a step goes: at the machine's limit, beyond it, waiting, and outside of the program.

Report stage. The parts of a budget add up to the measured time of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.report.source import Machine, StepTimes
from rlx.report.work import RegionWork

SHORT = 0.2  # regions that need less than this share of their time at the machine's limit are too short to reach it


@dataclass
class Part:
    """A part of the time.

    Attributes:
        kind: "memory" and "arithmetic": the work at the machine's limits; "beyond": regions that take longer than
            that; "short": regions with too little work to reach a limit; "waits": workers at the end of regions;
            "outside": the call without its regions.
        seconds: of the step.
        of: seconds by label of the region.
    """

    kind: str
    seconds: float = 0.0
    of: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, label: str) -> None:
        """More time, of a region."""
        self.seconds += seconds
        self.of[label] += seconds  # type: ignore[assignment]  # a Counter of seconds

    def as_row(self) -> dict[str, Any]:
        """Plain data, the largest labels first."""
        return {"kind": self.kind, "seconds": self.seconds, "of": [[k, v] for k, v in self.of.most_common(8)]}


def budget(work: Sequence[RegionWork], labels: Sequence[str], times: StepTimes, machine: Machine) -> list[Part]:
    """The parts of a step's time.

    Args:
        labels: what each region is called.
    """
    parts = {kind: Part(kind) for kind in ("memory", "arithmetic", "beyond", "short", "waits", "outside")}
    for i, (region, label, seconds) in enumerate(zip(work, labels, times.regions, strict=True)):
        waited = min(mean_wait(times, i), seconds)
        working = seconds - waited
        least, limit = region.seconds(machine.bandwidth, machine.peaks)
        parts[limit].add(min(least, working), label)
        parts["short" if least < SHORT * working else "beyond"].add(max(0.0, working - least), label)
        parts["waits"].add(waited, label)
    parts["outside"].seconds = max(0.0, times.seconds - sum(times.regions))
    return list(parts.values())


def mean_wait(times: StepTimes, region: int) -> float:
    """Seconds that a worker waited at the end of a region, on average over those that worked in it."""
    found = [row[region] for row in times.waits if row[region] is not None]
    waits = [wait for wait in found if wait is not None]
    return sum(waits) / len(waits) if waits else 0.0
