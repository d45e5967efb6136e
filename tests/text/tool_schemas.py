"""Schemas of tools of many kinds, for forced calls."""

from __future__ import annotations

from typing import Any


def _object(properties: dict[str, Any], required: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), **more}


TEXT, WHOLE, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 12}
SMALL = {"type": "integer", "minimum": 0, "maximum": 999}
TREE = {
    "type": "object",
    "properties": {"value": SMALL, "next": {"$ref": "#/$defs/tree"}},
    "required": ["value"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "nothing": _object({}),
    "a text": _object({"city": SHORT}, "city"),
    "optional": _object({"city": SHORT, "days": SMALL}, "city"),
    "all optional": _object({"a": SMALL, "b": FLAG, "c": SHORT}),
    "bounds": _object({"ratio": {"type": "number", "minimum": 0, "maximum": 1}}, "ratio"),
    "exclusive bounds": _object({"n": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9}}, "n"),
    "words": _object({"unit": {"enum": ["C", "F"]}}, "unit"),
    "words like values": _object({"code": {"type": "string", "enum": ["42", "true", "null", "[]"]}}, "code"),
    "mixed values": _object({"level": {"enum": ["low", 3, None, True]}}, "level"),
    "constant": _object({"kind": {"const": "exact words"}}, "kind"),
    "flag": _object({"sure": FLAG}, "sure"),
    "null": _object({"nothing": {"type": "null"}}, "nothing"),
    "text or null": _object({"note": {"type": ["string", "null"], "maxLength": 8}}, "note"),
    "text or number": _object({"id": {"anyOf": [SMALL, {"type": "string", "maxLength": 6}]}}, "id"),
    "list": _object({"words": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3}}, "words"),
    "list of lists": _object(
        {"rows": {"type": "array", "maxItems": 2, "items": {"type": "array", "items": SMALL, "maxItems": 2}}}, "rows"
    ),
    "no list": _object({"words": {"type": "array", "items": SHORT, "maxItems": 0}}, "words"),
    "object": _object({"place": _object({"name": SHORT, "floor": SMALL}, "name")}, "place"),
    "deep": _object({"a": _object({"b": _object({"c": _object({"d": SMALL}, "d")}, "c")}, "b")}, "a"),
    "objects in a list": _object(
        {"items": {"type": "array", "maxItems": 2, "items": _object({"sku": SHORT, "count": SMALL}, "sku count")}},
        "items",
    ),
    "reference": _object({"tree": {"$ref": "#/$defs/tree"}}, "tree", **{"$defs": {"tree": TREE}}),
    "map": _object({"counts": {"type": "object", "additionalProperties": SMALL}}, "counts"),
    "length": _object({"pin": {"type": "string", "minLength": 4, "maxLength": 4}}, "pin"),
    "pattern": _object({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}, "plate"),
    "pattern within": _object({"plate": {"type": "string", "pattern": "[0-9]", "maxLength": 9}}, "plate"),
    "date": _object({"day": {"type": "string", "format": "date"}}, "day"),
    "long names": _object({"a_rather_long_name_of_a_parameter": SMALL, "camelCase": FLAG}, "camelCase"),
    "names of JSON": _object({"name": SHORT, "arguments": SMALL, "type": {"enum": ["x"]}}, "name arguments"),
    "unicode": _object({"größe": SMALL, "word": {"enum": ["naïve", "日本"]}}, "word"),
    "closed": _object({"a": SMALL}, "a", additionalProperties=False),
}
