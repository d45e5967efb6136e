"""One caller at a time: a second one is told so at once, instead of getting a wrong answer or waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.errors import BusyError


class Turns:
    """The lock of one object.

    Args:
        what: what the object is called in messages.

    Attributes:
        closed: whether it is busy for good.
    """

    def __init__(self, what: str) -> None:
        self._what, self.closed = what, False
        self._lock = threading.Lock()
        self._user: tuple[str, str] | None = None

    @contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        """Inside, nobody else has a turn.

        Raises:
            BusyError: someone has one, a callback's caller included, or the object is closed.
        """
        if not self._lock.acquire(blocking=False):
            thread, other = self._user or ("another thread", "something")
            raise BusyError(
                f"the {self._what} is in use: {other} in thread {thread}", where=doing,
                hint="one thread at a time, and not from a callback of its own; close a stream that is left early, and "
                f"open a {self._what} for each thread",
            )  # fmt: skip
        try:
            if self.closed:
                raise BusyError(f"the {self._what} was closed", where=doing, hint="open the model again")
            self._user = (threading.current_thread().name, doing)
            yield
        finally:
            self._user = None
            self._lock.release()
