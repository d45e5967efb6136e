#!/usr/bin/env python3
"""Answers as values: a JSON schema, then a choice.

python examples/structured.py [MODEL]
"""

from __future__ import annotations

import sys

import rlx
from rlx import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "dog", "cat"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 20},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 2},
    },
    "required": ["animal", "age", "friends"],
    "additionalProperties": False,
}


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo.path()
    with rlx.auto_runner(path) as runner:
        hero = runner.chat("Invent the hero of a story, as JSON.", 80, json_schema=SCHEMA).parsed
        print(f"the hero: a {hero['animal']}, {hero['age']} years old, with {len(hero['friends'])} friends")
        mood = rlx.Grammar.choice(["happy", "sad"])
        end = runner.chat(f"A story of a {hero['animal']}: is its end happy or sad?", 10, grammar=mood)
        print(f"the end: {end}")


if __name__ == "__main__":
    main()
