"""The work of a step of a program: its regions with bytes and operations, its kernels, its memory, and its time; what
passes changed, and what a fusion saved.

Report stage, from the graph after all passes, the manifest, and the times of a step if it was measured. The parts of a
time budget add up to the measured time of the step: at the machine's limit, beyond it, waiting, and outside of the
program.

Changes that differ only in the number of a layer are one change with the numbers of its layers. For the groups of rules
the passes run again without each of them (or with it, where it is off), so the figures are exact. For a near miss they
are an estimate: the value between the ops would not be written and read, and its region would not be waited for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.ir import printer
from rlx.ir.costs import arithmetic, cost, filled, peak, stored_bytes
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op_table import OPS
from rlx.passes import fuse
from rlx.passes.memory import lifetimes
from rlx.passes.options import FUSION_MEANINGS, FUSIONS, Options
from rlx.passes.program import Program, is_work, root
from rlx.passes.report import Event, PassReport, layer_of, relative, without_layer
from rlx.report.source import Machine, StepTimes

USUAL_PAST = 512  # tokens before the step that figures are for, where nothing was measured


@dataclass
class RegionWork:
    """The work of a region, whatever the time.

    Attributes:
        nodes: computed by units of work, which the workers share.
        own: computed by every worker for itself; counted once.
        bytes: read and written.
        stored: of these, bytes of weights and states, which come from memory; other values stay in caches.
        operations: by kind of arithmetic.
    """

    nodes: tuple[Node, ...]
    own: tuple[Node, ...]
    bytes: int = 0
    stored: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    def seconds(self, bandwidth: float, peaks: Mapping[str, float]) -> tuple[float, str]:
        """The time at the nearest limit of the machine, and the limit: "memory" or "arithmetic".

        Args:
            bandwidth: in 10^9 bytes a second.
            peaks: in 10^9 operations a second, by kind.
        """
        computing = sum(n / peak(kind, peaks) for kind, n in self.operations.items())
        least, limit = max((self.stored / bandwidth, "memory"), (computing, "arithmetic"))
        return least / 1e9, limit


def step_extents(graph: Graph, rows: tuple[int, int], measured: Mapping[str, int] | None = None) -> dict[str, int]:
    """Symbol values that figures are for: those measured, else the largest call; a single row after `USUAL_PAST`."""
    env = {symbol: high for symbol, (_, high) in graph.bounds.items()}
    env |= {"SEQ": rows[1], "PAST_SEQ": USUAL_PAST if rows[1] == 1 else 0, "SLOTS": 1}
    env |= {symbol: rows[1] for symbol in ("SEGMENTS", "OUTS") if symbol in env}
    return filled(env | dict(measured or {}))


def region_work(program: Program, env: Mapping[str, int]) -> list[RegionWork]:
    """The work of every region, in order."""
    found = []
    for own, nodes in zip(program.prologues, program.regions, strict=True):
        region = RegionWork(nodes, own)
        for node in dict.fromkeys((*nodes, *own)):
            operations, moved = cost(node, env)
            region.operations[arithmetic(node)] += operations
            region.bytes += moved
            region.stored += stored_bytes(node, env)
        found.append(region)
    return found


def region_rows(program: Program, manifest: Mapping[str, Any], work: list[RegionWork]) -> dict[str, Any]:
    """Plain data of the regions: `groups` of equal ones, and `of`, the group of each region in order.

    Regions are equal if they call the same kernels for values whose names differ only in the number of a layer.
    """
    names = program.graph.names()
    units = manifest.get("units") or [[] for _ in work]
    groups: dict[Any, dict[str, Any]] = {}
    of = []
    for i, region in enumerate(work):
        calls, own = (
            [(without_layer(names[node]), symbol) for node, (_, symbol) in zip(nodes, manifest[kind][i], strict=True)]
            for nodes, kind in ((region.nodes, "regions"), (region.own, "prologues"))
        )
        key = (tuple(calls), tuple(own), region.bytes)
        if key not in groups:
            groups[key] = {
                "calls": [
                    {"n": name, "op": n.op, "k": symbol, "u": units[i][c] if units[i] else None}
                    for c, (n, (name, symbol)) in enumerate(zip(region.nodes, calls, strict=True))
                ],
                "own": [
                    {"n": name, "op": n.op, "k": symbol} for n, (name, symbol) in zip(region.own, own, strict=True)
                ],
                "bytes": region.bytes,
                "stored": region.stored,
                "operations": dict(region.operations),
                "function": (manifest.get("functions") or [""] * len(work))[i],
                "ids": [],
                "layers": [],
            }
        group = groups[key]
        group["ids"].append(i)
        layers = {layer_of(names[n]) for n in region.nodes} - {None}
        group["layers"] = sorted({*group["layers"], *layers})
        of.append(list(groups).index(key))
    return {"groups": list(groups.values()), "of": of}


def kernel_rows(
    program: Program, manifest: Mapping[str, Any], env: Mapping[str, int], seconds: list[float] | None
) -> list[dict[str, Any]]:
    """Plain data of the kernels that a step calls, the longest or largest first.

    The time of a region with several kernels is divided between them by the bytes and operations of their calls; what
    workers compute for themselves counts as part of the region, not as time of its kernel.
    """
    names = program.graph.names()
    found: dict[str, dict[str, Any]] = {}

    def row(symbol: str, node: Node) -> dict[str, Any]:
        empty: dict[str, Any] = {"symbol": symbol, "op": node.op, "calls": 0, "own": 0, "bytes": 0, "stored": 0}
        return found.setdefault(symbol, empty | {"operations": {}, "seconds": 0.0, "where": {}, "regions": set()})

    for i, (own, nodes) in enumerate(zip(program.prologues, program.regions, strict=True)):
        weights = [float(sum(cost(n, env)) or 1) for n in nodes]
        for node, (_, symbol), weight in zip(nodes, manifest["regions"][i], weights, strict=True):
            kernel = row(symbol, node)
            operations, moved = cost(node, env)
            kernel["calls"] += 1
            kernel["bytes"] += moved
            kernel["stored"] += stored_bytes(node, env)
            kind = arithmetic(node)
            kernel["operations"][kind] = kernel["operations"].get(kind, 0) + operations
            kernel["seconds"] += seconds[i] * weight / sum(weights) if seconds else 0.0
            kernel["regions"].add(i)
            _note(kernel["where"], names[node])
        for node, (_, symbol) in zip(own, manifest["prologues"][i], strict=True):
            kernel = row(symbol, node)
            kernel["own"] += 1
            kernel["regions"].add(i)
            _note(kernel["where"], names[node])
    for kernel in found.values():
        kernel["regions"] = len(kernel["regions"])
        kernel["where"] = [[name, sorted(layers)] for name, layers in kernel["where"].items()]
        if not seconds:
            del kernel["seconds"]
    return sorted(found.values(), key=lambda k: (-k.get("seconds", 0.0), -k["bytes"], k["symbol"]))


def _note(where: dict[str, set[int]], name: str) -> None:
    layer = layer_of(name)
    where.setdefault(without_layer(name), set()).update(() if layer is None else (layer,))


def memory_rows(program: Program, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of the memory: each value of the arena with its place and the regions in which it lives."""
    names = program.graph.names()
    values = []
    for node, made, last in lifetimes(program):
        buffer = program.buffer(node)
        values.append([names[node], buffer.offset, buffer.nbytes, made, last])
    own = [[names[n], b.offset, b.nbytes] for n, b in (program.replicated or {}).items()]
    return {
        "arena": manifest["arena"],
        "values_end": program.arena,
        "private": manifest["private"],
        "values": values,
        "own": own,
    }


SHORT = 0.2  # regions that need less than this share of their time at the machine's limit are too short to reach it


@dataclass
class Part:
    """A part of the time.

    Attributes:
        kind: "memory" and "arithmetic": the work at the machine's limits; "beyond": regions that take longer than
            that; "short": regions with too little work to reach a limit; "waits": workers at the end of regions;
            "outside": the call without its regions.
        seconds: of the step.
        of: seconds by label of the region.
    """

    kind: str
    seconds: float = 0.0
    of: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, label: str) -> None:
        """More time, of a region."""
        self.seconds += seconds
        self.of[label] += seconds  # type: ignore[assignment]  # a Counter of seconds

    def as_row(self) -> dict[str, Any]:
        """Plain data, the largest labels first."""
        return {"kind": self.kind, "seconds": self.seconds, "of": [[k, v] for k, v in self.of.most_common(8)]}


def budget(work: Sequence[RegionWork], labels: Sequence[str], times: StepTimes, machine: Machine) -> list[Part]:
    """The parts of a step's time.

    Args:
        labels: what each region is called.
    """
    parts = {kind: Part(kind) for kind in ("memory", "arithmetic", "beyond", "short", "waits", "outside")}
    for i, (region, label, seconds) in enumerate(zip(work, labels, times.regions, strict=True)):
        waited = min(mean_wait(times, i), seconds)
        working = seconds - waited
        least, limit = region.seconds(machine.bandwidth, machine.peaks)
        parts[limit].add(min(least, working), label)
        parts["short" if least < SHORT * working else "beyond"].add(max(0.0, working - least), label)
        parts["waits"].add(waited, label)
    parts["outside"].seconds = max(0.0, times.seconds - sum(times.regions))
    return list(parts.values())


def mean_wait(times: StepTimes, region: int) -> float:
    """Seconds that a worker waited at the end of a region, on average over those that worked in it."""
    found = [row[region] for row in times.waits if row[region] is not None]
    waits = [wait for wait in found if wait is not None]
    return sum(waits) / len(waits) if waits else 0.0


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
    again: Callable[[Options], Program], program: Program, options: Options, env: Mapping[str, int], used: Set[str]
) -> list[dict[str, Any]]:
    """The effect of each group of fusion rules on a program.

    Args:
        again: runs the passes from the first one that asks for groups, `fuse`, with other options.
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
        other = Totals.of(again(changed), env)
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
