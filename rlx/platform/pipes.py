"""The pipes of a child process, read and written with deadlines: the interface, and a form over threads."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
import time
from abc import ABC, abstractmethod

PART = 1 << 20  # bytes of one read, at most


class Pipes(ABC):
    """The pipes of a child.

    Methods take a time of `time.monotonic()`.
    """

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
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
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
