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

Source: the chat templates of DeepSeek-V3, -R1 and -V3.1 (MIT), Mistral-Small-3.2 and Ministral 3 (Apache-2.0), and
Kimi-K2 (modified MIT) on the Hugging Face hub, and the description of gpt-oss's harmony format by OpenAI (Apache-2.0).

The answers of gpt-oss are several messages in channels, each with a header that says what it is:

    <|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>

What is in the channel `analysis`, or sent to a tool of the model's own, is reasoning; what is in `final` or
`commentary` is text. A call of a function is a message to `functions.NAME`, in several forms: it becomes a text with
one form of header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rlx.text.tokenizer import tail_of
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import Lark, literal
from rlx.text.tool_calls.reader import BLANKS, CallReader, Reading, Unreadable
from rlx.text.tool_calls.tools import Tool

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
FUNCTIONS = "functions."
CALL_HEADER = f"{CHANNEL}commentary to={FUNCTIONS}"

_MARKERS = (END, CALL, RETURN, START, CHANNEL)  # where a message ends
_ENDS = re.compile("|".join(map(re.escape, _MARKERS)))
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_MAX_HEADER = 1000


class ChannelSplitter:
    """Splits the text of an answer, piece by piece, into reasoning and the rest. A text without a header is the rest.

    Several messages of one kind have a line break between them.
    """

    def __init__(self) -> None:
        self._held, self._kind = "", "header"
        self._begun = ""  # the header of a call, to be given out
        self._last = ""  # the kind of the message before that was reasoning or text
        self._given = {"thinking": False, "text": False}

    def push(self, text: str) -> tuple[str, str]:
        """More text: what is certainly reasoning, and what is certainly not."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> tuple[str, str]:
        """No more text: the rest."""
        return self._read(final=True)

    def _read(self, final: bool) -> tuple[str, str]:
        found = {"thinking": "", "text": ""}
        while self._kind != "header" or self._has_header(final):
            end = _ENDS.search(self._held)
            waits = 0 if final or end else tail_of(self._held, _MARKERS)
            said = self._held[: end.start()] if end else self._held[: len(self._held) - waits]
            found["thinking" if self._kind == "thinking" else "text"] += self._separated(said)
            self._held = self._held[len(said) :]
            if end is None:
                break
            self._after(end[0], found)
        return found["thinking"], found["text"]

    def _separated(self, said: str) -> str:
        """A piece of a message, after a line break if another message of its kind came before."""
        if self._kind == "call":
            header, self._begun = self._begun, ""
            return header + said
        if not said:
            return said
        breaks = "\n" if self._last != self._kind and self._given[self._kind] else ""
        self._last, self._given[self._kind] = self._kind, True
        return breaks + said

    def _after(self, marker: str, found: dict[str, str]) -> None:
        """The end of a message."""
        if self._kind == "call":
            found["text"] += CALL
        if marker in (END, CALL, RETURN):
            self._held = self._held[len(marker) :]
        self._kind, self._last = "header", ""

    def _has_header(self, final: bool) -> bool:
        """Reads a header, if all of it is there; what cannot be one is text."""
        head, found, rest = self._held.partition(MESSAGE)
        if not found:
            begins = (START, CHANNEL, " to=", "assistant")
            is_header = any(head.startswith(begin) or begin.startswith(head) for begin in begins)
            if not head or (is_header and not final and len(head) < _MAX_HEADER):
                return False
            if is_header and head.startswith((START, CHANNEL)):  # cut off
                self._held = ""
                return False
            self._kind = "text"
            return True
        recipient = _RECIPIENT.search(head)
        if recipient and recipient[1].startswith(FUNCTIONS):
            self._kind, self._held = "call", rest
            self._begun = CALL_HEADER + recipient[1].removeprefix(FUNCTIONS) + MESSAGE
            return True
        self._kind = "thinking" if recipient or f"{CHANNEL}analysis" in head else "text"
        self._held = rest
        return True


_FENCE = "```"
_NAME = r"([^<>\[\]\s]{1,200})"
_MAX_CALL_HEADER = 600


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


class HeadedReader(CallReader):
    """Reads calls of a header and JSON."""

    def __init__(self, header: Header, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((header.begin, *header.around), tools, new_id)
        self._header = header

    def _call(self, marker: str) -> Reading[None]:
        header = self._header
        if marker != header.begin:
            return
        while (found := header.pattern.match(self._held, self._at)) is None:
            if len(self._rest) > _MAX_CALL_HEADER or any(
                end in self._rest for end in (header.begin, *header.ends[-1:])
            ):
                raise Unreadable
            yield from self._wait()
        self._at = found.end()
        if (yield from self._peek(BLANKS)) != "{":
            raise Unreadable
        if not (yield from self._arguments(next(filter(None, found.groups())))):
            return
        for end in header.ends:
            yield from self._close(end)


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
    return ToolFormat(name, header.begin, every, partial(HeadedReader, header), call, separator=separator)


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
    "mistral", _MISTRAL, lambda lark, name: f"{literal(name)} {lark.mark(_ARGUMENTS)}", (_ARGUMENTS, "[CALL_ID]"), ""
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
