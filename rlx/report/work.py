"""The work of a step of a program: its regions with bytes and operations, its kernels, its memory, and its time.

Report stage, from the graph after all passes, the manifest, and the times of a step if it was measured. The parts of a
time budget add up to the measured time of the step: at the machine's limit, beyond it, waiting, and outside of the
program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.ir.costs import arithmetic, cost, filled, peak, stored_bytes
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.memory import lifetimes
from rlx.passes.program import Program
from rlx.passes.report import layer_of, without_layer
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
        calls = [(without_layer(names[n]), symbol) for n, (_, symbol) in _called(region.nodes, manifest["regions"][i])]
        own = [(without_layer(names[n]), symbol) for n, (_, symbol) in _called(region.own, manifest["prologues"][i])]
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


def _called(nodes: tuple[Node, ...], calls: list[Any]) -> list[tuple[Node, Any]]:
    return list(zip(nodes, calls, strict=True))


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
