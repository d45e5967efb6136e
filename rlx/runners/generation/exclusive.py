"""Exclusive use: one caller at a time. A second caller gets a `BusyError` at once instead of waiting.

Runners stage, under `base.py` and `token_history.py`.

There is no lock that must be released. An interrupt (Ctrl-C) may arrive between any two instructions, so code that
releases a lock may never run. Instead, whether a use is active follows from its state: a call is active while Python
executes its frame, a stream while its generator can continue. The uses of an object form a linked list. The last one
owns the object. The next caller appends itself once the last use is over.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Generator
from types import FrameType, GeneratorType, TracebackType
from typing import Any, Self, cast

from rlx.errors import BusyError

_NEXT = "next"


class Use:
    """One use of an object: by a call, as a context manager, or by a stream.

    The `with` statement must be in a plain function: the frame of a generator stays active while it is suspended.

    Args:
        exclusive: the object's `Exclusive`.
        doing: name of the method that uses the object, for messages.
    """

    __slots__ = ("_ended_by", "_exclusive", "_frame", "_generator", "_thread", "after", "doing", "done", "failed")

    def __init__(self, exclusive: Exclusive, doing: str) -> None:
        self._exclusive, self.doing, self.done, self.failed = exclusive, doing, False, False
        self.after: dict[str, Use] = {}
        self._thread = threading.current_thread()
        self._frame: FrameType | None = None
        self._generator: weakref.ref[GeneratorType[Any, None, None]] | None = None
        self._ended_by: str | None = None

    def __enter__(self) -> Self:
        self._frame = sys._getframe(1)
        self._exclusive.take(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.failed = kind is not None
        self.done = True
        self._frame = None

    def closing(self, generator: Generator[Any, None, None]) -> None:
        """Attaches a generator to this use: the next owner closes it first."""
        self._generator = weakref.ref(cast("GeneratorType[Any, None, None]", generator))

    def resume(self) -> None:
        """For a stream, before it computes the next token: takes ownership, unless the stream is over.

        Raises:
            BusyError: another use has ended the stream, or the object is in use.
        """
        self.check()
        if self._unfinished() is not None:
            self._thread = threading.current_thread()
            self._exclusive.take(self)

    def check(self) -> None:
        """For a stream: raises `BusyError` if another use has ended it."""
        if self._ended_by is not None:
            raise BusyError(
                f"this stream was ended by a call of {self._ended_by}", where=self.doing,
                hint="finish or close a stream before you use its runner for something else",
            )  # fmt: skip

    def is_over(self) -> bool:
        """Whether it is inactive: no code of it runs, and only its own thread could resume its stream."""
        if self.done:
            return True
        if (frame := self._frame) is not None:  # another thread may end the call meanwhile
            return _is_finished(frame)
        if (generator := self._unfinished()) is None:
            return True
        other_thread = self._thread is not threading.current_thread() and self._thread.is_alive()
        return not (generator.gi_running or other_thread)

    def end(self, by: str) -> bool:
        """Closes its suspended generator; False if another thread has just resumed it."""
        self._frame = None
        if (generator := self._unfinished()) is not None:
            self._ended_by = by
            try:
                generator.close()
            except ValueError:  # it is executing
                self._ended_by = None
                return False
        return True

    def _unfinished(self) -> GeneratorType[Any, None, None] | None:
        """Its generator; None if there is none, or it is finished or garbage-collected."""
        generator = None if self._generator is None else self._generator()
        return None if generator is None or generator.gi_frame is None else generator

    @property
    def who(self) -> str:
        """The call and its thread, for messages."""
        return f"{self.doing} in thread {self._thread.name}"


class Exclusive:
    """Grants the use of an object to one caller at a time.

    Args:
        what: name of the object in messages.

    Attributes:
        closed: True once the object is closed; every later use is refused.
        restore: called before a use whose predecessor failed or was interrupted.
    """

    def __init__(self, what: str) -> None:
        self._what, self.closed = what, False
        self.restore: Callable[[], None] | None = None
        self._last = Use(self, "")
        self._last.done = True

    def __call__(self, doing: str) -> Use:
        """Creates a use. As a context manager it raises `BusyError` if the object is in use or closed."""
        return Use(self, doing)

    @property
    def is_free(self) -> bool:
        """Whether the object is unused. To be called from a thread that does not use it itself."""
        last = self._last
        while (newer := last.after.get(_NEXT)) is not None:
            last = newer
        return last.is_over()

    def take(self, use: Use) -> None:
        """Makes `use` the owner; no effect if it is already.

        Raises:
            BusyError: another use is active (that of a callback's caller counts), or the object is closed.
        """
        last = self._last
        while True:
            self._refuse_if_closed(use)
            while (newer := last.after.get(_NEXT)) is not None:
                last = newer
            if last is use:
                break
            if not (last.is_over() and last.end(use.doing)):
                raise BusyError(
                    f"the {self._what} is in use: {last.who}", where=use.doing,
                    hint="one thread at a time can use it, and not from its own callback; close a stream that another "
                    f"thread has not finished, or open a {self._what} for each thread",
                )  # fmt: skip
            if last.after.setdefault(_NEXT, use) is use:  # one atomic operation: only one caller joins here
                break
        if self.restore is not None and last is not use and (last.failed or not last.done):
            self.restore()
        self._last = use
        if self.closed:  # by another thread, since the check above
            use.done = True
            self._refuse_if_closed(use)

    def _refuse_if_closed(self, use: Use) -> None:
        if self.closed:
            raise BusyError(f"the {self._what} was closed", where=use.doing, hint="open the model again")


def _is_finished(frame: FrameType) -> bool:
    """Whether Python no longer executes the frame of a plain function. Clears the variables of a finished frame."""
    try:
        frame.clear()  # raises RuntimeError for an executing frame, in whatever thread
    except RuntimeError:
        return False
    return True
