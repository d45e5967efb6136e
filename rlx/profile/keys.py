"""The table of a profile's keys, and the check of a value: what reads, writes or explains profiles uses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx import env
from rlx.errors import ProfileError
from rlx.ir.dtypes import KV_DTYPES
from rlx.passes.options import FUSION_MEANINGS, PASS_MEANINGS, PRECISIONS

PHASES = ("prefill", "decode")
#: Families of models, as runners name them.
FAMILIES = ("llama32", "qwen3", "qwen35", "gemma")
MAX_ROWS = 4096  # of a bucket
BUCKETS = (1, 16, 512)

_KIND_NAMES = {str: "a string", int: "a whole number", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class Key:
    """One key of a profile.

    Attributes:
        path: section and name, joined by a dot; a name alone is at the top of the file.
        kind: of its value.
        default: what holds where no profile says anything, for people.
        meaning: a sentence or two, for the comment in a file and the table in docs/profiles.md.
        choices: the values there are; empty where they are too many.
        by_phase: whether [prefill] and [decode] may override it.
    """

    path: str
    kind: type
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    by_phase: bool = False

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


_LEVELS = ("native", "generic", "avx2", "avx512", "amx")
_KV = tuple(dtype.name for dtype in KV_DTYPES)


def _switches(section: str, meanings: Mapping[str, str]) -> list[Key]:
    return [
        Key(f"{section}.{name}", bool, "true", f"{text[0].upper()}{text[1:]}.", by_phase=True)
        for name, text in meanings.items()
    ]


_ROWS = [
    Key(
        "model", str, "the one model beside the profile",
        "The model it is for where none is named: a path from the profile's folder, or the name of a downloaded model.",
    ),
    Key("family", str, "any", "The family of models it is for; a model of another one is refused.", FAMILIES),
    Key(
        "precision.mode", str, "auto",
        "auto: int8 activations for quantized weights, bf16 ones for bf16 weights. exact: float32 throughout.",
        PRECISIONS, by_phase=True,
    ),
    Key(
        "precision.bf16_dots", bool, "true",
        "Whether mode auto may multiply prompts in bf16: bf16 weights, where the family bears it, and 16-bit caches.",
        by_phase=True,
    ),
    Key(
        "precision.bf16_tiles", bool, "true",
        "Whether mode auto may multiply prompts in bf16 for quantized weights, at level amx.",
        by_phase=True,
    ),
    Key(
        "precision.kv_dtype", str, "f16; f32 if a phase is exact, and for models that magnify rounding",
        "The type of the KV cache.", _KV,
    ),
    Key("fusion.skip", bool, "false", "With true, none of the groups below runs.", by_phase=True),
    *_switches("fusion", FUSION_MEANINGS),
    *_switches("passes", PASS_MEANINGS),
    Key(
        "buckets.seq", list, str(list(BUCKETS)),
        f"The largest row count of each program, ascending from 1 to at most {MAX_ROWS}; longer prompts run in chunks.",
    ),
    Key("backend.cpu.level", str, "native", "The instruction set; native is the widest that the machine has.", _LEVELS),
    Key("backend.cpu.threads", int, "the physical cores the process may use", "Worker threads, from 1 to 1024."),
    Key(
        "cache.policy", str, "on",
        "on: memory, then disk, then compile. off: nothing on disk. redo: compile in place of what is on disk. "
        "readonly: a program that is not there is an error.",
        env.CACHE_POLICIES,
    ),
    Key("cache.capacity", int, "64", "Compiled programs kept in memory; the least recently used goes first."),
]  # fmt: skip
KEYS: dict[str, Key] = {key.path: key for key in _ROWS}
MAX_PROGRAMS = 1 << 20  # that a cache, or a table of them, keeps
_HIGHEST = {"backend.cpu.threads": 1024, "cache.capacity": MAX_PROGRAMS}

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
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise ProfileError(f"unknown {what} {name!r}", where=where, hint=hint)


def check_value(path: str, value: Any, where: str) -> None:
    """The value is one that the key may have.

    Raises:
        ProfileError: it is of another kind, no choice, or out of its range.
    """
    key = KEYS[path]
    if not _is_a(key.kind, value):
        raise ProfileError(f"{key.name} is {value!r}, expected {_KIND_NAMES[key.kind]}", where=where)
    if key.choices and value not in key.choices:
        close = difflib.get_close_matches(value, key.choices, 1)
        hint = f"Did you mean {close[0]!r}?" if close else None
        what = f"{key.name} is {value!r}, expected one of {', '.join(key.choices)}"
        raise ProfileError(what, where=where, hint=hint)
    if path in _HIGHEST and not 1 <= value <= _HIGHEST[path]:
        raise ProfileError(f"{key.name} is {value}, expected a number from 1 to {_HIGHEST[path]}", where=where)
    if path == "buckets.seq":
        _check_ladder(value, where)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_ladder(ends: list[Any], where: str) -> None:
    numbers = all(type(end) is int and 1 <= end <= MAX_ROWS for end in ends)
    if not numbers or len(ends) < 2 or ends[0] != 1 or ends != sorted(set(ends)):
        what = f"seq is {ends}, expected row counts ascending from 1 to at most {MAX_ROWS}"
        raise ProfileError(what, where=where, hint=f"Write, for example, {list(BUCKETS)}.")
