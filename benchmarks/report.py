"""What `versus.py` makes of its measurements: medians, ratios, tables, and their place in a page of documentation."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = """# Measurements

Written by [`benchmarks/versus.py`](../benchmarks/versus.py); [its page](../benchmarks/README.md) says how it measures.
A ratio above 1 means that rlx is faster.
"""


@dataclass
class Series:
    """The runs of one side in one measurement.

    Attributes:
        units: what one run computes, in tokens; seconds are for all of them.
        seconds: one number a repetition, in the order in which the sides took turns.
        settings: what was chosen for this side, for the reader.
    """

    units: int
    seconds: list[float] = field(default_factory=list)
    settings: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second, of the median run."""
        return self.units / statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens a second of the slowest and of the fastest run."""
        return self.units / max(self.seconds), self.units / min(self.seconds)


def ratio(ours: Series, theirs: Series) -> float:
    """How many times as fast ours is, by medians."""
    return ours.rate / theirs.rate


def paired_ratio(ours: Series, theirs: Series) -> float:
    """The median over repetitions of the ratio within one: what the machine did meanwhile happened to both."""
    pairs = zip(ours.seconds, theirs.seconds, strict=True)
    scale = ours.units / theirs.units
    return statistics.median(scale * b / a for a, b in pairs)


@dataclass
class Measurement:
    """One row of the table: all sides on one task.

    Attributes:
        name: "prefill 512", "decode at 4096".
        sides: by name; "rlx" is one.
        work: operations (prefill) or bytes (decode) of one run, the same for all sides.
        limit: the machine's own rate of these, measured in between, in 10^9 a second, and what it is called.
    """

    name: str
    sides: dict[str, Series]
    work: float = 0.0
    limit: tuple[float, str] = (0.0, "")

    def achieved(self, side: str) -> float:
        """GB/s or GFLOP/s of the median run."""
        return self.work / statistics.median(self.sides[side].seconds) / 1e9

    def share(self, side: str) -> float:
        """Of the limit."""
        return self.achieved(side) / self.limit[0] if self.limit[0] else 0.0

    def as_json(self) -> dict[str, Any]:
        rows = {name: self._side(name, series) for name, series in self.sides.items()}
        return {"name": self.name, "limit": {"rate": self.limit[0], "of": self.limit[1]}, "sides": rows}

    def _side(self, name: str, series: Series) -> dict[str, Any]:
        row: dict[str, Any] = {"tokens_per_s": series.rate, "spread": series.spread, "seconds": series.seconds}
        row |= {"settings": series.settings, "giga_per_s": self.achieved(name), "share_of_limit": self.share(name)}
        if name != "rlx" and "rlx" in self.sides:
            ours = self.sides["rlx"]
            row |= {"ratio": ratio(ours, series), "paired_ratio": paired_ratio(ours, series)}
        return row


# -- tables -------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others numbers."""
    first, *lines = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join([first, "|---" + "|---:" * (len(head) - 1) + "|", *lines]) + "\n"


def speed_table(measurements: Sequence[Measurement]) -> str:
    """Tokens a second, ratios, and how near rlx is to the machine's limit where there is one.

    A dash stands where a side took no part. `Measurement.as_json` has more.
    """
    peers = list(dict.fromkeys(name for m in measurements for name in m.sides if name != "rlx"))
    limited = any(m.limit[0] for m in measurements)
    head = ["tokens/s", "rlx", *(["of the limit"] if limited else [])]
    for peer in peers:
        head += [peer, "ratio"]
    return markdown(head, (_speed_row(m, peers, limited) for m in measurements))


def _speed_row(m: Measurement, peers: Sequence[str], limited: bool) -> list[str]:
    ours, row = m.sides["rlx"], [m.name, _rate(m.sides["rlx"])]
    if limited:
        row.append(f"{m.share('rlx'):.0%} of {number(m.limit[0])} {m.limit[1]}")
    for peer in peers:
        series = m.sides.get(peer)
        row += [_rate(series), f"**{ratio(ours, series):.2f}**"] if series else ["-"] * 2
    return row


def _rate(series: Series) -> str:
    low, high = series.spread
    return f"{number(series.rate)} ({number(low)}-{number(high)})"


def start_table(starts: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Seconds to the first token: rows are kinds of start, columns sides; a dash where a side has no such start."""
    kinds = list(dict.fromkeys(kind for found in starts.values() for kind in found))
    rows = [[kind, *(_seconds(found.get(kind, ())) for found in starts.values())] for kind in kinds]
    return markdown(["seconds to the first token", *starts], rows)


def _seconds(runs: Sequence[float]) -> str:
    return f"{statistics.median(runs):.2f} ({min(runs):.2f}-{max(runs):.2f})" if runs else "-"


def memory_table(peaks: Mapping[str, int], file_bytes: int, kv_bytes: int) -> str:
    """Peak resident memory, and what of it is neither the file's size nor the cache's."""
    rows = [[side, *(f"{n / 1e6:,.0f}" for n in (peak, peak - file_bytes - kv_bytes))] for side, peak in peaks.items()]
    table = markdown(["MB", "peak resident", "beyond file and cache"], rows)
    return f"{table}\nFile {file_bytes / 1e6:,.0f} MB, cache {kv_bytes / 1e6:,.0f} MB.\n"


def busy_table(quiet: Mapping[str, Series], busy: Mapping[str, Series]) -> str:
    """Decoding alone and beside another program that computes without pause, and the share of its own speed that each
    side keeps.
    """
    kept = [f"**{busy[name].rate / quiet[name].rate:.0%}**" for name in quiet]
    rows = [["alone", *map(_rate, quiet.values())], ["beside one busy process", *map(_rate, busy.values())]]
    return markdown(["decoding, tokens/s", *quiet], [*rows, ["kept", *kept]])


# -- the page -----------------------------------------------------------------------------------------------------


def put(page: str, key: str, section: str) -> str:
    """A page with the section of this key put in place of the one of the same key, or added at the end."""
    if not re.fullmatch(r"[^<>\n]+", key):
        raise ValueError(f"{key!r} cannot name a section")
    begin, end = f"<!-- begin {key} -->", f"<!-- end {key} -->"
    block = f"{begin}\n{section.strip()}\n{end}"
    at, stop = page.find(begin), page.find(end)
    if at >= 0 and stop < at:
        raise ValueError(f"the page has {begin!r} without its end")
    if at >= 0:
        return page[:at] + block + page[stop + len(end) :]
    return f"{page.rstrip()}\n\n{block}\n"


def write(path: Path, key: str, section: str) -> None:
    """Puts a section into a file, which is made if there is none, and is never half written."""
    page = path.read_text() if path.exists() else HEAD
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(put(page, key, section))
    partial.replace(path)
