"""The cost of steps: rows of prompts by how many positions come before them, decode steps by their number of rows.

Runners stage, under the scheduler. The products of a row take the same time everywhere; attention reads all positions
before it. So a row after 8,000 positions may take five times as long as the first one.

    seconds of a row = level * (first + more * depth)

`depth` is the number of positions before a row. The line, `first` and `more`, is a least-squares fit over steps; older
ones count less and less. The level follows the newest steps: how busy the machine is changes from one moment to the
next, the shape of the line does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

RECENT = 0.3  # weight of the newest step in the level and in averages
FADE = 0.97  # weight of a step in the line, beside that of the step after it
SPREAD = 256.0  # positions: steps whose depths differ by less say little about what depth costs
LEAST_FIRST = 0.1  # `first` is at least this part of the average cost
USUAL_SHARE = 0.15  # of a step of one row: what a further row costs
FORGOTTEN = 256  # decode steps after which a measurement counts no more


@dataclass
class PromptCost:
    """How long prompt rows take.

    Args:
        first: seconds of a row, until anything was measured.

    Attributes:
        is_known: whether anything was measured.
    """

    first: float
    is_known: bool = False
    _more: float = 0.0
    _level: float = 1.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def rows_per_second(self) -> float:
        """The rate at the beginning of a prompt; 0 before anything was measured."""
        return 1 / (self._level * self.first) if self.is_known else 0.0

    def observe(self, rows: int, depth: float, seconds: float) -> None:
        """Notes a step.

        Args:
            depth: how many positions come before a row of it, on average.
        """
        if rows <= 0 or seconds <= 0:
            return
        each = seconds / rows
        if self.is_known:
            self._level += RECENT * (each / (self.first + self._more * depth) - self._level)
        self.is_known = True
        new = (1.0, depth, each, depth * depth, depth * each)
        self._sums = [FADE * old + more for old, more in zip(self._sums, new, strict=True)]
        count, *sums = self._sums
        x, y, xx, xy = (each / count for each in sums)
        more = (xy - x * y) / (xx - x * x + SPREAD * SPREAD)
        self._more = max(0.0, min(more, (1 - LEAST_FIRST) * y / x if x else 0.0))
        self.first = y - self._more * x

    def seconds_of(self, rows: int, past: int) -> float:
        """How long so many rows after `past` positions take."""
        return rows * self._level * (self.first + self._more * (past + rows / 2))

    def rows_in(self, seconds: float, past: int) -> int:
        """How many rows after `past` positions take so long."""
        if seconds <= 0:
            return 0
        one, growth = self._level * (self.first + self._more * past), self._level * self._more
        return int(2 * seconds / (one + sqrt(one * one + 2 * growth * seconds)))


@dataclass
class StepCost:
    """The cost of a decode step by its number of rows: seconds = first + more * (rows - 1), from measured steps.

    Until steps of different sizes were measured, and again when that was long ago, a further row costs a share of the
    first.

    Attributes:
        share: the cost of a further row, as a share of a step of one.
        of_one: seconds of a step of one row; infinite before any was measured.
    """

    share: float = USUAL_SHARE
    of_one: float = inf
    _steps: int = 0
    _sizes: dict[int, tuple[float, int, int]] = field(default_factory=dict)  # rows: seconds, how often, newest step

    def observe(self, rows: int, seconds: float) -> None:
        self._steps += 1
        known, count, _ = self._sizes.get(rows, (seconds, 0, 0))
        # The first step of a size may load its program. A much slower one was disturbed, unless steps stay so slow.
        now = seconds if count < 2 else known + RECENT * (min(seconds, 4 * known) - known)
        self._sizes[rows] = now, count + 1, self._steps
        if rows == 1:
            self.of_one = now

    def update(self) -> None:
        """Computes `share` from what was measured."""
        sizes = [n for n, (_, count, at) in self._sizes.items() if count > 1 and self._steps - at < FORGOTTEN]
        self.share = self._share(min(sizes), max(sizes)) if len(sizes) > 1 else USUAL_SHARE

    def _share(self, low: int, high: int) -> float:
        more = (self._sizes[high][0] - self._sizes[low][0]) / (high - low)
        first = self._sizes[low][0] - more * (low - 1)
        return min(1.0, max(0.0, more / first)) if first > 0 else 1.0

    def of(self, rows: int) -> float:
        """The cost of a step, in steps of one row."""
        return 1 + self.share * (rows - 1)
