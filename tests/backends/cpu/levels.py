"""The targets that kernel tests run on: every level of this machine, with and without its dot-product instructions.

Level `amx` is `avx512` but for the kernels on tiles, whose tests take `TILE_TARGETS`.
"""

from __future__ import annotations

from dataclasses import replace

import foreign

from rlx.backends.cpu.levels import X86, feature_string
from rlx.backends.cpu.target import Target, supported_levels

_HOST = [Target.host(level) for level in supported_levels()]
if foreign.EMULATOR:  # kernels of another machine, see `foreign.py`
    _HOST = foreign.targets()

LEVELS = [t for t in _HOST if not t.has_bf16_tiles]

#: The levels of this machine that have tile registers: none or one.
TILE_TARGETS = [t for t in _HOST if t.has_bf16_tiles]


def machine(level: str) -> Target:
    """An x86 machine that has what the level requires and no more. Code for it can be made, not run, everywhere."""
    row = next(each for each in X86.levels if each.name == level)
    return Target(level, "x86_64-unknown-linux-gnu", row.cpu, feature_string(row, row.required))


def widest_and_another(turn: int) -> list[Target]:
    """For what depends on the level little: the widest, and the others in turn."""
    return [LEVELS[at] for at in sorted({turn % len(LEVELS), len(LEVELS) - 1})]


def name(target: Target) -> str:
    """A short name for test ids."""
    if not target.triple.startswith("x86_64") or target.level == "generic":
        return target.level
    return f"{target.level}-{'vnni' if target.has_vnni256 else 'plain'}"


def _without_vnni(target: Target) -> Target:
    return target.without("avxvnni", "avx512vnni")


#: The levels of this machine that have dot products of bf16: none or one.
BF16_TARGETS = [t for t in LEVELS if t.has_bf16_dots]

#: Targets without dot products of bf16: the other levels, and these where the instruction may be left out.
PLAIN_BF16_TARGETS = [
    t.without("avx512bf16") if t.has("avx512bf16") else t for t in LEVELS if t.has("avx512bf16") or not t.has_bf16_dots
]


def _short_registers() -> list[Target]:
    """Level avx2 with `vpdpbusd` on 256 bits, on machines that have it with AVX-512 only, in another encoding."""
    narrow = [t for t in LEVELS if t.level == "avx2" and not t.has_vnni256]
    wide = any(t.has_vnni512 for t in LEVELS)
    return [replace(t, features=f"{t.features},+avx512f,+avx512vl,+avx512vnni") for t in narrow if wide]


#: Every way this machine can compute an int8 dot product.
DOT_TARGETS = list({name(t): t for level in LEVELS for t in (level, _without_vnni(level))}.values())
DOT_TARGETS += _short_registers()
