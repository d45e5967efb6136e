"""Fault injection: the n-th call of a kind fails, for n = 1, 2, ... until an action no longer makes n such calls.

What may come out is a result, an `RlxError`, or a `CacheWarning` and a result. Anything else is a bug. A usual run
tries a dozen calls, `TEST_FAULTS=all pytest tests/fuzz/test_faults.py` every one, in minutes.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlx.errors import RlxError

CODES = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES)


@dataclass
class Fault:
    """The call that fails.

    Attributes:
        number: which one, from 1.
        calls: how many there were so far.
        fired: the function that failed.
    """

    number: int
    make: Callable[[], BaseException]
    calls: int = 0
    fired: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, name: str) -> None:
        """Raises if this is the one."""
        with self.lock:
            self.calls += 1
            if self.calls != self.number:
                return
            self.fired = name
        raise self.make()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls count; a class stays one, because `isinstance` asks for it."""
        if isinstance(function, type):
            call = self.call

            class Counted(function):  # type: ignore[misc, valid-type]
                def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                    call(function.__name__)
                    return function.__new__(cls, *args, **kwargs)

            return Counted

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.call(getattr(function, "__name__", str(function)))
            return function(*args, **kwargs)

        return wrapped


def files(number: int) -> tuple[Fault, list[tuple[Any, str]]]:
    """What opens, writes and moves files."""
    code = CODES[number % len(CODES)]
    fault = Fault(number, lambda: OSError(code, os.strerror(code)))
    return fault, [(os, name) for name in ("open", "fsync", "rename", "replace", "mkdir", "scandir", "utime")]


def threads(number: int) -> tuple[Fault, list[tuple[Any, str]]]:
    """What starts threads."""
    return Fault(number, lambda: RuntimeError("can't start new thread")), [(threading.Thread, "start")]


def memory(number: int) -> tuple[Fault, list[tuple[Any, str]]]:
    """What asks for much memory: maps, and NumPy's arrays."""
    names = ("empty", "zeros", "ascontiguousarray", "concatenate", "frombuffer")
    return Fault(number, MemoryError), [(np, name) for name in names]


def maps(number: int) -> tuple[Fault, list[tuple[Any, str]]]:
    """What maps files and memory."""
    return Fault(number, lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))), [(mmap, "mmap")]


KINDS = {kind.__name__: kind for kind in (files, threads, memory, maps)}


class _Written(io.BufferedWriter):
    """A file whose every write counts."""

    fault: Fault

    def write(self, data: Any) -> int:
        self.fault.call("write")
        return super().write(data)


@contextmanager
def injected(kind: str, number: int) -> Iterator[Fault]:
    """In the body the call `number` of the kind fails."""
    fault, places = KINDS[kind](number)
    opened, fdopened = builtins.open, os.fdopen

    def counted(file: io.IOBase) -> Any:
        if type(file) is not io.BufferedWriter:
            return file
        written = _Written(file.detach())
        written.fault = fault
        return written

    def open_(*args: Any, **kwargs: Any) -> Any:
        fault.call("open")
        return counted(opened(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # on a busy disk most of the time goes there
        for owner, name in places:
            patch.setattr(owner, name, fault.wrap(getattr(owner, name)))
        if kind == "files":
            patch.setattr(builtins, "open", open_)
            patch.setattr(os, "fdopen", lambda *args, **kwargs: counted(fdopened(*args, **kwargs)))
        yield fault


def numbers(most: int) -> list[int]:
    """The calls that fail: a dozen in a usual run, every one with TEST_FAULTS=all."""
    if os.environ.get("TEST_FAULTS") == "all":
        return list(range(1, most + 1))
    return [number for number in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377) if number <= most]


def inject(kind: str, action: Callable[[], object], check: Callable[[], None], most: int) -> list[str]:
    """Runs the action with each fault in turn and checks what is left; returns the functions that failed.

    Args:
        check: what must hold after each run, without faults.
        most: calls at most; beyond it the faults are too many for one test.
    """
    fired = []
    for number in numbers(most):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cache that cannot be used is a warning
            with injected(kind, number) as fault:
                try:
                    action()
                except RlxError:
                    pass
                except BaseException as error:
                    error.add_note(f"after fault {number} of the kind {kind!r}, in {fault.fired}")
                    raise
            check()
        if not fault.fired:
            break
        fired.append(fault.fired)
    return fired
