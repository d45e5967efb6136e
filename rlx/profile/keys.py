"""The keys of a profile, the check of a value, and profiles as TOML: from a file or a table to choices, and back.

Choices are flat: the path of a key in `KEYS` -> its value.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlx import env
from rlx.arguments import did_you_mean
from rlx.errors import ProfileError
from rlx.json_file import read_text
from rlx.passes.options import FUSION_MEANINGS, PASS_MEANINGS, PRECISIONS
from rlx.profile.option import Option, Values, profile_options

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


PHASES = ("prefill", "decode")
#: Families of models, as runners name them.
FAMILIES = ("llama32", "qwen3", "qwen35", "gemma")
MAX_ROWS = 4096  # of a bucket
BUCKETS = (1, 16, 512)
MAX_PROGRAMS = 1 << 20  # that a cache, or a table of them, keeps


@dataclass(frozen=True)
class Key(Values):
    """One key of a profile.

    Attributes:
        path: section and name, joined by a dot; a name alone is at the top of the file.
        default: what holds where no profile says anything, for people.
        meaning: a sentence or two, for the comment in a file and the table in docs/profiles.md.
        by_phase: whether [prefill] and [decode] may override it.
    """

    path: str
    default: str
    meaning: str
    by_phase: bool = False

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @staticmethod
    def of(option: Option) -> Key:
        """The key that sets an option."""
        values = {each.name: getattr(option, each.name) for each in fields(Values)}
        return Key(str(option.key), option.default, f"{option.meaning}.", **values)


_LEVELS = ("native", "generic", "avx2", "avx512", "amx", "neon", "dotprod", "i8mm", "bf16")


def _switches(section: str, meanings: Mapping[str, str]) -> list[Key]:
    return [
        Key(f"{section}.{name}", "true", f"{text[0].upper()}{text[1:]}.", kind=bool, by_phase=True)
        for name, text in meanings.items()
    ]


_ROWS = [
    Key(
        "model", "the one model beside the profile",
        "The model it is for where none is named: a path from the profile's folder, or the name of a downloaded model.",
    ),
    Key("family", "any", "The family of models it is for; a model of another one is refused.", choices=FAMILIES),
    Key(
        "precision.mode", "auto",
        "auto: int8 activations for quantized weights, bf16 ones for bf16 and f16 weights. exact: float32 throughout.",
        choices=PRECISIONS, by_phase=True,
    ),
    Key(
        "precision.bf16_dots", "true",
        "Whether mode auto may multiply prompts in bf16: 16-bit weights, where the family bears it, and 16-bit caches.",
        kind=bool, by_phase=True,
    ),
    Key(
        "precision.bf16_tiles", "true",
        "Whether mode auto may multiply many rows in bf16 for quantized weights, at level amx.",
        kind=bool, by_phase=True,
    ),
    Key("fusion.skip", "false", "With true, none of the groups below runs.", kind=bool, by_phase=True),
    *_switches("fusion", FUSION_MEANINGS),
    *_switches("passes", PASS_MEANINGS),
    Key(
        "buckets.seq", str(list(BUCKETS)),
        f"The largest row count of each program, ascending from 1 to at most {MAX_ROWS}; longer prompts run in chunks. "
        "Cards have those of 64 and 2048, too, if this is left out.",
        kind=list,
    ),
    Key(
        "backend.cpu.level", "native", "The instruction set; native is the widest that the machine has.",
        choices=_LEVELS,
    ),
    Key(
        "cache.policy", "on",
        "on: memory, then disk, then compile. off: nothing on disk. redo: compile in place of what is on disk. "
        "readonly: a program that is not there is an error.",
        choices=env.CACHE_POLICIES,
    ),
    Key(
        "cache.capacity", "64", "Compiled programs kept in memory; the least recently used goes first.",
        kind=int, low=1, high=MAX_PROGRAMS,
    ),
]  # fmt: skip


def _by_section(rows: Iterable[Key]) -> dict[str, Key]:
    """The rows by path, those of one section together, sections in the order of their first rows."""
    rows = list(rows)
    order = list(dict.fromkeys(row.section for row in rows))
    return {row.path: row for row in sorted(rows, key=lambda row: order.index(row.section))}


KEYS: dict[str, Key] = _by_section([*_ROWS, *map(Key.of, profile_options().values())])

#: Keys of profiles of other compilers that cannot mean anything here, and why.
FOREIGN = {
    "fusion.policy": "models are always written as plain ops, which fusion joins; [fusion] has a switch for each group",
    "fusion.target": "every target has the same list of passes; the instruction set is `level` in [backend.cpu]",
    "fusion.assert_clean": "a group of rules either runs or does not; `rlx compile --dump-ir DIR` shows what it left",
    "passes.dce": "dead code cannot exist: a program is what its outputs reach",
    "passes.constant_folding": "a model's constants are its weights, which are not there yet when it is compiled; "
    "algebra on numbers is the pass `simplify`",
    "passes.verbose": "the text after every pass is written by `--dump-ir DIR`",
    "precision.compute": 'arithmetic follows the type of each weight; mode = "exact" is float32 throughout',
    "precision.mixed": 'mode = "auto" is mixed, mode = "exact" is not',
    "backend.cpu.unfuse_regions": "it is `elementwise = false` in [fusion]",
    **dict.fromkeys(
        [f"backend.{name}" for name in ("metal", "mlx", "cuda", "rocm", "wgpu", "tpu")],
        "the device that programs run on is `device` in [engine]",
    ),
}


def check_names(found: Iterable[Any], known: Sequence[str], where: str, what: str = "key") -> None:
    """Every name is known.

    Raises:
        ProfileError: one is not; with the nearest known one.
    """
    for name in found:
        if not isinstance(name, str) or name not in known:
            hint = did_you_mean(name, known, otherwise=f"Known: {', '.join(known)}.")
            raise ProfileError(f"unknown {what} {name!r}", where=where, hint=hint)


def check_value(path: str, value: Any, where: str) -> None:
    """The value is one that the key may have.

    Raises:
        ProfileError: it is of another kind, no choice, or out of its range.
    """
    key = KEYS[path]
    if found := key.problem(key.name, value):
        raise ProfileError(found[0], where=where, hint=found[1])
    if path == "buckets.seq":
        _check_ladder(value, where)


def _check_ladder(ends: list[Any], where: str) -> None:
    numbers = all(type(end) is int and 1 <= end <= MAX_ROWS for end in ends)
    if not numbers or len(ends) < 2 or ends[0] != 1 or ends != sorted(set(ends)):
        what = f"seq is {ends}, expected row counts ascending from 1 to at most {MAX_ROWS}"
        raise ProfileError(what, where=where, hint=f"Write, for example, {list(BUCKETS)}.")
