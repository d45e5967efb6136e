"""Calls between `<tool_call>` and `</tool_call>`: as JSON (Hermes, Qwen 2.5, Qwen 3) or as XML (Qwen3-Coder, Qwen 3.5).

Text stage. One parser reads both, because models of one family also write the other's form:

    <tool_call>                                     <tool_call>
    {"name": "f", "arguments": {"city": "Paris"}}   <function=f>
    </tool_call>                                    <parameter=city>
                                                    Paris
                                                    </parameter>
                                                    </function>
                                                    </tool_call>

Values in XML have no type: the schema of the tool says what they are, see `values.py`. Source: the chat templates of
Qwen2.5, Qwen3, Qwen3-Coder and Qwen3.5 (Apache-2.0) on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.errors import ToolError
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import ANY_TEXT, Lark, branches, either, json_value, literal, text_terminals
from rlx.text.tool_calls.reader import BLANKS, CallReader, Reading, Unreadable, quoted, tail_of
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import cast, child, is_text, types_of

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER, _VALUE_END, _FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
_END_LINE = "\n" + _VALUE_END
_NAME = re.compile(r"([^<>\s]{1,200})>")
_WHOLE_NAME = re.compile(r"[^<>\s]{1,200}")
_NAME_BEGIN = re.compile(r"[^<>\s]{0,200}")


class TaggedReader(CallReader):
    """Reads calls between tags. `<function=` without `<tool_call>` before it begins a call, too."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((BEGIN, _FUNCTION), new_id)
        self._tools = {tool.name: tool for tool in tools}

    def _call(self, marker: str) -> Reading[None]:
        if marker == BEGIN and (yield from self._peek(BLANKS)) == "{":
            if not (yield from self._json_call()):
                return
        else:
            if marker == BEGIN:
                while not self._rest.startswith(_FUNCTION):
                    if not _FUNCTION.startswith(self._rest):
                        raise Unreadable
                    yield from self._wait()
                self._at += len(_FUNCTION)
            yield from self._function()
        yield from self._close()

    def _close(self) -> Reading[None]:
        """After a call: `</tool_call>`, which may be missing. Models also write a bracket too many before it."""
        while True:
            rest = self._held.lstrip(" \t\r\n}")
            if rest.startswith(END):
                self._held = rest.removeprefix(END)
            if not END.startswith(rest) or rest == END or self._final:
                return
            yield

    def _function(self) -> Reading[None]:
        """A function: its name, and parameters as long as there are some."""
        name = yield from self._name()
        self._begin(name)
        tool, lead = self._tools.get(name, Tool(name)), "{"
        try:
            while (yield from self._has_parameter()):
                yield from self._parameter((yield from self._name()), tool.parameters, lead)
                lead = ", "
        except Unreadable:
            self._at = 0  # what was looked at is text
        self._argue("}" if lead == ", " else "{}")
        self._end()

    def _has_parameter(self) -> Reading[bool]:
        """Whether there is a further parameter; then its tag is read up to the name, otherwise the function's end."""
        yield from self._peek(BLANKS)
        self._drop()
        while not self._held.startswith((_PARAMETER, _FUNCTION_END)):
            if not (_PARAMETER.startswith(self._held) or _FUNCTION_END.startswith(self._held)):
                return False
            yield from self._wait()
        is_parameter = self._held.startswith(_PARAMETER)
        self._at = len(_PARAMETER if is_parameter else _FUNCTION_END)
        return is_parameter

    def _name(self) -> Reading[str]:
        """A name, and the bracket after it."""
        while (found := _NAME.match(self._held, self._at)) is None:
            if not _NAME_BEGIN.fullmatch(self._held, self._at):
                raise Unreadable
            yield from self._wait()
        self._at = found.end()
        return found[1]

    def _parameter(self, name: str, root: Mapping[str, Any], lead: str) -> Reading[None]:
        """A parameter after its name: the value, without the line breaks next to the tags.

        Args:
            root: the schema of all parameters.
            lead: the JSON before it.
        """
        schema = child(root, name, root, {"type": "string"})
        streams, value, ended = is_text(schema, root), "", False
        self._argue(f'{lead}"{quoted(name)}": ' + ('"' if streams else ""))
        self._drop()
        while not self._held and not self._final:
            yield
        self._held = self._held.removeprefix("\n")
        while not ended:
            said, found, rest = self._held.partition(_VALUE_END)
            ended = bool(found) or self._final
            waits = 0 if ended else tail_of(said, (_END_LINE, _VALUE_END))
            self._held = rest if found else said[len(said) - waits :]
            said = said.removesuffix("\n") if found else said[: len(said) - waits]
            if streams:
                self._argue(quoted(said))
            else:
                value += said
            if not ended:
                yield
        self._argue('"' if streams else cast(value, schema, root))


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
        if not _WHOLE_NAME.fullmatch(name):
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
            found.append(literal((value if isinstance(value, str) else json.dumps(value)) + _END_LINE))
        elif kind == "string" or not each:
            terminals = text_terminals({**each, "type": ["string", "null"]} if mixed else each, where)
            found.append(lark.before(_END_LINE, *([ANY_TEXT] if not each else terminals)))
        else:
            roots = {key: root[key] for key in ("$defs", "definitions") if key in root}
            found.append(f"{json_value({**roots, **each})} {literal(_END_LINE)}")
    return either(found)


def _json_call(lark: Lark, tool: Tool, arguments: str) -> str:
    head = literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'{head} {arguments} "}}\\n" {lark.mark(END)}'


def _xml_call(lark: Lark, tool: Tool, arguments: str) -> str:
    head, tail = literal(f"\n<function={tool.name}>"), literal("\n</function>\n")
    return f"{head} {arguments} {tail} {lark.mark(END)}"


HERMES = ToolFormat("hermes", BEGIN, (BEGIN, END), TaggedReader, _json_call)
"""JSON between `<tool_call>` and `</tool_call>`."""

XML = ToolFormat("xml", BEGIN, (BEGIN, END), TaggedReader, _xml_call, parameters)
"""XML with untyped parameters between `<tool_call>` and `</tool_call>`."""
