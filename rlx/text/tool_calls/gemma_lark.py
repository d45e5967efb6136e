"""The grammar of arguments as Gemma 4 and FunctionGemma write them.

Text stage, used by `gemma.py`. Keys have no quotes, and strings stand between quotes of the family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import ToolError
from rlx.text.tool_calls.branches import branches
from rlx.text.tool_calls.lark import ANY_TEXT, Lark, either, json_value, literal, text_terminals
from rlx.text.tool_calls.tools import Tool

_KEY = re.compile(r'[^:{}\[\],"<>\s][^:{}\[\],"<>]*')
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
        if not _KEY.fullmatch(name) or name != name.strip():
            raise ToolError(f"a key cannot be called {name!r} in the model's format", where=self._where)
        return literal(f"{name}:")

    def _anything(self) -> str:
        """Any value."""
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
        for name in required:
            if name not in properties:
                raise ToolError(f"{name!r} is required, but it is no property", where=self._where)
        names = sorted(properties, key=str.lower)
        entries = [self._lark.rule("entry", f"{self._key(name)} {self.value(properties[name])}") for name in names]
        more = schema.get("additionalProperties", True)
        last = None
        if more is not False:
            last = self._lark.rule("entry", f'{_ANY_KEY} ":" {self.value(more if isinstance(more, Mapping) else {})}')
        first = self._chain(entries, [name in required for name in names], last)
        return f'"{{" {first} "}}"'

    def _chain(self, entries: Sequence[str], needed: Sequence[bool], last: str | None) -> str:
        """Entries with commas between them, of which some may be missing, and any number of `last` at the end.

        There are two rules for each place: one where an entry stands before it, one where none does.
        """
        after = self._lark.rule("rest", f'("," {last})*' if last else '""')
        begin = self._lark.rule("rest", f'({last} ("," {last})*)?' if last else '""')
        for entry, is_needed in zip(reversed(entries), reversed(needed), strict=True):
            first, further = f"{entry} {after}", f'"," {entry} {after}'
            begin = self._lark.rule("rest", first if is_needed else f"{first} | {begin}")
            after = self._lark.rule("rest", further if is_needed else f"{further} | {after}")
        return begin


def gemma_arguments(lark: Lark, quote: str, tool: Tool, schema: Mapping[str, Any]) -> str:
    """The body of the rule for the arguments of a tool."""
    where = f"tool {tool.name}"
    found = [each for each in branches(schema, schema, where) if each.get("type") == "object"]
    if not found:
        raise ToolError("the parameters are no object", where=where)
    values = GemmaValues(lark, quote, schema, where)
    return either([values.object(each) for each in found])
