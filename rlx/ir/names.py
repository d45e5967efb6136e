"""Value names: the names of a graph's values in IR text, derived from what each value is.

The product with the weight `blk.3.attn_q.weight` is `%blk.3.attn_q`, its rotation is `%blk.3.attn_q.rope`, and the
state `k.3` after the write is `%k.3.write`. A pass keeps the names of what it rebuilds (`Graph.map`), so the texts of
two passes differ only where the pass changed something. Names are no part of nodes: equal nodes stay one node, and a
compile key does not depend on names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlx.ir.node import LEAVES, Node, topological
from rlx.ir.op_table import OPS

#: The characters of a value's name.
NAME = r"[A-Za-z0-9_.]+"

_WEIGHTED = ("linear", "expert_linear", "rms_norm", "embedding", "causal_conv", "linear_pick")
_BINARY = ("add", "sub", "mul", "div")
_SUFFIX = {"pack": "packed", "kv_write": "write", "rope_kv_write": "write", "rope_angles": "angles"}


def value_names(outputs: Mapping[str, Node], known: Mapping[Node, str]) -> dict[Node, str]:
    """A unique name for every node under the outputs.

    Values that would have the same name are numbered from the second one on in topological order: `x`, `x.2`.

    Args:
        known: names set by the builder of the graph, or in the graph before a pass.
    """
    nodes = topological(outputs.values())
    names: dict[Node, str] = {}
    taken: set[str] = set()

    def give(node: Node, name: str) -> None:
        names[node] = unique = _unique(name, taken)
        taken.add(unique)

    for node in nodes:
        if node in known:
            give(node, known[node])
    for node in nodes:
        if node not in names and node.op in LEAVES:
            give(node, sanitize(node.name))
    for name, node in outputs.items():
        if node not in names and sanitize(name) not in taken:
            give(node, sanitize(name))
    stems = dict(names)  # prefix for the names of values computed from a value
    for node in nodes:
        if node not in names:
            stems[node], name = _derived(node, names, stems)
            give(node, name)
    return names


def numbers(outputs: Mapping[str, Node]) -> dict[Node, str]:
    """Every node's index in topological order, as text: names that depend only on the graph's structure."""
    return {node: str(i) for i, node in enumerate(topological(outputs.values()))}


def sanitize(name: str) -> str:
    """The name with every other character replaced by an underscore."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", name) or "_"


def _derived(node: Node, names: Mapping[Node, str], stems: Mapping[Node, str]) -> tuple[str, str]:
    """(stem, name) of a node whose operands are named already."""
    suffix = _SUFFIX.get(node.op, node.op)
    if not node.inputs:
        return node.op, node.op
    first = node.inputs[0]
    if node.op in _WEIGHTED and (weight := next(filter(None, map(_weight, node.inputs)), None)):
        stem = sanitize(weight.removesuffix(".weight"))
        return stem, stem if stem != sanitize(weight) else f"{stem}.{suffix}"
    if node.op in ("pack", "quantize", "last_row", "take_rows"):  # the same value in another form
        return stems[first], f"{names[first]}.{node['out'] if node.op == 'quantize' else suffix}"
    if OPS[node.op].writes:
        return names[first], f"{names[first]}.{suffix}"
    values = [i for i in node.inputs if i.op not in LEAVES] or [first]
    ordered = values[::-1] if node.op in _BINARY else values  # x + f(x) is named after f
    stem = max((stems[value] for value in ordered), key=_layer)  # of the highest layer; ties go to the first
    return stem, f"{stem}.{suffix}"


def _layer(stem: str) -> int:
    """The number in a name: 3 of "blk.3.attn_q"; -1 if there is none."""
    return next((int(part) for part in stem.split(".") if part.isdigit() and len(part) < 10), -1)


def _weight(node: Node) -> str | None:
    """The name of the weight that a node is, or that it packs."""
    source = node.inputs[0] if node.op == "pack" else node
    return source.name if source.op == "weight" else None


def _unique(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"
