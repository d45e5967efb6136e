"""Hand out: how the workers of a step get the units of a call.

The units of a call are cut into ranges, and the ranges into as many shares, each in one piece, as there are workers,
but no more than `SHARES`. A worker takes range after range of its own share, so that its weights follow each other: the
hardware, and the prefetches of the kernels, run ahead into the range that comes next. When nothing is left there, it
takes from the other shares, so a slow worker leaves its work to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.codegen.calls import Units
from rlx.ir import dims
from rlx.ir.dims import DimLike

CHUNKS = 32  # ranges that a call's units are cut into at most: small enough to balance, large enough to stream
FEWEST = 16  # ranges that are left where units go together
SHARES = 8  # of a call at most: a worker without work looks into each


class Text:
    """Lines of a function body with fresh value names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def value(self, code: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {code}")
        return f"%v{self.count}"

    def load(self, kind: str, table: str, index: int) -> str:
        return self.value(f"load {kind}, ptr {self.value(f'getelementptr {kind}, ptr {table}, i64 {index}')}")

    def dim(self, dim: DimLike, symbols: list[str]) -> str:
        """The value of a dim; `%ext` has those of the symbols."""
        if isinstance(dim, int):
            return str(dim)
        total = str(dim.const)
        for name, factor in dim.terms:
            part = self.load("i64", "%ext", symbols.index(name))
            part = part if factor == 1 else self.value(f"mul i64 {part}, {factor}")
            total = part if total == "0" else self.value(f"add i64 {total}, {part}")
        return total

    def units(self, units: Units, symbols: list[str]) -> str:
        """How many units there are."""
        if isinstance(units.dim, int):
            return str(units.most({}))
        count = self.ceil_div(self.dim(units.dim, symbols), str(units.per))
        return count if units.times == 1 else self.value(f"mul i64 {count}, {units.times}")

    def ceil_div(self, count: str, by: str) -> str:
        if by == "1":
            return count
        if count.isdigit() and by.isdigit():
            return str(-(-int(count) // int(by)))
        less = str(int(by) - 1) if by.isdigit() else self.value(f"sub i64 {by}, 1")
        return self.value(f"udiv i64 {self.value(f'add i64 {count}, {less}')}, {by}")

    def least(self, a: str, b: str) -> str:
        return self.value(f"call i64 @llvm.umin.i64(i64 {a}, i64 {b})")


def grain(units: Units, bounds: dims.Bounds) -> int:
    """Units of a range: a multiple of those that go together, where that leaves enough ranges."""
    most = units.most(bounds)
    size = max(1, most // CHUNKS)
    return size if most < FEWEST * units.together else -(-size // units.together) * units.together


@dataclass(frozen=True)
class Handout:
    """The loop in which a worker takes ranges of a call's units, over `%stream`, `%streams` and `%turns`.

    Attributes:
        c: number of the call in its region.
        units: how many there are.
        grain: units of a range.
        stride: bytes from the counters of one share to those of the next, in `%turns`.
    """

    c: int
    units: str
    grain: int
    stride: int

    def begin(self, t: Text) -> tuple[str, str]:
        """Opens the loop's body, where the units of the result, [start, end), are to be done; closed by `end`."""
        c = self.c
        ranges = t.ceil_div(self.units, str(self.grain))
        share, counter = t.ceil_div(ranges, "%streams"), t.value(f"getelementptr i64, ptr %turns, i64 {c}")
        t.lines += [f"  store i64 0, ptr %turn{c}", f"  br label %take{c}", f"take{c}:"]
        passed = f"ptr {counter}, i64 {self.stride}, ptr %turn{c}, i64 %stream, i64 %streams, i64 {share}, i64 {ranges}"
        taken = t.value(f"call i64 @take({passed})")
        t.lines += [f"  br i1 {t.value(f'icmp slt i64 {taken}, 0')}, label %done{c}, label %work{c}", f"work{c}:"]
        start = t.value(f"mul i64 {taken}, {self.grain}")
        return start, t.least(t.value(f"add i64 {start}, {self.grain}"), self.units)

    def end(self, t: Text) -> None:
        """Closes the loop's body, and the loop."""
        t.lines += [f"  br label %take{self.c}", f"done{self.c}:"]


#: The number of a range that is nobody's yet, or -1 if there is none. It is looked for in the shares of `%share` ranges
#: from `%turn` on, which counts them beginning with the own one, `%stream`; `%counter` is that of share 0.
TAKE = """define i64 @take(
  ptr %counter, i64 %stride, ptr %turn, i64 %stream, i64 %streams, i64 %share, i64 %ranges
) noinline {
entry:
  %begin = load i64, ptr %turn
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
  store i64 %at, ptr %turn
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
    """Bytes of a share's counters, for all calls of a step: shares have cache lines of their own, in pairs."""
    return -(-8 * calls // 128) * 128


def counter_bytes(manifest: Mapping[str, Any]) -> int:
    """Bytes of a program's counters: for each share one a call, then one a region."""
    regions = manifest["regions"]
    return SHARES * stride(sum(map(len, regions))) + 8 * len(regions)
