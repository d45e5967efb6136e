"""Calls as Python writes them, between two texts: LFM2 and OLMo 3.

Text stage. What is read is never run:

    <|tool_call_start|>[f(city="Paris", days=3), g()]<|tool_call_end|>      LFM2
    <function_calls>f(city="Paris", days=3)\\ng()</function_calls>           OLMo 3

Source: the model cards and chat templates of LFM2 (Liquid AI) and Olmo-3 (Apache-2.0) on the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import Lark, branches, chain, either, json_value, literal, parameters_of
from rlx.text.tool_calls.reader import BLANKS, CallReader, CutOff, Give, Reading, Unreadable, quoted
from rlx.text.tool_calls.tools import Tool

_HEAD = re.compile(r"([A-Za-z_][\w.:/-]{0,200})\s*\(")
_HEAD_BEGIN = re.compile(r"[A-Za-z_][\w.:/-]{0,200}\s*")
_KEY = re.compile(r"([^\W\d]\w{0,200})\s*=")
_KEY_BEGIN = re.compile(r"[^\W\d]\w{0,200}\s*")
_PARAMETER = re.compile(r"[^\W\d]\w*")
_BETWEEN = " \t\r\n,;]"
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {**dict(zip("abfnrtv0", "\a\b\f\n\r\t\v\0", strict=True)), **{char: char for char in "'\"\\/"}, "\n": ""}


class PythonReader(CallReader):
    """Reads calls of Python: arguments by keyword, or in the order of the tool's parameters.

    Args:
        begin, end: the texts around all calls.
    """

    space, quotes = BLANKS, "\"'"

    def __init__(self, begin: str, end: str, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((begin,), tools, new_id)
        self._end_mark = end

    def _call(self, marker: str) -> Reading[None]:
        self._at += (yield from self._peek(BLANKS)) == "["
        yield from self._peek(BLANKS)
        found = yield from self._match(_HEAD, _HEAD_BEGIN)
        while (yield from self._keywords(found[1])) and (following := (yield from self._next())):
            found = following

    def _next(self) -> Reading[re.Match[str] | None]:
        """After a call: the head of a further one. Without one the end of all calls is dropped."""
        while True:
            rest = self._held.lstrip(_BETWEEN)
            if rest.startswith(self._end_mark):
                self._held = rest.removeprefix(self._end_mark)
                return None
            if found := _HEAD.match(rest):
                self._held, self._at = rest, found.end()
                return found
            if self._final or not (self._end_mark.startswith(rest) or _HEAD_BEGIN.fullmatch(rest)):
                return None
            yield

    def _keywords(self, name: str) -> Reading[bool]:
        """The arguments of a call and their closing bracket; returns whether they are readable to the end."""
        self._begin(name)
        names, lead = iter(self._tools.get(name, Tool(name)).properties), "{"
        opened, start = False, 0

        def give(fragment: str) -> None:
            nonlocal opened
            opened = opened or bool(fragment)
            self._argue(fragment)

        try:
            while (yield from self._peek(BLANKS)) != ")":
                start = self._at
                key = yield from self._keyword(names)
                yield from self.json(give, f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
                lead = ", "
                char, start = (yield from self._peek(BLANKS)), self._at
                if char not in ",)":
                    raise Unreadable
                self._at += char == ","
            self._at += 1
            return True
        except Unreadable as error:
            self._at = len(self._held) if isinstance(error, CutOff) else start
            return False
        finally:
            self._argue("}" if opened else "{}")
            self._end()

    def _keyword(self, names: Iterator[str]) -> Reading[str]:
        try:
            return (yield from self._match(_KEY, _KEY_BEGIN))[1]
        except CutOff:
            raise
        except Unreadable:
            if (name := next(names, None)) is None:
                raise
            return name

    def _single(self, give: Give, lead: str, schema: Any, char: str) -> Reading[None]:
        if char not in self.quotes:
            yield from super()._single(give, lead, schema, char)
            return
        while (found := _QUOTED.match(self._held, self._at)) is None:
            if self._final:
                give(f'{lead}"{quoted(unescaped(self._held[self._at + 1 :]))}"')
                raise CutOff
            yield
        self._at = found.end()
        give(f'{lead}"{quoted(unescaped(found[1] or found[2] or ""))}"')


def unescaped(text: str) -> str:
    """The text that a literal of Python or JSON stands for, without its quotes. An unknown escape is its own text."""

    def meant(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) == 1:
            return _ESCAPES.get(escape, found[0])
        code = int(escape[1:], 16)
        return chr(code) if code <= sys.maxunicode else found[0]

    return _ESCAPE.sub(meant, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _arguments(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """The body of the rule for the arguments of a tool, by keyword, in the order of the schema.

    Raises:
        ToolError: a part of the schema cannot be enforced.
    """
    properties, required, _ = parameters_of(tool, schema, _PARAMETER)
    entries = [
        lark.rule("argument", f"{literal(f'{name}=')} {_value(each, schema, f'tool {tool.name}')}")
        for name, each in properties.items()
    ]
    return chain(lark, entries, [name in required for name in properties], None, ", ")


def _value(schema: Any, root: Mapping[str, Any], where: str) -> str:
    """A value: JSON, but for the words that Python writes otherwise."""
    found = []
    for each in branches(schema, root, where):
        if each.get("type") == "boolean":
            found.append('"True" | "False"')
        elif each.get("type") == "null" or ("const" in each and isinstance(each["const"], bool | None)):
            found.append(f'"{each.get("const")}"')
        else:
            found.append(json_value(each, root))
    return either(found)


def _format(name: str, begin: str, end: str, enclosed: tuple[str, str], separator: str) -> ToolFormat:
    return ToolFormat(
        name, begin, (begin, end), partial(PythonReader, begin, end),
        lambda lark, tool, arguments: f'{literal(tool.name + "(")} {arguments} ")"', _arguments,
        separator=separator, enclosed=(enclosed[0], enclosed[1] + end),
    )  # fmt: skip


LFM2 = _format("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", ("[", "]"), ", ")
OLMO = _format("olmo", "<function_calls>", "</function_calls>", ("", ""), "\n")
