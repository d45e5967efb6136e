"""Instruction set levels: what each requires of the machine, what it uses besides, and the grammar of their names.

CPU backend, under the target. A level is a row of the table of its architecture. Features have the names of LLVM. How a
processor is called plays no part: a machine has a level if it has the features that the level requires.

A target's name is a level and changes to its features, from left to right:

    name    = level { ("-" | "+") feature }
    level   = "native" | a level of the architecture
    feature = an LLVM name, such as avx512vnni, or its short form, such as vnni

`-feature` leaves out a feature that the level uses where the machine has it. `+feature` requires one that the level may
use. A short form names all features that end in it: `vnni` is `avx512vnni` and `avxvnni`. `native` is the widest level
that requires nothing that the name leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlx.errors import TargetError

NATIVE = "native"


@dataclass(frozen=True)
class Level:
    """An instruction set level.

    Attributes:
        name: in RLX_TARGET, keys and messages.
        required: features that the machine must have.
        optional: features that code uses if the machine has them.
        cpu: LLVM name of the processor model: of the level, not of this machine, so that equal levels give equal code.
        implied: features that the model has; those that the machine lacks are disabled by name.
        options: further words of LLVM's feature string.
        vectors: the kind of the vector registers; it decides how vector code is tiled.
        vector_bits: width of a vector register.
        vector_room: number of 16-lane f32 vectors that the registers hold.
        slow_beside: (features, other features): the first are left out on machines that have the others.
    """

    name: str
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    cpu: str = "generic"
    implied: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()
    vectors: str = "generic"
    vector_bits: int = 128
    vector_room: int = 4
    slow_beside: tuple[frozenset[str], frozenset[str]] = field(default=(frozenset(), frozenset()))

    @property
    def usable(self) -> frozenset[str]:
        """All features that code of the level may use."""
        return self.required | self.optional

    def defaults(self, features: frozenset[str]) -> frozenset[str]:
        """The features that code of the level uses on a machine with these."""
        slow, beside = self.slow_beside
        return self.usable & features - (slow if beside and features >= beside else frozenset())


@dataclass(frozen=True)
class Architecture:
    """The levels of a processor architecture, from the narrowest to the widest.

    Attributes:
        name: first word of LLVM triples.
        levels: the table.
        prefixes: what the short form of a feature lacks.
    """

    name: str
    levels: tuple[Level, ...]
    prefixes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all levels."""
        return tuple(level.name for level in self.levels)

    def supported(self, features: frozenset[str]) -> tuple[Level, ...]:
        """The levels of a machine with these features."""
        return tuple(level for level in self.levels if level.required <= features)

    def short(self, feature: str) -> str:
        """`vnni` of `avx512vnni`."""
        for prefix in self.prefixes:
            if feature.startswith(prefix) and feature != prefix:
                return feature.removeprefix(prefix)
        return feature

    def features(self, name: str) -> frozenset[str]:
        """The features that a word in a target's name means.

        Raises:
            TargetError: there is none.
        """
        known = frozenset[str]().union(*(level.usable for level in self.levels))
        found = frozenset(each for each in known if name in (each, self.short(each)))
        if not found:
            some = frozenset[str]().union(*(level.optional for level in self.levels))
            names = ", ".join(sorted({self.short(each) for each in some})) or "none"
            raise TargetError(f"unknown feature {name!r}", where="target", hint=f"There are: {names}")
        return found


# -- x86 --------------------------------------------------------------------------------------------------------------

_AVX2 = frozenset({"avx", "avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

#: The features of tile registers, which the operating system must permit.
TILES = frozenset({"amx-tile", "amx-int8", "amx-bf16"})

#: On processors with tiles, these dot products run at half the f32 rate.
SLOW_BESIDE_TILES = frozenset({"avx512bf16"})

_AVX2_EXTRAS = frozenset(
    {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "movbe", "bmi", "bmi2", "lzcnt", "cx16", "sahf", "xsave", "avxvnni"}
)
_AVX512_EXTRAS = _AVX2_EXTRAS | {"avx512cd", "avx512vnni", "avx512bf16", "avx512vbmi", "avx512fp16"}
_V3 = _AVX2 | {"bmi", "bmi2", "lzcnt", "movbe", "popcnt", "sse4.2", "ssse3", "sse3", "sse4.1"}
_V4 = _AVX512 | {"avx512cd", "bmi", "bmi2", "lzcnt", "movbe", "popcnt"}
_WHOLE = ("-prefer-256-bit",)  # on the v4 model LLVM splits 512-bit vectors in two unless this is off

#: What AVX10.1 contains, of the features that levels use (Intel, "AVX10.1 ISA Architecture Specification", table 3-2).
_AVX10 = _AVX512 | {"avx512cd", "avx512vnni", "avx512bf16", "avx512vbmi", "avx512fp16"}

X86 = Architecture(
    "x86_64",
    (
        Level("generic", cpu="x86-64"),
        Level(
            "avx2", _AVX2, _AVX2_EXTRAS, "x86-64-v3", _V3, vectors="avx2", vector_bits=256, vector_room=8
        ),
        Level(
            "avx512", _AVX512, _AVX512_EXTRAS, "x86-64-v4", _V4, _WHOLE, "avx512", 512, 32, (SLOW_BESIDE_TILES, TILES)
        ),
        Level(
            "amx", _AVX512 | TILES | {"avx512vnni", "avx512bf16"}, _AVX512_EXTRAS, "x86-64-v4", _V4, _WHOLE, "avx512",
            512, 32,
        ),
    ),
    prefixes=("avx512", "avx"),
)  # fmt: skip

# -- aarch64 ----------------------------------------------------------------------------------------------------------

# LLVM's generic model of aarch64 is a processor that executes in order: its code needs more registers. The model of the
# levels implies nothing that code for all processors may not use, but counters that only the operating system may read.
_MODEL, _IMPLIED = "cortex-a57", frozenset({"aes", "crc", "perfmon", "sha2"})


def _neon(name: str, *required: str) -> Level:
    """A level with the registers of NEON: 32 of 128 bits. `lse`: atomic instructions, for counters of work."""
    needs, extras = frozenset({"neon", *required}), frozenset({"lse"})
    return Level(name, needs, extras, _MODEL, _IMPLIED, vectors="neon", vector_bits=128, vector_room=8)


AARCH64 = Architecture(
    "aarch64",
    (
        Level("generic"),
        _neon("neon"),
        _neon("dotprod", "dotprod"),
        _neon("i8mm", "dotprod", "i8mm"),
        _neon("bf16", "dotprod", "i8mm", "bf16"),
    ),
)

#: The levels of all architectures.
LEVELS = tuple(dict.fromkeys((*X86.names, *AARCH64.names)))

# -- by triple --------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {"x86_64": X86, "amd64": X86, "aarch64": AARCH64, "arm64": AARCH64}


def architecture(triple: str) -> Architecture:
    """The levels of machines with an LLVM triple; of one that has no table, portable code only."""
    name = triple.split("-")[0]
    return _ARCHITECTURES.get(name) or Architecture(name, (Level("generic"),))


def with_implied(features: Iterable[str]) -> frozenset[str]:
    """The features, and those that AVX10 contains, which is AVX-512 under another name."""
    found = frozenset(features)
    return found | _AVX10 if any(re.match(r"avx10\.\d+", each) for each in found) else found


def feature_string(level: Level, used: frozenset[str]) -> str:
    """LLVM's feature string for code of a level that uses these features; equal for equal code."""
    off = level.implied - used  # the processor model has them
    return ",".join([*(f"+{f}" for f in sorted(used)), *(f"-{f}" for f in sorted(off)), *level.options])


# -- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The meaning of a target's name on a machine.

    Attributes:
        level: the level.
        features: what its code uses.
    """

    level: Level
    features: frozenset[str]


def choose(name: str, architecture: Architecture, features: frozenset[str]) -> Choice:
    """The level and the features that a target's name means on a machine with these features.

    Raises:
        TargetError: a level or a feature is unknown, the machine lacks it, or the level does not go with it.
    """
    first, *words = re.split(r"([-+])", name)
    added, removed = set[str](), set[str]()
    for sign, word in zip(words[::2], words[1::2], strict=True):
        named = architecture.features(word)
        if sign == "-":
            added, removed = added - named, removed | named
        else:
            present = _present(word, named, features, first)
            added, removed = added | present, removed - present
    level = _level(first, architecture, features - removed if first == NATIVE else features)
    if fixed := level.required & removed:
        what = f"{', '.join(sorted(fixed))} belongs to the level"
        raise TargetError(what, where=f"target {level.name}", hint="Choose a lower level.")
    if foreign := added - level.usable:
        wider = [each.name for each in architecture.levels if added <= each.usable]
        hint = f"Levels that use it: {', '.join(wider)}." if wider else "No level uses all of the added features."
        raise TargetError(f"the level does not use {', '.join(sorted(foreign))}", where=f"target {name}", hint=hint)
    return Choice(level, level.defaults(features) - removed | added)


def _present(word: str, named: frozenset[str], features: frozenset[str], level: str) -> frozenset[str]:
    """Those of the features that `+word` names that the machine has."""
    if not named & features:
        what = f"this machine lacks {' and '.join(sorted(named))}"
        raise TargetError(what, where=f"target {level}+{word}", hint=f"Leave out +{word}")
    return named & features


def _level(name: str, architecture: Architecture, features: frozenset[str]) -> Level:
    have = architecture.supported(features)
    if name == NATIVE:
        return have[-1]
    names = ", ".join(level.name for level in have)
    for level in architecture.levels:
        if level.name == name:
            if missing := level.required - features:
                what = f"this machine lacks {', '.join(sorted(missing))}"
                raise TargetError(what, where=f"target level {name}", hint=f"It has: {names}")
            return level
    for other in (X86, AARCH64):
        if name in other.names:
            what = f"{name} is a level of {other.name}, and this machine is {architecture.name}"
            raise TargetError(what, where="target", hint=f"It has: {names}")
    hint = f"Use {NATIVE} or one of {', '.join(architecture.names)}"
    if name.startswith("sm_"):
        hint = 'That is a kind of NVIDIA card: choose device="cuda"'
    raise TargetError(f"unknown target level {name!r}", hint=hint)
