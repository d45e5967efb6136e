"""The text form of a graph: one line a node; prints and parses back to the same interned nodes."""

from __future__ import annotations

import ast
import re
from typing import Any

from rlx.errors import IrSyntaxError, RlxError
from rlx.ir import dims, ops
from rlx.ir.dims import Dim
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import LEAVES, Graph, Node


def dumps(graph: Graph) -> str:
    """The graph as text. Values of constants are not part of it."""
    lines = [f'graph "{graph.name}" {graph.phase} {{']
    lines += [f"  bound {s} {low}..{high}" for s, (low, high) in sorted(graph.bounds.items())]
    number: dict[Node, int] = {}
    for node in graph.nodes():
        number[node] = len(number)
        lines.append("  " + line(node, number))
    lines += [f"  output {_quote(name)} %{number[n]}" for name, n in graph.outputs.items()]
    return "\n".join([*lines, "}"]) + "\n"


def line(node: Node, number: dict[Node, int]) -> str:
    """`%2 = rms_norm(%0, %1) {eps=1e-06} : f32[SEQ, 64]`; attributes at their defaults are left out."""
    head = f" {_quote(node.name)}" if node.op in LEAVES else f"({', '.join(f'%{number[i]}' for i in node.inputs)})"
    defaults = ops.OPS[node.op].attrs
    shown = [f"{k}={_attr(v)}" for k, v in node.attrs if v != defaults[k] and not (k == "name" and node.op in LEAVES)]
    attrs = f" {{{', '.join(shown)}}}" if shown else ""
    return f"%{number[node]} = {node.op}{head}{attrs} : {node.dtype}[{', '.join(map(str, node.shape))}]"


def _quote(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _attr(value: Any) -> str:
    if isinstance(value, Dim):
        return f"<{value}>"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_attr(v)}, " for v in value).rstrip() + ")"
    return _quote(value) if isinstance(value, str) else repr(value)


_HEAD = re.compile(r'graph ("(?:[^"\\]|\\.)*") (\w+) \{$')
_BOUND = re.compile(r"bound (\w+) (-?\d+)\.\.(-?\d+)$")
_OUTPUT = re.compile(r'output ("(?:[^"\\]|\\.)*") %(\d+)$')
_NODE = re.compile(
    r'%(?P<id>\d+) = (?P<op>\w+)(?: (?P<name>"(?:[^"\\]|\\.)*")|\((?P<args>[%\d, ]*)\))'
    r"(?: \{(?P<attrs>.*)\})? : (?P<dtype>\w+)\[(?P<shape>[^\]]*)\]$"
)


def loads(text: str) -> Graph:
    """Parses what `dumps` prints; raises `IrSyntaxError` with the line number."""
    lines = [entry.strip() for entry in text.strip().split("\n")]
    head = _HEAD.match(lines[0])
    if not head or lines[-1] != "}":
        raise IrSyntaxError('expected `graph "name" phase {` ... `}`', where="line 1")
    graph = Graph(ast.literal_eval(head[1]), phase=head[2])
    nodes: dict[str, Node] = {}
    for at, entry in enumerate(lines[1:-1], 2):
        try:
            _parse_line(entry, graph, nodes)
        except (RlxError, KeyError, ValueError, SyntaxError) as error:
            raise IrSyntaxError(f"{error} in {entry!r}", where=f"line {at}") from error
    return graph


def _parse_line(entry: str, graph: Graph, nodes: dict[str, Node]) -> None:
    if match := _BOUND.match(entry):
        graph.bounds[match[1]] = (int(match[2]), int(match[3]))
    elif match := _OUTPUT.match(entry):
        graph.output(ast.literal_eval(match[1]), nodes[match[2]])
    elif match := _NODE.match(entry):
        node = _parse_node(match, nodes)
        shape = tuple(dims.parse_dim(d) for d in match["shape"].split(",") if d.strip())
        if (node.shape, node.dtype.name) != (shape, match["dtype"]):
            raise IrSyntaxError(f"the op gives {node!r}")
        nodes[match["id"]] = node
    else:
        raise IrSyntaxError("no node, bound or output")


def _parse_node(match: re.Match[str], nodes: dict[str, Node]) -> Node:
    attrs = _parse_attrs(match["attrs"] or "")
    if match["op"] in LEAVES:
        shape = tuple(dims.parse_dim(d) for d in match["shape"].split(",") if d.strip())
        return ops.leaf(match["op"], ast.literal_eval(match["name"]), shape, DTYPES[match["dtype"]], **attrs)
    operands = [nodes[a.strip().lstrip("%")] for a in match["args"].split(",") if a.strip()]
    return ops.make(match["op"], *operands, **attrs)


def _parse_attrs(text: str) -> dict[str, Any]:
    # Dims are written <SEQ+1>: as one-element sets of a string, which no other attribute is, they parse as literals.
    call = ast.parse(f"f({re.sub(r'<([^<>]*)>', _dim_literal, text)})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {k.arg: _undim(ast.literal_eval(k.value)) for k in call.keywords if k.arg}


def _dim_literal(match: re.Match[str]) -> str:
    return f"{{{match[1]!r}}}"


def _undim(value: Any) -> Any:
    if isinstance(value, set):
        return dims.parse_dim(next(iter(value)))
    return tuple(_undim(v) for v in value) if isinstance(value, tuple) else value
