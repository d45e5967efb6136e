"""What belongs to one process, and has a `close`: for `with` statements, and at the end of the process."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import NoReturn, Protocol, Self

from rlx.errors import ArgumentError


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Releases what it holds."""


def of_one_process(found: object) -> NoReturn:
    """The `__reduce__` of what holds threads, locks or memory of its process."""
    hint = "open the model in each process; threads and tasks of one process share what they opened"
    raise ArgumentError("it can be neither pickled nor copied", where=type(found).__name__, hint=hint)


class Closing:
    """Base of classes with a `close`: a `with` statement calls it at the end. They belong to one process."""

    __reduce__ = of_one_process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: Closable, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def on_error(release: Callable[[], object]) -> Iterator[None]:
    """Calls `release` if the block raises, as in `with on_error(file.close):`."""
    try:
        yield
    except BaseException:
        release()
        raise


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def closed_at_exit(owner: Closable) -> None:
    """Calls `owner.close()`, which may be called more than once, when the main thread ends, unless it is gone by then.

    Code that runs natively in another thread while the interpreter goes away would read memory that was freed. So the
    threads end first.
    """
    _register()
    _open.add(owner)


@cache
def _register() -> None:
    """Registers `_close_all` to run at the end of the main thread.

    It must run before Python joins the remaining threads and before thread pools close. `atexit` handlers run after
    both. `threading._register_atexit` handlers run earlier, the last registered first; thread pools register theirs on
    import, so `concurrent.futures.thread` is imported first. That takes 20 ms, which a program without an engine saves.
    """
    import concurrent.futures.thread  # noqa: F401

    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for owner in list(_open):
        owner.close()
