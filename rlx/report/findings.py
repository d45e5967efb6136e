"""What a fusion saves, and what a missed one would: regions and bytes.

Report stage. For the groups of rules the passes run again without each of them (or with it, where it is off), so the
figures are exact. For a near miss they are an estimate: the value between the ops would not be written and read, and
its region would not be waited for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from rlx.ir.costs import cost
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes import fuse, pipeline
from rlx.passes.options import FUSION_MEANINGS, FUSIONS, Options
from rlx.passes.program import Program, is_work, root
from rlx.passes.report import Event, PassReport

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
    """What each group of fusion rules does for a program.

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
    from rlx.ir.op_table import OPS

    return all(n is node or OPS[n.op].in_prologue for n in program.regions[at])
