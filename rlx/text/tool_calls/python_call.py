"""Calls written as Python: `print(f(city="Paris", days=3))`. They are read, never run.

Text stage, used by the parsers of bare calls.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlx.text.tool_calls.tools import Tool

Calls = list[tuple[str, dict[str, Any]]]


def called(code: str, tools: Mapping[str, Tool]) -> Calls:
    """Names and arguments of the calls that a text consists of; empty if there is anything else in it."""
    try:
        found = [_call(node, tools) for node in _nodes(ast.parse(code.strip()))]
        return json.loads(json.dumps(found, allow_nan=False)) and found
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def tool_name(dotted: str, tools: Mapping[str, Tool]) -> str | None:
    """The tool that a function's name means: `f`, `f.call` as Llama writes it, or `module.f`; None if there is none."""
    names = (dotted, dotted.removesuffix(".call"), dotted.rpartition(".")[2])
    return next((name for name in names if name in tools), None)


def _nodes(tree: ast.Module) -> Iterator[ast.expr]:
    for statement in tree.body:
        if not isinstance(statement, ast.Expr | ast.Assign):
            raise ValueError("not a call")
        value = statement.value
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _call(node: ast.expr, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    dotted = ast.unparse(node.func)
    if dotted == "print" and dotted not in tools and len(node.args) == 1 and not node.keywords:
        return _call(node.args[0], tools)
    name = tool_name(dotted, tools)
    if name is None:
        raise ValueError("not a tool")
    keys = list(tools[name].properties)
    if len(node.args) > len(keys):
        raise ValueError("more arguments than parameters")
    found = {key: ast.literal_eval(value) for key, value in zip(keys, node.args, strict=False)}
    for keyword in node.keywords:
        value = ast.literal_eval(keyword.value)
        found |= value if keyword.arg is None else {keyword.arg: value}
    return name, found
