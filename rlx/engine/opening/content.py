"""The content of a model's files as one digest, whatever their paths: for states of prompts that outlive the process.

Runners stage, under the engine. A model of 8 GB takes some seconds to read, so the digest is noted in a folder, under
what the system says of the files: path, size, and the times of the last change of content and of the file's record. A
file that was changed in place, or put in the place of another one, has other times and is read again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from rlx.errors import CacheError, ModelFileError
from rlx.json_file import read_bytes
from rlx.partial_file import into_place

_CHUNK = 8 << 20
_SIZE = 32  # bytes of a digest


class ContentDigest:
    """The digest of the bytes of some files.

    Args:
        paths: the files, in order.
        folder: where the digest is noted; nothing is noted where it cannot be written.
    """

    def __init__(self, paths: Sequence[Path], folder: Path) -> None:
        self._paths, self._folder = list(paths), folder

    @property
    def nbytes(self) -> int:
        """Bytes that have to be read if nothing is noted."""
        return sum(path.stat().st_size for path in self._paths)

    def noted(self) -> bytes | None:
        """The digest, 32 bytes, if it was noted for the files as they are now."""
        try:
            found = read_bytes(self._note(self._stamp()), CacheError, 2 * _SIZE)
        except (OSError, CacheError):
            return None
        digest, check = found[:_SIZE], found[_SIZE:]
        return digest if check == blake2b(digest, digest_size=_SIZE).digest() else None

    def read(self, keep_on: Callable[[], bool] = lambda: True) -> bytes | None:
        """Reads the files, and notes the digest; None if `keep_on()` was false meanwhile.

        Raises:
            OSError: a file cannot be read.
            ModelFileError: a file was changed meanwhile.
        """
        before, total = self._stamp(), blake2b(digest_size=_SIZE)
        for path in self._paths:
            total.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    if not keep_on():
                        return None
                    total.update(chunk)
        if self._stamp() != before:
            raise ModelFileError("the file changed while it was read", where=self._paths[0], hint="open it again")
        digest = total.digest()
        with contextlib.suppress(OSError), into_place(self._note(before), 0o600) as partial:
            partial.write_bytes(digest + blake2b(digest, digest_size=_SIZE).digest())
        return digest

    def _stamp(self) -> bytes:
        rows = []
        for path in self._paths:
            found = os.stat(path)
            rows.append((str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev))
        return repr(rows).encode()

    def _note(self, stamp: bytes) -> Path:
        return self._folder / f"{blake2b(stamp, digest_size=16).hexdigest()}.content"
