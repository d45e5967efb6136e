"""The interface to the operating system, and its plain form: Python and C's standard library, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rlx.platform.pipes import Pipes, ThreadPipes
from rlx.platform.processors import Processors


@dataclass(frozen=True)
class Usage:
    """What a process has used: seconds of CPU time, and bytes of memory now."""

    cpu_seconds: float
    memory: int


class Platform(Processors):
    """The plain form. The other forms override what their system can do better.

    Attributes:
        name: of the form.
        waits: how an idle worker thread waits, a key of `WAITS` in `rlx.backends.cpu.launch.waits`.
        jit_link: whether LLVM's newer loader (JITLink) loads object code.
        limits_children: whether a process can forbid itself to open files and to start others, and limit its CPU time
            (`setrlimit`, `setitimer`).
        limits_memory: whether it can limit its memory too. Without one of the two its parent watches it, as far as
            `usage` tells.
        by_descriptor: whether names are resolved relative to an open folder (`openat`).
        renames_open: whether a file can be renamed, replaced and removed while a process has it open or mapped.
    """

    name = "plain"
    waits = "naps"
    jit_link = True
    limits_children = limits_memory = by_descriptor = False
    renames_open = True

    # -- memory -------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> mmap.mmap:
        """Zeroed memory, which becomes resident at the first access; OSError if the system refuses."""
        # Private: Python's default is shared memory, which a forked child would modify and which gets no huge pages.
        if sys.platform != "win32":
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:  # noqa: RET505  mypy knows the other branch of a platform only so
            return mmap.mmap(-1, nbytes)

    def advise_huge(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        """Requests huge pages for a range."""

    def huge_pages(self) -> str | None:
        """The system's choice for huge pages: always, madvise or never; None if it does not say."""
        return None

    def zero(self, memory: mmap.mmap, start: int, nbytes: int) -> bool:
        """Gives whole pages back to the system, and zeros in their place; False if the system cannot."""
        return False

    def release(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        """Whole pages of a mapped file no longer count as memory of this process."""

    def read_ahead(self, memory: mmap.mmap) -> None:
        """Says that all of a mapped file will be read soon."""

    def total_memory(self) -> int | None:
        """Bytes of memory of the machine; None if the system does not say."""
        return None

    def available_memory(self) -> float:
        """Bytes of memory that this process may still use; infinity if the system does not say."""
        return math.inf

    # -- files --------------------------------------------------------------------------------------------------------

    def lock(self, descriptor: int, *, shared: bool = False, wait: bool = False) -> bool | None:
        """Locks an open file or folder until it is closed or the process ends.

        Returns:
            False if another process holds it; None if the system or the file system has no locks.
        """
        return None

    def cache_folder(self, home: Callable[[], Path]) -> Path:
        """The user's folder for caches of programs."""
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The standard says to ignore a relative XDG_CACHE_HOME.
        return base if base.is_absolute() else home() / ".cache"

    def open_files(self) -> int:
        """How many files and connections this process may have open; 0 if the system does not say."""
        return 0

    # -- other processes ----------------------------------------------------------------------------------------------

    def child_options(self) -> Mapping[str, Any]:
        """Arguments of `subprocess.Popen` for a child that a Ctrl-C in the terminal does not reach."""
        return {"start_new_session": True}

    def pipes(self, process: subprocess.Popen[bytes]) -> Pipes:
        """Reads and writes the pipes of a child, with deadlines."""
        return ThreadPipes(process)

    def usage(self, pid: int) -> Usage | None:
        """What a child process has used; None if the system does not say."""
        return None

    # -- terminal and signals -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quiet_terminal(self, fd: int) -> Iterator[None]:
        """Inside, nothing that is typed into a terminal is shown or lost."""
        yield

    def wait_readable(self, fds: Iterable[int], seconds: float | None = None) -> list[int] | None:
        """Waits, at most `seconds`, until files have something to read; returns which. None if the system cannot."""
        try:
            return select.select(list(fds), [], [], seconds)[0]
        except OSError:  # some systems wait for sockets only
            return None

    @contextlib.contextmanager
    def on_signals(
        self, loop: asyncio.AbstractEventLoop, numbers: Iterable[int], act: Callable[[], object]
    ) -> Iterator[None]:
        """Inside, signals call `act` in the loop's thread, which must be the main one."""

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(act)

        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, each in before.items():
                signal.signal(number, each)

    # -- code ---------------------------------------------------------------------------------------------------------

    def triple(self, triple: str) -> str:
        """The LLVM triple of code for this process, from that of the process."""
        return triple

    def symbols(self) -> Mapping[str, int]:
        """Addresses of functions that the worker loop calls and LLVM does not find by itself."""
        return {}
