"""Ctrl-C in the commands that generate: one SIGINT handler from start to end, so that no press is lost or comes twice.

Python's own handler raises `KeyboardInterrupt` wherever the program happens to be: while a progress bar is taken down,
in a destructor that swallows it, or just before a system call that then waits. Here the handler notes the signal first
and raises only inside `run`. Code that must not be cut in two (drawing, storing a message) runs outside of it or under
`held`, and the next place that can act on the signal asks `take`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

from rlx import platform


class Interrupts:
    """Catches SIGINT between `__enter__` and `__exit__`.

    Where SIGINT is ignored (a background job) it stays ignored. Outside of the main thread Python allows no handler;
    the methods work, and nothing is caught.
    """

    def __init__(self) -> None:
        self._pending = self._raises = self._installed = False
        self._before: Any = None
        self._nudge: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and before not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._caught)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            self._installed = False

    @property
    def pending(self) -> bool:
        """Whether there was a SIGINT on which nobody has acted yet."""
        return self._pending

    def note(self) -> None:
        """Counts a Ctrl-C that came as a key instead of a signal."""
        self._pending = True

    def take(self) -> bool:
        """`pending`, which is False from now on: whoever asks acts on the signal."""
        was, self._pending = self._pending, False
        return was

    def run(self, work: Callable[[], object]) -> bool:
        """Calls `work`; True if SIGINT stopped it, came just before it, or is still to be acted on when it ends.

        Inside, SIGINT raises `KeyboardInterrupt`, unless one is on its way up already: the clean-up that it sets off is
        not interrupted.
        """
        try:
            try:
                self._raises = True
                if not self._pending:
                    work()
            finally:
                self._raises = False
        except KeyboardInterrupt:
            self._pending = True
        return self.take()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, SIGINT is noted and raises nothing."""
        before, self._raises = self._raises, False
        try:
            yield
        finally:
            self._raises = before

    def guarded(self, act: Callable[..., object]) -> Callable[..., None]:
        """`act`, which SIGINT interrupts in front or behind, not in the middle."""

        def guarding(*arguments: Any) -> None:
            with self.held():
                act(*arguments)
            if self._raises and self._pending:
                raise KeyboardInterrupt

        return guarding

    @contextmanager
    def nudging(self, nudge: Callable[[], object]) -> Iterator[None]:
        """Inside, every SIGINT calls `nudge` after it was noted, and so does one that is pending already."""
        self._nudge = nudge
        try:
            if self._pending:
                nudge()
            yield
        finally:
            self._nudge = None

    def wait_readable(self, fd: int) -> bool:
        """Waits until `fd` has something to read; False if SIGINT came first.

        A signal wakes the wait by a pipe: one that comes between two instructions in front of the system call does not
        interrupt it, and would wait for the next key.
        """
        wait = platform.current().wait_readable
        if not self._installed:
            wait([fd])
            return True
        wakes, woken = os.pipe()
        if hasattr(os, "set_blocking"):  # on Windows since Python 3.12; what is read there is known to have come
            os.set_blocking(woken, False)
            os.set_blocking(wakes, False)
        before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            while not self.take():
                ready = wait([fd, wakes])
                if ready is None or fd in ready:  # None: the read itself waits
                    return True
                with suppress(BlockingIOError):
                    os.read(wakes, 512)
            return False
        finally:
            signal.set_wakeup_fd(before)
            os.close(wakes)
            os.close(woken)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._nudge is not None:
            self._nudge()
        if self._raises and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            raise KeyboardInterrupt
