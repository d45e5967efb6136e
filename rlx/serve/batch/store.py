"""Files that clients upload, and those that batches write: bounded in bytes and number, gone when the server ends.

Serve stage, under `/v1/files`. They are in a temporary folder; who holds one key does not see those of another.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.serve.errors import ApiError

MOST_FILES = 1000


@dataclass(frozen=True)
class StoredFile:
    """A file.

    Attributes:
        id: its name here, such as `file-0f3e...`.
        owner: whose it is.
        name: that the client gave.
        purpose: what it is for.
        path: where it is.
        nbytes: its size.
        created: Unix time.
    """

    id: str
    owner: str
    name: str
    purpose: str
    path: Path
    nbytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self) -> dict[str, Any]:
        """The file as OpenAI's clients read it."""
        return {
            "id": self.id, "object": "file", "bytes": self.nbytes, "created_at": self.created, "filename": self.name,
            "purpose": self.purpose, "status": "processed", "expires_at": None,
        }  # fmt: skip


class FileStore:
    """All files of a server.

    Args:
        most: bytes of all files together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._files: dict[str, StoredFile] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(each.nbytes for each in self._files.values())

    def new_path(self) -> Path:
        """Where a new file may be written."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rlx-files-")
        return Path(self._folder.name) / f"file-{uuid.uuid4().hex}"

    def check_room(self, nbytes: int) -> None:
        """Refuses a file that there is no room for.

        Raises:
            ApiError: as said.
        """
        if self.used + nbytes > self.most or len(self._files) >= MOST_FILES:
            what = f"there is no room for the file: {MOST_FILES} with {self.most / 1e6:g} MB together are kept"
            hint = "delete files, or start the server with a larger --files-mb"
            raise ApiError(413, what, param="file", code="storage_full", hint=hint)

    def add(self, owner: str, name: str, purpose: str, data: bytes) -> StoredFile:
        """Keeps the content of a file.

        Raises:
            ApiError: there is no room.
            OSError: the disk is full.
        """
        self.check_room(len(data))
        path = self.new_path()
        path.write_bytes(data)
        return self.adopt(owner, name, purpose, path)

    def adopt(self, owner: str, name: str, purpose: str, path: Path) -> StoredFile:
        """Keeps a file that was written to a `new_path`."""
        made = StoredFile(path.name, owner, name, purpose, path, path.stat().st_size)
        self._files[made.id] = made
        return made

    def find(self, owner: str, file_id: str) -> StoredFile:
        """A file of a client.

        Raises:
            ApiError: 404, the client has no such file.
        """
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no file {file_id[:80]!r}", param="id", code="file_not_found")
        return found

    def of(self, owner: str) -> list[StoredFile]:
        """The files of a client, the newest first."""
        return [each for each in reversed(self._files.values()) if each.owner == owner]

    def delete(self, owner: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            ApiError: 404, the client has no such file.
        """
        found = self.find(owner, file_id)
        del self._files[file_id]
        with suppress(OSError):  # a system that keeps open files removes it with the folder
            found.path.unlink()

    def close(self) -> None:
        """Removes all files."""
        self._files.clear()
        if self._folder is not None:
            with suppress(OSError):
                self._folder.cleanup()
