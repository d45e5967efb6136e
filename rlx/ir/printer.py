"""Prints graphs: one line a node. `rlx.ir.text` reads it back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlx.ir import ops
from rlx.ir.dims import Bounds, Dim
from rlx.ir.node import LEAVES, Node, topological


def dumps(name: str, phase: str, limits: Bounds, outputs: Mapping[str, Node]) -> str:
    """A graph as text. Values of constants are not part of it."""
    lines = [f"graph {_quote(name)} {phase} {{"]
    lines += [f"  bound {s} {low}..{high}" for s, (low, high) in sorted(limits.items())]
    number: dict[Node, int] = {}
    for node in topological(outputs.values()):
        number[node] = len(number)
        lines.append("  " + line(node, number))
    lines += [f"  output {_quote(key)} %{number[n]}" for key, n in outputs.items()]
    return "\n".join([*lines, "}"]) + "\n"


def line(node: Node, number: dict[Node, int]) -> str:
    """`%2 = rms_norm(%0, %1) {eps=1e-06} : f32[SEQ, 64]`; attributes at their defaults are left out."""
    head = f" {_quote(node.name)}" if node.op in LEAVES else f"({', '.join(f'%{number[i]}' for i in node.inputs)})"
    defaults = ops.OPS[node.op].attrs
    shown = [f"{k}={_attr(v)}" for k, v in node.attrs if v != defaults[k] and not (k == "name" and node.op in LEAVES)]
    attrs = f" {{{', '.join(shown)}}}" if shown else ""
    return f"%{number[node]} = {node.op}{head}{attrs} : {node.dtype}[{', '.join(map(str, node.shape))}]"


def _quote(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)  # JSON's escapes are Python's too


def _attr(value: Any) -> str:
    if isinstance(value, Dim):
        return f"<{value}>"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_attr(v)}, " for v in value).rstrip() + ")"
    return _quote(value) if isinstance(value, str) else repr(value)
