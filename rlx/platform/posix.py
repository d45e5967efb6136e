"""The common part of Linux and macOS: locks of files, limits of processes, terminals, `poll`."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlx.platform.base import PART, Pipes, Platform

if TYPE_CHECKING:
    import asyncio

assert sys.platform != "win32"  # for mypy; the imports above fail there

_LFLAG, _IFLAG, _CC = 3, 0, 6  # places in what termios.tcgetattr returns


class PollPipes(Pipes):
    """For systems with `poll`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)

    def write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            self._wait(self._to, select.POLLOUT, deadline)
            left = left[os.write(self._to, left) :]

    def read(self, most: int, deadline: float) -> bytes:
        self._wait(self._from, select.POLLIN, deadline)
        return os.read(self._from, min(most, PART))

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError


class Posix(Platform):
    """A system with the interfaces of POSIX."""

    name = "posix"
    limits_children = limits_memory = by_descriptor = True

    def read_ahead(self, memory: mmap.mmap) -> None:
        memory.madvise(mmap.MADV_WILLNEED)

    def total_memory(self) -> int | None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def address_space(self) -> float:
        """The limit of the address space (`ulimit -v`) in bytes; infinity without one."""
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return math.inf if limit == resource.RLIM_INFINITY else limit

    def lock(self, descriptor: int, *, shared: bool = False, wait: bool = False) -> bool | None:
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(descriptor, kind)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems have no locks
            return None
        return True

    def open_files(self) -> int:
        return max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def child_options(self) -> Mapping[str, Any]:
        return {"process_group": 0}

    def pipes(self, process: subprocess.Popen[bytes]) -> Pipes:
        return PollPipes(process)

    @contextlib.contextmanager
    def quiet_terminal(self, fd: int) -> Iterator[None]:
        """Between two prompts nothing that is typed is shown or lost: it waits, byte by byte, for the next prompt.

        Ctrl-C stays a signal, and does not throw away what was typed before it. A stop by Ctrl-Z and its end, and death
        by a signal, leave the terminal as a shell expects it.
        """
        import termios

        before = termios.tcgetattr(fd)
        quiet = termios.tcgetattr(fd)
        quiet[_LFLAG] = quiet[_LFLAG] & ~(termios.ECHO | termios.ICANON) | termios.ISIG | termios.NOFLSH
        quiet[_IFLAG] &= ~termios.ICRNL  # Enter is what it is in the editor
        quiet[_CC][termios.VMIN] = 1

        def apply(*_: object) -> None:
            termios.tcsetattr(fd, termios.TCSANOW, quiet)

        def die(number: int, _: object) -> None:
            termios.tcsetattr(fd, termios.TCSANOW, before)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        handlers: dict[signal.Signals, Any] = {signal.SIGCONT: apply, signal.SIGTERM: die, signal.SIGHUP: die}
        kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            apply()
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
            termios.tcsetattr(fd, termios.TCSANOW, before)

    @contextlib.contextmanager
    def on_signals(
        self, loop: asyncio.AbstractEventLoop, numbers: Iterable[int], act: Callable[[], object]
    ) -> Iterator[None]:
        chosen = list(numbers)
        for number in chosen:
            loop.add_signal_handler(number, act)
        try:
            yield
        finally:
            for number in chosen:
                loop.remove_signal_handler(number)
