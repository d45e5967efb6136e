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
from functools import partial
from typing import Any

from rlx.errors import ToolError
from rlx.text.tokenizer import tail_of
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import (
    ANY_TEXT,
    Lark,
    branches,
    chain,
    checked_required,
    either,
    json_value,
    literal,
    text_terminals,
)
from rlx.text.tool_calls.reader import BLANKS, CallReader, CutOff, Give, Reading, Unreadable, quoted
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import cast, types_of

_HEAD = re.compile(r"\s*call:\s*([^\s{}<>]{1,200})\s*\{")
_HEAD_BEGIN = re.compile(r"\s*(c|ca|cal|call|call:\s*[^\s{}<>]{0,200}\s*)?")
_KEY = re.compile(r'"?([^:{}\[\],"<>]{1,400}?)"?\s*:')
_KEY_BEGIN = re.compile(r'"?[^:{}\[\],"<>]{0,400}"?\s*')
_BARE = re.compile(r"[^,{}\[\]]*")


class GemmaReader(CallReader):
    """Reads calls whose arguments are written without JSON's quotes.

    Args:
        begin, end: the texts around a call.
        quote: that around a string.
    """

    space = BLANKS

    def __init__(self, begin: str, end: str, quote: str, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__((begin,), tools, new_id)
        self._end_mark, self._quote = end, quote

    def _call(self, marker: str) -> Reading[None]:
        head = yield from self._match(_HEAD, _HEAD_BEGIN)
        self._at -= 1
        self._root = self._tools.get(head[1], Tool("")).parameters
        if (yield from self._arguments(head[1], self._root)):
            yield from self._close(self._end_mark)

    def _single(self, give: Give, lead: str, schema: Any, char: str) -> Reading[None]:
        quote = self._quote
        while quote.startswith(self._rest) and self._rest != quote and not self._final:
            yield
        if self._held.startswith(quote, self._at):
            self._at += len(quote)
            yield from self._text_value(lead, schema)
        elif char == '"':
            yield from super()._single(give, lead, schema, char)
        else:
            found = yield from self._bare()
            give(lead + cast(found, schema, self._root))

    def _key(self) -> Reading[str]:
        """A key and its colon. Keys with quotes are keys, too."""
        quote = self._quote
        while True:
            rest = self._rest
            if rest.startswith(quote) or quote.startswith(rest):
                key, _, behind = rest[len(quote) :].partition(quote)
                if behind.strip():
                    if behind.lstrip()[0] != ":":
                        raise Unreadable
                    self._at = len(self._held) - len(behind.lstrip()) + 1
                    return _json(key)
            elif found := _KEY.match(rest):
                self._at += found.end()
                return _json(found[1].strip())
            elif not _KEY_BEGIN.fullmatch(rest):
                raise Unreadable
            yield from self._wait()

    def _text_value(self, lead: str, schema: Any) -> Reading[None]:
        """A string after the family's first quote."""
        quote, ended, value = self._quote, False, ""
        streams = "string" in types_of(schema, self._root)
        self._argue(lead + '"' if streams else "")
        while not ended:
            self._drop()
            said, found, _ = self._held.partition(quote)
            ended = bool(found)
            said = said if ended or self._final else said[: len(said) - tail_of(said, (quote,))]
            self._at = len(said) + len(found)
            value += said
            self._argue(quoted(said) if streams else "")
            if self._final and not ended:
                self._argue('"' if streams else "")
                raise CutOff
            if not ended:
                yield
        self._argue('"' if streams else lead + cast(value, schema, self._root))

    def _bare(self) -> Reading[str]:
        """A number or a word: it ends before a comma or a bracket."""
        while True:
            found = _BARE.match(self._held, self._at)
            assert found is not None
            if found.end() < len(self._held):
                break
            yield from self._wait()
        if not found[0].strip() or self._held[found.end()] in "{[":
            raise Unreadable
        self._at = found.end()
        return found[0].strip()


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_PLAIN_KEY = re.compile(r'[^:{}\[\],"<>\s][^:{}\[\],"<>]*')
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"


class GemmaValues:
    """Writes the rules for the values of one tool.

    Args:
        quote: the text around strings.
        root: the schema that `$ref` refers to.
        where: the tool, for messages.
    """

    def __init__(self, lark: Lark, quote: str, root: Mapping[str, Any], where: str) -> None:
        self._lark, self._quote, self._root, self._where = lark, quote, root, where
        self._known: dict[str, str] = {}  # rules of schemas that others refer to

    def value(self, schema: Any) -> str:
        """The body of the rule for a value.

        Raises:
            ToolError: a part of the schema cannot be enforced.
        """
        reference = schema.get("$ref") if isinstance(schema, Mapping) and len(schema) == 1 else None
        if not isinstance(reference, str):
            return either([self._single(each) for each in branches(schema, self._root, self._where)])
        if reference not in self._known:
            name = self._known[reference] = self._lark.reserve("value")
            found = [self._single(each) for each in branches(schema, self._root, self._where)]
            self._lark.define(name, either(found))
        return self._known[reference]

    def _single(self, schema: Mapping[str, Any]) -> str:
        if "const" in schema:
            return self._written(schema["const"])
        kind = schema.get("type")
        if kind is None:
            return self._anything()
        if kind in ("integer", "number", "boolean", "null"):
            return json_value(schema)
        if kind == "string":
            return self._text(*text_terminals(schema, self._where))
        if kind == "array":
            return self._list(schema)
        if kind != "object":
            raise ToolError(f"there is no type {kind!r}", where=self._where)
        return self.object(schema)

    def _text(self, *terminals: str) -> str:
        return f"{self._lark.mark(self._quote)} {self._lark.before(self._quote, *terminals)}"

    def _written(self, value: Any) -> str:
        """A value as the model writes it."""
        mark = self._lark.mark(self._quote)
        if isinstance(value, str):
            return f"{mark} {literal(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, list):
            inner = ' "," '.join(self._written(each) for each in value)
            return f'"[" {inner} "]"'
        if isinstance(value, Mapping):
            inner = ' "," '.join(f"{self._key(key)} {self._written(each)}" for key, each in value.items())
            return f'"{{" {inner} "}}"'
        return literal(json.dumps(value))

    def _key(self, name: str) -> str:
        if not _PLAIN_KEY.fullmatch(name) or name != name.strip():
            raise ToolError(f"a key cannot be called {name!r} in the model's format", where=self._where)
        return literal(f"{name}:")

    def _anything(self) -> str:
        if "" not in self._known:
            name = self._known[""] = self._lark.reserve("any")
            text, number = self._text(ANY_TEXT), json_value({"type": ["number", "boolean", "null"]})
            entries = f'{_ANY_KEY} ":" {name} ("," {_ANY_KEY} ":" {name})*'
            self._lark.define(name, f'{text} | {number} | "[" ({name} ("," {name})*)? "]" | "{{" ({entries})? "}}"')
        return self._known[""]

    def _list(self, schema: Mapping[str, Any]) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[]"'
        item = self._lark.rule("item", self.value(schema.get("items", {})))
        more = f'{item} ("," {item}){{{max(0, low - 1)},{"" if high is None else high - 1}}}'
        return f'"[" {more} "]"' if low else f'"[" ({more})? "]"'

    def object(self, schema: Mapping[str, Any]) -> str:
        """The body of the rule for an object: its properties in order, as the chat template sorts them."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        checked_required(schema, self._where)
        names = sorted(properties, key=str.lower)
        entries = [self._lark.rule("entry", f"{self._key(name)} {self.value(properties[name])}") for name in names]
        more = schema.get("additionalProperties", True)
        last = None
        if more is not False:
            last = self._lark.rule("entry", f'{_ANY_KEY} ":" {self.value(more if isinstance(more, Mapping) else {})}')
        first = chain(self._lark, entries, [name in required for name in names], last)
        return f'"{{" {first} "}}"'


def gemma_arguments(lark: Lark, quote: str, tool: Tool, schema: Mapping[str, Any]) -> str:
    """The body of the rule for the arguments of a tool."""
    where = f"tool {tool.name}"
    found = [each for each in branches(schema, schema, where) if each.get("type") == "object"]
    if not found:
        raise ToolError("the parameters are no object", where=where)
    values = GemmaValues(lark, quote, schema, where)
    return either([values.object(each) for each in found])


def _format(name: str, begin: str, end: str, quote: str) -> ToolFormat:
    """The format of a family.

    Args:
        begin, end: the texts around a call.
        quote: that around a string.
    """
    return ToolFormat(
        name, begin, (begin, end, quote), partial(GemmaReader, begin, end, quote),
        lambda lark, tool, arguments: f"{literal(f'call:{tool.name}')} {arguments} {lark.mark(end)}",
        lambda lark, tool, schema: gemma_arguments(lark, quote, tool, schema), separator="",
    )  # fmt: skip


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
