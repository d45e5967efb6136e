"""What a `with` statement closes at its end: one way for everything that has a `close`."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Closable(Protocol):
    """Something that can be closed."""

    def close(self) -> None: ...


class Closing:
    """Beside a `close` of its own: the methods that make a `with` call it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: Closable, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
