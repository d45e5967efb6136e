"""What a command takes for a terminal."""

from __future__ import annotations

from io import StringIO


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True
