"""A JSON schema as a choice between schemas of one type each, for grammars that are written by hand.

Text stage, used by the grammars of formats whose values are not JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlx.errors import ToolError
from rlx.text.tool_calls.values import referred, type_of

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
_COMBINED = ("anyOf", "oneOf", "allOf")


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
    key = next((key for key in _COMBINED if isinstance(schema.get(key), list)), None)
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
        kinds = _kinds(schema.get("type"))
        found = [value for value in values if not kinds or type_of(value) in kinds or _is_whole(value, kinds)]
        if not found:
            raise ToolError("the schema allows no value", where=where)
        return [{"const": value} for value in found]
    kinds = _kinds(schema.get("type")) or _guessed(schema)
    for kind in kinds or [""]:
        known = _NOTES | {"type"}.union(*(_KEYS.get(each, ()) for each in kinds))
        if unknown := [key for key in schema if key not in known]:
            what = f"the keyword {unknown[0]!r} of a {kind or 'value'} cannot be enforced"
            raise ToolError(what, where=where, hint="leave it out, or use tool_choice auto")
    return [_of_kind(schema, kind) for kind in kinds] or [{}]


def _of_kind(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    keys = _KEYS.get(kind, set()) | ({"format"} if kind == "string" else set())
    return {"type": kind, **{key: schema[key] for key in keys if key in schema}}


def _kinds(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value if isinstance(each, str)] if value else []


def _is_whole(value: Any, kinds: Iterable[str]) -> bool:
    return type_of(value) == "integer" and "number" in kinds


def _guessed(schema: Mapping[str, Any]) -> list[str]:
    """The type that the keywords of a schema without one are for."""
    found = [kind for kind in ("string", "number", "array", "object") if any(key in schema for key in _KEYS[kind])]
    return found[:1]
