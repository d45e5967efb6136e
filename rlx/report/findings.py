"""The changes of a pass, line by line, and the savings of a fusion, or of a missed one: regions and bytes.

Report stage. Changes that differ only in the number of a layer are one change with the numbers of its layers. For the
groups of rules the passes run again without each of them (or with it, where it is off), so the figures are exact. For a
near miss they are an estimate: the value between the ops would not be written and read, and its region would not be
waited for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from rlx.ir import printer
from rlx.ir.costs import cost
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes import fuse, pipeline
from rlx.passes.options import FUSION_MEANINGS, FUSIONS, Options
from rlx.passes.program import Program, is_work, root
from rlx.passes.report import Event, PassReport, layer_of, relative, without_layer

_VALUE = re.compile(r"%([A-Za-z0-9_.*]*(?:\*-1)?[A-Za-z0-9_.]*[A-Za-z0-9_])")


@dataclass(frozen=True)
class Totals:
    """Figures of a program.

    Attributes:
        nodes: number of nodes that a step computes.
        regions: number of regions.
        bytes: that all nodes of a step read and write.
    """

    nodes: int
    regions: int
    bytes: int

    @staticmethod
    def of(program: Program, env: Mapping[str, int]) -> Totals:
        """Those of a program after all passes."""
        work = [node for node in program.graph.nodes() if is_work(node)]
        return Totals(len(work), len(program.regions), sum(cost(node, env)[1] for node in work))


def groups(
    before: Graph, after: str, program: Program, options: Options, env: Mapping[str, int], used: Set[str]
) -> list[dict[str, Any]]:
    """The effect of each group of fusion rules on a program.

    Args:
        before: the graph before the first pass that asks for groups, `fuse`.
        after: the name of the pass that made it.
        program: with the options as they are.
        env: the symbol values that figures are for.
        used: the rules that did something, of all passes.

    Returns:
        For each group that changes the program: its name, meaning, whether it is on, and the figures of the program
        `with` and `without` it.
    """
    now = Totals.of(program, env)
    found = []
    for name in FUSIONS:
        on = name in options.fusions
        if on and not used & rules_of(name):
            continue
        others = tuple(group for group in FUSIONS if (group in options.fusions) != (group == name))
        changed = replace(options, fusions=others)
        other = Totals.of(pipeline.resume(before, changed, after), env)
        if other != now:
            pair = {"with": vars(now if on else other), "without": vars(other if on else now)}
            found.append({"group": name, "meaning": FUSION_MEANINGS[name], "on": on, **pair})
    return found


def rules_of(group: str) -> set[str]:
    """The names of a group's rules, as they are in reports."""
    return {rule.name for rule in fuse.groups().get(group, ())} | {group, f"{group}-bf16"}


def missed_rows(done: PassReport, program: Program | None) -> list[dict[str, Any]]:
    """Plain data of a pass's near misses, with what each would save at most, where the values are still there."""
    rows = []
    for event in done.missed:
        row: dict[str, Any] = {"rule": event.rule, "n": event.where, "why": event.detail, "layers": list(event.layers)}
        row["count"] = event.count
        if program is not None:
            row |= _saved(event, program)
        rows.append(row)
    return rows


def _saved(event: Event, program: Program) -> dict[str, Any]:
    nodes = {name: node for node, name in program.graph.names().items()}
    total_bytes, regions, values = 0, set[int](), list[str]()
    for layer in event.layers or (None,):
        name, detail = _at(event.where, layer), _at(event.detail, layer)
        node = nodes.get(name)
        between = _between(node, detail, nodes, event.rule)
        if between is None:
            continue
        values.append(program.graph.names()[between])
        at = _region(between, program)
        if at is None:
            continue  # every worker computes it for itself, in its own cache: there is nothing to save
        if event.rule != "prologue":
            total_bytes += 2 * program.buffer(root(between)).nbytes
        if _alone(between, at, program):
            regions.add(at)
    return {"value": values[0], "bytes": total_bytes, "regions": len(regions)} if values else {}


def _at(text: str, layer: int | None) -> str:
    """A name or text of an event, for one layer."""
    return text if layer is None else text.replace("*-1", str(layer - 1)).replace("*", str(layer))


def _between(node: Node | None, detail: str, nodes: Mapping[str, Node], rule: str) -> Node | None:
    """The value that a fusion would do away with: the one that the reason names, else the first computed operand."""
    if rule == "prologue":
        return node
    named = [nodes[name] for name in _VALUE.findall(detail) if name in nodes]
    operands = [root(i) for i in node.inputs if is_work(root(i))] if node is not None else []
    return next((n for n in (*named, *operands) if is_work(n)), None)


def _region(node: Node, program: Program) -> int | None:
    """The region whose units compute a value; None for one that every worker computes for itself."""
    return next((i for i, nodes in enumerate(program.regions) if root(node) in nodes or node in nodes), None)


def _alone(node: Node, at: int, program: Program) -> bool:
    """Whether the region would be gone without the value: nothing but small work like it is in there."""
    return all(n is node or OPS[n.op].in_prologue for n in program.regions[at])


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
