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

from rlx.text.tool_calls.format import CallParser, ToolFormat, new_call_id
from rlx.text.tool_calls.json_call import JsonCall
from rlx.text.tool_calls.lark import Lark, json_value, literal
from rlx.text.tool_calls.scan import CallScanner, State, quoted, tail_of
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import cast, child, is_text
from rlx.text.tool_calls.xml_lark import parameters

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER, _VALUE_END, _FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
_NAME = re.compile(r"([^<>\s]{1,200})>")
_NAME_BEGIN = re.compile(r"[^<>\s]{0,200}")


class TaggedParser(CallScanner):
    """Reads calls between tags. `<function=` without `<tool_call>` before it begins a call, too."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((BEGIN, _FUNCTION), new_id)
        self._schemas: dict[str, Tool] = {tool.name: tool for tool in tools}
        self._json = JsonCall()
        self._tool = Tool("")
        self._parameters, self._at_start = 0, False  # of the call so far; whether a value begins
        self._name, self._value = "", ""  # of the parameter that is read
        self._schema: Any = {}
        self._streams = False

    def _opened(self, marker: str) -> State:
        return self._body if marker == BEGIN else self._function

    def _body(self) -> bool:
        if not self._skip_blanks():
            return False
        if self._held[0] == "{":
            self._json, self._state = JsonCall(), self._json_body
            return True
        if self._held.startswith(_FUNCTION):
            self._use(len(_FUNCTION))
            self._state = self._function
            return True
        if _FUNCTION.startswith(self._held):
            return False
        self._abandon()
        return True

    def _json_body(self) -> bool:
        return self._read_json(self._json, self._close)

    def _close(self) -> bool:
        """After a call: `</tool_call>`, which may be missing. Models also write a bracket too many before it."""
        rest = self._held.lstrip(" \t\r\n}")
        if END.startswith(rest) and rest != END and not self._final:
            return False
        self._held = rest.removeprefix(END) if rest.startswith(END) else self._held
        self._state = self._text
        return True

    def _function(self) -> bool:
        found = _NAME.match(self._held)
        if found is None:
            if _NAME_BEGIN.fullmatch(self._held):
                return False
            self._abandon()
            return True
        self._use(found.end())
        self._tool = self._schemas.get(found[1], Tool(found[1]))
        self._begin(found[1])
        self._parameters, self._state = 0, self._between
        return True

    def _between(self) -> bool:
        """Between two parameters."""
        self._held = self._held.lstrip()
        if self._held.startswith(_FUNCTION_END):
            self._held = self._held[len(_FUNCTION_END) :]
            self._close_arguments()
            return True
        if self._held.startswith(_PARAMETER):
            found = _NAME.match(self._held, len(_PARAMETER))
            if found is not None:
                self._held = self._held[found.end() :]
                self._open_parameter(found[1])
                return True
            if _NAME_BEGIN.fullmatch(self._held, len(_PARAMETER)):
                return False
        elif _PARAMETER.startswith(self._held) or _FUNCTION_END.startswith(self._held):
            return False
        self._close_arguments()
        return True

    def _open_parameter(self, name: str) -> None:
        self._name, self._value, self._state = name, "", self._parameter
        self._schema = child(self._tool.parameters, name, self._tool.parameters, {"type": "string"})
        self._streams = is_text(self._schema, self._tool.parameters)
        lead = f'{", " if self._parameters else "{"}"{quoted(name)}": '
        self._argue(lead + '"' if self._streams else lead)
        self._parameters += 1
        self._at_start = True

    def _parameter(self) -> bool:
        """The value, without the line breaks next to the tags."""
        if self._at_start and self._held:
            self._held, self._at_start = self._held.removeprefix("\n"), False
        value, found, rest = self._held.partition(_VALUE_END)
        if found:
            self._more(value.removesuffix("\n"))
            self._held, self._state = rest, self._between
            self._close_value()
            return True
        waits = tail_of(value, ("\n" + _VALUE_END, _VALUE_END))
        self._more(value[: len(value) - waits])
        self._held = value[len(value) - waits :]
        return False

    def _more(self, value: str) -> None:
        if self._streams:
            self._argue(quoted(value))
        else:
            self._value += value

    def _close_value(self) -> None:
        self._argue('"' if self._streams else cast(self._value, self._schema, self._tool.parameters))

    def _close_arguments(self) -> None:
        self._argue("}" if self._parameters else "{}")
        self._end(self._close)

    def _cut_off(self) -> None:
        if self._state == self._json_body and self._json.begun:
            self._argue(self._json.close())
            self._end()
        elif self._state == self._parameter:
            self._more(self._held)
            self._held = ""
            self._close_value()
            self._close_arguments()
        elif self._state == self._between:
            self._close_arguments()
        else:
            self._abandon()


class HermesFormat(ToolFormat):
    """JSON between `<tool_call>` and `</tool_call>`."""

    name, trigger = "hermes", BEGIN

    @property
    def markers(self) -> tuple[str, ...]:
        return BEGIN, END

    def parser(self, tools: Sequence[Tool], new_id: Callable[[], str] = new_call_id) -> CallParser:
        return TaggedParser(tools, new_id)

    def _call(self, lark: Lark, tool: Tool, arguments: str) -> str:
        head = literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        return f'{head} {arguments} "}}\\n" {lark.mark(END)}'

    def _arguments(self, lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
        return json_value(schema)


class XmlFormat(HermesFormat):
    """XML with untyped parameters between `<tool_call>` and `</tool_call>`."""

    name = "xml"

    def _call(self, lark: Lark, tool: Tool, arguments: str) -> str:
        head, tail = literal(f"\n<function={tool.name}>"), literal("\n</function>\n")
        return f"{head} {arguments} {tail} {lark.mark(END)}"

    def _arguments(self, lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
        return parameters(lark, tool, schema)
