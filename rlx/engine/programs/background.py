"""Compiles in the background, ahead of time: programs that later calls need are made while the runner is idle.

Runners stage, under the engine. A cold start compiles while weights are packed; a chat compiles while its user types.
Before each kernel the background thread waits until the runner is idle, or until a call waits for what is being
compiled: a program, or the choice of tokens. A call is therefore delayed by at most about one kernel. A call that needs
what is being compiled waits only for the rest of its compile. A step of several sequences does not wait: it computes
one sequence after the other until its program is there (`is_pending`), and the thread then no longer waits for an idle
runner.

The thread has normal priority, because a call may wait for it. When the runner is closed or the process exits, the
thread stops at the next kernel.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from rlx.closing import closed_at_exit
from rlx.compiler.compile import Progress
from rlx.errors import BusyError

_LOOK = 0.02  # seconds between two checks whether the runner is idle
FIRST = 3  # jobs that an answer needs: the programs of prompts and of single tokens, and the choice of tokens


class CompileAheadWarning(UserWarning):
    """A background compile failed; the call that needs the program compiles it again."""


class _StoppedError(Exception):
    """Tells the background thread to end."""


class BackgroundCompiler:
    """Compiles programs in a background thread.

    Args:
        progress: called for programs that a call waits for; not for programs that the background compiles for later.

    Attributes:
        is_busy: whether the runner is in use now; the owner of the engine sets it.
        is_over: whether the runner is being closed: no compile then goes on beyond its current kernel, neither in the
            background nor for a call. The owner of the engine sets it.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self.is_over: Callable[[], bool] = lambda: False
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._done = 0  # jobs that the thread has behind it
        self._closed = threading.Event()
        self._current: Hashable = None  # what the thread compiles
        self._needed: list[Hashable] = []  # what calls wait for
        self._pending = set[Hashable]()  # what the thread has not begun, or not finished
        self._missed = set[Hashable]()  # what calls do without until then

    def start(self, jobs: Mapping[Hashable, Callable[[], object]]) -> None:
        """Starts the thread, once. It runs the jobs in order; each job compiles one program, which its key names."""
        if self._thread is None and not self._closed.is_set():
            # No daemon thread: one that is inside LLVM at process exit would crash the process.
            closed_at_exit(self)
            self._pending.update(jobs)
            self._thread = threading.Thread(target=self._run, args=(dict(jobs),), name="rlx-ahead")
            self._thread.start()

    @contextmanager
    def compiling(self, what: Hashable) -> Iterator[None]:
        """Wraps a compile, or the wait for one. The background thread continues while a call waits for the same."""
        if self._is_own():
            self._current = what
        else:
            self._needed.append(what)
        try:
            yield
        finally:
            if self._is_own():
                self._current = None
            else:
                self._needed.remove(what)

    def tell(self, what: str, done: int, total: int) -> None:
        """Called by the compiler before each kernel: reports progress, and pauses the background thread if need be.

        Raises:
            BusyError: the runner is being closed.
        """
        if self._is_own():
            self._wait_until_idle()
            if self._current not in self._needed:
                return
        elif self.is_over():
            raise BusyError("the runner was closed", where=what, hint="open the model again")
        if self._progress:
            self._progress(what, done, total)

    def close(self) -> None:
        """Ends the thread after its current kernel. Can be called more than once."""
        self._closed.set()
        if self._thread and not self._is_own():
            self._thread.join()

    def wait(self) -> None:
        """Waits until everything is compiled."""
        if self._thread and not self._is_own():
            self._thread.join()

    @property
    def is_ready(self) -> bool:
        """Whether an answer need not wait for a compile: the first programs are there, or nothing is compiled ahead."""
        return self._done >= FIRST or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be compiled ahead."""
        return self._thread is None or not self._thread.is_alive()

    def is_pending(self, what: Hashable) -> bool:
        """Whether the thread still has to compile something. A caller that can do without it asks before each use."""
        if what not in self._pending or self.is_complete:
            return False
        self._missed.add(what)
        return True

    def _run(self, jobs: dict[Hashable, Callable[[], object]]) -> None:
        for self._done, (what, job) in enumerate(jobs.items()):
            try:
                self._wait_until_idle()
                job()
            except _StoppedError:
                return
            except Exception as error:
                problem = f"background compile failed; it is repeated when the program is needed: {error}"
                warnings.warn(problem, CompileAheadWarning, stacklevel=1)
            self._pending.discard(what)
            self._missed.discard(what)

    def _wait_until_idle(self) -> None:
        while not self._is_closing() and self.is_busy() and not self._is_needed():
            self._closed.wait(_LOOK)
        if self._is_closing():
            raise _StoppedError

    def _is_closing(self) -> bool:
        return self._closed.is_set() or self.is_over()

    def _is_needed(self) -> bool:
        return bool(self._missed) or self._current in self._needed

    def _is_own(self) -> bool:
        return threading.current_thread() is self._thread
