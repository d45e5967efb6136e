"""Writes the tables of speed in the documentation from one place: `python tools/site/speed.py`.

docs/data/speed.toml says which machines and formats they show. The rates stand in docs/measurements.md, where
`benchmarks/versus.py --write` puts them. A page has a table between `<!-- begin speed: PEER -->` and
`<!-- end speed -->`, one for each program that rlx is compared with. tests/test_speed_tables.py fails where a page
shows something else.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = "docs/data/speed.toml"
MEASUREMENTS = "docs/measurements.md"
PAGES = ("README.md", "docs/performance.md")
_TABLE = re.compile(r"(?<=<!-- begin speed: )([\w.]+)( -->\n).*?(?=<!-- end speed -->)", re.DOTALL)
_DATE = re.compile(r"; (\d{4}-\d\d-\d\d),")


class SpeedError(Exception):
    """A table cannot be made of what was measured."""


@dataclass(frozen=True)
class Section:
    """A section of the measurements: its date, and the rows of its table of speeds, by their names."""

    date: str
    rows: dict[str, dict[str, float]]

    @staticmethod
    def of(text: str, name: str) -> Section:
        """The section of this name. A rate is the first number of its cell, a median."""
        found = re.search(rf"<!-- begin {re.escape(name)} -->\n(.*?)<!-- end ", text, re.DOTALL)
        if found is None or (date := _DATE.search(found[1])) is None:
            raise SpeedError(f"{MEASUREMENTS} lacks the section {name!r} with a date: run benchmarks/versus.py")
        head, _, *lines = list(_cells(found[1]))
        sides = {side: at for at, side in enumerate(head) if side == "rlx" or head[at + 1 : at + 2] == ["ratio"]}
        return Section(date[1], {line[0]: {side: _rate(line[at]) for side, at in sides.items()} for line in lines})


def _cells(text: str) -> Iterator[list[str]]:
    """The rows of the first table."""
    for line in text.partition("\n\n|")[2].partition("\n\n")[0].splitlines():
        if line.endswith("|"):
            yield [cell.strip() for cell in line.strip("| ").split("|")]


def _rate(cell: str) -> float:
    return float(cell.split()[0].replace(",", ""))


def spread(ratios: Sequence[float]) -> str:
    """One number, or a range where runs differ: `1.8`, `2.4 to 4.3`."""
    shown = [f"{ratio:.1f}" for ratio in (min(ratios), max(ratios))]
    return " to ".join(dict.fromkeys(shown))


def table(peer: str, root: Path = ROOT) -> str:
    """The table of rlx beside one program, with a line above it. Machines where it was not measured are left out."""
    data = tomllib.loads((root / DATA).read_text(encoding="utf-8"))
    text = (root / MEASUREMENTS).read_text(encoding="utf-8")
    lines, dates = [], set()
    for machine, section in data["machines"].items():
        found = {f: Section.of(text, f"{data['model']}-{f}.gguf, {section}") for f in data["formats"]}
        if any(peer not in rates for part in found.values() for rates in part.rows.values()):
            continue
        dates |= {part.date for part in found.values()}
        for task, shown in data["tasks"].items():
            cells = [spread(list(_ratios(data, machine, f, task, peer, found[f]))) for f in data["formats"]]
            lines.append(f"| {machine}, {shown} | {' | '.join(cells)} |")
    if not lines:
        raise SpeedError(f"no machine of {DATA} was measured with {peer}")
    days = " to ".join(dict.fromkeys((min(dates), max(dates))))
    head = f"Speed relative to {peer} (above 1, rlx is faster), {days}:"
    columns = f"| {data['title']} | {' | '.join(data['formats'])} |"
    return "\n".join(["", head, "", columns, "|---" * (len(data["formats"]) + 1) + "|", *lines, "", ""])


def _ratios(data: dict[str, Any], machine: str, kind: str, task: str, peer: str, section: Section) -> Iterator[float]:
    """Of the section, and of each separate run."""
    runs = [run for run in data.get("runs", []) if (run["machine"], run["format"]) == (machine, kind)]
    for rates in (section.rows[task], *(run[task] for run in runs if peer in run.get(task, {}))):
        yield rates["rlx"] / rates[peer]


def filled(page: str, root: Path = ROOT) -> str:
    """The text of a page with its tables made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}{found[2]}{table(found[1], root)}", page)


def main() -> None:
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
