"""Compile profiles as TOML: from a file or a table to checked choices, flat (the path of a key in `KEYS` -> its value),
and back.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.errors import ProfileError
from rlx.json_file import read_text
from rlx.profile.keys import FOREIGN, KEYS, PHASES, Key, check_names, check_value

Flat = dict[str, Any]
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Found:
    """The contents of a profile.

    Attributes:
        common: choices of both phases.
        phases: phase -> what [prefill] and [decode] override.
    """

    common: Flat
    phases: dict[str, Flat]

    def of(self, phase: str) -> Flat:
        """The choices of a phase: its own where it has one."""
        return {**self.common, **self.phases[phase]}


def read_file(path: Path) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        ProfileError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path, ProfileError, MAX_BYTES))
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, or a number of thousands of digits
        hint = 'A profile is a TOML file, such as: [precision] on one line, mode = "exact" on the next.'
        raise ProfileError(f"this is not TOML: {error}", where=path, hint=hint) from error


def read_table(table: Mapping[str, Any], where: str) -> Found:
    """The choices of a table.

    Raises:
        ProfileError: an unknown key or value, or one that cannot be chosen for a phase alone.
    """
    own = {name: value for name, value in table.items() if name not in PHASES}
    common = dict(_walk(own, "", where, PHASES))
    phases = {}
    for phase in PHASES:
        inner = _section(table.get(phase, {}), phase, where)
        phases[phase] = dict(_walk(inner, "", where, (), phase))
    return Found(common, phases)


def _walk(
    table: Mapping[str, Any], section: str, where: str, more: tuple[str, ...] = (), phase: str = ""
) -> Iterator[tuple[str, Any]]:
    """(path, value) of every key in a section and the sections inside it."""
    label = ".".join(filter(None, (phase, section)))
    here = f"{where} [{label}]" if label else where
    known = [*_names_in(section, phase), *more]
    for name, value in table.items():
        path = f"{section}.{name}" if section else str(name)
        if path in FOREIGN:
            raise ProfileError(f"{name!r} has no meaning here: {FOREIGN[path]}", where=here, hint="Take it out.")
        if name not in known and name in _names_in(section, ""):
            place = f"it in [{section}]" if section else f"it outside [{phase}]"
            raise ProfileError(f"{name!r} holds for both phases", where=here, hint=f"Write {place}.")
        check_names([name], known, here)
        if path in KEYS:
            check_value(path, value, here)
            yield path, value
        else:
            yield from _walk(_section(value, path, here), path, where, (), phase)


def _names_in(section: str, phase: str) -> list[str]:
    """The keys and sections that a section may hold; those of a phase that it may override."""
    prefix = f"{section}." if section else ""
    paths = [path for path, key in KEYS.items() if key.by_phase or not phase]
    return list(dict.fromkeys(p.removeprefix(prefix).partition(".")[0] for p in paths if p.startswith(prefix)))


def _section(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        hint = f"Write [{name}] on a line of its own, the keys below it."
        raise ProfileError(f"{name} is {value!r}, expected a section", where=where, hint=hint)
    return value


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
