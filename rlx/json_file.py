"""JSON objects from files that are not trusted: bounded in size, no key twice, every failure an error of the caller's.

Used by every stage that reads a file: headers and indexes of safetensors, `config.json`, the files beside a tokenizer,
headers of snapshots.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rlx import platform
from rlx.errors import RlxError, file_error

MAX_BYTES = 32 << 20
MAX_CONTAINERS = 1 << 20  # objects and arrays: an empty one takes 3 bytes in a file and 64 in memory

JsonObject = dict[str, Any]

_READ = os.O_RDONLY | platform.flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")


def read_object(path: Path, kind: type[RlxError], most: int = MAX_BYTES) -> JsonObject:
    """The object in a JSON file.

    Args:
        kind: class of the errors.
        most: most bytes of the file.

    Raises:
        kind: the file is missing, no regular file, too large, or holds no JSON object.
    """
    return parse_object(read_bytes(path, kind, most), path, kind, most=most)


@contextmanager
def open_regular(path: Path, kind: type[RlxError]) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, open for reading, and its size. A FIFO, which waits for a writer for ever, is refused.

    Raises:
        kind: the file cannot be opened, or is no regular file.
    """
    try:
        file = os.fdopen(os.open(path, _READ), "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise file_error(kind, "the file cannot be read", error, path) from error
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise kind("this is not a regular file", where=path)
        yield file, found.st_size


def read_bytes(path: Path, kind: type[RlxError], most: int = MAX_BYTES) -> bytes:
    """A whole regular file; errors as of `read_object`."""
    with open_regular(path, kind) as (file, size):
        if size > most:
            raise kind(f"the file has {size} bytes, at most {most} are allowed", where=path)
        try:
            return file.read(most)
        except OSError as error:
            raise file_error(kind, "the file cannot be read", error, path) from error


def read_text(path: Path, kind: type[RlxError], most: int = MAX_BYTES) -> str:
    """A whole file as UTF-8 text; errors as of `read_object`."""
    try:
        return read_bytes(path, kind, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"the file is no UTF-8 text ({error})", where=path) from error


def parse_object(
    raw: bytes, where: object, kind: type[RlxError], *, sizes_only: bool = False, most: int = MAX_BYTES
) -> JsonObject:
    """A JSON object without duplicate keys.

    Args:
        where: shown in errors: the file.
        sizes_only: numbers are integers and not negative.

    Raises:
        kind: it is no such object, is nested too deeply, or has more than a million parts.
    """
    if len(raw) > most:
        raise kind(f"the JSON has {len(raw)} bytes, at most {most} are allowed", where=where)
    containers = raw.count(b"{") + raw.count(b"[")
    if containers * MAX_BYTES > MAX_CONTAINERS * most:
        raise kind(f"the JSON has {containers} objects and arrays, too many to be read", where=where)
    hooks: dict[str, Any] = {"parse_float": _no_size, "parse_constant": _no_size}
    if b"-" in raw:  # a function called for every number takes its time
        hooks["parse_int"] = _size
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, **(hooks if sizes_only else {}))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise kind(f"the JSON does not parse: {reason}", where=where) from error
    if not isinstance(value, dict):
        raise kind(f"the JSON is a {type(value).__name__}, expected an object", where=where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{name[:80]!r} occurs twice")
    return found


def _size(digits: str) -> int:
    return _no_size(digits) if digits.startswith("-") else int(digits)


def _no_size(digits: str) -> NoReturn:
    raise ValueError(f"{digits[:40]} is not a size")
