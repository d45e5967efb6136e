"""Reports: what each pass did to a graph, by which rule and where, and what a rule missed and why.

A pass notes events in a `Log`. Events that differ only in the number of a layer are folded into one with a count, so
the report of a model with 28 equal layers is as long as that of one layer. Reports are plain data: text for a terminal
(`str(report)`), JSON for tools (`Report.as_dict`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.rules import OFF, Rule, misses, rewrite

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d{1,9}(?=\.|$)")  # of a layer: a whole part of a name
_NAME = re.compile(r"%[A-Za-z0-9_.]*[A-Za-z0-9_]")


@dataclass(frozen=True)
class Event:
    """Something that a pass did, or something that a rule missed, at one or several values.

    Attributes:
        rule: name of the rule or choice.
        where: name of the value; `*` stands for the number of a layer.
        detail: what the value became; of a miss, the reason. In names here, `*` is the same layer, `*-1` the layer
            before.
        layers: the numbers that `*` stands for; empty where there is none.
        count: number of values.
    """

    rule: str
    where: str
    detail: str = ""
    layers: tuple[int, ...] = ()
    count: int = 1

    @property
    def place(self) -> str:
        """`where` with the layers: "blk.{0-27}.attn_q"."""
        return self.where.replace("*", ranges(self.layers), 1) if self.layers else self.where


@dataclass(frozen=True)
class PassReport:
    """The changes of one pass.

    Attributes:
        name: of the pass, as `rlx compile --stop-after` takes it.
        done: the rewrites and choices.
        missed: rules whose pattern was there and that a condition kept from being applied.
        facts: figures, such as the number of regions.
        nodes: number of nodes before and after.
        changed: whether the result differs from what the pass got.
        note: why it did nothing, where that was a choice.
        seconds: wall time.
    """

    name: str
    done: tuple[Event, ...] = ()
    missed: tuple[Event, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict)
    nodes: tuple[int, int] = (0, 0)
    changed: bool = False
    note: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = [f"{name} {value:,}" for name, value in self.facts.items()]
        if self.nodes[0] != self.nodes[1]:
            counts.append(f"{self.nodes[0]} -> {self.nodes[1]} nodes")
        said = ", ".join(filter(None, ["" if self.changed else "no change", self.note, *counts]))
        rows = [("  ", event) for event in self.done] + [("  missed: ", event) for event in self.missed]
        return "\n".join([f"{self.name}: {said or 'changed'}", *_table(rows)])


@dataclass(frozen=True, repr=False)
class Report:
    """The changes of the compiler to a graph for one program.

    Attributes:
        graph: name of the graph.
        phase: "prefill", "decode" or "batch".
        rows: smallest and largest number of rows of a call.
        precision: "auto" or "exact".
        passes: in order.
        kernels: which kernel computes which values: `rule` is the kernel's symbol, as `exe.source` takes it.
    """

    graph: str
    phase: str
    rows: tuple[int, int]
    precision: str
    passes: tuple[PassReport, ...]
    kernels: tuple[Event, ...] = ()

    def __str__(self) -> str:
        low, high = self.rows
        rows = f"{low} row{'s' * (low != 1)}" if low == high else f"{low}-{high} rows"
        head = f"{self.graph}: {self.phase}, {rows}, precision {self.precision}"
        kernels = ["kernels:", *_table([("  ", event) for event in self.kernels])] if self.kernels else []
        return "\n".join([head, "", *map(str, self.passes), *kernels]) + "\n"

    __repr__ = __str__

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """The report that `as_dict` describes."""
        passes = tuple(
            PassReport(**{**p, "done": _events(p["done"]), "missed": _events(p["missed"]), "nodes": tuple(p["nodes"])})
            for p in data["passes"]
        )
        return Report(**{**data, "rows": tuple(data["rows"]), "passes": passes, "kernels": _events(data["kernels"])})

    def to_json(self) -> str:
        """As text; `from_json` reads it back."""
        return json.dumps(self.as_dict())

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        """The report that `to_json` wrote."""
        return Report.from_dict(json.loads(text))


class Log:
    """Takes the events of one pass, each at one value."""

    def __init__(self) -> None:
        self._done: list[Event] = []
        self._missed: list[Event] = []
        self._facts: dict[str, int] = {}
        self._note = ""

    def remark(self, note: str) -> None:
        """Why the pass did nothing, or not all that it could."""
        self._note = note

    def fact(self, name: str, value: int) -> None:
        """A figure about the result."""
        self._facts[name] = value

    def done(self, rule: str, name: str, detail: str = "") -> None:
        """A rule rewrote the value of this name."""
        self._done.append(Event(rule, name, detail))

    def missed(self, rule: str, name: str, reason: str) -> None:
        """A rule could have been applied to the value, had it not been for `reason`. In it, names begin with `%`."""
        self._missed.append(Event(rule, name, reason))

    def report(self, name: str, nodes: tuple[int, int], changed: bool, seconds: float) -> PassReport:
        """The changes of the pass."""
        done, missed = fold(self._done), fold(self._missed)
        return PassReport(name, done, missed, self._facts, nodes, changed, self._note, round(seconds, 6))


class _Silent(Log):
    """Keeps nothing."""

    def remark(self, note: str) -> None: ...
    def fact(self, name: str, value: int) -> None: ...
    def done(self, rule: str, name: str, detail: str = "") -> None: ...
    def missed(self, rule: str, name: str, reason: str) -> None: ...


#: The log of a pass that nobody wants a report of.
SILENT: Log = _Silent()


def fold(events: Iterable[Event]) -> tuple[Event, ...]:
    """Joins events at values whose names differ only in the number of a layer. The first of a kind gives the order."""
    groups: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        layer = layer_of(event.where)
        where = event.where if layer is None else without_layer(event.where)
        groups.setdefault((event.rule, where, relative(event.detail, layer)), []).append(event)
    folded = []
    for (rule, where, detail), group in groups.items():
        found = (layer_of(event.where) for event in group)
        layers = tuple(sorted({layer for layer in found if layer is not None}))
        if len(layers) > 1:
            folded.append(Event(rule, where, detail, layers, len(group)))
        else:
            folded.append(replace(group[0], count=len(group)))
    return tuple(folded)


def layer_of(name: str) -> int | None:
    """The number of the layer in the name of a value: 3 of "blk.3.attn_q"; None if there is none."""
    number = _NUMBER.search(name)
    return int(number[0]) if number else None


def without_layer(name: str) -> str:
    """The name of a value with `*` in place of the number of its layer: "blk.*.attn_q"."""
    return _NUMBER.sub("*", name, count=1)


def relative(text: str, layer: int | None) -> str:
    """A text with `*` in place of the layer in the names in it, and `*-1` in place of the layer before."""
    if layer is None:
        return text
    stars = {str(layer): "*", str(layer - 1): "*-1"}
    return _NAME.sub(lambda name: _NUMBER.sub(lambda n: stars.get(n[0], n[0]), name[0], count=1), text)


def ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "{0-2,5}"."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    ends = [a for a, b in pairwise(numbers) if b != a + 1] + [*numbers[-1:]]
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) + "}"


def _table(rows: Sequence[tuple[str, Event]]) -> list[str]:
    """Lines of events, their columns aligned."""
    cells = [(before + e.rule, f"{e.place}{f' x{e.count}' * (e.count > 1)}", e.detail) for before, e in rows]
    widths = [max((len(row[i]) for row in cells), default=0) for i in (0, 1)]
    return [f"{rule:{widths[0]}}  {place:{widths[1]}}  {detail}".rstrip() for rule, place, detail in cells]


def _events(rows: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    return tuple(Event(**{**row, "layers": tuple(row["layers"])}) for row in rows)


def rewrite_logged(
    graph: Graph, rules: Sequence[Rule], log: Log, off: Mapping[str, Sequence[Rule]] | None = None
) -> Graph:
    """Applies the rules until none matches.

    Args:
        off: rules that are left out, by the name of their group: where they would match is noted as missed.
    """
    after = rewrite(graph, rules, lambda rule, name: log.done(rule.name, name))
    names = after.names()
    for rule, node, reason in misses(after, rules):
        log.missed(rule.name, names[node], reason)
    for group, left_out in (off or {}).items():
        for rule, node, reason in misses(after, left_out):
            if reason == OFF:
                log.missed(rule.name, names[node], f'the group "{group}" is off')
    return after
