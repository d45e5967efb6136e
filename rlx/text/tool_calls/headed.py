"""Calls of a header, which names the function, and JSON: DeepSeek, gpt-oss, Mistral, Kimi K2.

Text stage. DeepSeek V3.1, DeepSeek V3 and R1, gpt-oss, Mistral since 2025, Kimi K2:

    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}<|call|>

    [TOOL_CALLS]f[ARGS]{"city": "Paris"}

    <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>

The header of gpt-oss has other forms, too: `rlx/text/channels.py` turns them into this one. Source: the chat templates
of DeepSeek-V3, -R1 and -V3.1 (MIT), Mistral-Small-3.2 and Ministral 3 (Apache-2.0), and Kimi-K2 (modified MIT) on the
Hugging Face hub, and the harmony format of gpt-oss (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlx.text.channels import CALL, CALL_HEADER, CHANNEL, CONSTRAIN, MESSAGE, START
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import Lark, literal
from rlx.text.tool_calls.reader import BLANKS, CallReader, Reading, Unreadable
from rlx.text.tool_calls.tools import Tool

_FENCE = "```"
_NAME = r"([^<>\[\]\s]{1,200})"
_MAX_HEADER = 600


@dataclass(frozen=True)
class Header:
    """How a family writes a call.

    Attributes:
        begin: the text before the header.
        pattern: the header, up to the JSON. One of its groups is the function's name.
        ends: the texts after the JSON, each of which may be missing.
        around: the texts around all calls, which are dropped.
    """

    begin: str
    pattern: re.Pattern[str]
    ends: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    def reader(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> HeadedReader:
        """A parser for one answer."""
        return HeadedReader(self, new_id)


class HeadedReader(CallReader):
    """Reads calls of a header and JSON."""

    def __init__(self, header: Header, new_id: Callable[[], str]) -> None:
        super().__init__((header.begin, *header.around), new_id)
        self._header = header

    def _call(self, marker: str) -> Reading[None]:
        header = self._header
        if marker != header.begin:
            return
        while (found := header.pattern.match(self._held, self._at)) is None:
            if len(self._rest) > _MAX_HEADER or any(end in self._rest for end in (header.begin, *header.ends[-1:])):
                raise Unreadable
            yield from self._wait()
        self._at = found.end()
        if (yield from self._peek(BLANKS)) != "{":
            raise Unreadable
        if not (yield from self._arguments(next(filter(None, found.groups())))):
            return
        for end in header.ends:
            while end.startswith(rest := self._held.lstrip()) and rest != end and not self._final:
                yield
            if rest.startswith(end):
                self._held = rest.removeprefix(end)


def _format(
    name: str, header: Header, written: Callable[[Lark, str], str], markers: Sequence[str], separator: str | None
) -> ToolFormat:
    """The format of a family.

    Args:
        written: `(lark, name of a tool)`: the rule for its header.
        markers: texts in the header that may be control tokens.
    """

    def call(lark: Lark, tool: Tool, arguments: str) -> str:
        end = lark.mark(header.ends[-1]) if header.ends else ""
        return f"{written(lark, tool.name)} {arguments} {end}"

    every = (header.begin, *header.around, *markers, *(end for end in header.ends if end != _FENCE))
    return ToolFormat(name, header.begin, every, header.reader, call, separator=separator)


_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = Header(
    "<｜tool▁call▁begin｜>",
    re.compile(rf"\s*(?:function{_SEPARATOR}{_NAME}\s*{_FENCE}(?:json)?\s|(?!function<){_NAME}{_SEPARATOR})"),
    (_FENCE, "<｜tool▁call▁end｜>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK = _format(
    "deepseek", _DEEPSEEK, lambda lark, name: f"{literal(name)} {lark.mark(_SEPARATOR)}", (_SEPARATOR,), "\n"
)
"""JSON behind a name, between tokens."""

_HARMONY = Header(CALL_HEADER, re.compile(rf"{_NAME}\s*(?:<\|constrain\|>)?[a-z]*<\|message\|>"), (CALL,))
HARMONY = _format(
    "harmony",
    _HARMONY,
    lambda lark, name: f"{literal(name + ' ')} {lark.mark(CONSTRAIN)} {literal('json')} {lark.mark(MESSAGE)}",
    (START, CHANNEL, CONSTRAIN, MESSAGE),
    None,
)
"""JSON in messages to functions."""

_ARGUMENTS = "[ARGS]"
_MISTRAL = Header("[TOOL_CALLS]", re.compile(rf"\s*{_NAME}(?:\[CALL_ID\][^\[\]\s]*)?\[ARGS\]"))
MISTRAL = _format(
    "mistral",
    _MISTRAL,
    lambda lark, name: f"{literal(name)} {lark.mark(_ARGUMENTS)}",
    (_ARGUMENTS, "[CALL_ID]"),
    "",
)
"""JSON behind a name and `[ARGS]`."""

_ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
_KIMI = Header(
    "<|tool_call_begin|>",
    re.compile(rf"\s*(?:functions\.)?([^<>\s]{{1,200}}?)(?::\d+)?\s*{re.escape(_ARGUMENT_BEGIN)}"),
    ("<|tool_call_end|>",),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
KIMI = _format(
    "kimi",
    _KIMI,
    lambda lark, name: rf"{literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {lark.mark(_ARGUMENT_BEGIN)}",
    (_ARGUMENT_BEGIN,),
    "",
)
"""JSON behind an id that holds the name."""
