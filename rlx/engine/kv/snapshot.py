"""Snapshots: copies of a session, in memory and in a file.

Runtime, under `sequence_snapshot.py`, which takes, checks and restores snapshots. File format, little-endian:

    magic     8 bytes  "RLXSNAP\\0"
    version   u32      2
    header    u32      bytes of the header
    digest    32 bytes BLAKE2b of all that follows
    header    JSON     model, ids (how many), formats, arrays (name, dtype and shape of each); if there are embedded
                       spans, also spans (start, digest, grid and two_way of each): their rows are arrays, too
    ids       i32 each
    arrays    their elements, one array after the other

`load` checks every size against the size of the file before it allocates memory. Whether a snapshot fits a model is
checked when it is restored.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from rlx import arguments
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.errors import PromptError, SnapshotError, file_error
from rlx.json_file import open_regular, parse_object
from rlx.partial_file import into_place

Array = np.ndarray[Any, Any]

MAGIC, VERSION = b"RLXSNAP\0", 2
_HEAD = struct.Struct("<8sII32s")
_ZIP = b"PK\x03\x04"  # version 1 was NumPy's .npz
MAX_HEADER_BYTES, MAX_DIMS, MAX_IDS = 16 << 20, 8, 1 << 24
_ELEMENTS = ("float32", "float16", "uint16", "uint8")
_FIELDS = {"model": str, "ids": int, "formats": dict, "arrays": list}
_SPAN, _BIAS = "embeddings.{}", "embeddings.bias"  # names of the arrays of embedded spans
_AGAIN = "the file is damaged: take the snapshot again"


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """An immutable copy of a session. A restored session continues exactly as the original would have.

    Attributes:
        ids: the tokens so far.
        arrays: by state. Full cache: its positions [heads, len(ids), head_dim]. Ring: the newest positions that it
            held, [heads, at most its capacity, head_dim]. Recurrent state: all of it. bf16 is uint16, heads of q8_0 and
            q4_0 are the bytes of their blocks; read-only.
        formats: by state: kind, type and shape; the session that restores the snapshot must have the same.
        model: identity of the model.
        embeddings: the images of the prompt as rows, or a caller's own embeddings; None if there are none.

    Example:
        >>> runner.snapshot().save("story.rlxsnap")
        >>> runner.restore(rlx.Snapshot.load("story.rlxsnap"))
    """

    ids: tuple[int, ...]
    arrays: Mapping[str, Array]
    formats: Mapping[str, str]
    model: str
    embeddings: PromptEmbeddings | None = None

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, of embedded rows, and of the ids (four each)."""
        return sum(a.nbytes for a in (*self.arrays.values(), *self._rows.values())) + 4 * len(self.ids)

    @property
    def _rows(self) -> dict[str, Array]:
        """The arrays of the embedded spans, by their names in the file."""
        if self.embeddings is None:
            return {}
        bias = {} if self.embeddings.bias is None else {_BIAS: self.embeddings.bias}
        return {**{_SPAN.format(i): span.rows for i, span in enumerate(self.embeddings.spans)}, **bias}

    def __repr__(self) -> str:
        return f"<Snapshot of {self.position} tokens, {self.nbytes} bytes>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that another process can `load`. On an error no file is written.

        Raises:
            SnapshotError: the file cannot be written.
        """
        path = arguments.path("path", path)
        try:
            with into_place(path, 0o600) as partial, partial.open("wb") as file:
                self._write(file)
        except OSError as error:
            raise file_error(SnapshotError, "the snapshot cannot be written", error, path) from error

    def _write(self, file: BinaryIO) -> None:
        arrays, spans = {**self.arrays, **self._rows}, self.embeddings.spans if self.embeddings else ()
        header = json.dumps({
            "model": self.model, "ids": len(self.ids), "formats": dict(self.formats),
            "arrays": [[name, value.dtype.name, value.shape] for name, value in arrays.items()],
            **({"spans": [[s.start, s.digest and s.digest.hex(), s.grid, s.two_way] for s in spans]} if spans else {}),
        }).encode()  # fmt: skip
        digest = blake2b(header, digest_size=32)
        file.write(bytes(_HEAD.size))
        file.write(header)
        for value in (np.array(self.ids, "<i4"), *arrays.values()):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            digest.update(data)
            file.write(data)
        file.seek(0)
        file.write(_HEAD.pack(MAGIC, VERSION, len(header), digest.digest()))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Snapshot:
        """Reads a file that `save` wrote.

        Raises:
            SnapshotError: the file does not exist, is damaged, is not a snapshot, or is of another version of rlx.
        """
        path = arguments.path("path", path)
        with open_regular(path, SnapshotError) as (file, size):
            try:
                return _read(file, size, path)
            except OSError as error:
                raise file_error(SnapshotError, "the snapshot cannot be read", error, path) from error


def _fail(what: str, path: Path, hint: str = _AGAIN) -> NoReturn:
    raise SnapshotError(what, where=path, hint=hint)


def _read(file: BinaryIO, size: int, path: Path) -> Snapshot:
    head = file.read(_HEAD.size)
    if head.startswith(_ZIP):
        hint = "take the snapshot again with this version of rlx"
        _fail("this is a ZIP archive, as snapshots were in earlier versions, or something else", path, hint)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        _fail(f"this is not a snapshot: it begins with {head[:8]!r}", path, "give a file that Snapshot.save wrote")
    _, version, length, digest = _HEAD.unpack(head)
    if version != VERSION:
        _fail(f"its version is {version}, expected {VERSION}", path, "take the snapshot again with this version of rlx")
    if length > min(MAX_HEADER_BYTES, size - _HEAD.size):
        _fail(f"its header is said to have {length} bytes, in a file of {size}", path)
    raw = file.read(length)
    header = parse_object(raw, path, SnapshotError, sizes_only=True)
    ids, arrays, formats, model = _described(header, path)
    values = [np.empty(shape, dtype) for dtype, shape in _fitting(ids, arrays, size - _HEAD.size - length, path)]
    found = blake2b(raw, digest_size=32)
    for value in values:
        bytes_of = value.reshape(-1).view(np.uint8)
        if file.readinto(bytes_of.data) != bytes_of.nbytes:  # type: ignore[attr-defined]
            _fail("the file was cut short while it was read", path)
        found.update(bytes_of.data)
        value.flags.writeable = False
    if found.digest() != digest:
        _fail("its digest does not fit its content", path)
    if (values[0] < 0).any():
        _fail("an id is negative", path)
    states = dict(zip(arrays, values[1:], strict=True))
    embeddings = _embeddings(header.get("spans", []), states, ids, path)
    return Snapshot(tuple(values[0].tolist()), states, formats, model, embeddings)


def _embeddings(spans: list[Any], arrays: dict[str, Array], ids: int, path: Path) -> PromptEmbeddings | None:
    """The embedded spans of a file's header; takes their rows out of its arrays."""
    found, bias = list[EmbeddedSpan](), arrays.pop(_BIAS, None)
    for i, each in enumerate(spans):
        rows = arrays.pop(_SPAN.format(i), None)
        if rows is None or not _is_span(each, len(rows)):
            _fail(f"span {i} of its header is not a start, a digest, a grid and a flag with rows", path)
        digest, grid = each[1] and bytes.fromhex(each[1]), each[2] and (each[2][0], each[2][1])
        found.append(EmbeddedSpan(each[0], rows, digest, grid, each[3]))
    try:
        embeddings = PromptEmbeddings(tuple(found), bias) if found else None
    except PromptError as error:
        _fail(f"its spans do not fit: {error.where}: {error.what}", path)
    if embeddings is not None and embeddings.end > ids:
        _fail(f"its spans end at position {embeddings.end}, its ids at {ids}", path)
    return embeddings


def _is_span(value: Any, rows: int) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    start, digest, grid, two_way = value
    whole = grid is None or (isinstance(grid, list) and [type(size) for size in grid] == [int, int])
    fits = whole and (grid is None or (grid[1] > 0 and rows <= grid[0] * grid[1]))
    text = digest is None or (type(digest) is str and re.fullmatch("(?:[0-9a-f]{2})+", digest))
    return type(start) is int and fits and bool(text) and type(two_way) is bool


def _described(header: dict[str, Any], path: Path) -> tuple[int, dict[str, tuple[str, list[int]]], dict[str, str], str]:
    """The number of ids, dtype and shape of each array, the formats and the model."""
    fields = {**_FIELDS, "spans": list} if "spans" in header else _FIELDS
    if header.keys() != fields.keys() or not all(type(header[name]) is kind for name, kind in fields.items()):
        _fail(f"its header does not hold {', '.join(_FIELDS)}", path)
    arrays: dict[str, tuple[str, list[int]]] = {}
    for each in header["arrays"]:
        if not isinstance(each, list) or [type(part) for part in each] != [str, str, list] or each[0] in arrays:
            _fail("its header has an array that is not a name, a type and a shape", path)
        name, dtype, shape = each
        if dtype not in _ELEMENTS or len(shape) > MAX_DIMS or not all(type(size) is int for size in shape):
            _fail(f"array {name[:80]!r} is not of a known type and shape", path)
        arrays[name] = dtype, shape
    if not all(type(form) is str for form in header["formats"].values()):
        _fail("its header has a format that is no text", path)
    return header["ids"], arrays, header["formats"], header["model"]


def _fitting(
    ids: int, arrays: Mapping[str, tuple[str, list[int]]], left: int, path: Path
) -> list[tuple[np.dtype[Any], list[int]]]:
    """Type and shape of the ids and of each array; together they must take exactly the remaining bytes."""
    if ids > MAX_IDS:
        _fail(f"it is said to have {ids} ids, at most {MAX_IDS} are allowed", path)
    every = [(np.dtype("<i4"), [ids]), *((np.dtype(dtype), shape) for dtype, shape in arrays.values())]
    needed = sum(dtype.itemsize * prod(shape) for dtype, shape in every)
    if needed != left or any(size > left for _, shape in every for size in shape):
        _fail(f"its ids and arrays take {needed} bytes, the file has {left} for them", path)
    return every
