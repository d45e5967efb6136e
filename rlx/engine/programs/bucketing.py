"""Cache modes: choose the program of a call by its number of rows and of past positions.

Runners stage, under the engine. docs/caches.md defines the modes and lists what each of them compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlx.engine.programs.program_spec import ProgramSpec, Range
from rlx.models.variants import EmbeddedRows

PREFILL = ("buckets", "exact", "dynamic")
DECODE = ("dynamic", "buckets", "exact")

SEGMENT_ROWS = (8, 32)  # largest row counts of programs for rows of several sequences, besides the largest bucket

_spec = lru_cache(ProgramSpec)  # called for every step; most steps repeat the spec of the last one


@dataclass(frozen=True)
class Bucketing:
    """How programs are specialized, for calls of several rows (prefill) and of one row (decode).

    Attributes:
        ranges: (smallest, largest) row count of each bucket.
        prefill: "buckets": one program for each of `ranges`; "exact": one for each number of rows, as a constant;
            "dynamic": one for all numbers of rows.
        decode: "dynamic": one program for every past; "buckets": one for each power of two, to which the past is
            rounded up, as far as `max_past`; "exact": one for each past, as a constant.
        max_past: the largest past with a bucket for decode; the dynamic program runs beyond it.
    """

    ranges: tuple[Range, ...]
    prefill: str = "buckets"
    decode: str = "dynamic"
    max_past: int = 0

    def spec(
        self,
        rows: int,
        past: int,
        all_rows: bool,
        hidden: bool,
        max_seq: int,
        embeds: EmbeddedRows | None = None,
        bias: int = 0,
        verifies: bool = False,
    ) -> ProgramSpec:
        """The spec of the program for a call of `rows` rows after `past` positions, in a context of `max_seq`.

        Args:
            all_rows, hidden: as in `ProgramSpec`. For the logits of several rows, the program is that of a bucket in
                every mode: only scoring and verifying request them.
            embeds, bias: as in `ProgramSpec`.
            verifies: whether rows may be rejected.
        """
        every = all_rows and rows > 1
        bounds = None if every else self.past(rows, past)
        if bias:  # its memory grows with the past, so the past is bounded
            bounds = (0, past_bucket(max_seq)[1])
        seq = self.bucket(rows) if every else self.rows(rows)
        return _spec(seq, every, hidden, bounds, embeds, bias, verifies=every and verifies)

    def bucket(self, rows: int) -> Range:
        """The range that contains `rows`."""
        return next(bounds for bounds in self.ranges if bounds[0] <= rows <= bounds[1])

    def segments(self, rows: int, embeds: EmbeddedRows | None = None) -> ProgramSpec:
        """The spec of the program for a call of `rows` rows that belong to several sequences; `embeds` as in `spec`."""
        return _spec(next(bounds for bounds in self.segment_ranges if rows <= bounds[1]), embeds=embeds, segments=True)

    @property
    def segment_ranges(self) -> tuple[Range, ...]:
        """(smallest, largest) row count of each program for rows of several sequences."""
        most = self.ranges[-1][1]
        ends = [*(rows for rows in SEGMENT_ROWS if rows < most), max(most, 2)]
        return tuple(zip([2, *(end + 1 for end in ends[:-1])], ends, strict=True))

    def rows(self, rows: int) -> Range:
        """Range of SEQ of the program for a call of `rows` rows."""
        if rows == 1 or self.prefill == "buckets":
            return self.bucket(rows)
        return (rows, rows) if self.prefill == "exact" else (2, self.ranges[-1][1])

    def past(self, rows: int, past: int) -> Range | None:
        """Range of PAST_SEQ of the program for a call after `past` positions; None for any."""
        if rows > 1 or self.decode == "dynamic":
            return None
        if self.decode == "exact":
            return (past, past)
        return past_bucket(past) if past <= self.max_past else None


def past_bucket(past: int) -> Range:
    """The bucket of a past: 0..1, 2, 3..4, 5..8, 9..16 and so on."""
    high = 1 << (past - 1).bit_length() if past > 1 else 1
    return (high // 2 + 1 if high > 1 else 0, high)


def past_buckets(max_past: int) -> int:
    """Number of buckets up to a past."""
    return past_bucket(max_past)[1].bit_length()
