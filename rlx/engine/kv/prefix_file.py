"""A file with states of a prompt's beginning: pages of full caches, or the rings and recurrent states at a position.

Runtime, under `prefix_store.py`. Little-endian:

    magic     8 bytes  "RLXKV\\0\\0\\0"
    version   u32      1
    parts     u32      how many parts there are: pages, or 1
    start     u64      first position of the keys
    end       u64      position after the last one
    size      u64      bytes of a part
    rate      f64      prompt tokens that were computed per second when it was written; 0 if nobody knows
    model     32 bytes digest of the model, the versions and the options that the values depend on
    digest    32 bytes BLAKE2b of all above and of the two tables below
    keys      i64 each, one for each position from `start` to `end`: see `prefix.py`
    digests   16 bytes each, BLAKE2b of each part
    parts     their bytes, one after the other

Every size is checked against the size of the file before anything is read, and every part against its digest. Parts can
be read one by one. Nothing is unpickled.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from rlx.engine.kv.prefix import Keys
from rlx.errors import CacheError
from rlx.json_file import open_regular
from rlx.partial_file import into_place
from rlx.store.folder import Damage

Bytes = npt.NDArray[np.uint8]

MAGIC, VERSION = b"RLXKV\0\0\0", 1
_HEAD = struct.Struct("<8sIIQQQd32s")
_DIGEST, _PART_DIGEST = 32, 16
MAX_POSITIONS = 1 << 20


@dataclass(frozen=True)
class PrefixHeader:
    """What a file holds.

    Attributes:
        start, end: its positions; a file with pages holds those, one with states has them at `end`.
        parts: number of parts.
        size: bytes of a part.
        model: digest of the model, 32 bytes.
        rate: prompt tokens per second that were computed when it was written; 0 if nobody knows.
    """

    start: int
    end: int
    parts: int
    size: int
    model: bytes
    rate: float = 0.0

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return _HEAD.size + _DIGEST + 8 * (self.end - self.start) + (_PART_DIGEST + self.size) * self.parts


def write(path: Path, header: PrefixHeader, keys: Keys, parts: Sequence[memoryview | bytes]) -> None:
    """Writes a file, whole or not at all.

    Args:
        keys: i64 [end - start].
        parts: each of `header.size` bytes.

    Raises:
        OSError: it cannot be written.
    """
    head = _HEAD.pack(MAGIC, VERSION, header.parts, header.start, header.end, header.size, header.rate, header.model)
    tables = keys.astype("<i8").tobytes() + b"".join(_digest(part) for part in parts)
    with into_place(path, 0o600) as partial, partial.open("wb") as file:
        file.write(head + blake2b(head + tables, digest_size=_DIGEST).digest() + tables)
        for part in parts:
            file.write(part)


class PrefixFile:
    """An open file. Close it, or use it in a `with`.

    Args:
        expected: what it must hold, but for the rate.

    Attributes:
        header: what it holds.
        keys: i64 [end - start].

    Raises:
        FileNotFoundError: it is not there any more.
        Damage: it is not such a file, holds something else, or was changed.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, expected: PrefixHeader) -> None:
        os.stat(path)  # FileNotFoundError
        self._stack = open_regular(path, CacheError)
        try:
            self._file, size = self._stack.__enter__()
        except CacheError as error:
            raise Damage(error.what) from error
        try:
            self.header, self.keys, self._digests = _read_head(self._file, size, expected)
        except BaseException:
            self.close()
            raise
        self._parts_at = self._file.tell()

    def read(self, first: int, count: int) -> Bytes:
        """Parts first .. first + count, u8 [count, size].

        Raises:
            Damage: one of them was changed, or the file was cut short.
            OSError: they cannot be read.
        """
        found = np.empty((count, self.header.size), np.uint8)
        self._file.seek(self._parts_at + first * self.header.size)
        _read_into(self._file, found)
        for i, part in enumerate(found):
            if _digest(part.data) != self._digests[first + i]:
                raise Damage(f"part {first + i} does not fit its digest")
        return found

    def close(self) -> None:
        """Closes the file."""
        self._stack.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _read_head(file: BinaryIO, size: int, expected: PrefixHeader) -> tuple[PrefixHeader, Keys, list[bytes]]:
    raw = file.read(_HEAD.size + _DIGEST)
    if len(raw) < _HEAD.size + _DIGEST or not raw.startswith(MAGIC):
        raise Damage(f"it is no file of states: it begins with {raw[:8]!r}")
    _, version, parts, start, end, part_bytes, rate, model = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise Damage(f"its version is {version}, expected {VERSION}")
    header = PrefixHeader(start, end, parts, part_bytes, model, rate)
    wanted = (expected.start, expected.end, expected.parts, expected.size, expected.model)
    if (start, end, parts, part_bytes, model) != wanted:
        raise Damage("it holds something else than its name says")
    if header.nbytes != size:
        raise Damage(f"it has {size} bytes, expected {header.nbytes}")
    tables = file.read(8 * (end - start) + _PART_DIGEST * parts)
    if blake2b(raw[: _HEAD.size] + tables, digest_size=_DIGEST).digest() != raw[_HEAD.size :]:
        raise Damage("its header does not fit its digest")
    keys = np.frombuffer(tables, "<i8", end - start).astype(np.int64)
    rest = tables[8 * (end - start) :]
    return header, keys, [rest[at : at + _PART_DIGEST] for at in range(0, len(rest), _PART_DIGEST)]


def _read_into(file: BinaryIO, out: Bytes) -> None:
    view = out.reshape(-1).data
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise Damage("the file was cut short")
        view = view[count:]


def _digest(part: memoryview | bytes) -> bytes:
    return blake2b(part, digest_size=_PART_DIGEST).digest()
