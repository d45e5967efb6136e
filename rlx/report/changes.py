"""What a pass changed, line by line: which values took the place of which, and the rule that did it.

Report stage. Changes that differ only in the number of a layer are one change with the numbers of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlx.ir import printer
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.report import Event, PassReport, layer_of, relative, without_layer


@dataclass(frozen=True)
class Change:
    """One change, at a value or at the equal values of several layers.

    Attributes:
        name: of the value; `*` stands for the number of the layer.
        rules: what changed it; empty if only its operands changed.
        before: lines of the IR that are gone: of values that became a part of it, and its own.
        after: its own line now; empty if it is gone.
        layers: numbers that `*` stands for.
    """

    name: str
    rules: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    layers: tuple[int, ...]

    def as_row(self) -> dict[str, Any]:
        """Plain data, with short keys because a report has many of them."""
        row: dict[str, Any] = {"n": self.name, "b": list(self.before), "a": list(self.after)}
        return row | ({"r": list(self.rules)} if self.rules else {}) | ({"l": list(self.layers)} if self.layers else {})


def changes(before: Graph, after: Graph, done: PassReport | None) -> list[Change]:
    """The changes of a pass, in the order of computation.

    Args:
        done: what the pass reported.
    """
    old, new = _lines(before), _lines(after)
    rules = _rules(done.done if done else ())
    gone: dict[str, list[str]] = {}  # name of a value -> lines of values that became a part of it
    lost = _lost(before, new)
    for name in old:
        if name not in new:
            gone.setdefault(lost[name], []).append(old[name])
    found = []
    for name, line in new.items():
        removed = gone.pop(name, [])
        if old.get(name) != line or removed:
            found.append(_change(name, rules, [*removed, *filter(None, [old.get(name, "")])], [line]))
    for name, removed in gone.items():
        found.append(_change(name, rules, removed, []))
    return _folded(found)


def _lines(graph: Graph) -> dict[str, str]:
    names = graph.names()
    return {names[node]: printer.line(node, names) for node in graph.nodes()}


def _rules(events: Sequence[Event]) -> dict[str, list[str]]:
    """Name of a value -> the rules that changed it."""
    found: dict[str, list[str]] = {}
    for event in events:
        for name in [event.where.replace("*", str(n), 1) for n in event.layers] or [event.where]:
            found.setdefault(name, []).append(event.rule)
    return found


def _lost(before: Graph, new: Mapping[str, str]) -> dict[str, str]:
    """Name of a value that is gone -> the value that it became a part of: the nearest reader that is still there."""
    names, users = before.names(), before.users()
    found: dict[Node, str] = {}
    for node in reversed(before.nodes()):
        kept = [names[user] for user in users[node] if names[user] in new]
        through = [found[user] for user in users[node] if user in found]
        found[node] = names[node] if names[node] in new else next(iter([*kept, *through]), names[node])
    return {names[node]: name for node, name in found.items() if names[node] not in new}


def _change(name: str, rules: Mapping[str, Sequence[str]], before: Sequence[str], after: Sequence[str]) -> Change:
    layer = layer_of(name)
    layers = () if layer is None else (layer,)
    gone, now = (tuple(relative(line, layer) for line in lines) for lines in (before, after))
    return Change(without_layer(name), tuple(dict.fromkeys(rules.get(name, ()))), gone, now, layers)


def _folded(found: Sequence[Change]) -> list[Change]:
    groups: dict[Change, list[Change]] = {}
    for each in found:
        groups.setdefault(replace(each, layers=()), []).append(each)
    return [
        replace(key, layers=tuple(sorted({layer for each in group for layer in each.layers})))
        for key, group in groups.items()
    ]
