"""Linux: affinity, cgroups, `/proc` and `/sys`, futex, huge pages, the permission to use tile registers."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from rlx import env
from rlx.errors import RlxError
from rlx.platform.posix import Posix  # type: ignore[attr-defined,unused-ignore]

assert sys.platform != "win32"  # for mypy, as in `posix`

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # the system call, ARCH_REQ_XCOMP_PERM, the state
# Bits of AT_HWCAP and AT_HWCAP2 (arch/arm64/include/uapi/asm/hwcap.h).
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {"neon": 1 << 1, "lse": 1 << 8, "dotprod": 1 << 20, "sve": 1 << 22}
_HWCAP2 = {"sve2": 1 << 1, "i8mm": 1 << 13, "bf16": 1 << 14}
_UNLIMITED = 1 << 60  # cgroups of version 1 say so with a number near 2^63
_V1_MEMORY, _V2_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
_INFO_BYTES = 4096  # of /proc/cpuinfo; it repeats everything per core


class Linux(Posix):
    """The form of Linux.

    Args:
        root: where `proc` and `sys` lie.
    """

    name = "linux"
    waits = "futex"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    # -- processors ---------------------------------------------------------------------------------------------------

    def allowed_cpus(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))  # type: ignore[attr-defined,unused-ignore]

    def cores(self, cpus: frozenset[int]) -> int:
        return len({self._siblings(cpu) & cpus for cpu in cpus})

    def _siblings(self, cpu: int) -> frozenset[int]:
        """The logical CPUs that share the core of `cpu`; only `cpu` if the system does not report them."""
        text = _read(self._root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return parse_cpu_list(text) if text else frozenset({cpu})

    def cpu_quota(self) -> float:
        """The quota of the cgroup (v1 or v2). Every ancestor's limit counts: the kernel enforces each of them."""
        return min([*self._quotas_v2(), *self._quotas_v1()], default=math.inf)

    def _quotas_v2(self) -> list[float]:
        folders = [folder for name, path in self._groups() if name == "" for folder in _ancestors(path)]
        texts = [_read(self._root / "sys/fs/cgroup" / folder / "cpu.max").split() for folder in folders]
        return [int(t[0]) / int(t[1]) for t in texts if len(t) == 2 and t[0] != "max"]

    def _quotas_v1(self) -> list[float]:
        folders = [folder for name, path in self._groups() if "cpu" in name.split(",") for folder in _ancestors(path)]
        mounts = [self._root / "sys/fs/cgroup" / mount for mount in ("cpu", "cpu,cpuacct")]
        bases = [mount / folder for mount in mounts for folder in folders]
        pairs = [(_read(base / "cpu.cfs_quota_us"), _read(base / "cpu.cfs_period_us")) for base in bases]
        return [int(quota) / int(period) for quota, period in pairs if quota and period and int(quota) > 0]

    def _groups(self) -> list[tuple[str, str]]:
        """Controllers and path of each hierarchy that this process is in; v2 has no controller names."""
        lines = [line.split(":", 2) for line in _read(self._root / "proc/self/cgroup").splitlines()]
        return [(line[1], line[2]) for line in lines if len(line) == 3]

    def processor(self) -> str | None:
        with (
            contextlib.suppress(OSError),
            open(self._root / "proc/cpuinfo", encoding="utf-8", errors="replace") as file,
        ):
            for line in file.read(_INFO_BYTES).splitlines():
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
        return None

    def cache_bytes(self) -> list[int]:
        return list(self._caches())

    def _caches(self) -> Iterator[int]:
        for path in (self._root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            with contextlib.suppress(OSError, RlxError):
                yield env.parse_size(path.read_text("utf-8"), str(path))

    def permit_tiles(self) -> bool:
        """Asks the kernel for tile registers, for this process and its children, and threads that run already."""
        if os.uname().machine != "x86_64":
            return False
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)

    def arm_features(self) -> frozenset[str]:
        """Of the auxiliary vector, which the kernel gives to each process."""
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return super().arm_features() | named(getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2))

    # -- memory -------------------------------------------------------------------------------------------------------

    def advise_huge(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # a kernel without huge pages: the memory works, reads are slower
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes)  # type: ignore[attr-defined,unused-ignore]

    def huge_pages(self) -> str | None:
        found = re.search(r"\[(\w+)\]", _read(self._root / "sys/kernel/mm/transparent_hugepage/enabled"))
        return found and found[1]

    def zero(self, memory: mmap.mmap, start: int, nbytes: int) -> bool:
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)
        return True

    def release(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def available_memory(self) -> float:
        """The least of: what the system calls available, what each level of the cgroup (v1 or v2) leaves, and what the
        limit of the address space leaves.
        """
        return min(self._free(), self._address_space(), *(_left(*group) for group in self._memory_groups))

    def _free(self) -> float:
        for line in _read(self._root / "proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return math.inf

    @cached_property
    def _memory_groups(self) -> list[tuple[Path, str, str]]:
        """Each level of the cgroup that counts memory: its folder, and its files of the limit and of what is used."""
        found = [
            (self._root / "sys/fs/cgroup" / ("memory" if names else "") / folder, _V1_MEMORY if names else _V2_MEMORY)
            for names, path in self._groups()
            if names == "" or "memory" in names.split(",")
            for folder in _ancestors(path)
        ]
        return [(folder, *files) for folder, files in found if (folder / files[0]).exists()]

    def _address_space(self) -> float:
        limit = self.address_space()
        pages = _read(self._root / "proc/self/statm").split() if math.isfinite(limit) else ()
        return max(0, limit - int(pages[0]) * mmap.PAGESIZE) if pages else math.inf


def named(hwcap: int, hwcap2: int) -> frozenset[str]:
    """The LLVM names of the features in two words of the auxiliary vector."""
    tables = ((_HWCAP, hwcap), (_HWCAP2, hwcap2))
    return frozenset(name for table, word in tables for name, bit in table.items() if word & bit)


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers of a kernel CPU list such as `0-3,8`."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def _ancestors(path: str) -> list[str]:
    """The folder, each folder above it and the mount itself. Inside a container the folder may not be visible."""
    parts = [part for part in path.strip("/").split("/") if part]
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _left(folder: Path, limit_file: str, used_file: str) -> float:
    """The memory that a level of the cgroup leaves; page cache that can be dropped counts as free."""
    limit = _read(folder / limit_file).strip()  # "max" where there is none
    if not limit.isdigit() or int(limit) >= _UNLIMITED or not (used := _read(folder / used_file).strip()).isdigit():
        return math.inf
    stat = _read(folder / "memory.stat").splitlines()
    rows = dict(line.split(maxsplit=1) for line in stat if " " in line)
    cached = int(rows.get("inactive_file", rows.get("total_inactive_file", 0)))
    return max(0, int(limit) - int(used) + cached)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
