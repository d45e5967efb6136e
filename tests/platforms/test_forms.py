"""The forms of macOS and Windows over imitations of their libraries, which record calls; and the plain form."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlx import ArgumentError, platform
from rlx.platform import Platform
from rlx.platform.base import ThreadPipes, Usage
from rlx.platform.macos import Macos
from rlx.platform.posix import PollPipes
from rlx.platform.windows import Windows


def put(target: Any, offset: int, value: int, size: int) -> None:
    """Writes a number where a system call would."""
    place = ctypes.addressof(getattr(target, "_obj", target)) + offset
    ctypes.memmove(place, value.to_bytes(size, "little"), size)


def test_the_form_follows_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_PLATFORM", raising=False)
    monkeypatch.setattr(sys, "platform", "freebsd14")
    platform.current.cache_clear()
    assert platform.current().name == "plain"
    monkeypatch.undo()
    monkeypatch.setenv("RLX_PLATFORM", "plain")
    platform.current.cache_clear()
    assert platform.current().name == "plain"
    monkeypatch.setenv("RLX_PLATFORM", "windows")
    platform.current.cache_clear()
    with pytest.raises(ArgumentError, match=r"'windows' is no platform.*native or plain"):
        platform.current()


class Kernel:
    """The functions of macOS that rlx calls. A number that is unknown is refused."""

    def __init__(self) -> None:
        self.numbers = {
            b"hw.physicalcpu": 10,
            b"hw.perflevel0.physicalcpu": 6,
            b"hw.pagesize": 16384,
            b"hw.memsize": 1 << 34,
            b"hw.optional.arm.FEAT_LSE": 1,
            b"hw.optional.arm.FEAT_DotProd": 1,
            b"hw.optional.arm.FEAT_I8MM": 1,
            b"hw.optional.arm.FEAT_BF16": 0,
        }

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: Any, length: int) -> int:
        if name == b"machdep.cpu.brand_string":
            value.value = b"Apple M4 Pro"
            return 0
        if name not in self.numbers:
            return -1
        put(value, 0, self.numbers[name], 8)
        return 0

    def mach_host_self(self) -> int:
        return 7

    def host_statistics64(self, host: int, kind: int, words: Any, count: Any) -> int:
        assert (host, kind) == (7, 4)
        for i, pages in {
            0: 100,
            1: 50_000,
            2: 20,
            3: 60_000,
            22: 3,
        }.items():  # free, active, inactive, wired, purgeable
            put(words, 4 * i, pages, 4)
        return 0

    def mach_timebase_info(self, pair: Any) -> int:
        pair[0], pair[1] = 125, 3
        return 0

    def proc_pid_rusage(self, pid: int, kind: int, words: Any) -> int:
        if (pid, kind) != (42, 2):
            return -1
        words[2], words[3], words[9] = 24_000_000, 48_000_000, 5 << 20  # user, system, footprint
        return 0


def test_macos() -> None:
    system = Macos(Kernel())
    assert system.cores(frozenset(range(14))) == 6 and system.processor() == "Apple M4 Pro"
    assert system.available_memory() == 123 * 16384
    assert system.usage(42) == Usage(pytest.approx(3.0), 5 << 20) and system.usage(43) is None
    assert not system.permit_tiles() and system.cpu_quota() == math.inf
    assert system.arm_features() == {"neon", "lse", "dotprod", "i8mm"}
    system._libc.numbers = {}
    assert system.cores(frozenset(range(14))) == 14 and system.cache_bytes() == []
    assert system.arm_features() == Platform().arm_features() == {"neon"}


def kernel32() -> MagicMock:
    """Two cores with two CPUs each, and a cache; what else is asked is set by tests."""
    rows = [(0b0011, 0, 0), (0b1100, 0, 0), (0b1111, 2, 30 << 20)]
    raw = b"".join(
        mask.to_bytes(8, "little") + kind.to_bytes(8, "little") + bytes(4) + size.to_bytes(4, "little") + bytes(8)
        for mask, kind, size in rows
    )

    def information(buffer: Any, size: Any) -> int:
        put(size, 0, len(raw), 4)
        if buffer is None:
            return 0
        ctypes.memmove(buffer, raw, len(raw))
        return 1

    def affinity(process: Any, mine: Any, all_: Any) -> int:
        put(mine, 0, 0b0110, 8)
        return 1

    def memory(status: Any) -> int:
        assert ctypes.c_uint32.from_buffer(status).value == 64, "the length that Windows asks for"
        status[2], status[4] = 9 << 30, 5 << 30
        return 1

    return MagicMock(
        GetLogicalProcessorInformation=information,
        GetProcessAffinityMask=affinity,
        GlobalMemoryStatusEx=memory,
        GetCurrentProcess=MagicMock(return_value=7),
        IsProcessorFeaturePresent=lambda number: number in (19, 34, 43, 66),
    )


def test_windows() -> None:
    kernel = kernel32()
    system = Windows(lambda name: kernel)
    assert system.allowed_cpus() == {1, 2}
    assert [system.cores(frozenset(cpus)) for cpus in ([1, 2], [0, 1], [3])] == [2, 1, 1]
    assert system.cache_bytes() == [30 << 20] and system.available_memory() == 5 << 30
    assert system.triple("x86_64-pc-windows-msvc") == "x86_64-pc-windows-msvc-elf"
    assert system.arm_features() == {"neon", "lse", "dotprod", "i8mm"}
    assert not system.renames_open and not system.by_descriptor and system.child_options()["creationflags"]


def test_locks_of_windows_lie_behind_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places: list[int] = []

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        import os

        places.append(os.lseek(descriptor, 0, os.SEEK_CUR))
        if len(places) > 1:
            raise PermissionError

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2))
    with (tmp_path / "file").open("w+b") as file:
        system = Windows(lambda name: MagicMock())
        assert system.lock(file.fileno()) is True and system.lock(file.fileno()) is False
        assert system.lock(file.fileno(), shared=True) is None
        assert places == [1 << 40] * 2 and file.tell() == 0


@pytest.mark.parametrize("kind", [PollPipes, ThreadPipes])
def test_pipes_have_deadlines_and_ends(kind: type) -> None:
    script = """
import sys
while data := sys.stdin.buffer.read1(1 << 16):
    sys.stdout.buffer.write(data[::-1])
    sys.stdout.flush()
"""
    process = subprocess.Popen([sys.executable, "-c", script], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pipes, soon = kind(process), time.monotonic() + 60
    try:
        with pytest.raises(TimeoutError):
            pipes.read(1, time.monotonic() + 0.01)
        pipes.write(b"abc", soon)
        found = b""
        while len(found) < 3:
            found += pipes.read(2, soon)
        assert found == b"cba"
        process.kill()
        process.wait()
        assert pipes.read(1, soon) == b""
        with pytest.raises(BrokenPipeError):
            for _ in range(100):
                pipes.write(b"x" * (1 << 20), soon)
    finally:
        process.kill()
        process.wait()
        pipes.close()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
