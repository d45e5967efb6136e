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
class _Sums:
    """Sums over the steps, x being a depth and y the seconds of a row there."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("count", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, FADE * getattr(self, name) + value)


@dataclass
class PromptCost:
    """How long prompt rows take.

    Args:
        first: seconds of a row, until anything was measured.
    """

    first: float
    _more: float = 0.0
    _level: float = 1.0
    _sums: _Sums = field(default_factory=_Sums)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._sums.count > 0

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
        self._sums.add(depth, each)
        self._fit()

    def _fit(self) -> None:
        s = self._sums
        x, y = s.x / s.count, s.y / s.count
        more = (s.xy / s.count - x * y) / (s.xx / s.count - x * x + SPREAD * SPREAD)
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
class _Measured:
    """The average time of steps of one size, and when the last of them was."""

    seconds: float
    at: int
    count: int = 1


@dataclass
class StepCost:
    """The cost of a decode step by its number of rows: seconds = first + more * (rows - 1), from measured steps.

    Until steps of different sizes were measured, and again when that was long ago, a further row costs a share of the
    first.
    """

    share: float = USUAL_SHARE
    _steps: int = 0
    _sizes: dict[int, _Measured] = field(default_factory=dict)

    def observe(self, rows: int, seconds: float) -> None:
        self._steps += 1
        known = self._sizes.setdefault(rows, _Measured(seconds, self._steps, 0))
        # The first step of a size may load its program. A much slower one was disturbed, unless steps stay so slow.
        now = seconds if known.count < 2 else min(seconds, 4 * known.seconds)
        known.seconds = now if known.count < 2 else known.seconds + RECENT * (now - known.seconds)
        known.count, known.at = known.count + 1, self._steps

    @property
    def of_one(self) -> float:
        """Seconds of a step of one row; infinite before any was measured."""
        return self._sizes[1].seconds if 1 in self._sizes else inf

    def update(self) -> None:
        """Computes `share` from what was measured."""
        sizes = [size for size, each in self._sizes.items() if each.count > 1 and self._steps - each.at < FORGOTTEN]
        self.share = self._share(min(sizes), max(sizes)) if len(sizes) > 1 else USUAL_SHARE

    def _share(self, low: int, high: int) -> float:
        more = (self._sizes[high].seconds - self._sizes[low].seconds) / (high - low)
        first = self._sizes[low].seconds - more * (low - 1)
        return min(1.0, max(0.0, more / first)) if first > 0 else 1.0

    def of(self, rows: int) -> float:
        """The cost of a step, in steps of one row."""
        return 1 + self.share * (rows - 1)
