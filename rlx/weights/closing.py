"""The `with` statement for classes that have a method `close`."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Closable(Protocol):
    """Something that can be closed."""

    def close(self) -> None: ...


class Closing:
    """Base of classes with a `close`: a `with` statement calls it at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: Closable, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
