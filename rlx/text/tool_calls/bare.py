"""Calls without tokens of their own: bare JSON, JSON or Python in a fence, a list of Python calls.

Text stage. Llama 3 writes `{"name": "f", "parameters": {...}}` as its whole answer, maybe after `<|python_tag|>`.
Models whose template knows no tools, such as Gemma 3, write the JSON that the prompt asks for, or a fence of `json` or
`tool_code`. Nothing but the name says that such a text is a call: it must be the name of a tool.

Source: the model cards of Llama 3.1 to 3.3 (Meta) and the guide to function calling with Gemma 3 (Google).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.text.tool_calls.format import CallParser, ToolFormat, new_call_id
from rlx.text.tool_calls.json_call import JsonCall
from rlx.text.tool_calls.lark import ANY_TEXT, Lark, escaped, json_value, literal
from rlx.text.tool_calls.python_call import called, tool_name
from rlx.text.tool_calls.scan import CallScanner, State
from rlx.text.tool_calls.tools import Tool

PYTHON_TAG = "<|python_tag|>"
FENCE = "```"
FENCES = tuple(FENCE + word for word in ("json", "tool_code", "tool_call", "python"))
_FUNCTION = re.compile(r"\[?\s*(?:print\s*\(\s*)?((?!print\b)[A-Za-z_][\w.]*)\s*\(")
_FUNCTION_BEGIN = re.compile(r"\[?\s*(?:print\s*\(\s*)?([A-Za-z_][\w.]{0,200})?\s*")
_MAX_CODE = 100_000


class BareParser(CallScanner):
    """Reads calls at the start of an answer, and those that a marker begins."""

    def __init__(self, markers: Sequence[str], tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__(markers, new_id)
        self._tools = {tool.name: tool for tool in tools}
        self._state = self._start
        self._json = JsonCall()
        self._list = self._fence = False

    def _start(self) -> bool:
        """The start of the answer."""
        blanks = len(self._held) - len(self._held.lstrip())
        if blanks == len(self._held):
            return False
        if self._held[blanks] in "{[":
            self._use(blanks)
            self._marked, self._fence, self._state = blanks + 1, False, self._body
        else:
            self._state = self._text
        return True

    def _opened(self, marker: str) -> State:
        self._fence = marker.startswith(FENCE)
        return self._body

    def _body(self) -> bool:
        """What follows a marker: JSON, a list of it, or Python."""
        self._list = False
        if not self._skip_blanks():
            return False
        if self._held[0] == "[" and not self._held[1:].strip():
            return False
        if self._held[0] == "[" and self._held[1:].lstrip()[0] == "{":
            self._use(1)
            self._skip_blanks()
            self._list = True
        if self._held[0] == "{":
            self._json, self._state = JsonCall(self._tools), self._json_body
            return True
        found = _FUNCTION.match(self._held)
        if found is None and _FUNCTION_BEGIN.fullmatch(self._held):
            return False
        if found is not None and tool_name(found[1], self._tools) is not None:
            self._state = self._code
        else:
            self._abandon()
        return True

    def _json_body(self) -> bool:
        return self._read_json(self._json, self._between)

    def _between(self) -> bool:
        """After a call: a further one, or the end of the list or the fence."""
        if not self._skip_blanks():
            return False
        char = self._held[0]
        if char in ";,":
            self._use(1)
            return True
        if char == "]" and self._list:
            self._held, self._begun, self._list = self._held[1:], "", False
            return True
        if char == "{":
            self._marked, self._json, self._state = len(self._begun) + 1, JsonCall(self._tools), self._json_body
            return True
        if self._fence and FENCE.startswith(self._held[: len(FENCE)]):
            if len(self._held) < len(FENCE):
                return False
            self._held = self._held[len(FENCE) :]
        else:
            self._held = self._begun + self._held  # separators that separate nothing are text
        self._begun, self._state = "", self._text
        return True

    def _code(self) -> bool:
        """Python, up to the end of its fence or of the answer."""
        end = self._held.find(FENCE) if self._fence else -1
        if end < 0 and not self._final:
            if len(self._held) <= _MAX_CODE:
                return False
            self._abandon()
            return True
        code = self._held if end < 0 else self._held[:end]
        calls = called(code, self._tools)
        if not calls:
            self._abandon()
            return True
        self._held = "" if end < 0 else self._held[end + len(FENCE) :]
        for name, arguments in calls:
            self._begin(name)
            self._argue(json.dumps(arguments, ensure_ascii=False))
            self._end()
        return True

    def _cut_off(self) -> None:
        if self._state == self._json_body and self._json.begun:
            self._argue(self._json.close())
            self._end()
        elif self._state == self._between:
            self._held, self._begun, self._state = self._begun.strip() + self._held, "", self._text
        elif self._state == self._start:
            self._state = self._text
        else:
            self._abandon()


class LlamaFormat(ToolFormat):
    """Bare JSON, maybe after `<|python_tag|>`."""

    name, trigger = "llama", '{"name": "'
    separator: str | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (PYTHON_TAG,)

    def parser(self, tools: Sequence[Tool], new_id: Callable[[], str] = new_call_id) -> CallParser:
        return BareParser(self.markers, tools, new_id)

    def _call(self, lark: Lark, tool: Tool, arguments: str) -> str:
        return f'''{literal(f'{tool.name}", "parameters": ')} {arguments} "}}"'''

    def _arguments(self, lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
        return json_value(schema)

    def _others(self, lark: Lark, tools: Sequence[Tool]) -> list[str]:
        names = "|".join(escaped(tool.name) for tool in tools)
        return [lark.rule("OTHER", f'{ANY_TEXT} & ~/({names})"(?s:.*)/')]


class PromptedFormat(LlamaFormat):
    """The JSON that the prompt asks for, where the chat template knows nothing of tools."""

    name, separator, prompted = "prompted", "\n", True

    @property
    def markers(self) -> tuple[str, ...]:
        return FENCES
