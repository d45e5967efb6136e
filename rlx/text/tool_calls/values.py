"""The types of values that a format writes without one: the schema of the tool says what they are.

Text stage, used by the parsers of formats with untyped values.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_REFERENCES = 16
_ANYTHING: Mapping[str, Any] = {}  # a schema


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows.

    Args:
        root: the schema that `$ref` refers to.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return _ANY
    if isinstance(schema.get("$ref"), str):
        return types_of(referred(schema["$ref"], root), root, depth + 1)
    found = _ANY
    kind = schema.get("type")
    if isinstance(kind, str):
        found = frozenset({kind})
    elif isinstance(kind, list):
        found = frozenset(each for each in kind if isinstance(each, str))
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        kinds = {type_of(value) for value in values}
        found &= kinds | {"number"} if "integer" in kinds else kinds
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(types_of(each, root, depth + 1) for each in schema[key]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            found &= types_of(each, root, depth + 1)
    return found


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a local reference such as `#/$defs/place` names; one that allows anything if there is none."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return {} if found is None else found


def type_of(value: Any) -> str:
    """The JSON type of a value; whole numbers are integers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value can be nothing but a string."""
    return types_of(schema, root) == {"string"}


def cast(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The value that an untyped text means under a schema, as JSON text.

    A text is a number, an object and so on only if the schema allows that type. What fits no type stays a string.
    """
    allowed = types_of(schema, root)
    for value in _readings(text.strip()):
        kind = type_of(value)
        if kind in allowed or (kind == "integer" and "number" in allowed):
            if kind == "string" and value != text:
                continue  # a string is taken as it stands, quotes included
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> list[Any]:
    """The meanings that a text may have: as JSON, as a word in any case, as a Python literal."""
    found: list[Any] = []
    with suppress(ValueError, RecursionError):
        found.append(json.loads(text, parse_constant=_no_number))
    if text.lower() in _WORDS:
        found.append(_WORDS[text.lower()])
    if text[:1] in "[{" and not found:
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            found.append(json.loads(json.dumps(ast.literal_eval(text), allow_nan=False)))
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def child(schema: Any, key: str | None, root: Mapping[str, Any], unknown: Any = _ANYTHING) -> Any:
    """The schema of an entry of an object, or of a list where `key` is None; `unknown` if there is none."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = referred(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return unknown
    if key is None:
        return schema.get("items", unknown)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    more = schema.get("additionalProperties")
    return more if isinstance(more, Mapping) else unknown
