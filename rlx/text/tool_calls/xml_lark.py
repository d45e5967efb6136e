"""The grammar of arguments as XML parameters whose values have no type.

Text stage, used by `tagged.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlx.errors import ToolError
from rlx.text.tool_calls.branches import branches
from rlx.text.tool_calls.lark import ANY_TEXT, Lark, either, json_value, literal, text_terminals
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import types_of

VALUE_END = "\n</parameter>"
_NAME = re.compile(r"[^<>\s]{1,200}")


def parameters(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """The body of the rule for the parameters of a tool: those that the schema names, in its order.

    Raises:
        ToolError: a part of the schema cannot be enforced.
    """
    where = f"tool {tool.name}"
    found = branches(schema, schema, where)
    if len(found) != 1:
        raise ToolError("the parameters are a choice between several schemas", where=where)
    properties, required = found[0].get("properties", {}), found[0].get("required", [])
    for name in required:
        if name not in properties:
            raise ToolError(f"{name!r} is required, but it is no property", where=where)
    parts = []
    for name, each in properties.items():
        if not _NAME.fullmatch(name):
            raise ToolError(f"a parameter cannot be called {name!r} in the model's format", where=where)
        value = _value(lark, each, schema, f"{where}, parameter {name}")
        head = literal(f"\n<parameter={name}>\n")
        rule = lark.rule("parameter", f"{head} {value}")
        parts.append(rule if name in required else f"{rule}?")
    if found[0].get("additionalProperties", True) is not False:
        more = found[0].get("additionalProperties")
        value = _value(lark, more if isinstance(more, Mapping) else {"type": "string"}, schema, where)
        rule = lark.rule("parameter", rf'"\n<parameter=" /[A-Za-z_][A-Za-z0-9_-]*/ ">\n" {value}')
        parts.append(f"{rule}*")
    return " ".join(parts) or '""'


def _value(lark: Lark, schema: Any, root: Mapping[str, Any], where: str) -> str:
    """A value and its end."""
    mixed = types_of(schema, root) != {"string"}
    found = []
    for each in branches(schema, root, where):
        kind = each.get("type")
        if "const" in each:
            value = each["const"]
            found.append(literal((value if isinstance(value, str) else json.dumps(value)) + VALUE_END))
        elif kind == "string" or not each:
            terminals = text_terminals({**each, "type": ["string", "null"]} if mixed else each, where)
            found.append(lark.before(VALUE_END, *([ANY_TEXT] if not each else terminals)))
        else:
            roots = {key: root[key] for key in ("$defs", "definitions") if key in root}
            found.append(f"{json_value({**roots, **each})} {literal(VALUE_END)}")
    return either(found)
