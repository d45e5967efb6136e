"""A child process with hard limits, for work on untrusted input.

Text stage. Chat templates (`dialect.py`) always run in one; tokenizers (`fast.py`) run in one if their file has
components of unbounded cost. A template is a program, and a regular expression may take exponential time. No check in
advance can bound them, but process limits can. `confined_main.py` is the program of the child. What a system does not
let a process limit (memory on macOS; all on Windows), this module watches, and ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any, cast
from weakref import WeakSet, finalize

from rlx import platform
from rlx.platform.base import Pipes, Usage

CPU_SECONDS = 2.0  # of one request
WALL_SECONDS = 60.0  # of one request, on however busy a machine
START_SECONDS = 300.0  # until the child is ready for the first one; usually a tenth of a second
NOT_STARTED = "NotStarted"
WATCH_SECONDS = 0.05  # between two looks at a child that cannot limit itself
MAX_REPLY = 256 << 20
READ_BYTES = 1 << 16  # of one read, at least if they are there
_BYTES = 1 << 20  # of a request that add its CPU time once more: long texts may take longer
_HERE = Path(__file__).parent
#: All that the child sees of the environment. Without SYSTEMROOT no Python starts on Windows.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "TZ", "TZDIR", "SYSTEMROOT")
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # no threads
_ENDED = (None, "MemoryError", "TimeoutError", NOT_STARTED)  # kinds of errors after which a process is of no use


class ConfinedError(Exception):
    """A request failed.

    Attributes:
        kind: name of the exception in the child, "TimeoutError" if it did not answer in time, None if the process ended
            or had to be ended for what it used, NOT_STARTED if there was none that could take the request.
        line: where in the input, if the exception says so.
    """

    def __init__(self, what: str, kind: str | None = None, line: int | None = None) -> None:
        super().__init__(what)
        self.kind, self.line = kind, line


class Confined:
    """A child process that answers requests. It starts at the first request, and again after it has ended.

    It is thread-safe: calls wait for each other. A forked process starts its own child. The child ends when its parent
    does, and Ctrl-C in the terminal does not reach it.

    Args:
        program: the path of a module, or the name of one beside this one, with `prepare()` and
            `handle(request) -> result`.
        memory: most bytes of address space.
        stack: most bytes of its stack, where a process can limit it; None for the system's limit.
        setup: a request that comes first whenever the process is started, such as the one that loads a file.
        cpu_seconds: most CPU time of one request, and as much again for each MiB of it.
        wall_seconds: most time of one request; None for `WALL_SECONDS`.
    """

    def __init__(
        self,
        program: str,
        *,
        memory: int,
        stack: int | None = None,
        setup: object | None = None,
        cpu_seconds: float = CPU_SECONDS,
        wall_seconds: float | None = None,
    ) -> None:
        path = [entry for entry in sys.path if os.path.isabs(entry)]
        hello = {"path": path, "program": str(_HERE / program), "memory": memory, "stack": stack}
        hello["cpu_seconds"] = cpu_seconds
        system = platform.current()
        hello |= {"limits": system.limits_children, "limits_memory": system.limits_memory}
        self._hello, self._setup, self._wall_seconds = hello, setup, wall_seconds
        self._forget()
        _ALL.add(self)

    def _forget(self) -> None:
        """The state of the beginning, in a forked process too: the parent's child is none of its own."""
        self._lock, self._process = Lock(), cast("_Process | None", None)

    def start(self) -> None:
        """Starts the process without waiting for it: it gets ready while the caller goes on.

        Raises:
            ConfinedError: there is no process to be had.
        """
        with self._lock:
            self._running()

    def call(self, request: object) -> Any:
        """The program's result for a request.

        Raises:
            ConfinedError: the program raised, took too much time or memory, or there is no process to be had.
        """
        message = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            try:
                if not process.is_set_up:
                    if self._setup is not None:
                        process.ask(json.dumps(self._setup).encode())
                    process.is_set_up = True
                return process.ask(message)
            except BaseException as error:  # Ctrl-C comes between a request and its reply
                if not isinstance(error, ConfinedError) or error.kind in _ENDED:
                    self._process = None
                    process.end()
                raise

    def _running(self) -> _Process:
        if self._process is None or self._process.has_ended():
            self._process = _Process(self._hello, self._wall_seconds)
        return self._process


class _Process:
    """A running child and its pipes."""

    def __init__(self, hello: dict[str, Any], wall_seconds: float | None) -> None:
        self._hello, self._is_ready, self.is_set_up = hello, False, False
        self._limits_itself = hello["limits"] and hello["limits_memory"]
        self._most_seconds = WALL_SECONDS if wall_seconds is None else wall_seconds
        command = [sys.executable, "-I", "-S", "-B", str(_HERE / "confined_main.py")]
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ} | _QUIET
        try:
            process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd=_HERE.anchor, env=environment, **platform.current().child_options(),
            )  # fmt: skip
        except OSError as error:
            raise ConfinedError(f"no process can be started for it ({error.strerror})", NOT_STARTED) from error
        self._process, self._pipes = process, platform.current().pipes(process)
        self.end = finalize(self, _end, process, self._pipes, os.getpid())
        self._deadline = time.monotonic() + START_SECONDS
        self._bound: Usage | None = None
        self._write(json.dumps(hello).encode())

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, message: bytes) -> Any:
        if not self._is_ready:
            self._deadline = time.monotonic() + START_SECONDS
            self._reply()  # an empty one: the program is loaded and confined
            self._is_ready = True
        self._deadline = time.monotonic() + self._most_seconds
        self._bound = None if self._limits_itself else self._usage_bound(len(message))
        self._write(message)
        reply = self._reply()
        try:
            found = json.loads(reply)
        except ValueError as error:
            raise ConfinedError("its process has sent no JSON") from error
        if "error" in found:
            raise ConfinedError(found["error"] or found["type"], found["type"], found.get("line"))
        return found["result"]

    def _write(self, message: bytes) -> None:
        try:
            self._pipes.write(len(message).to_bytes(8, "little") + message, self._deadline)
        except BrokenPipeError:
            raise self._died() from None
        except TimeoutError:
            raise self._late() from None

    def _reply(self) -> bytes:
        """A reply, behind its length in 8 bytes."""
        found, end = bytearray(), 8
        while len(found) < end:
            part = self._next(READ_BYTES + end - len(found))  # mostly all of it
            if not part:
                raise self._died()
            found += part
            if end == 8 <= len(found):
                end += int.from_bytes(found[:8], "little")
                if end > 8 + MAX_REPLY:
                    raise ConfinedError(f"its result takes {end - 8} bytes, more than {MAX_REPLY}")
        return bytes(found[8:end])

    def _next(self, most: int) -> bytes:
        """The next bytes. A child that cannot limit itself is looked at from time to time."""
        while True:
            until = self._deadline if self._bound is None else min(self._deadline, time.monotonic() + WATCH_SECONDS)
            try:
                return self._pipes.read(most, until)
            except TimeoutError:
                self._check_usage()
                if time.monotonic() >= self._deadline:
                    raise self._late() from None

    def _late(self) -> ConfinedError:
        if not self._is_ready:
            return ConfinedError(f"its process was not ready after {START_SECONDS:g} s", NOT_STARTED)
        return ConfinedError(f"it took longer than {self._most_seconds:g} s", "TimeoutError")

    def _usage_bound(self, nbytes: int) -> Usage | None:
        """The most that a child that does not limit itself may have used at the end of a request of so many bytes."""
        if (used := platform.current().usage(self._process.pid)) is None:
            return None
        return Usage(used.cpu_seconds + self._hello["cpu_seconds"] * (1 + nbytes / _BYTES), self._hello["memory"])

    def _check_usage(self) -> None:
        """Raises for a child that has used more than it may; the caller ends it."""
        used = platform.current().usage(self._process.pid) if self._bound is not None else None
        if self._bound is None or used is None:
            return
        if used.cpu_seconds > self._bound.cpu_seconds:
            raise ConfinedError(f"it takes more CPU time than {self._hello['cpu_seconds']:g} s")
        if used.memory > self._bound.memory:
            raise ConfinedError("it takes too much memory")

    def _died(self) -> ConfinedError:
        """Why the process has closed its pipes."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        if not self._is_ready:
            return ConfinedError(f"its process ended before it was ready (status {code})", NOT_STARTED)
        seconds, memory = self._hello["cpu_seconds"], self._hello["memory"]
        if sys.platform != "win32" and self._hello["limits"] and code == -signal.SIGPROF:
            return ConfinedError(f"it takes more CPU time than {seconds:g} s")
        return ConfinedError(f"it ended its process (status {code}), which may use {memory >> 20} MB")


def _end(process: subprocess.Popen[bytes], pipes: Pipes, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
    pipes.close()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _forget_all() -> None:
    for each in _ALL:
        each._forget()


_ALL: WeakSet[Confined] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
