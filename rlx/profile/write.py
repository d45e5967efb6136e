"""The way back: checked choices as a TOML file, with a comment a key where wanted."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from rlx.profile.keys import KEYS, Key
from rlx.profile.read import Flat

WIDTH = 100  # columns of a comment


def to_toml(common: Flat, phases: dict[str, Flat], comments: bool, commented_out: Collection[str] = ()) -> str:
    """The file: what all phases agree on in the sections, the rest below [prefill] and [decode]."""
    first, *others = phases.values()
    agreed = {path: value for path, value in first.items() if all(o.get(path) == value for o in others)}
    shared = {**common, **agreed}
    lines = [_HEAD] if comments else []
    lines += _sections({path: shared[path] for path in KEYS if path in shared}, "", comments, commented_out)
    for phase, flat in phases.items():
        own = {path: flat[path] for path in KEYS if path in flat and path not in agreed}
        lines += _sections(own, f"{phase}.", False)
    return "\n".join(lines).strip("\n") + "\n"


_HEAD = """\
# A compile profile for rlx. Without a line its default holds; options of the command line win.
# [prefill.precision], [decode.fusion] and so on override keys "by phase" for that phase.
"""


def _sections(flat: Flat, prefix: str, comments: bool, commented_out: Collection[str] = ()) -> Iterator[str]:
    """The lines of a part of the file; keys without a section first."""
    section = ""
    for path, value in flat.items():
        key = KEYS[path]
        if key.section != section:
            section = key.section
            yield f"\n[{prefix}{section}]"
        if comments:
            yield from _comment(key)
        yield f"{'# ' if path in commented_out else ''}{key.name} = {_value(value)}"


def _comment(key: Key) -> list[str]:
    text = key.meaning
    if key.choices:
        text += f" Choices: {', '.join(key.choices)}."
    text += f" Default: {key.default}."
    if key.by_phase:
        text += " By phase."
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    """As TOML: of booleans, whole numbers, strings and lists of numbers JSON is a part of it, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
