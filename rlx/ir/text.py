"""The text form of a graph, one line per node. It parses back to the same interned nodes with the same value names."""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from typing import Any

from rlx.errors import IrSyntaxError, RlxError
from rlx.ir import dims, ops
from rlx.ir.dims import Shape
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.node import LEAVES, Node
from rlx.ir.printer import NAME


def dumps(graph: Graph) -> str:
    """The graph as text; same as `str(graph)`."""
    return str(graph)


def _unquote(text: str) -> str:
    return str(json.loads(text))


_STRING = r'"(?:[^"\\]|\\(?:["\\bfnrt]|u[0-9a-f]{4}))*"'
_DIM = re.compile(rf"{_STRING}|<([^<>]*)>")
_HEAD = re.compile(rf"graph ({_STRING}) (\w+) \{{$")
_BOUND = re.compile(r"bound (\w+) (-?\d+)\.\.(-?\d+)$")
_OUTPUT = re.compile(rf"output ({_STRING}) %({NAME})$")
_NODE = re.compile(
    rf"%(?P<id>{NAME}) = (?P<op>\w+)(?: (?P<name>{_STRING})|\((?P<args>(?:%{NAME}(?:, %{NAME})*)?)\))"
    r"(?: \{(?P<attrs>.*)\})? : (?P<dtype>\w+)\[(?P<shape>[^\]]*)\]$"
)


def loads(text: str) -> Graph:
    """Parses the text of `dumps`. The text does not contain the values of constants.

    Raises:
        IrSyntaxError: a line is not a valid node, bound or output; the message has its number.
    """
    lines = [entry.strip() for entry in text.rstrip().split("\n")]
    head = _HEAD.match(lines[0])
    if not head:
        raise IrSyntaxError(f'expected `graph "name" phase {{`, found {lines[0]!r}', where="line 1")
    if lines[-1] != "}":
        raise IrSyntaxError(f"expected `}}` at the end, found {lines[-1]!r}", where=f"line {len(lines)}")
    graph = Graph(_unquote(head[1]), phase=head[2])
    nodes: dict[str, Node] = {}
    for at, entry in enumerate(lines[1:-1], 2):
        try:
            _parse_line(entry, graph, nodes)
        except KeyError as error:
            what = f"%{error.args[0]} is not defined before this line: {entry!r}"
            raise IrSyntaxError(what, where=f"line {at}") from error
        except (RlxError, ValueError, TypeError) as error:
            raise IrSyntaxError(f"{error} in {entry!r}", where=f"line {at}") from error
    return graph


@lru_cache(64)
def body(text: str) -> Graph:
    """The graph that nodes `call` with this attribute compute; nobody changes it."""
    return loads(text)


def _parse_line(entry: str, graph: Graph, nodes: dict[str, Node]) -> None:
    if match := _BOUND.match(entry):
        graph.bounds[match[1]] = (int(match[2]), int(match[3]))
    elif match := _OUTPUT.match(entry):
        graph.output(_unquote(match[1]), nodes[match[2]])
    elif match := _NODE.match(entry):
        if match["id"] in nodes:
            raise IrSyntaxError(f"%{match['id']} has two definitions")
        if match["dtype"] not in DTYPES:
            raise IrSyntaxError(f"no dtype is called {match['dtype']!r}")
        shape = tuple(map(dims.parse_dim, match["shape"].split(","))) if match["shape"] else ()
        node = nodes[match["id"]] = _parse_node(match, shape, nodes)
        graph.named(match["id"], node)
        if (node.shape, node.dtype.name) != (shape, match["dtype"]):
            raise IrSyntaxError(f"the op gives {node!r}")
    else:
        raise IrSyntaxError("no node, bound or output")


def _parse_node(match: re.Match[str], shape: Shape, nodes: dict[str, Node]) -> Node:
    attrs = _parse_attrs(match["attrs"] or "")
    if (match["op"] in LEAVES) != (match["name"] is not None):
        raise IrSyntaxError("a leaf has a name, an op has operands in parentheses")
    if match["name"] is not None:
        return ops.leaf(match["op"], _unquote(match["name"]), shape, DTYPES[match["dtype"]], **attrs)
    return ops.make(match["op"], *(nodes[a] for a in re.findall(NAME, match["args"])), **attrs)


def _parse_attrs(text: str) -> dict[str, Any]:
    # Dims are written <SEQ+1>. They are parsed as one-element sets of a string, a type that no attribute has.
    try:
        call = ast.parse(f"f({_DIM.sub(_dim_literal, text)})", mode="eval").body
    except SyntaxError as error:
        raise IrSyntaxError(f"{text!r} is no list of attributes") from error
    if not isinstance(call, ast.Call) or call.args or not all(k.arg for k in call.keywords):
        raise IrSyntaxError(f"{text!r} is no list of attributes")
    attrs = {str(k.arg): _undim(ast.literal_eval(k.value)) for k in call.keywords}
    if len(attrs) != len(call.keywords):
        raise IrSyntaxError(f"{text!r} gives an attribute twice")
    return attrs


def _dim_literal(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else f"{{{match[1]!r}}}"


def _undim(value: Any) -> Any:
    if isinstance(value, set):
        return dims.parse_dim(next(iter(value)))
    return tuple(_undim(v) for v in value) if isinstance(value, tuple) else value
