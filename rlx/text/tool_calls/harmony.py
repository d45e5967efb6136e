"""Calls as messages to functions (gpt-oss), as `rlx/text/channels.py` gives them out.

Text stage. A call is

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The header has other forms, too, of which the reader sees only one: without `<|constrain|>json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlx.text.channels import CALL, CALL_HEADER, CHANNEL, CONSTRAIN, MESSAGE, START
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import Lark, literal
from rlx.text.tool_calls.reader import BLANKS, CallReader, Reading, Unreadable
from rlx.text.tool_calls.tools import Tool

_NAME = re.compile(r"([^<>\s]{1,200})\s*(?:<\|constrain\|>)?[a-z]*<\|message\|>")
_MAX_HEADER = 300


class HarmonyReader(CallReader):
    """Reads calls in messages."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((CALL_HEADER,), new_id)

    def _call(self, marker: str) -> Reading[None]:
        while (found := _NAME.match(self._held, self._at)) is None:
            if len(self._rest) > _MAX_HEADER:
                raise Unreadable
            yield from self._wait()
        self._at = found.end()
        if (yield from self._peek(BLANKS)) != "{":
            raise Unreadable
        if not (yield from self._arguments(found[1])):
            return
        while CALL.startswith(self._held) and self._held != CALL and not self._final:
            yield
        self._held = self._held.removeprefix(CALL)


def _call(lark: Lark, tool: Tool, arguments: str) -> str:
    header = f"{literal(tool.name + ' ')} {lark.mark(CONSTRAIN)} {literal('json')} {lark.mark(MESSAGE)}"
    return f"{header} {arguments} {lark.mark(CALL)}"


HARMONY = ToolFormat(
    "harmony", CALL_HEADER, (START, CHANNEL, CONSTRAIN, MESSAGE, CALL), HarmonyReader, _call, separator=None
)
"""JSON in messages to functions."""
