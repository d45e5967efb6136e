"""Grammars of tool calls, written as Lark text for llguidance.

Text stage, used by the formats. `%json` embeds a JSON schema; `<[id]>` is a control token; the syntax is described in
llguidance's `docs/syntax.md`. A schema is a choice between schemas of one type each (`branches`), for the values that a
format does not write as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlx.errors import ToolError
from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls.tools import Tool, ToolChoice
from rlx.text.tool_calls.values import referred, type_of, types_of

ANY_TEXT = "/(?s:.*)/"
#: Between two tokens of JSON: a blank, or a line break and an indentation. A grammar without it keeps a model from the
#: text that it has learned, and the answers get worse; one with any white space lets a model write blanks without end.
JSON_SPACE = r" |\n( {0,24}|\t{0,6})"
_SPACED = {"whitespace_pattern": JSON_SPACE}
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "if")
_OPEN_TEXT = r'/\s*([\[{"0-9.+-](?s:.*)|[tT]rue|[fF]alse|[nN]ull|[nN]one)\s*/'
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class Lark:
    """A grammar that is being written: rules by name.

    Args:
        tokens: ids of the control tokens, by their texts.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens, self._rules, self._names = tokens, dict[str, str](), set[str]()

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule, or a terminal if the name is in capitals; returns its name, which no other grammar has."""
        name = f"{'TOOL' if name.isupper() else 'tool'}_{name}"
        unique, number = name, 1
        while unique in self._names:
            unique, number = f"{name}_{number}", number + 1
        self._names.add(unique)
        self._rules[unique + options] = body
        return unique

    def reserve(self, name: str) -> str:
        """A name for a rule whose body follows with `define`: it may refer to itself."""
        return self.rule(name, "")

    def define(self, name: str, body: str) -> None:
        self._rules[name] = body

    def mark(self, text: str) -> str:
        """A text that is a control token in some vocabularies, or contains some."""
        between = "|".join(map(re.escape, self._tokens)) or "(?!)"
        parts = [part for part in re.split(f"({between})", text) if part]
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else literal(part) for part in parts)

    def before(self, end: str, *texts: str) -> str:
        """A text up to `end`, and `end`; the text matches each of the terminals `texts`."""
        if end in self._tokens:
            return f"{self.rule('TEXT', ' & '.join(texts))} {self.mark(end)}"
        inner = end.strip("\n")
        excluded = f"~/(?s:.*){escaped(inner)}(?s:.*)/"
        terminal = self.rule("TEXT", " & ".join([*texts, excluded]))
        return self.rule("text", terminal, f"[suffix={literal(end)}]")


def control_tokens(tokenizer: Tokenizer | None, texts: Iterable[str]) -> dict[str, int]:
    """The ids of those texts that are control tokens of a vocabulary."""
    if tokenizer is None:
        return {}
    found = {text: tokenizer.token_to_id(text) for text in texts}
    return {text: token for text, token in found.items() if token is not None and token in tokenizer.special_ids}


def literal(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", "\\n")


def either(bodies: Sequence[str]) -> str:
    """One of several bodies of rules."""
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"


def json_value(schema: Any, root: Mapping[str, Any] = {}) -> str:
    """JSON of a schema, which may refer to definitions of `root`, with white space as models write it."""
    found = {key: root[key] for key in ("$defs", "definitions") if key in root}
    found |= schema if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({**found, "x-guidance": _SPACED | found.get("x-guidance", {})})


def closed(schema: Any) -> Any:
    """The schema without properties that it does not name, where it does not speak of others.

    JSON Schema allows any further property then, which neither a tool nor a class of pydantic models means.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            found[key] = {name: closed(each) for name, each in value.items()}
        else:
            found[key] = closed(value) if key in ("items", "prefixItems", "additionalProperties") else value
    if isinstance(found.get("properties"), Mapping) and not any(key in found for key in _COMBINED):
        found.setdefault("additionalProperties", False)
    return found


def text_terminals(schema: Mapping[str, Any], where: str) -> list[str]:
    """Terminals that a string of a schema matches, all of them.

    Raises:
        ToolError: the schema has a pattern that cannot be enforced.
    """
    found = []
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        found.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
    if isinstance(schema.get("pattern"), str):
        found.append(f"/{_searched(schema['pattern'], where)}/")
    if schema.get("format") in _FORMATS:
        found.append(f"/{_FORMATS[schema['format']]}/")
    if types_of(schema, schema) != {"string"}:
        found.append(f"~{_OPEN_TEXT}")
    return [ANY_TEXT, *found]


def _outside_brackets(pattern: str) -> str:
    """A pattern without what stands in brackets."""
    left, last = re.sub(r"\\.|\[[^\]]*\]", "", pattern), ""
    while left != last:
        left, last = re.sub(r"\([^()]*\)", "", left), left
    return left


def _searched(pattern: str, where: str) -> str:
    """A pattern that matches anywhere in a text, as one that matches the whole text."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    body = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in _outside_brackets(body):
        what = f"the pattern {pattern!r} has alternatives beside ^ or $"
        raise ToolError(what, where=where, hint="put the alternatives into brackets")
    body = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", body).replace("\n", "\\n")
    return f"{'' if begins else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}"


def chain(lark: Lark, entries: Sequence[str], needed: Sequence[bool], last: str | None, comma: str = ",") -> str:
    """The rule for entries with commas between them, of which some may be missing, and any number of `last` at the end.

    There are two rules for each place: one where an entry stands before it, one where none does.
    """
    comma = literal(comma)
    after = lark.rule("rest", f"({comma} {last})*" if last else '""')
    begin = lark.rule("rest", f"({last} ({comma} {last})*)?" if last else '""')
    for entry, is_needed in zip(reversed(entries), reversed(needed), strict=True):
        first, further = f"{entry} {after}", f"{comma} {entry} {after}"
        begin = lark.rule("rest", first if is_needed else f"{first} | {begin}")
        after = lark.rule("rest", further if is_needed else f"{further} | {after}")
    return begin


def checked_required(schema: Mapping[str, Any], where: str) -> None:
    """Checks that the properties which the schema of an object requires are there.

    Raises:
        ToolError: one is not.
    """
    for name in schema.get("required", []):
        if name not in schema.get("properties", {}):
            raise ToolError(f"{name!r} is required, but it is no property", where=where)


def parameters_of(
    tool: Tool, schema: Mapping[str, Any], name: re.Pattern[str]
) -> tuple[dict[str, Any], list[str], Any]:
    """The schemas of the parameters of a tool, which of them are required, and the schema of further ones.

    Args:
        name: what the format allows as the name of a parameter.

    Raises:
        ToolError: there are several such sets, or a name that cannot be written.
    """
    where = f"tool {tool.name}"
    found = branches(schema, schema, where)
    if len(found) != 1:
        raise ToolError("the parameters are a choice between several schemas", where=where)
    checked_required(found[0], where)
    properties = found[0].get("properties", {})
    for each in properties:
        if not name.fullmatch(each):
            raise ToolError(f"a parameter cannot be called {each!r} in the model's format", where=where)
    return properties, found[0].get("required", []), found[0].get("additionalProperties", True)


def tools_of(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that an answer may call."""
    return [tool for tool in tools if choice.name is None or tool.name == choice.name]


ErrorOf = Callable[[str], str]
"""Compiles a grammar, and returns what is wrong with it; an empty text if nothing is."""

Arguments = Callable[[Lark, Tool, Mapping[str, Any]], str]
"""Writes the arguments of a tool under a schema: `(lark, tool, schema) -> body of a rule`."""


def arguments(lark: Lark, tool: Tool, choice: ToolChoice, write: Arguments, error_of: ErrorOf) -> str:
    """The body of the rule for the arguments of a tool.

    Where the model decides whether it calls, the schema is enforced as far as it can be: it is a help for the model.
    Where a call is forced, all of it is. `strict` of the tool decides otherwise.

    Raises:
        ToolError: a part of the schema cannot be enforced.
    """
    schemas = [closed(tool.parameters)]
    if not (choice.forced if tool.strict is None else tool.strict):
        schemas += [{**schemas[0], "x-guidance": {"lenient": True}}, {"type": "object"}]
    for schema in schemas[:-1]:
        with suppress(ToolError):
            _check_schema(tool, schema, write, error_of)
            return write(lark, tool, schema)
    _check_schema(tool, schemas[-1], write, error_of)
    return write(lark, tool, schemas[-1])


def _check_schema(tool: Tool, schema: Mapping[str, Any], write: Arguments, error_of: ErrorOf) -> None:
    """`ToolError` if a schema cannot be enforced."""
    lark = Lark({})
    lark.define("start", write(lark, tool, schema))
    if error := error_of(str(lark)):
        raise ToolError(f"its parameters cannot be enforced: {error}", where=f"tool {tool.name}", hint=_WAY_OUT)


_WAY_OUT = 'leave this part of the schema out, or enforce the rest: give the tool "strict": false'
_MAX_DEPTH = 32
_NOTES = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "example", "examples",
    "format", "nullable", "readOnly", "title", "writeOnly", "x-guidance",
})  # fmt: skip
_KEYS = {
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_KEYS["integer"] = _KEYS["number"]
_CHOICES = ("anyOf", "oneOf", "allOf")


def branches(schema: Any, root: Mapping[str, Any], where: str, depth: int = 0) -> list[dict[str, Any]]:
    """The schemas of one type, or of fixed values, between which a schema leaves the choice. `{}` allows anything.

    Args:
        root: the schema that `$ref` refers to.
        where: what the schema is called in messages.

    Raises:
        ToolError: the schema has a keyword that cannot be enforced, or allows nothing.
    """
    if schema is False or depth > _MAX_DEPTH:
        raise ToolError("the schema allows no value" if schema is False else "the schema never ends", where=where)
    if not isinstance(schema, Mapping):
        return [{}]
    if isinstance(schema.get("$ref"), str):
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return branches(_merged(referred(schema["$ref"], root), rest, where), root, where, depth + 1)
    key = next((key for key in _CHOICES if isinstance(schema.get(key), list)), None)
    if key is None:
        return _single(schema, where)
    rest = {name: value for name, value in schema.items() if name != key}
    if key == "allOf":
        for each in schema[key]:
            rest = _merged(rest, each, where)
        return branches(rest, root, where, depth + 1)
    found = [branches(_merged(rest, each, where), root, where, depth + 1) for each in schema[key]]
    return [branch for each in found for branch in each]


def _merged(a: Any, b: Any, where: str) -> dict[str, Any]:
    """The schema of what two allow."""
    found = {**a} if isinstance(a, Mapping) else {}
    for key, value in (b if isinstance(b, Mapping) else {}).items():
        old = found.get(key)
        if key == "properties" and isinstance(old, Mapping):
            value = {**old, **value}
        elif key == "required" and isinstance(old, list):
            value = [*old, *(each for each in value if each not in old)]
        elif key in found and old != value and key not in _NOTES:
            raise ToolError(f"{key!r} stands in two schemas that both apply", where=where, hint="write it once")
        found[key] = value
    return found


def _single(schema: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The branches of a schema that is not combined of others."""
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        allowed = {*_kinds(schema.get("type"))}
        allowed |= {"integer"} if "number" in allowed else set()
        found = [value for value in values if not allowed or type_of(value) in allowed]
        if not found:
            raise ToolError("the schema allows no value", where=where)
        return [{"const": value} for value in found]
    kinds = _kinds(schema.get("type")) or _guessed(schema)
    known = _NOTES | {"type"}.union(*(_KEYS.get(each, ()) for each in kinds))
    if unknown := [key for key in schema if key not in known]:
        raise ToolError(f"the keyword {unknown[0]!r} cannot be enforced", where=where, hint=_WAY_OUT)
    return [_of_kind(schema, kind) for kind in kinds] or [{}]


def _of_kind(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    keys = _KEYS.get(kind, set()) | ({"format"} if kind == "string" else set())
    return {"type": kind, **{key: schema[key] for key in keys if key in schema}}


def _kinds(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value if isinstance(each, str)] if value else []


def _guessed(schema: Mapping[str, Any]) -> list[str]:
    """The type that the keywords of a schema without one are for."""
    found = [kind for kind in ("string", "number", "array", "object") if any(key in schema for key in _KEYS[kind])]
    return found[:1]
