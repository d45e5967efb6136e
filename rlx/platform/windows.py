"""Windows: waits on an address, figures of memory and processors, locks, pipes. Written from Microsoft's documentation,
never run there.

Memory comes from the paging file (`mmap` without a file), and is committed at once. A file that is open or mapped can
be neither replaced nor removed. LLVM makes ELF objects, because its loaders handle Windows' own format in part only.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlx.platform.base import Platform, Usage

_PROCESSOR_CORE, _CACHE = 0, 2  # LOGICAL_PROCESSOR_RELATIONSHIP
_ROW = 32  # bytes of SYSTEM_LOGICAL_PROCESSOR_INFORMATION: mask, relationship, 16 bytes of a union
_NEW_GROUP, _NO_WINDOW = 0x200, 0x08000000  # CREATE_NEW_PROCESS_GROUP, CREATE_NO_WINDOW
_QUERY, _READ = 0x400, 0x10  # PROCESS_QUERY_INFORMATION, PROCESS_VM_READ
_LOOK_SECONDS = 0.01  # between two looks at a pipe
_LOCK_AT = 1 << 40  # locks of Windows keep others from reading, so the locked byte lies behind the file
_WAIT = "api-ms-win-core-synch-l1-2-0"
_WAITS = ("WaitOnAddress", "WakeByAddressAll")
#: Arguments of IsProcessorFeaturePresent (winnt.h: PF_ARM_...). Older versions of Windows answer no to the last two.
_FEATURES = {"lse": 34, "dotprod": 43, "i8mm": 66, "bf16": 68}
_CLOCKS = ("QueryPerformanceCounter", "QueryPerformanceFrequency")


class Windows(Platform):
    """The form of Windows.

    Args:
        library: finds a DLL by its name; `ctypes.WinDLL` by default.
    """

    name = "windows"
    waits = "address"
    renames_open = False

    def __init__(self, library: Callable[[str], Any] | None = None) -> None:
        self._library = library or ctypes.WinDLL  # type: ignore[attr-defined,unused-ignore]
        self._kernel = self._library("kernel32")
        for name in ("GetCurrentProcess", "OpenProcess"):
            getattr(self._kernel, name).restype = ctypes.c_void_p

    # -- processors ---------------------------------------------------------------------------------------------------

    def allowed_cpus(self) -> frozenset[int]:
        """By the affinity within the processor group, of at most 64 CPUs."""
        mine, all_ = ctypes.c_size_t(0), ctypes.c_size_t(0)
        process = ctypes.c_void_p(self._kernel.GetCurrentProcess())
        if not self._kernel.GetProcessAffinityMask(process, ctypes.byref(mine), ctypes.byref(all_)) or not mine.value:
            return super().allowed_cpus()
        return frozenset(i for i in range(64) if mine.value >> i & 1)

    def cores(self, cpus: frozenset[int]) -> int:
        masks = [mask for mask, kind, _ in self._rows() if kind == _PROCESSOR_CORE]
        return sum(any(mask >> cpu & 1 for cpu in cpus) for mask in masks) or len(cpus)

    def cache_bytes(self) -> list[int]:
        """CACHE_DESCRIPTOR: level, associativity, line (u16), then the size (u32)."""
        return [int.from_bytes(union[4:8], "little") for _, kind, union in self._rows() if kind == _CACHE]

    def _rows(self) -> list[tuple[int, int, bytes]]:
        """Mask of CPUs, kind and details of what the system knows of the processors."""
        size = ctypes.c_uint32(0)
        self._kernel.GetLogicalProcessorInformation(None, ctypes.byref(size))  # fails, and says the size
        buffer = ctypes.create_string_buffer(max(1, size.value))
        if not self._kernel.GetLogicalProcessorInformation(buffer, ctypes.byref(size)):
            return []
        rows = [buffer.raw[at : at + _ROW] for at in range(0, size.value, _ROW)]
        return [(int.from_bytes(r[:8], "little"), int.from_bytes(r[8:12], "little"), r[16:]) for r in rows]

    def processor(self) -> str | None:
        return os.environ.get("PROCESSOR_IDENTIFIER")

    def arm_features(self) -> frozenset[str]:
        present = self._kernel.IsProcessorFeaturePresent
        return super().arm_features() | {name for name, number in _FEATURES.items() if present(number)}

    # -- memory -------------------------------------------------------------------------------------------------------

    def total_memory(self) -> int | None:
        status = self._memory()
        return int(status[1]) if status else None

    def available_memory(self) -> float:
        status = self._memory()
        return min(status[2], status[4]) if status else super().available_memory()

    def _memory(self) -> Any:
        """MEMORYSTATUSEX: u32 length and load, then u64 physical total and available, paging total and available."""
        status = (ctypes.c_uint64 * 8)()
        ctypes.c_uint32.from_buffer(status).value = ctypes.sizeof(status)
        return status if self._kernel.GlobalMemoryStatusEx(status) else None

    # -- files --------------------------------------------------------------------------------------------------------

    def lock(self, descriptor: int, *, shared: bool = False, wait: bool = False) -> bool | None:
        """Exclusive locks only; the byte that is locked lies far behind the end of a file."""
        if shared:
            return None
        msvcrt = importlib.import_module("msvcrt")
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, _LOCK_AT, os.SEEK_SET)
            while True:
                try:
                    msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                    return True
                except OSError:  # LK_LOCK gives up after ten seconds
                    if not wait:
                        return False
        finally:
            os.lseek(descriptor, at, os.SEEK_SET)

    def cache_folder(self, home: Callable[[], Path]) -> Path:
        return Path(os.environ.get("LOCALAPPDATA") or home() / "AppData" / "Local")

    # -- other processes ----------------------------------------------------------------------------------------------

    def child_options(self) -> Mapping[str, Any]:
        return {"creationflags": _NEW_GROUP | _NO_WINDOW}

    def usage(self, pid: int) -> Usage | None:
        process = ctypes.c_void_p(self._kernel.OpenProcess(_QUERY | _READ, False, pid))
        if process.value is None:
            return None
        try:
            times = (ctypes.c_uint64 * 4)()  # FILETIMEs: creation, exit, kernel, user, in 100 ns
            places = [ctypes.byref(times, 8 * i) for i in range(4)]
            counters = (ctypes.c_uint64 * 9)()  # PROCESS_MEMORY_COUNTERS: u32 size and faults, then sizes
            size = ctypes.sizeof(counters)
            ctypes.c_uint32.from_buffer(counters).value = size
            if not self._kernel.GetProcessTimes(process, *places):
                return None
            if not self._kernel.K32GetProcessMemoryInfo(process, counters, size):
                return None
            return Usage((times[2] + times[3]) / 1e7, counters[7])  # PagefileUsage: what it has committed
        finally:
            self._kernel.CloseHandle(process)

    # -- terminal and signals -----------------------------------------------------------------------------------------

    def wait_readable(self, fds: Iterable[int], seconds: float | None = None) -> list[int] | None:
        """Pipes are looked at until they hold something or are closed; of all else the next read says it."""
        handles = {fd: ctypes.c_void_p(importlib.import_module("msvcrt").get_osfhandle(fd)) for fd in fds}
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            found = [fd for fd, handle in handles.items() if self._holds(handle)]
            if found or time.monotonic() >= end:
                return found
            time.sleep(_LOOK_SECONDS)

    def _holds(self, handle: ctypes.c_void_p) -> bool:
        count = ctypes.c_uint32(0)
        return not self._kernel.PeekNamedPipe(handle, None, 0, None, ctypes.byref(count), None) or count.value > 0

    # -- code ---------------------------------------------------------------------------------------------------------

    def triple(self, triple: str) -> str:
        return triple if triple.endswith("-elf") else f"{triple}-elf"

    def symbols(self) -> Mapping[str, int]:
        found = {name: getattr(self._library(_WAIT), name) for name in _WAITS}
        found |= {name: getattr(self._kernel, name) for name in _CLOCKS}
        return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in found.items()}
