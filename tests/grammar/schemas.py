"""Fifty JSON schemas of many kinds, and prompts.

Most have bounds, so that answers of a model that knows nothing of JSON end. Every schema is valid draft 2020-12.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 12}
NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": 999}


def closed(properties: dict[str, Any], required: list[str] | None = None) -> Schema:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def several(items: Any, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": NUMBER,
    "negative": {"type": "integer", "minimum": -50, "maximum": -10},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 8},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "text": TEXT,
    "text of a length": {"type": "string", "minLength": 4, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "alternatives in a pattern": {"type": "string", "pattern": "^(red|green|blue)(ish)?$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["fox", "dog", "cat"]},
    "mixed enum": {"enum": ["fox", 7, None, True, ["a", 1]]},
    "const": {"const": {"version": 2, "name": "rlx", "tags": ["a", "b"]}},
    "quotes in a const": {"const": 'she said "no"\n\tand left \\ slowly'},
    "unicode in an enum": {"enum": ["Käse", "日本", "🦊 fox", "ﬁ"]},
    "several types": {"type": ["boolean", "null"]},
    "person": closed({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "optional": closed({"a": NUMBER, "b": NUMBER, "c": {"type": "boolean"}}, ["b"]),
    "nothing required": closed({"x": NUMBER, "y": NUMBER}, []),
    "many properties": closed({f"field_{i}": {"type": "boolean"} for i in range(12)}),
    "odd names": closed({"a b": NUMBER, 'quote"d': NUMBER, "ünïcode": {"type": "null"}, "": {"type": "boolean"}}),
    "nested": closed({"outer": closed({"inner": closed({"value": NUMBER})})}),
    "address": closed({
        "street": TEXT, "number": NUMBER, "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["DE", "FR", "US"]},
    }),
    "list": several(NUMBER),
    "list of a length": several({"type": "boolean"}, 4, 4),
    "list of objects": several(closed({"id": NUMBER, "ok": {"type": "boolean"}}), 2, 1),
    "list of lists": several(several({"enum": [0, 1]}, 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [NUMBER, TEXT, {"type": "boolean"}], "items": False, "minItems": 3},
    "empty list": several(NUMBER, 0),
    "any of": {"anyOf": [NUMBER, {"type": "boolean"}, closed({"error": TEXT})]},
    "one of": {"oneOf": [closed({"kind": {"const": "circle"}, "radius": NUMBER}),
                         closed({"kind": {"const": "square"}, "side": NUMBER})]},
    "all of": {"allOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 20}]},
    "all of objects": {"allOf": [
        {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
    ], "additionalProperties": False, "properties": {"a": True, "b": True}},
    "nullable": closed({"note": {"anyOf": [TEXT, {"type": "null"}]}}),
    "definitions": {"$defs": {"point": closed({"x": NUMBER, "y": NUMBER})},
                    **closed({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}})},
    "tree": {"$defs": {"node": closed({"value": {"type": "integer", "minimum": 0, "maximum": 9},
                                       "children": several({"$ref": "#/$defs/node"}, 1)})},
             "$ref": "#/$defs/node"},
    "linked list": {"$defs": {"node": closed({"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})},
                    "$ref": "#/$defs/node"},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "map with a pattern": {"type": "object", "patternProperties": {"^k[0-9]$": NUMBER}, "additionalProperties": False,
                           "maxProperties": 2},
    "entry and others": {"type": "object", "properties": {"id": NUMBER}, "required": ["id"],
                         "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "annotations": closed({"size": {"type": "integer", "title": "Size", "description": "in cm", "default": 3,
                                    "examples": [1, 2], "minimum": 1, "maximum": 9, "deprecated": False}}),
    "tool call": closed({"name": {"const": "get_weather"},
                         "arguments": closed({"city": TEXT, "unit": {"enum": ["C", "F"]}}, ["city"])}),
    "graph": closed({"nodes": several({"type": "string", "pattern": "^[a-z]$"}, 3, 1),
                     "edges": several({"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False,
                                       "minItems": 2}, 2)}),
    "settings": closed({"theme": {"enum": ["light", "dark"]}, "size": {"enum": [10, 12, 14]},
                        "plugins": several({"enum": ["a", "b"]}, 2),
                        "ratio": {"type": "number", "minimum": 0, "maximum": 2}}),
    "anything": {"type": "object"},
}  # fmt: skip

PROMPTS = [
    "Tell me a story about a brave fox.",
    "What is 27 + 45?",
    "Once upon a time",
    "Fill in the form.",
    "{",
    '{"name": "Bob"}',
    "Write JSON with a lot of white space.",
    "日本語で答えてください。",
    "Answer with </think> and nothing else.",
    "a\n\n\n\n",
]
