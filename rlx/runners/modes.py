"""Cache modes: which program a call runs in, from the number of its rows and of the positions before them.

Runners stage, under the engine. docs/caches.md defines the modes and shows what each of them compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlx.runners.wanted import Range, Wanted
from rlx.runtime.given import Given

PREFILL = ("buckets", "exact", "dynamic")
DECODE = ("dynamic", "buckets", "exact")

_wanted = lru_cache(Wanted)  # most calls want what the last one wanted, and all of them ask


@dataclass(frozen=True)
class Modes:
    """How programs are cut, for calls of several rows (prefill) and of one (decode).

    Attributes:
        ranges: (smallest, largest) row count of each bucket.
        prefill: "buckets": a program for each of `ranges`; "exact": one for each number of rows, as a constant;
            "dynamic": one for all numbers of rows.
        decode: "dynamic": one program for every past; "buckets": one for each power of two that the past is rounded up
            to, as far as `max_past`; "exact": one for each past, as a constant.
        max_past: the past up to which decode has buckets; behind it the dynamic program runs.
    """

    ranges: tuple[Range, ...]
    prefill: str = "buckets"
    decode: str = "dynamic"
    max_past: int = 0

    def wanted(
        self,
        rows: int,
        past: int,
        all_rows: bool,
        hidden: bool,
        given: Given | None,
        max_seq: int,
        turn: int | None = None,
    ) -> Wanted:
        """The program for a call of some rows behind `past` positions, in a context of `max_seq`.

        Args:
            all_rows, hidden: as in `Wanted`. Logits of every row are for measuring and verifying: buckets serve.
            given: what the rows are computed from, if it is something else than their ids.
            turn: as in `Wanted`, where rows may turn out wrong.
        """
        if all_rows and rows > 1:
            return _wanted(self.bucket(rows), True, hidden, verifies=turn is not None, turn=turn or 0)
        seq, bounds, bias = self.rows(rows), self.past(rows, past), 0
        if given is not None and given.bias is not None:  # its memory grows with the past, so that has a bound
            bounds, bias = (0, past_bucket(max_seq)[1]), given.bias.shape[1]
        return _wanted(seq, False, hidden, bounds, given is not None, bias)

    def bucket(self, rows: int) -> Range:
        """The range that so many rows are in."""
        return next(bounds for bounds in self.ranges if bounds[0] <= rows <= bounds[1])

    def rows(self, rows: int) -> Range:
        """Range of SEQ of the program for a call of so many rows."""
        if rows == 1 or self.prefill == "buckets":
            return self.bucket(rows)
        return (rows, rows) if self.prefill == "exact" else (2, self.ranges[-1][1])

    def past(self, rows: int, past: int) -> Range | None:
        """Range of PAST_SEQ of the program for a call behind `past` positions; None for any."""
        if rows > 1 or self.decode == "dynamic":
            return None
        if self.decode == "exact":
            return (past, past)
        return past_bucket(past) if past <= self.max_past else None


def past_bucket(past: int) -> Range:
    """0..1, 2, 3..4, 5..8, 9..16 and so on: the bucket of a past."""
    high = 1 << (past - 1).bit_length() if past > 1 else 1
    return (high // 2 + 1 if high > 1 else 0, high)


def past_buckets(max_past: int) -> int:
    """How many buckets there are up to a past."""
    return past_bucket(max_past)[1].bit_length()
