"""The table of a profile's keys, and the check of a value: what reads, writes or explains profiles uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rlx import env
from rlx.arguments import did_you_mean
from rlx.errors import ProfileError
from rlx.passes.options import FUSION_MEANINGS, PASS_MEANINGS, PRECISIONS
from rlx.profile.option import Option, Values, profile_options

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
        "Whether mode auto may multiply prompts in bf16 for quantized weights, at level amx.",
        kind=bool, by_phase=True,
    ),
    Key("fusion.skip", "false", "With true, none of the groups below runs.", kind=bool, by_phase=True),
    *_switches("fusion", FUSION_MEANINGS),
    *_switches("passes", PASS_MEANINGS),
    Key(
        "buckets.seq", str(list(BUCKETS)),
        f"The largest row count of each program, ascending from 1 to at most {MAX_ROWS}; longer prompts run in chunks.",
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
        [f"backend.{name}" for name in ("metal", "mlx", "cuda", "rocm", "wgpu", "tpu")], "there is one backend, cpu"
    ),
}


def check_names(found: Iterable[Any], known: Sequence[str], where: str, what: str = "key") -> None:
    """Every name is known.

    Raises:
        ProfileError: one is not; with the nearest known one.
    """
    for name in found:
        if name not in known:
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
