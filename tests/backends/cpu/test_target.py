"""Targets: levels, features, the environment variable, and the count of usable cores."""

from __future__ import annotations

from inspect import unwrap
from pathlib import Path

import pytest

from rlx.backends.cpu import target as targets
from rlx.backends.cpu.target import LEVELS, REQUIRED, Target, cgroup_quota, cpu_count, supported_levels
from rlx.errors import TargetError

AVX2 = REQUIRED["avx2"]


def test_native_is_the_widest_level_of_this_machine() -> None:
    _, features = targets._host()
    assert Target.host("native").level == supported_levels(features)[-1]
    assert {level: Target.host(level).level for level in supported_levels(features)} == {
        level: level for level in supported_levels(features)
    }


@pytest.mark.parametrize("level", supported_levels(targets._host()[1]))
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
    assert Target.host("native").level != "generic" or supported_levels(targets._host()[1]) == ("generic",)
    monkeypatch.setenv("RLX_TARGET", "")
    assert Target.host() == Target.host("native")
    monkeypatch.setenv("RLX_TARGET", "pentium")
    with pytest.raises(TargetError, match=r"pentium.*native"):
        Target.host()


def test_a_level_that_the_machine_lacks_is_refused_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_host", lambda: ("x86_64-unknown-linux-gnu", AVX2))
    assert Target.host("native").level == "avx2"
    with pytest.raises(TargetError, match=r"lacks avx512bw, avx512dq, avx512f, avx512vl.*generic, avx2\.$"):
        Target.host("avx512")


def test_other_architectures_get_portable_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_host", lambda: ("aarch64-unknown-linux-gnu", frozenset()))
    assert Target.host("native") == Target("generic", "aarch64-unknown-linux-gnu", "generic", "")


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
    with pytest.raises(TargetError, match=r"unknown feature 'vnny' to leave out. There are: bf16, .*, vnni"):
        Target.host("avx512-vnny")
    with pytest.raises(TargetError, match=r"avx512vnni belongs to the level. Choose a lower level"):
        Target.host("amx-vnni")
    with pytest.raises(TargetError, match="unknown target level 'pentium'"):
        Target.host("pentium-vnni")


def test_vector_registers() -> None:
    assert [Target(level, "", "", "").vector_bits for level in LEVELS] == [128, 256, 512, 512]
    assert [Target(level, "", "", "").vector_room for level in LEVELS] == [16 // 4, 16 // 2, 32, 32]


def test_tiles_are_a_level_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_host", lambda: ("x86_64-unknown-linux-gnu", REQUIRED["amx"]))
    assert Target.host("native").level == "amx" and Target.host("native").has_bf16_tiles
    plain = Target.host("avx512")
    assert not plain.has_bf16_tiles and plain.vectors == Target.host("amx").vectors == "avx512"


def test_dots_of_bf16_are_used_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors with tiles have them at half the rate of multiply-adds."""
    tiles = {"amx-tile", "amx-int8", "amx-bf16"}
    for features in (REQUIRED["amx"], REQUIRED["amx"] - tiles):
        monkeypatch.setattr(targets, "_host", lambda features=features: ("x86_64-unknown-linux-gnu", features))
        assert Target.host("avx512").has_bf16_dots == (not tiles & features)


@pytest.mark.parametrize("permitted", [False, True])
def test_tiles_count_where_the_kernel_permits_them(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    monkeypatch.setattr(llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(REQUIRED["amx"], True))
    monkeypatch.setattr(targets, "_tiles_permitted", lambda: permitted)
    features = unwrap(targets._host)()[1]
    assert supported_levels(features) == (LEVELS if permitted else LEVELS[:-1])
    assert ("avx512bf16" in features) == permitted  # tiles round with it; without them f32 is faster


def test_the_kernel_grants_tiles_exactly_where_the_processor_has_them() -> None:
    processor = Path("/proc/cpuinfo")
    assert targets._tiles_permitted() == (processor.exists() and "amx_tile" in processor.read_text())


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, float("inf")),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, float("inf")),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 1", "sys/fs/cgroup/a/cpu.max": "3 2"}, 1.5),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "765000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            7.65,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            float("inf"),
        ),
    ],
)  # fmt: skip
def test_cgroup_quota(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    assert cgroup_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("allowed", "quota", "count"),
    [(8, float("inf"), 4), (8, 7.65, 4), (8, 3.99, 3), (8, 0.5, 1), (3, float("inf"), 2), (1, float("inf"), 1)],
)
def test_cores_are_physical_allowed_and_within_the_quota(
    allowed: int, quota: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight logical CPUs, two a core: 0-1, 2-3, 4-5, 6-7."""
    monkeypatch.setattr(targets, "_affinity", lambda: frozenset(range(allowed)))
    monkeypatch.setattr(targets, "_siblings", lambda cpu: frozenset({cpu // 2 * 2, cpu // 2 * 2 + 1}))
    monkeypatch.setattr(targets, "cgroup_quota", lambda: quota)
    assert cpu_count() == count


def test_cpu_lists() -> None:
    assert targets.parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert targets.parse_cpu_list("5") == {5}
