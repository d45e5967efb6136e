"""The form of Linux: what it reads of `/proc` and `/sys`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlx.platform.linux import Linux, parse_cpu_list

pytestmark = pytest.mark.skipif("sys.platform != 'linux'")


def test_the_kernel_grants_tiles_exactly_where_the_processor_has_them() -> None:
    assert Linux().permit_tiles() == ("amx_tile" in Path("/proc/cpuinfo").read_text())


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, math.inf),
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
            math.inf,
        ),
    ],
)  # fmt: skip
def test_cgroup_quota(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    assert Linux(write(tmp_path, files)).cpu_quota() == quota


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("5") == {5}


def test_hyper_threads_are_one_core(tmp_path: Path) -> None:
    """Eight logical CPUs, two a core: 0-1, 2-3, 4-5, 6-7. A CPU that the system says nothing of is a core."""
    pairs = {i: f"{i // 2 * 2}-{i // 2 * 2 + 1}" for i in range(8)}
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    system = Linux(write(tmp_path, {name.format(i): pair for i, pair in pairs.items()}))
    assert [system.cores(frozenset(some)) for some in (range(8), range(3), [1], [1, 6], [0, 9])] == [4, 2, 1, 2, 2]
