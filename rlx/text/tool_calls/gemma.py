"""Calls as Gemma 4 and FunctionGemma write them.

Text stage. Keys have no quotes, strings have a token of the family as quote:

    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>                          Gemma 4
    <start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>    FunctionGemma

Source: the chat templates of gemma-4 and functiongemma on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls.format import CallParser, ToolFormat, new_call_id
from rlx.text.tool_calls.gemma_lark import gemma_arguments
from rlx.text.tool_calls.json_reader import MAX_DEPTH, JsonReader
from rlx.text.tool_calls.lark import Lark, literal
from rlx.text.tool_calls.scan import CallScanner, State, quoted, tail_of
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import cast, child, types_of

_HEAD = re.compile(r"\s*call:\s*([^\s{}<>]{1,200})\s*\{")
_HEAD_BEGIN = re.compile(r"\s*(c|ca|cal|call|call:\s*[^\s{}<>]{0,200}\s*)?")
_KEY = re.compile(r'"?([^:{}\[\],"<>]{1,400}?)"?\s*:')
_KEY_BEGIN = re.compile(r'"?[^:{}\[\],"<>]{0,400}"?\s*')
_BARE = re.compile(r"[^,{}\[\]]*")


@dataclass(frozen=True)
class Marks:
    """The texts that a family writes calls with: around a call, and around a string."""

    begin: str
    end: str
    quote: str


GEMMA4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")


@dataclass
class _Frame:
    """An object or a list that is open: its closing bracket, its schema, and whether it has an entry."""

    close: str
    schema: Any
    filled: bool = False


class GemmaParser(CallScanner):
    """Reads calls whose arguments are written without JSON's quotes."""

    def __init__(self, marks: Marks, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((marks.begin,), new_id)
        self._marks, self._tools = marks, {tool.name: tool for tool in tools}
        self._tool = Tool("")
        self._frames: list[_Frame] = []
        self._pending = ""  # a comma and a key, which wait for a value
        self._schema: Any = {}  # of the value that comes
        self._string = ""  # of a value that is no string by its schema
        self._streams = False
        self._json = JsonReader()

    def _opened(self, marker: str) -> State:
        return self._head

    def _head(self) -> bool:
        found = _HEAD.match(self._held)
        if found is None:
            if _HEAD_BEGIN.fullmatch(self._held):
                return False
            self._abandon()
            return True
        self._use(found.end())
        self._tool = self._tools.get(found[1], Tool(found[1]))
        self._begin(found[1])
        self._frames, self._schema = [], self._tool.parameters
        self._open("{")
        return True

    def _open(self, bracket: str) -> None:
        self._give(bracket)
        self._frames.append(_Frame("}" if bracket == "{" else "]", self._schema))
        self._state = self._key if bracket == "{" else self._value

    def _give(self, text: str) -> None:
        """JSON of a value that begins."""
        self._argue(self._pending + text)
        self._pending = ""
        if self._frames:
            self._frames[-1].filled = True

    def _key(self) -> bool:
        if not self._skip_blanks():
            return False
        if self._closes():
            return True
        found = self._found_key()
        if found is None:
            return False
        key, used = found
        if not used:
            return self._give_up()
        self._held = self._held[used:]
        self._pending = f"{', ' if self._frames[-1].filled else ''}{json.dumps(key, ensure_ascii=False)}: "
        self._schema = child(self._frames[-1].schema, key, self._tool.parameters)
        self._state = self._value
        return True

    def _found_key(self) -> tuple[str, int] | None:
        """A key and the characters up to its value; None if more text decides, none of them if it is unreadable."""
        quote = self._marks.quote
        if self._held.startswith(quote) or quote.startswith(self._held):  # keys with quotes are keys, too
            key, _, rest = self._held[len(quote) :].partition(quote)
            if not rest.strip():
                return None
            used = len(self._held) - len(rest.lstrip()) + 1
            return (key, used) if rest.lstrip()[0] == ":" else ("", 0)
        found = _KEY.match(self._held)
        if found is None:
            return None if _KEY_BEGIN.fullmatch(self._held) else ("", 0)
        return found[1].strip(), found.end()

    def _value(self) -> bool:
        if not self._skip_blanks():
            return False
        frame = self._frames[-1]
        if frame.close == "]" and not self._pending:
            if self._closes():
                return True
            self._pending = ", " if frame.filled else ""
            self._schema = child(frame.schema, None, self._tool.parameters)
        quote = self._marks.quote
        if self._held[0] in "{[" and len(self._frames) < MAX_DEPTH:
            bracket, self._held = self._held[0], self._held[1:]
            self._open(bracket)
        elif self._held.startswith(quote):
            self._held = self._held[len(quote) :]
            self._streams = "string" in types_of(self._schema, self._tool.parameters)
            self._string, self._state = "", self._text_value
            if self._streams:
                self._give('"')
        elif quote.startswith(self._held) and not self._final:
            return False
        elif self._held[0] == '"':
            self._json, self._state = JsonReader(), self._json_value
        else:
            return self._bare()
        return True

    def _text_value(self) -> bool:
        """A string between the family's quotes."""
        text, found, rest = self._held.partition(self._marks.quote)
        waits = 0 if found else tail_of(text, (self._marks.quote,))
        self._held = rest if found else text[len(text) - waits :]
        self._more(text if found else text[: len(text) - waits])
        if not found:
            return False
        self._close_text()
        self._state = self._next
        return True

    def _more(self, text: str) -> None:
        if self._streams:
            self._argue(quoted(text))
        else:
            self._string += text

    def _close_text(self) -> None:
        if self._streams:
            self._argue('"')
        else:
            self._give(cast(self._string, self._schema, self._tool.parameters))

    def _json_value(self) -> bool:
        """A string between JSON's quotes."""
        used = self._json.push(self._held)
        self._held = self._held[used:]
        if found := self._json.take():
            self._give(found)
        if self._json.done:
            self._state = self._next
        return self._json.done or (self._json.broken and self._give_up())

    def _bare(self) -> bool:
        """A number or a word: it ends before a comma or a bracket."""
        found = _BARE.match(self._held)
        assert found is not None
        if found.end() == len(self._held):
            return False
        text = found[0].strip()
        if not text or self._held[found.end()] in "{[":
            return self._give_up()
        self._held = self._held[found.end() :]
        self._give(cast(text, self._schema, self._tool.parameters))
        self._state = self._next
        return True

    def _next(self) -> bool:
        """After a value."""
        if not self._skip_blanks():
            return False
        if self._closes():
            return True
        if self._held[0] != ",":
            return self._give_up()
        self._held = self._held[1:]
        self._state = self._key if self._frames[-1].close == "}" else self._value
        return True

    def _closes(self) -> bool:
        """Takes the closing bracket of what is open, if it comes."""
        if self._held[0] != self._frames[-1].close:
            return False
        self._held = self._held[1:]
        self._argue(self._frames.pop().close)
        self._state = self._next
        if not self._frames:
            self._end(self._close)
        return True

    def _close(self) -> bool:
        """After a call: its end, which may be missing."""
        self._held = self._held.lstrip()
        end = self._marks.end
        if end.startswith(self._held) and self._held != end and not self._final:
            return False
        self._held = self._held.removeprefix(end)
        self._state = self._text
        return True

    def _give_up(self) -> bool:
        self._cut_off()
        return True

    def _cut_off(self) -> None:
        if self._state == self._head:
            self._abandon()
            return
        if self._state == self._text_value and self._streams:
            self._argue(quoted(self._held) + '"')
            self._held = ""
        elif self._state == self._json_value:
            self._argue(self._json.close())
        elif self._final:
            self._held = ""  # of a value that is not whole
        self._pending = ""
        self._argue("".join(frame.close for frame in reversed(self._frames)))
        self._frames = []
        self._end()


class GemmaFormat(ToolFormat):
    """Calls of Gemma 4 and FunctionGemma."""

    separator = ""

    def __init__(self, marks: Marks, tokenizer: Tokenizer | None = None) -> None:
        self.marks, self.trigger = marks, marks.begin
        super().__init__(tokenizer)

    @property
    def name(self) -> str:  # type: ignore[override]
        return "gemma4" if self.marks == GEMMA4 else "functiongemma"

    @property
    def markers(self) -> tuple[str, ...]:
        return self.marks.begin, self.marks.end, self.marks.quote

    def parser(self, tools: Sequence[Tool], new_id: Callable[[], str] = new_call_id) -> CallParser:
        return GemmaParser(self.marks, tools, new_id)

    def _call(self, lark: Lark, tool: Tool, arguments: str) -> str:
        return f"{literal(f'call:{tool.name}')} {arguments} {lark.mark(self.marks.end)}"

    def _arguments(self, lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
        return gemma_arguments(lark, self.marks.quote, tool, schema)
