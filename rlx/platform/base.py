"""The interface to the operating system, and its plain form: Python and C's standard library, nothing else."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

PART = 1 << 20  # bytes of one read, at most


class Pipes(ABC):
    """The pipes of a child.

    Methods take a time of `time.monotonic()`.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()

    @abstractmethod
    def write(self, data: bytes, deadline: float) -> None:
        """Writes all of it.

        Raises:
            TimeoutError: the deadline has passed.
            BrokenPipeError: the child has closed its side.
        """

    def close(self) -> None:
        """Ends what works on the pipes. The child has ended, and the pipes are still open."""
        return

    @abstractmethod
    def read(self, most: int, deadline: float) -> bytes:
        """The next bytes, at least one; none at the end.

        Raises:
            TimeoutError: the deadline has passed.
        """


class ThreadPipes(Pipes):
    """For systems without `poll`: a thread reads, another one writes, and both end with the child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process)
        self._written: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()  # of writes
        self._found: queue.Queue[bytes] = queue.Queue(8)
        self._rest = b""
        works = self._write_all, self._read_all
        self._threads = [threading.Thread(target=work, name="rlx-pipe", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def write(self, data: bytes, deadline: float) -> None:
        self._written.put(data)
        try:
            error = self._results.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise BrokenPipeError from error

    def read(self, most: int, deadline: float) -> bytes:
        if not self._rest:
            try:
                self._rest = self._found.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise TimeoutError from None
        found, self._rest = self._rest[:most], self._rest[most:]
        return found

    def close(self) -> None:
        self._written.put(b"")
        while self._threads[1].is_alive():  # it ends at the end of the pipe; what it has read is in its way
            with contextlib.suppress(queue.Empty):
                self._found.get(timeout=0.01)

    def _write_all(self) -> None:
        while data := self._written.get():
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(self._to, left) :]
            except OSError as error:
                self._results.put(error)
                return
            self._results.put(None)

    def _read_all(self) -> None:
        while True:
            try:
                data = os.read(self._from, PART)
            except OSError:
                data = b""
            self._found.put(data)
            if not data:
                return


@dataclass(frozen=True)
class Usage:
    """The use of a process: seconds of CPU time, and bytes of memory now."""

    cpu_seconds: float
    memory: int


class Platform:
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

    # -- processors ---------------------------------------------------------------------------------------------------

    def allowed_cpus(self) -> frozenset[int]:
        """The logical CPUs that this process may run on."""
        return frozenset(range(os.cpu_count() or 1))

    def cores(self, cpus: frozenset[int]) -> int:
        """The number of physical cores that logical CPUs belong to; that of the CPUs if the system does not say."""
        return len(cpus)

    def cpu_quota(self) -> float:
        """CPUs that this process may use on average; infinity without a limit."""
        return math.inf

    def processor(self) -> str | None:
        """The processor's model, for people and to tell machines apart; None if the system does not say."""
        return None

    def cache_bytes(self) -> list[int]:
        """The sizes of the processor's caches; none if the system does not say."""
        return []

    def permit_tiles(self) -> bool:
        """Asks for the processor's tile registers (AMX); whether this process and its threads may use them."""
        return False

    def arm_features(self) -> frozenset[str]:
        """The features of an aarch64 processor, by LLVM name; `neon`, which all have, if the system does not say more.

        It is not asked on other processors. LLVM's own detection reads `/proc/cpuinfo`, which containers and emulators
        may hide or take from another machine.
        """
        return frozenset({"neon"})

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
        """The use of a child process; None if the system does not say."""
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
