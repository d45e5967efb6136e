"""The lines of earlier conversations, in a file that only its owner may read."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory

from rlx import platform

_MOST_BYTES = 1 << 20  # of the file; the older half goes when it has grown beyond


def history_path() -> Path:
    """`$XDG_STATE_HOME/rlx/chat_history`, by default under `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    return folder / "rlx" / "chat_history"


class PrivateHistory(FileHistory):
    """`FileHistory` with mode 0600 and a bound on its size; where the file cannot be used, a warning and no file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path: Path | None = path

    def load_history_strings(self) -> Iterable[str]:
        """Earlier entries, the newest first."""
        try:
            self._prepare()
            return list(super().load_history_strings())
        except (OSError, RuntimeError) as error:
            self._give_up(error)
            return []

    def store_string(self, string: str) -> None:
        """Appends an entry."""
        if self._path is None:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._give_up(error)

    def _prepare(self) -> None:
        """Makes the file, closes it to others, and keeps it small."""
        assert self._path is not None
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        more = platform.flags("O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_BINARY")
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | more, 0o600)
        with os.fdopen(handle, "r+b") as file:
            if sys.platform != "win32" and os.fstat(handle).st_mode & 0o177:
                os.fchmod(handle, 0o600)
            if (length := os.fstat(handle).st_size) > _MOST_BYTES:
                file.seek(length - _MOST_BYTES // 2)
                kept = file.read().partition(b"\n\n")[2]  # from the beginning of an entry
                file.seek(0)
                file.write(kept)
                file.truncate()

    def _give_up(self, error: Exception) -> None:
        warnings.warn(f"the history of chat cannot be kept in {self._path}: {error}", stacklevel=2)
        self._path = None
