"""macOS: `sysctl`, Mach's figures of memory, waits on an address. Written from Apple's headers, never run there.

There is no affinity. `madvise(MADV_DONTNEED)` does not set pages to zeros here, so memory is never given back by it.
`RLIMIT_AS` cannot be set, so the parent watches the memory of a confined child.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlx.platform.base import Usage
from rlx.platform.posix import Posix  # type: ignore[attr-defined,unused-ignore]

assert sys.platform != "win32"  # for mypy, as in `posix`

_VM_INFO, _VM_WORDS = 4, 40  # HOST_VM_INFO64; words of 4 bytes of vm_statistics64 (mach/vm_statistics.h)
_FREE, _INACTIVE, _PURGEABLE = 0, 2, 22  # places of its counts of pages, in words
_RUSAGE_V2 = 2  # RUSAGE_INFO_V2 (sys/resource.h): 16 bytes of UUID, then u64
_USER, _SYSTEM, _FOOTPRINT = 2, 3, 9  # places of its fields, in u64
_RUSAGE_WORDS = 2 + 18

# Keys of `sysctl` (Apple: "Determining Instruction Set Characteristics"). Every Apple processor has NEON.
_FEATURES = {
    "lse": "hw.optional.arm.FEAT_LSE",
    "dotprod": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
}


class Macos(Posix):
    """The form of macOS.

    Args:
        libc: the C library; that of this process by default.
    """

    name = "macos"
    waits = "ulock"
    limits_memory = False

    def __init__(self, libc: Any = None) -> None:
        self._libc = libc if libc is not None else ctypes.CDLL(None)

    def cores(self, cpus: frozenset[int]) -> int:
        """The performance cores: with slower ones among them, workers wait for those at the end of each region."""
        return self._first(("hw.perflevel0.physicalcpu", "hw.physicalcpu")) or len(cpus)

    def processor(self) -> str | None:
        buffer, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
        if self._libc.sysctlbyname(b"machdep.cpu.brand_string", buffer, ctypes.byref(size), None, 0):
            return None
        return buffer.value.decode(errors="replace") or None

    def cache_bytes(self) -> list[int]:
        names = ("hw.perflevel0.l1dcachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize", "hw.l3cachesize")
        return [size for name in names if (size := self._number(name))]

    def arm_features(self) -> frozenset[str]:
        """By `sysctl`; older systems lack the keys of newer features."""
        return super().arm_features() | {name for name, key in _FEATURES.items() if self._number(key) == 1}

    def available_memory(self) -> float:
        words, count = (ctypes.c_uint32 * _VM_WORDS)(), ctypes.c_uint32(_VM_WORDS)
        host = self._libc.mach_host_self()
        if self._libc.host_statistics64(host, _VM_INFO, words, ctypes.byref(count)):
            return self._number("hw.memsize") or math.inf
        pages = words[_FREE] + words[_INACTIVE] + words[_PURGEABLE]
        return pages * (self._number("hw.pagesize") or os.sysconf("SC_PAGE_SIZE"))

    def cache_folder(self, home: Callable[[], Path]) -> Path:
        return home() / "Library" / "Caches"

    def usage(self, pid: int) -> Usage | None:
        words = (ctypes.c_uint64 * _RUSAGE_WORDS)()
        if self._libc.proc_pid_rusage(pid, _RUSAGE_V2, words):
            return None
        ticks = words[_USER] + words[_SYSTEM]
        return Usage(ticks * self._tick(), words[_FOOTPRINT])

    def _tick(self) -> float:
        """Seconds of a tick of `mach_absolute_time`, in which CPU times are given."""
        pair = (ctypes.c_uint32 * 2)()
        self._libc.mach_timebase_info(pair)
        return pair[0] / (pair[1] or 1) / 1e9

    def _first(self, names: Sequence[str]) -> int | None:
        return next((found for name in names if (found := self._number(name))), None)

    def _number(self, name: str) -> int | None:
        """A number that the kernel knows by name; None if it does not."""
        value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)  # little-endian: a 4-byte value fills the lower half
        if self._libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0):
            return None
        return value.value
