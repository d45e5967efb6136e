"""What has a `close`, for `with` statements."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Releases what it holds."""


class Closing:
    """Base of classes with a `close`: a `with` statement calls it at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: Closable, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
