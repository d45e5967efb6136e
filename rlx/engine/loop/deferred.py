"""Delays Ctrl-C while the main thread computes.

Runners stage, under the engine loop. Python raises KeyboardInterrupt between any two instructions of the main thread.
In the middle of a step that would leave states half written; after it, nothing is.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

# What the module `signal` wraps. The wrappers convert numbers to enums and back, which takes 10 us a call.
_get, _set = _signal.getsignal, _signal.signal
_INTERRUPT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class DeferredInterrupt:
    """A context in which Ctrl-C is only noted; the program's own handler is called at the end.

    In other threads it does nothing: signals are handled in the main thread.

        with DeferredInterrupt() as interrupt:
            while not interrupt.came:
                work()

    Attributes:
        came: whether Ctrl-C was pressed.
    """

    __slots__ = ("_handler", "came")

    def __init__(self) -> None:
        self.came = False
        self._handler: Any = None

    def __enter__(self) -> Self:
        if threading.get_ident() == _MAIN and callable(handler := _get(_INTERRUPT)):
            _set(_INTERRUPT, self._note)
            self._handler = handler  # afterwards: an interrupt before it would be lost otherwise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _set(_INTERRUPT, self._handler)
            if self.came:
                self._handler(_INTERRUPT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
