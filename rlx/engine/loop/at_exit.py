"""Ends threads of the runners when the process ends.

Runners stage. Code that runs natively in another thread while the interpreter goes away would read memory that was
freed. So the threads end first, at the end of the main thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Protocol


class Closable(Protocol):
    """What can be closed; more than once."""

    def close(self) -> object: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def closed_at_exit(owner: Closable) -> None:
    """Closes `owner` when the main thread ends, unless it is gone by then."""
    _register()
    _open.add(owner)


@cache
def _register() -> None:
    """Registers `_close_all` to run at the end of the main thread.

    It must run before Python joins the remaining threads and before thread pools close. `atexit` handlers run after
    both. `threading._register_atexit` handlers run earlier, the last registered first; thread pools register theirs on
    import, so `concurrent.futures.thread` is imported first.
    """
    import atexit
    import concurrent.futures.thread  # noqa: F401

    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for owner in list(_open):
        owner.close()
