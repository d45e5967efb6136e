"""aarch64: what is detected, which levels follow, and the code of kernels, compiled for it on any machine."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from native import assembly

from rlx.backends.cpu import target as targets
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.levels import AARCH64, feature_string
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, IQ4_XS, Q4_K, Q6_K, Q8_0, DType

TRIPLE = "aarch64-unknown-linux-gnu"
#: Processors, by what their features are.
CORTEX_A72, NEOVERSE_N1 = frozenset({"neon"}), frozenset({"neon", "lse", "dotprod"})
NEOVERSE_V1 = NEOVERSE_N1 | {"sve", "i8mm", "bf16"}

#: The instruction by which a level multiplies int8.
DOTS = {"neon": "smlal", "dotprod": "sdot", "i8mm": "sdot", "bf16": "sdot"}
LEVELS = tuple(DOTS)
#: Stores of vectors to the stack for 32 k of 16 rows: codes and constants, not sums. The table of IQ4_XS, both sets of
#: scales of Q6_K and the sums of pairs of `neon` leave too few registers.
ROOM = {Q8_0: (12, 0), Q4_K: (12, 0), Q6_K: (20, 6), IQ4_XS: (12, 10)}
_LOOP = re.compile(r"^(\.\w+):\n((?:(?!\.\w+:).*\n)*?)\tb\.\w+\t\1\n", re.MULTILINE)  # of one block


@pytest.fixture(autouse=True, scope="module")
def llvm() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes this machine one with certain features."""
    return lambda features: monkeypatch.setattr(targets, "_host", lambda: (TRIPLE, features))


def host(level: str) -> Target:
    """The target of a level on a machine that has everything."""
    row = next(each for each in AARCH64.levels if each.name == level)
    return Target(level, TRIPLE, row.cpu, feature_string(row, row.defaults(NEOVERSE_V1)))


@cache
def loops(kernel: Kernel, target: Target) -> list[str]:
    """The innermost loops of a kernel, as assembler text."""
    return [match[2] for match in _LOOP.finditer(assembly(kernel, target))]


def with_most(loops: list[str], instruction: str) -> str:
    """The loop that has an instruction most often."""
    return max(loops, key=lambda loop: len(re.findall(rf"\t{instruction}\d?\t", loop)))


def spilled(loop: str) -> list[str]:
    """Instructions that keep vectors on a fixed place of the stack."""
    return re.findall(r"\t(?:ld|st)[rp]\tq.*\[(?:sp|x29).*\n", loop)


# --- detection and levels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("features", "level"), [(CORTEX_A72, "neon"), (NEOVERSE_N1, "dotprod"), (NEOVERSE_V1, "bf16")])
def test_native_is_the_widest_level(features: frozenset[str], level: str, machine: Any) -> None:
    machine(features)
    target = Target.host("native")
    assert (target.level, target.triple, target.vectors) == (level, TRIPLE, "neon")
    assert {f[1:] for f in target.features.split(",") if f[0] == "+"} <= features
    assert "-perfmon" in target.features.split(",")  # or the clock of steps would be a counter of the kernel
    assert target.has_bf16_dots == ("bf16" in features)


# --- the code of kernels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [Q8_0, Q4_K, Q6_K, IQ4_XS], ids=str)
def test_one_row_of_int8(dtype: DType, level: str) -> None:
    """Sums of 16 rows for 32 k: 32 dot products of 16 bytes. Tables are looked up by `tbl`. Sums are not spilled."""
    target = host(level)
    loop = with_most(loops(linear(dtype, 64, 1024, "q8a", target, single=True), target), DOTS[level])
    if level == "neon":
        assert len(re.findall(r"\tsm(?:ull|lal)2?\t", loop)) == 64
    else:
        assert len(re.findall(rf"\t{DOTS[level]}\tv\d+.4s, v\d+.16b, v\d+.4b\[\d\]", loop)) == 32
    assert len([line for line in spilled(loop) if line.startswith("\tst")]) <= ROOM[dtype][level != "neon"]
    if dtype is IQ4_XS:
        assert len(re.findall(r"\ttbl\t", loop)) >= 32


@pytest.mark.parametrize("level", ["dotprod", "i8mm", "bf16"])
@pytest.mark.parametrize("dtype", [Q8_0, Q4_K, Q6_K, IQ4_XS], ids=str)
def test_tiles_of_int8(dtype: DType, level: str) -> None:
    """Six rows, or four for types with more sums, times eight weight rows for 32 k: products of 16 bytes, read once.

    No sums are spilled. By lanes, six rows lack one register.
    """
    target, six = host(level), dtype in (Q8_0, IQ4_XS)
    name, of_row = ("sdot", 16) if level == "dotprod" else ("smmla", 8)
    count = of_row * (6 if six else 4)
    found = [x for x in loops(linear(dtype, 64, 1024, "q8a", target), target) if x.count(f"\t{name}\t") == count]
    loop = min(found, key=len)  # the streamed ones also unpack
    assert len(spilled(loop)) <= (2 if six and level == "dotprod" else 0)
    assert len(loop.splitlines()) <= count + {Q4_K: 55, Q6_K: 80}.get(dtype, 62)


def test_bf16_dots_of_a_linear() -> None:
    target = host("bf16")
    found = with_most(loops(linear(BF16, 32, 512, "bf16", target), target), "bfdot")
    assert found.count("\tbfdot\t") >= 24
    assert not spilled(found)


def test_halves_are_converted_by_instructions() -> None:
    assert "\tfcvtl\t" in assembly(linear(F16, 16, 64, "f32", host("neon"), single=True), host("neon"))


@pytest.mark.parametrize("level", LEVELS)
def test_instructions_of_higher_levels_do_not_occur(level: str) -> None:
    text = assembly(linear(Q6_K, 64, 1024, "q8a", host(level)), host(level))
    later = {"neon": "[su]dot|usdot|u?smmla|bfdot", "dotprod": "usdot|u?smmla|bfdot", "i8mm": "bfdot|bfmmla"}
    assert not re.findall(rf"\t(?:{later.get(level, 'whilelo')})\t", text)
