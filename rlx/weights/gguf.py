"""GGUF files: the checked header reader and the mapped tensors behind it.

Part of the weights stage. The file is not trusted: every count, length, offset and type is checked against the bytes
that are left before anything of that size is made, and sizes are Python integers, which do not overflow. Large arrays
(token strings, merges, scores) are located at opening and decoded when asked for.

Layout (GGUF specification, versions 2 and 3, little-endian): magic, version u32, tensor count u64, key count u64; then
the key-values (key string, type u32, value), then the tensor records (name string, dimension count u32, dimensions u64
fastest first, type u32, offset u64 from the data section), then the data section at the next multiple of the alignment.
A string is a u64 length and UTF-8 bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from rlx.errors import CUT_SHORT, GgufError, ModelFileError, UnsupportedModelError
from rlx.ir.dtypes import BY_GGML
from rlx.weights.gguf_values import GgufMetadata, Numbers, Strings, check_hyperparameters
from rlx.weights.mapped import Buffer, MappedFile, MappedTensors, TensorInfo

MAX_PARTS = 99_999
_PART = re.compile(r"(.*-)([0-9]{5})(-of-)([0-9]{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_KEYS = ("split.no", "split.count", "split.tensors.count")
_TOGETHER = "download all files of the model again, from one place"


def part_number(name: str) -> tuple[str, int] | None:
    """The model's name and the part's number, from 1, if a file is called like a part."""
    part = _PART.fullmatch(name)
    return (part[1] + part[4], int(part[2])) if part else None


def part_paths(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The files of the model that `path` is a part of, in order; `path` alone if the model is not split.

    Raises:
        GgufError: what the part says of itself is not what its name says.
        ModelFileError: a file is missing.
    """
    count = metadata.get("split.count", 0)
    if count <= 1:
        return [path]
    for key in _KEYS:
        if key not in metadata:
            raise GgufError(f"there is no key {key!r}, but split.count is {count}", where=path, hint=_TOGETHER)
    number = metadata["split.no"] + 1
    if not 1 <= number <= count <= MAX_PARTS:
        raise GgufError(f"split.no is {number - 1} and split.count is {count}", where=path, hint=_TOGETHER)
    part = _PART.fullmatch(path.name)
    if part is None or (int(part[2]), int(part[4])) != (number, count):
        called = f"NAME-{number:05}-of-{count:05}.gguf"
        raise GgufError(
            f"this is part {number} of {count} of a split model, expected a file called {called}",
            where=path,
            hint="give the parts the names that they were made with, in one directory",
        )
    paths = [path.with_name(f"{part[1]}{i:05}{part[3]}{part[4]}{part[5]}") for i in range(1, count + 1)]
    for i, each in enumerate(paths, start=1):
        if not each.exists():
            what = f"part {i} of {count} of the split model is missing: {each.name}"
            raise ModelFileError(what, where=path, hint="all parts must be in one directory")
    return paths


def check_parts(
    paths: Sequence[Path], metadata: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, Any]]
) -> None:
    """Raises `GgufError` unless the files are all parts of one model. A single file that is not split passes."""
    if len(paths) == 1:
        return
    total = metadata[0].get("split.tensors.count")
    for i, (path, keys) in enumerate(zip(paths, metadata, strict=True)):
        for key, expected in zip(_KEYS, (i, len(paths), total), strict=True):
            if keys.get(key) != expected:
                raise GgufError(f"{key} is {keys.get(key)}, expected {expected}", where=path, hint=_TOGETHER)
    places: dict[str, Path] = {}
    for path, names in zip(paths, tensors, strict=True):
        for name in names:
            if name in places:
                what = f"tensor {name!r} is in this part and in {places[name].name}"
                raise GgufError(what, where=path, hint=_TOGETHER)
            places[name] = path
    if len(places) != total:
        what = f"the parts have {len(places)} tensors, split.tensors.count is {total}"
        raise GgufError(what, where=paths[0], hint=_TOGETHER)


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS, MIN_KEY_BYTES = 65_536, 14  # length, one letter, type, one byte
MAX_TENSORS, MIN_TENSOR_BYTES = 1 << 18, 33  # length, one letter, dimension count, one dimension, type, offset
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_STRING_BYTES = 65_535, 63, 64 << 20
MAX_DIMS = 4
MIN_ALIGNMENT, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 8, 32, 65_536

_NO_GGUF = "this is no GGUF file, whatever its name says"
_WRONG = "the file is damaged or was written wrongly: download or convert it again"

_STRING, _ARRAY, _BOOL = 8, 9, 7
TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_NUMPY = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_SCALARS = {kind: struct.Struct(f"<{letter}") for kind, letter in zip(_NUMPY, "BbHhIifBQqd", strict=True)}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
#: Number of dimensions -> what follows it in the record of a tensor: the dimensions, the type and the offset.
_RECORDS = {count: struct.Struct(f"<{count}QIQ") for count in range(1, MAX_DIMS + 1)}

# Keys whose meaning the reader and the tokenizer rest on, with the types they may have.
_KNOWN_TYPES: dict[str, tuple[str, ...]] = {
    "general.architecture": ("string",),
    "general.alignment": ("u32",),
    "split.no": ("u16", "u32", "i32"),
    "split.count": ("u16", "u32", "i32"),
    "split.tensors.count": ("u16", "u32", "i32"),
    "tokenizer.ggml.model": ("string",),
    "tokenizer.ggml.pre": ("string",),
    "tokenizer.ggml.tokens": ("array of string",),
    "tokenizer.ggml.merges": ("array of string",),
    "tokenizer.ggml.scores": ("array of f32",),
    "tokenizer.ggml.token_type": ("array of i32", "array of u32"),
    "tokenizer.chat_template": ("string",),
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header.

    Attributes:
        offsets: tensor name -> first byte, from the start of the file.
        data_offset: first byte of the data section (beyond the end in a file without tensors).
    """

    version: int
    alignment: int
    metadata: GgufMetadata
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]
    data_offset: int


class GgufFile(MappedTensors):
    """A GGUF file as a `WeightLoader`: metadata, tensor table, bytes of each tensor.

    Args:
        path: the file; of a model that is split over several files any of them, the others are found by their names.

    Attributes:
        path: the file, or the first one of a split model.
        metadata: see `GgufMetadata`; of a split model those of its first file.
        tensors: name -> `TensorInfo`, in file order.
        version, alignment: as in the (first) header.

    Raises:
        ModelFileError: the file cannot be read, or a file of a split model is missing.
        GgufError: a rule of the format is broken; the message names the key or tensor, the byte and both values.
        UnsupportedModelError: a tensor type that rlx does not read.
        ConfigError: a hyper-parameter is out of its range.
    """

    format: ClassVar[str] = "gguf"

    def __init__(self, path: str | Path, *, mmap: bool = True) -> None:
        super().__init__(Path(path))
        parts = {self.path: _open(self.path, mmap)}
        paths = part_paths(self.path, parts[self.path][1].metadata)
        self.path = paths[0]
        for each in paths:
            if each not in parts:
                parts[each] = _open(each, mmap)
        self._files = [parts[each][0] for each in paths]
        headers = [parts[each][1] for each in paths]
        self.version, self.alignment = headers[0].version, headers[0].alignment
        self.metadata: GgufMetadata = headers[0].metadata
        check_parts(paths, [header.metadata for header in headers], [h.tensors for h in headers])
        self.tensors = {name: info for header in headers for name, info in header.tensors.items()}
        if len(paths) > 1:  # the first part alone may lack tensors that are checked
            check_hyperparameters(self.metadata, self.tensors, str(self.path))
        for file, header in zip(self._files, headers, strict=True):
            self._places |= {name: (file, offset) for name, offset in header.offsets.items()}

    def metadata_bytes(self, key: str) -> list[bytes]:
        """The strings of a string array, as the bytes in the file; `ConfigError` if the value is no such array."""
        return self.metadata.metadata_bytes(key)

    def close(self) -> None:
        super().close()
        self.metadata.close()


def _open(path: Path, mmap: bool) -> tuple[MappedFile, GgufHeader]:
    file = MappedFile(path, mmap=mmap)
    return file, parse_header(file.buffer, str(path))


def parse_header(buffer: Buffer, where: str) -> GgufHeader:
    """Reads and checks everything before the data section.

    Args:
        buffer: the whole file.
        where: name of the file for messages.

    Raises:
        GgufError, UnsupportedModelError, ConfigError: see `GgufFile`.
    """
    at = _Cursor(buffer, where)
    version = _read_version(at)
    n_tensors = at.count("tensor count", MAX_TENSORS, MIN_TENSOR_BYTES)
    n_keys = at.count("key count", MAX_KEYS, MIN_KEY_BYTES)
    metadata = _read_metadata(at, n_keys)
    _check_known(metadata, where)
    alignment = _alignment(metadata, where)
    records = _read_records(at, n_tensors)
    data_offset = -(-at.pos // alignment) * alignment
    tensors = {record.info.name: record.info for record in records}
    offsets = _place(records, data_offset, alignment, len(buffer), where)
    check_hyperparameters(metadata, tensors, where)
    return GgufHeader(version, alignment, metadata, tensors, offsets, data_offset)


class _Cursor:
    """A position in the header. Every read checks that enough bytes are left; errors name what was read."""

    def __init__(self, buffer: Buffer, where: str) -> None:
        self.buffer, self.where, self.pos, self.end = buffer, where, 0, len(buffer)

    def fail(self, what: str, *, at: int | None = None, hint: str | None = None) -> NoReturn:
        raise GgufError(what, where=f"{self.where}, byte {self.pos if at is None else at}", hint=hint or _WRONG)

    def need(self, nbytes: int, what: str) -> None:
        left = self.end - self.pos
        if nbytes > left:
            self.fail(f"{what} needs {nbytes} bytes, the file has {left} left", hint=CUT_SHORT)

    def numbers(self, what: str, form: struct.Struct = _U64) -> tuple[Any, ...]:
        if form.size > self.end - self.pos:
            self.need(form.size, what)
        self.pos += form.size
        return form.unpack_from(self.buffer, self.pos - form.size)

    def count(self, what: str, most: int, smallest: int) -> int:
        """A u64 count of records that each take at least `smallest` bytes."""
        at = self.pos
        value: int = self.numbers(f"the {what}")[0]
        if value > most:
            self.fail(f"the {what} is {value}, at most {most} are allowed", at=at)
        if value * smallest > self.end - self.pos:
            left = self.end - self.pos
            self.fail(f"the {what} is {value}, too many for the {left} bytes that follow", at=at, hint=CUT_SHORT)
        return value

    def text(self, what: str, most: int) -> bytes:
        at, length = self.pos, self.numbers(f"the length of {what}")[0]
        if length > most:
            self.fail(f"{what} is {length} bytes long, at most {most} are allowed", at=at)
        if length > self.end - self.pos:
            self.need(length, what)
        self.pos += length
        return self.buffer[self.pos - length : self.pos]

    def name(self, what: str, most: int) -> str:
        """A string that identifies something: not empty, valid UTF-8."""
        at, raw = self.pos, self.text(what, most)
        if not raw:
            self.fail(f"{what} is empty", at=at)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {raw[:40]!r}", at=at)

    def skip_strings(self, count: int, what: str) -> Strings:
        """Locates `count` strings. For a large vocabulary this loop takes most of the time of opening a file."""
        start = pos = self.pos
        ends: list[int] = []
        add, length = ends.append, _U64.unpack_from
        try:
            for _ in range(count):
                pos += 8 + length(self.buffer, pos)[0]
                add(pos)
        except (struct.error, OverflowError):
            pos = self.end + 1
        if pos > self.end:
            self._fail_in_strings(ends, count, what)
        found = Strings(start, np.array(ends, np.int64))
        sizes = np.diff(found.ends, prepend=start) - 8
        if count and sizes.max() > MAX_STRING_BYTES:
            at = int(sizes.argmax())
            self.fail(f"string {at} of {what} is {sizes[at]} bytes long, at most {MAX_STRING_BYTES} are allowed")
        self.pos = pos
        return found

    def _fail_in_strings(self, ends: list[int], count: int, what: str) -> NoReturn:
        whole = next((i for i, end in enumerate(ends) if end > self.end), len(ends))
        at = ends[whole - 1] if whole else self.pos
        self.fail(
            f"string {whole} of the {count} in {what} runs past the end of the file ({self.end} bytes)",
            at=at,
            hint=CUT_SHORT,
        )


def _read_version(at: _Cursor) -> int:
    at.need(4, "the magic")
    if at.buffer[:4] != MAGIC:
        at.fail(f"the file does not begin with {MAGIC!r} but with {at.buffer[:16]!r}", hint=_NO_GGUF)
    at.pos = 4
    version: int = at.numbers("the version", _U32)[0]
    if version and version & 0xFFFF == 0:
        at.fail(f"the file is big-endian (version {version:#010x})", at=4, hint="convert the model to little-endian")
    if version not in VERSIONS:
        hint = "convert the model again with a current converter" if version < 2 else "a newer rlx may read it"
        at.fail(f"GGUF version {version} is not one of {VERSIONS}", at=4, hint=hint)
    return version


def _read_metadata(at: _Cursor, count: int) -> GgufMetadata:
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    for index in range(count):
        start = at.pos
        key = at.name(f"the name of key {index}", MAX_KEY_BYTES)
        if key in values:
            at.fail(f"key {key!r} occurs twice", at=start)
        values[key], types[key] = _read_value(at, key)
    return GgufMetadata(values, types, at.buffer, at.where)


def _read_value(at: _Cursor, key: str) -> tuple[Any, str]:
    kind = _read_type(at, f"key {key!r}")
    if kind == _ARRAY:
        return _read_array(at, key)
    if kind == _STRING:
        return at.text(f"the value of key {key!r}", MAX_STRING_BYTES).decode("utf-8", "replace"), "string"
    value = at.numbers(f"the value of key {key!r}", _SCALARS[kind])[0]
    if kind != _BOOL:
        return value, TYPE_NAMES[kind]
    if value > 1:
        at.fail(f"key {key!r} is a bool with the value {value}, expected 0 or 1", at=at.pos - 1)
    return bool(value), "bool"


def _read_type(at: _Cursor, what: str) -> int:
    kind: int = at.numbers(f"the type of {what}", _U32)[0]
    if kind >= len(TYPE_NAMES):
        at.fail(f"{what} has the type id {kind}, expected 0 to {len(TYPE_NAMES) - 1}", at=at.pos - 4)
    return kind


def _read_array(at: _Cursor, key: str) -> tuple[Strings | Numbers, str]:
    what = f"the array of key {key!r}"
    kind = _read_type(at, what)
    if kind == _ARRAY:
        at.fail(f"{what} holds arrays; arrays of arrays are not allowed", at=at.pos - 4)
    size = 8 if kind == _STRING else _SCALARS[kind].size
    start, count = at.pos, at.numbers(f"the length of {what}")[0]
    if count * size > at.end - at.pos:
        at.fail(f"{what} has {count} elements, too many for the {at.end - at.pos} bytes that follow", at=start)
    name = f"array of {TYPE_NAMES[kind]}"
    if kind == _STRING:
        return at.skip_strings(count, what), name
    return _skip_numbers(at, kind, count, what), name


def _skip_numbers(at: _Cursor, kind: int, count: int, what: str) -> Numbers:
    found = Numbers(at.pos, np.dtype(_NUMPY[kind]), count)
    if kind == _BOOL and count and max(at.buffer[at.pos : at.pos + count]) > 1:
        at.fail(f"{what} holds bools other than 0 and 1")
    at.pos += count * found.dtype.itemsize
    return found


def _check_known(metadata: GgufMetadata, where: str) -> None:
    for key, allowed in _KNOWN_TYPES.items():
        if key in metadata and metadata.type_of(key) not in allowed:
            found = metadata.type_of(key)
            raise GgufError(f"key {key!r} has type {found}, expected {' or '.join(allowed)}", where=where)


def _alignment(metadata: GgufMetadata, where: str) -> int:
    value = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        expected = f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        raise GgufError(f"general.alignment is {value}, expected {expected}", where=where)
    return value


@dataclass(frozen=True, slots=True)
class _Record:
    info: TensorInfo
    offset: int  # from the data section
    at: int  # byte of the record, for messages


def _read_records(at: _Cursor, count: int) -> list[_Record]:
    records: dict[str, _Record] = {}
    for index in range(count):
        start = at.pos
        name = at.name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in records:
            at.fail(f"tensor {name!r} occurs twice", at=start)
        info, offset = _read_record(at, name)
        records[name] = _Record(info, offset, start)
    return list(records.values())


def _read_record(at: _Cursor, name: str) -> tuple[TensorInfo, int]:
    """A tensor, and its offset from the data section."""
    n_dims: int = at.numbers(f"the dimension count of tensor {name!r}", _U32)[0]
    if not 1 <= n_dims <= MAX_DIMS:
        at.fail(f"tensor {name!r} has {n_dims} dimensions, expected 1 to {MAX_DIMS}", at=at.pos - 4)
    start = at.pos
    *dims, kind, offset = at.numbers(f"the record of tensor {name!r}", _RECORDS[n_dims])
    if 0 in dims:
        at.fail(f"tensor {name!r} has a dimension of 0: {dims}", at=start)
    if kind not in BY_GGML:
        what, place = f"tensor {name!r} has the type id {kind}, which rlx does not know", start + 8 * n_dims
        hint = "use a file in one of the types that `gguf` lists as current, such as Q4_K_M or Q8_0"
        raise UnsupportedModelError(what, where=f"{at.where}, byte {place}", hint=hint)
    dtype, shape = BY_GGML[kind], tuple(reversed(dims))
    if shape[-1] % dtype.block:
        at.fail(f"tensor {name!r} has rows of {shape[-1]}, no multiple of the {dtype.block} in a {dtype} block")
    nbytes = shape[-1] // dtype.block * dtype.nbytes * prod(shape[:-1])
    if nbytes > at.end:
        what = f"tensor {name!r} of shape {shape} and type {dtype} takes {nbytes} bytes, the whole file has {at.end}"
        at.fail(what, hint=CUT_SHORT)
    return TensorInfo(name, dtype, shape, nbytes), offset


def _place(records: list[_Record], data_offset: int, alignment: int, size: int, where: str) -> dict[str, int]:
    """Tensor name -> offset of its first byte from the start of the file.

    Raises:
        GgufError: data is misaligned, overlaps other data, or lies beyond the end of the file.
    """

    def refuse(record: _Record, what: str, hint: str = _WRONG) -> NoReturn:
        raise GgufError(f"tensor {record.info.name!r} {what}", where=f"{where}, byte {record.at}", hint=hint)

    for record in records:
        end = data_offset + record.offset + record.info.nbytes
        if record.offset % alignment:
            refuse(record, f"has the offset {record.offset}, expected a multiple of the alignment {alignment}")
        if end > size:
            refuse(record, f"ends at byte {end}, the file has {size}", CUT_SHORT)
    for before, after in pairwise(sorted(records, key=attrgetter("offset"))):
        end = before.offset + before.info.nbytes
        if end > after.offset:
            refuse(after, f"at offset {after.offset} overlaps tensor {before.info.name!r}, which ends at {end}")
    return {record.info.name: data_offset + record.offset for record in records}
