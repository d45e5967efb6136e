"""Targets: levels, features, the environment variable, and the count of usable cores."""

from __future__ import annotations

import pytest

from rlx import platform
from rlx.backends.cpu import target as targets
from rlx.backends.cpu.levels import X86
from rlx.backends.cpu.target import Target, supported_levels
from rlx.errors import TargetError
from rlx.platform import cpu_count

REQUIRED = {level.name: level.required for level in X86.levels}
AVX2 = REQUIRED["avx2"]
LINUX = "x86_64-unknown-linux-gnu"


@pytest.mark.parametrize("level", supported_levels())
def test_every_level_of_this_machine_emits_code(level: str) -> None:
    import llvmlite.binding as llvm

    target = Target.host(level)
    module = llvm.parse_assembly("define <16 x float> @f(<16 x float> %a) { ret <16 x float> %a }")
    assert target.machine().emit_object(module).startswith(b"\x7fELF")
    assert target.describe() == {
        "level": level, "triple": target.triple, "cpu": target.cpu, "features": target.features
    }  # fmt: skip


def test_the_environment_chooses_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_TARGET", "generic")
    assert Target.host().level == "generic"
    assert Target.host("native").level != "generic" or supported_levels() == ("generic",)
    monkeypatch.setenv("RLX_TARGET", "")
    assert Target.host() == Target.host("native")
    monkeypatch.setenv("RLX_TARGET", "pentium")
    message = r"unknown target level 'pentium'. Use native or one of generic, "
    with pytest.raises(TargetError, match=f"^RLX_TARGET: {message}"):
        Target.host()
    with pytest.raises(TargetError, match=f"^{message}"):
        Target.host("pentium")
    monkeypatch.setenv("RLX_TARGET", "sm_90a")
    with pytest.raises(TargetError, match=r"^RLX_TARGET: unknown .*'sm_90a'. That is a kind of NVIDIA card: .*cuda"):
        Target.host()
    monkeypatch.setenv("RLX_TARGET", "native-sse9")
    with pytest.raises(TargetError, match=r"^RLX_TARGET: unknown feature 'sse9'. There are: "):
        Target.host()


def test_a_level_that_the_machine_lacks_is_refused_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_host", lambda: ("x86_64-unknown-linux-gnu", AVX2))
    assert Target.host("native").level == "avx2"
    with pytest.raises(TargetError, match=r"lacks avx512bw, avx512dq, avx512f, avx512vl.*generic, avx2\.$"):
        Target.host("avx512")


def test_dot_product_instructions_are_used_when_present(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(*extra: str) -> Target:
        features = frozenset(REQUIRED["avx512"] | set(extra))
        monkeypatch.setattr(targets, "_host", lambda: ("x86_64-unknown-linux-gnu", features))
        return Target.host("native")

    assert (host().has_vnni512, host().has_vnni256) == (False, False)
    assert (host("avx512vnni").has_vnni512, host("avx512vnni").has_vnni256) == (True, True)
    assert (host("avxvnni").has_vnni512, host("avxvnni").has_vnni256) == (False, True)
    assert host("avxvnni").without("avxvnni").has_vnni256 is False
    # bmi2 is part of LLVM's x86-64-v4 model; a machine without it must not get such code.
    assert "-bmi2" in host().features.split(",")
    with pytest.raises(TargetError, match="avx512f belongs to the level"):
        host().without("avx512f")


def test_a_name_leaves_features_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = REQUIRED["amx"] | {"avxvnni", "avx512vbmi", "bmi2"}
    for features, cases in {
        wide - {"amx-tile", "amx-int8", "amx-bf16"}: {
            "avx512-vnni-bf16": ("avx512", (False, False, False)),
            "avx512-bf16": ("avx512", (True, True, False)),
            "avx512-avx512vnni": ("avx512", (False, True, True)),
            "native-vnni": ("avx512", (False, False, True)),
            "avx2-vnni": ("avx2", (False, False, False)),
            "avx2-bf16": ("avx2", (False, True, False)),
            "generic-vnni": ("generic", (False, False, False)),
        },
        wide: {"amx-vbmi": ("amx", (True, True, True)), "native-vnni": ("avx512", (False, False, False))},
    }.items():
        monkeypatch.setattr(targets, "_host", lambda features=features: ("x86_64-unknown-linux-gnu", features))
        for name, (level, dots) in cases.items():
            target = Target.host(name)
            found = (target.has_vnni512, target.has_vnni256, target.has_bf16_dots)
            assert (target.level, found) == (level, dots), name
    assert Target.host("avx512-bmi2").describe() != Target.host("avx512").describe()
    with pytest.raises(TargetError, match=r"unknown feature 'vnny'. There are: bf16, .*, vnni"):
        Target.host("avx512-vnny")
    with pytest.raises(TargetError, match=r"avx512vnni belongs to the level. Choose a lower level"):
        Target.host("amx-vnni")
    with pytest.raises(TargetError, match="unknown target level 'pentium'"):
        Target.host("pentium-vnni")


@pytest.mark.parametrize(
    ("allowed", "quota", "count"),
    [(8, float("inf"), 4), (8, 7.65, 4), (8, 3.99, 3), (8, 0.5, 1), (3, float("inf"), 2), (1, float("inf"), 1)],
)
def test_cores_are_physical_allowed_and_within_the_quota(
    allowed: int, quota: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight logical CPUs, two a core: 0-1, 2-3, 4-5, 6-7."""
    system = platform.current()
    monkeypatch.setattr(system, "allowed_cpus", lambda: frozenset(range(allowed)))
    monkeypatch.setattr(system, "cores", lambda cpus: len({cpu // 2 for cpu in cpus}))
    monkeypatch.setattr(system, "cpu_quota", lambda: quota)
    assert cpu_count() == count


def on(monkeypatch: pytest.MonkeyPatch, triple: str, *features: str) -> None:
    monkeypatch.setattr(targets, "_host", lambda: (triple, frozenset(features)))


def test_a_name_requires_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word changes what those before it say; a machine that lacks a required feature is named."""
    on(monkeypatch, LINUX, *REQUIRED["avx512"], "avx512vnni", "avx512vbmi")
    same = Target.host("avx512").describe()
    assert Target.host("avx512+vnni").describe() == Target.host("avx512-vnni+vnni").describe() == same
    assert not Target.host("avx512+vnni-vnni").has("avx512vnni")
    assert Target.host("avx512-vnni-vbmi+vnni").has("avx512vnni")
    for name, message in {
        "avx512+bf16": r"target avx512\+bf16: this machine lacks avx512bf16",
        "avx512+avxvnni": "machine lacks avxvnni",
        "avx2+avx512vnni": "the level does not use avx512vnni. Levels that use it: avx512, amx",
        "avx512+": "unknown feature ''",
        "avx512--vnni": "unknown feature ''",
        "+vnni": "unknown target level ''",
        "avx512 +vnni": "unknown target level 'avx512 '",
        "AVX2": "unknown target level 'AVX2'",
    }.items():
        with pytest.raises(TargetError, match=message):
            Target.host(name)


def test_a_feature_that_is_masked_and_one_that_is_not_there_give_equal_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """So tests with masks use the very code of other machines, and machines that share a folder share programs."""
    on(monkeypatch, LINUX, *REQUIRED["avx512"], "avx512vnni", "bmi2")
    masked = Target.host("avx512-vnni-bmi2"), Target.host("avx512").without("avx512vnni", "bmi2")
    on(monkeypatch, LINUX, *REQUIRED["avx512"])
    assert {*masked} == {Target.host("avx512")}


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ((), "generic"),
        (("neon",), "neon"),
        (("neon", "dotprod", "crc"), "dotprod"),
        (("neon", "dotprod", "i8mm"), "i8mm"),
        (("neon", "dotprod", "i8mm", "bf16", "sve2"), "bf16"),
    ],
)
def test_levels_of_aarch64(features: tuple[str, ...], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "arm64-apple-darwin24.1.0", *features)
    target = Target.host("native")
    assert target.level == level and target.vectors in ("generic", "neon")
    with pytest.raises(TargetError, match=r"avx2 is a level of x86_64, and this machine is aarch64.*It has: generic"):
        Target.host("avx2")
