"""Prints graphs: the name of each value, and one line per node. `rlx.ir.text` parses the text.

Names derive from what a value is. The product with the weight `blk.3.attn_q.weight` is `%blk.3.attn_q`, its rotation is
`%blk.3.attn_q.rope`, and the state `k.3` after the write is `%k.3.write`. A pass keeps the names of what it rebuilds
(`Graph.map`), so the texts of two passes differ only where the pass changed something. Names are no part of nodes:
equal nodes stay one node, and a compile key does not depend on names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlx.ir import ops
from rlx.ir.dims import Bounds, Dim, symbols
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


def numbered(outputs: Mapping[str, Node]) -> dict[Node, str]:
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


def dumps(name: str, phase: str, limits: Bounds, outputs: Mapping[str, Node], names: Mapping[Node, str]) -> str:
    """A graph as text, without the values of constants.

    Args:
        names: the name of each node under the outputs, as `value_names` gives them.
    """
    lines = [f"graph {quote(name)} {phase} {{"]
    lines += [f"  bound {s} {low}..{high}" for s, (low, high) in sorted(limits.items())]
    lines += [f"  {line(node, names)}" for part in parts(topological(outputs.values())) for node in part]
    lines += [f"  output {quote(key)} %{names[n]}" for key, n in outputs.items()]
    return "\n".join([*lines, "}"]) + "\n"


def parts(nodes: Iterable[Node]) -> tuple[list[Node], list[Node], list[Node]]:
    """Nodes in the order of their lines: leaves, packed weights (computed once at load), nodes of a step."""
    leaves, load, step = list[Node](), list[Node](), list[Node]()
    for node in nodes:
        (leaves if node.op in LEAVES else load if node.op == "pack" else step).append(node)
    return leaves, load, step


def line(node: Node, names: Mapping[Node, str]) -> str:
    """`%y = rms_norm(%x, %w) {eps=1e-06} : f32[SEQ, 64]`."""
    operands = "" if node.op in LEAVES else f"({', '.join([f'%{names[i]}' for i in node.inputs])})"
    return f"%{names[node]} = {node.op}{operands}{node.text or _text(node)}"


def _text(node: Node) -> str:
    """The part of a node's line behind the operands, which is the same in every graph.

    Attributes with default values are omitted, except those that name symbols.
    """
    leaf, defaults = node.op in LEAVES, ops.OPS[node.op].attrs
    head = f" {quote(node.name)}" if leaf else ""
    given = [(k, v) for k, v in node.attrs if (v != defaults[k] or symbols(v)) and not (k == "name" and leaf)]
    shown = [f"{k}={_attr(v)}" for k, v in given]
    attrs = f" {{{', '.join(shown)}}}" if shown else ""
    node.text = f"{head}{attrs} : {node.dtype}[{', '.join(map(str, node.shape))}]"
    return node.text


def quote(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)  # Python parses JSON's escapes, too


def _attr(value: Any) -> str:
    if isinstance(value, Dim):
        return f"<{value}>"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_attr(v)}, " for v in value).rstrip() + ")"
    return quote(value) if isinstance(value, str) else repr(value)
