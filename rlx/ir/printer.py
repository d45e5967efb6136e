"""Prints graphs, one line per node. `rlx.ir.text` parses the text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rlx.ir import ops
from rlx.ir.dims import Bounds, Dim, symbols
from rlx.ir.node import LEAVES, Node, topological


def dumps(name: str, phase: str, limits: Bounds, outputs: Mapping[str, Node], names: Mapping[Node, str]) -> str:
    """A graph as text, without the values of constants.

    Args:
        names: the name of each node under the outputs (`rlx.ir.names`).
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
