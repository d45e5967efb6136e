"""Calls between `<tool_call>` and `</tool_call>`: as JSON (Hermes, Qwen 2.5, Qwen 3) or as tags (Qwen 3.5, GLM 4.5).

Text stage. One parser reads JSON and each form of tags, because models of one family also write the other's form:

    <tool_call>                                     <tool_call>         <tool_call>f
    {"name": "f", "arguments": {"city": "Paris"}}   <function=f>        <arg_key>city</arg_key>
    </tool_call>                                    <parameter=city>    <arg_value>Paris</arg_value>
                                                    Paris               </tool_call>
                                                    </parameter>
                                                    </function>
                                                    </tool_call>

Values in tags have no type: the schema of the tool says what they are, see `values.py`. Source: the chat templates of
Qwen2.5, Qwen3, Qwen3-Coder and Qwen3.5 (Apache-2.0) and of GLM-4.5 (MIT) on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlx.text.tokenizer import tail_of
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import (
    ANY_TEXT,
    Lark,
    branches,
    either,
    json_value,
    literal,
    parameters_of,
    text_terminals,
)
from rlx.text.tool_calls.reader import BLANKS, CallReader, Reading, Unreadable, quoted
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import cast, child, is_text, types_of

BEGIN, END = "<tool_call>", "</tool_call>"
_WHOLE_NAME = re.compile(r"[^<>\s]{1,200}")


@dataclass(frozen=True)
class Tags:
    """How a family writes a function and its parameters.

    Attributes:
        function: the tag before the name of the function; it may be empty.
        name: the name and what follows it.
        parameter: the tag before the name of a parameter.
        key: that name and what stands between it and the value.
        begins: what may become `name` or `key` with more text.
        value_end, end: the tags after a value and after the last parameter.
        line: what stands between the tags of a value and the value.
    """

    function: str
    name: re.Pattern[str]
    parameter: str
    key: re.Pattern[str]
    begins: re.Pattern[str]
    value_end: str
    end: str
    line: str = ""


_NAMED = re.compile(r"([^<>\s]{1,200})>")
_BEGINS = re.compile(r"[^<>\s]{0,200}")
_XML = Tags("<function=", _NAMED, "<parameter=", _NAMED, _BEGINS, "</parameter>", "</function>", "\n")
_GLM = Tags(
    "",
    re.compile(r"([^<>\s]{1,200})\s*(?=<arg_key>|</tool_call>)"),
    "<arg_key>",
    re.compile(r"([^<>\s]{1,200})</arg_key>\s*<arg_value>"),
    re.compile(r"[^<>\s]{0,200}\s*(<[^<>]{0,12}(>\s*(<[^<>]{0,12})?)?)?"),
    "</arg_value>",
    END,
)


class TaggedReader(CallReader):
    """Reads calls between tags. A function's tag without `<tool_call>` before it begins a call, too."""

    def __init__(self, tags: Tags, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__(tuple(filter(None, (BEGIN, tags.function))), tools, new_id)
        self._tags = tags

    def _call(self, marker: str) -> Reading[None]:
        if marker == BEGIN and (yield from self._peek(BLANKS)) == "{":
            if not (yield from self._json_call()):
                return
        else:
            if marker == BEGIN:
                tag = self._tags.function
                while not self._rest.startswith(tag):
                    if not tag.startswith(self._rest):
                        raise Unreadable
                    yield from self._wait()
                self._at += len(tag)
            yield from self._function()
        yield from self._close(END, " \t\r\n}")  # models also write a bracket too many before it

    def _function(self) -> Reading[None]:
        """A function: its name, and parameters as long as there are some."""
        tags = self._tags
        name = yield from self._name(tags.name)
        self._begin(name)
        tool, lead = self._tools.get(name, Tool(name)), "{"
        try:
            while (yield from self._has_parameter()):
                yield from self._parameter((yield from self._name(tags.key)), tool.parameters, lead)
                lead = ", "
        except Unreadable:
            self._at = 0  # what was looked at is text
        self._argue("}" if lead == ", " else "{}")
        self._end()

    def _has_parameter(self) -> Reading[bool]:
        """Whether there is a further parameter; then its tag is read up to the name, otherwise the function's end."""
        parameter, end = self._tags.parameter, self._tags.end
        yield from self._peek(BLANKS)
        self._drop()
        while not self._held.startswith((parameter, end)):
            if not (parameter.startswith(self._held) or end.startswith(self._held)):
                return False
            yield from self._wait()
        is_parameter = self._held.startswith(parameter)
        self._at = len(parameter if is_parameter else end)
        return is_parameter

    def _name(self, pattern: re.Pattern[str]) -> Reading[str]:
        return (yield from self._match(pattern, self._tags.begins))[1]

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
        end, line = self._tags.value_end, self._tags.line
        while not self._held and not self._final:
            yield
        self._held = self._held.removeprefix(line)
        while not ended:
            said, found, rest = self._held.partition(end)
            ended = bool(found) or self._final
            waits = 0 if ended else tail_of(said, (line + end, end))
            self._held = rest if found else said[len(said) - waits :]
            said = said.removesuffix(line) if found else said[: len(said) - waits]
            if streams:
                self._argue(quoted(said))
            else:
                value += said
            if not ended:
                yield
        self._argue('"' if streams else cast(value, schema, root))


def parameters(tags: Tags, before: str, between: str, lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """The body of the rule for the parameters of a tool: those that the schema names, in its order.

    Args:
        before: the text before the name of a parameter.
        between: that between its name and its value.

    Raises:
        ToolError: a part of the schema cannot be enforced.
    """
    where, parts = f"tool {tool.name}", []
    properties, required, more = parameters_of(tool, schema, _WHOLE_NAME)
    for name, each in properties.items():
        value = _value(tags, lark, each, schema, f"{where}, parameter {name}")
        head = literal(f"{before}{name}{between}")
        rule = lark.rule("parameter", f"{head} {value}")
        parts.append(rule if name in required else f"{rule}?")
    if more is not False:
        value = _value(tags, lark, more if isinstance(more, Mapping) else {"type": "string"}, schema, where)
        rule = lark.rule("parameter", f"{literal(before)} /[A-Za-z_][A-Za-z0-9_-]*/ {literal(between)} {value}")
        parts.append(f"{rule}*")
    return " ".join(parts) or '""'


def _value(tags: Tags, lark: Lark, schema: Any, root: Mapping[str, Any], where: str) -> str:
    end = tags.line + tags.value_end
    mixed = types_of(schema, root) != {"string"}
    found = []
    for each in branches(schema, root, where):
        kind = each.get("type")
        if "const" in each:
            value = each["const"]
            found.append(literal((value if isinstance(value, str) else json.dumps(value)) + end))
        elif kind == "string" or not each:
            terminals = text_terminals({**each, "type": ["string", "null"]} if mixed else each, where)
            found.append(lark.before(end, *([ANY_TEXT] if not each else terminals)))
        else:
            found.append(f"{json_value(each, root)} {literal(end)}")
    return either(found)


def _json_call(lark: Lark, tool: Tool, arguments: str) -> str:
    head = literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'{head} {arguments} "}}\\n" {lark.mark(END)}'


def _xml_call(lark: Lark, tool: Tool, arguments: str) -> str:
    head, tail = literal(f"\n<function={tool.name}>"), literal("\n</function>\n")
    return f"{head} {arguments} {tail} {lark.mark(END)}"


def _glm_call(lark: Lark, tool: Tool, arguments: str) -> str:
    return f'{literal(f"{tool.name}")} {arguments} "\\n" {lark.mark(END)}'


HERMES = ToolFormat("hermes", BEGIN, (BEGIN, END), partial(TaggedReader, _XML), _json_call)
"""JSON between `<tool_call>` and `</tool_call>`."""

XML = replace(HERMES, name="xml", call=_xml_call, arguments=partial(parameters, _XML, "\n<parameter=", ">\n"))
"""A tag for the function and for each parameter between `<tool_call>` and `</tool_call>`."""

GLM = replace(
    HERMES,
    name="glm",
    markers=(BEGIN, END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    reader=partial(TaggedReader, _GLM),
    call=_glm_call,
    arguments=partial(parameters, _GLM, "\n<arg_key>", "</arg_key>\n<arg_value>"),
)
"""A name, and tags for each key and value, between `<tool_call>` and `</tool_call>`."""
