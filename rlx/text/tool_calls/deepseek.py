"""Calls of DeepSeek V3, R1 and V3.1.

Text stage. One parser reads both forms, that of V3.1 and that of V3 and R1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat templates of DeepSeek-V3, -R1 and -V3.1 (MIT) on the Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import Lark, literal
from rlx.text.tool_calls.reader import BLANKS, CallReader, Reading, Unreadable
from rlx.text.tool_calls.tools import Tool

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"
_HEAD = re.compile(rf"\s*(?:function{SEPARATOR}([^<>\s]{{1,200}})\s*{_FENCE}(?:json)?\s|([^<>\s]{{1,200}}){SEPARATOR})")
_MAX_HEAD = 600


class DeepSeekReader(CallReader):
    """Reads calls in both forms. The texts around all calls are dropped."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((CALL_BEGIN, CALLS_BEGIN, CALLS_END), new_id)

    def _call(self, marker: str) -> Reading[None]:
        if marker != CALL_BEGIN:
            return
        while (head := _HEAD.match(self._held, self._at)) is None or head[2] == "function":
            if len(self._rest) > _MAX_HEAD or CALL_END in self._rest:
                raise Unreadable
            yield from self._wait()
        self._at = head.end()
        if (yield from self._peek(BLANKS)) != "{":
            raise Unreadable
        if not (yield from self._arguments(head[1] or head[2])):
            return
        for end in (_FENCE, CALL_END):  # either may be missing
            while end.startswith(rest := self._held.lstrip()) and rest != end and not self._final:
                yield
            if rest.startswith(end):
                self._held = rest.removeprefix(end)


def _call(lark: Lark, tool: Tool, arguments: str) -> str:
    return f"{literal(tool.name)} {lark.mark(SEPARATOR)} {arguments} {lark.mark(CALL_END)}"


DEEPSEEK = ToolFormat(
    "deepseek", CALL_BEGIN, (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR), DeepSeekReader, _call
)
"""JSON behind a name, between tokens."""
