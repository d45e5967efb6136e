"""Dynamic scheduling: how the workers of a step take the units of a call.

The units of a call are divided into ranges, and the ranges into contiguous shares: one per worker, at most `SHARES`. A
worker takes the ranges of its own share in order. So it reads weights sequentially, and the prefetches of the hardware
and of the kernels reach into its next range. When its own share is empty, a worker steals ranges from the other shares.
This balances the load when a worker is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.backends.cpu.kernel import Units
from rlx.ir import dims

if TYPE_CHECKING:
    from rlx.backends.cpu.llvm_text import Text

SHARES = 16  # most shares of a call: an idle worker looks into each of them


def grain(units: Units, bounds: dims.Bounds) -> int:
    """Units per range: a multiple of `units.together`, but see `grain_of_few`."""
    if dims.bounds(units.dim, bounds)[1] <= units.few:
        return grain_of_few(units)
    size = max(1, units.most(bounds) // units.ranges)
    return -(-size // units.together) * units.together


def grain_of_few(units: Units) -> int:
    """Units per range where there are few: a multiple of `units.together` if there are so many ranges."""
    size = units.count(units.few) // units.ranges
    return -(-size // units.together) * units.together or 1


@dataclass(frozen=True)
class WorkStealing:
    """The loop in which a worker takes ranges of a call's units.

    The generated code reads `%stream` (the worker's own share), `%streams` (the number of shares) and `%counters` (the
    counters of the shares).

    Attributes:
        c: index of the call in its region.
        units: the number of units, an LLVM value.
        grain: units per range, an LLVM value.
        stride: bytes from the counters of one share to those of the next, in `%counters`.
    """

    c: int
    units: str
    grain: str
    stride: int

    def begin(self, t: Text) -> tuple[str, str]:
        """Opens the body of the loop; `end` closes it. Returns (start, end): the body computes units [start, end)."""
        c = self.c
        ranges = t.ceil_div(self.units, self.grain)
        share, counter = t.ceil_div(ranges, "%streams"), t.value(f"getelementptr i64, ptr %counters, i64 {c}")
        t.lines += [f"  store i64 0, ptr %empty{c}", f"  br label %take{c}", f"take{c}:"]
        passed = (
            f"ptr {counter}, i64 {self.stride}, ptr %empty{c}, i64 %stream, i64 %streams, i64 {share}, i64 {ranges}"
        )
        taken = t.value(f"call i64 @take({passed})")
        t.lines += [f"  br i1 {t.value(f'icmp slt i64 {taken}, 0')}, label %done{c}, label %work{c}", f"work{c}:"]
        start = t.value(f"mul i64 {taken}, {self.grain}")
        return start, t.least(t.value(f"add i64 {start}, {self.grain}"), self.units)

    def end(self, t: Text) -> None:
        """Closes the body and the loop."""
        t.lines += [f"  br label %take{self.c}", f"done{self.c}:"]


#: Takes a range and returns its number, or -1 if none is left. The search goes through the shares, of `%share` ranges
#: each, starting with `%stream`. `%empty` points to the number of shares that were already found empty, and
#: `%counter` to the counter of share 0.
TAKE = """define i64 @take(
  ptr %counter, i64 %stride, ptr %empty, i64 %stream, i64 %streams, i64 %share, i64 %ranges
) noinline {
entry:
  %begin = load i64, ptr %empty
  br label %look
look:
  %at = phi i64 [ %begin, %entry ], [ %after, %next ]
  %sum = add i64 %stream, %at
  %around = sub i64 %sum, %streams
  %whose = call i64 @llvm.umin.i64(i64 %sum, i64 %around)
  %first = mul i64 %whose, %share
  %end = add i64 %first, %share
  %last = call i64 @llvm.umin.i64(i64 %end, i64 %ranges)
  %left = sub i64 %last, %first
  %offset = mul i64 %whose, %stride
  %place = getelementptr i8, ptr %counter, i64 %offset
  %seen = load atomic i64, ptr %place monotonic, align 8
  %some = icmp slt i64 %seen, %left
  br i1 %some, label %try, label %next
try:
  %taken = atomicrmw add ptr %place, i64 1 monotonic
  %mine = icmp slt i64 %taken, %left
  br i1 %mine, label %found, label %next
found:
  store i64 %at, ptr %empty
  %range = add i64 %first, %taken
  ret i64 %range
next:
  %after = add i64 %at, 1
  %more = icmp ult i64 %after, %streams
  br i1 %more, label %look, label %none
none:
  ret i64 -1
}"""


def stride(calls: int) -> int:
    """Bytes of a share's counters for all calls of a step: a multiple of 128, so that shares use separate cache lines.

    128 bytes are a pair of lines, because hardware prefetches lines in pairs.
    """
    return -(-8 * calls // 128) * 128


def counter_bytes(manifest: Mapping[str, Any]) -> int:
    """Bytes of a program's counters: for each share one per call, then one per region."""
    regions = manifest["regions"]
    return SHARES * stride(sum(map(len, regions))) + 8 * len(regions)
