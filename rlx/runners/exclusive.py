"""One caller at a time: a second one gets a `BusyError` at once, instead of a wrong answer or a wait.

Runners stage, under `base.py` and `token_history.py`.

There is no lock that somebody has to open again. An interrupt (Ctrl-C) may come between any two instructions, so the
code that would open a lock may never run. Instead, every use says by its state whether it still goes on: a call as long
as Python executes its frame, a stream as long as its generator can continue. The uses of an object form a chain, and
the last one owns the object; the next caller joins the chain behind a use that is over.
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
    """The use of an object by one call, as a context manager, or by one stream.

    A `with` statement over it must stand in a plain function: the frame of a generator goes on while it is suspended.

    Args:
        exclusive: the object.
        doing: the method that uses it, for messages.
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
        """Makes the generator a part of this use: whoever takes over closes it first."""
        self._generator = weakref.ref(cast("GeneratorType[Any, None, None]", generator))

    def resume(self) -> None:
        """For a stream, before it computes the next token: makes it the owner, unless it is over.

        Raises:
            BusyError: another use has ended it, or the object is in use.
        """
        self.check()
        if self._unfinished() is not None:
            self._thread = threading.current_thread()
            self._exclusive.take(self)

    def check(self) -> None:
        """For a stream: raises a `BusyError` if another use has ended it."""
        if self._ended_by is not None:
            raise BusyError(
                f"this stream was ended by a call of {self._ended_by}", where=self.doing,
                hint="finish or close a stream before you use its runner for something else",
            )  # fmt: skip

    def is_over(self) -> bool:
        """Whether nothing of it runs any more, and nothing can run again unless its own thread resumes a stream."""
        if self.done:
            return True
        if (frame := self._frame) is not None:  # another thread may end the call meanwhile
            return _is_finished(frame)
        if (generator := self._unfinished()) is None:
            return True
        other_thread = self._thread is not threading.current_thread() and self._thread.is_alive()
        return not (generator.gi_running or other_thread)

    def end(self, by: str) -> bool:
        """Closes its generator, if that is suspended; False if another thread has just resumed it."""
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
        """Its generator; None if there is none, if it is over, or if nobody has it any more."""
        generator = None if self._generator is None else self._generator()
        return None if generator is None or generator.gi_frame is None else generator

    @property
    def who(self) -> str:
        """The call and its thread, for messages."""
        return f"{self.doing} in thread {self._thread.name}"


class Exclusive:
    """What lets one caller at a time use an object.

    Args:
        what: what the object is called in messages.

    Attributes:
        closed: whether nobody may use it any more.
        restore: called for a use whose predecessor did not end well: it may have been interrupted anywhere.
    """

    def __init__(self, what: str) -> None:
        self._what, self.closed = what, False
        self.restore: Callable[[], None] | None = None
        self._last = Use(self, "")
        self._last.done = True

    def __call__(self, doing: str) -> Use:
        """A use; as a context manager it raises `BusyError` if someone else uses the object, or if it is closed."""
        return Use(self, doing)

    @property
    def is_free(self) -> bool:
        """Whether nobody uses the object now, for a thread that does not use it itself."""
        last = self._last
        while (newer := last.after.get(_NEXT)) is not None:
            last = newer
        return last.is_over()

    def take(self, use: Use) -> None:
        """Makes `use` the owner; one that owns it already stays.

        Raises:
            BusyError: another use goes on, a callback's caller included, or the object is closed.
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
                    hint="one thread at a time, and not from a callback of its own; close a stream that another thread "
                    f"has not finished, or open a {self._what} for each thread",
                )  # fmt: skip
            if last.after.setdefault(_NEXT, use) is use:  # one atomic operation: only one caller joins here
                break
        if self.restore is not None and last is not use and (last.failed or not last.done):
            self.restore()
        self._last = use
        if self.closed:  # since we looked
            use.done = True
            self._refuse_if_closed(use)

    def _refuse_if_closed(self, use: Use) -> None:
        if self.closed:
            raise BusyError(f"the {self._what} was closed", where=use.doing, hint="open the model again")


def _is_finished(frame: FrameType) -> bool:
    """Whether Python no longer executes a frame of a plain function. Of one that is over it drops the variables."""
    try:
        frame.clear()  # refuses a frame that is executing, in whatever thread
    except RuntimeError:
        return False
    return True
