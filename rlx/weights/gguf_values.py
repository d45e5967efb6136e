"""Values of a GGUF file's metadata: located when the header is read, decoded at first use.

Part of the weights stage, under `gguf.py`. A vocabulary of 150,000 strings costs nothing until it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import ConfigError, GgufError
from rlx.weights.mapped import Buffer


@dataclass(frozen=True, slots=True)
class Strings:
    """A string array in the file: string i ends at `ends[i]`, its length field stands right after string i - 1."""

    start: int
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, buffer: Buffer) -> list[bytes]:
        span, begins = self._span(buffer)
        return [span[begin + 8 : end] for begin, end in pairwise([*begins.tolist(), len(span)])]

    def decode(self, buffer: Buffer) -> list[str]:
        """All strings at once: every length field becomes one NUL, which is no part of a longer UTF-8 sequence."""
        span, begins = self._span(buffer)
        keep = np.ones(len(span), bool)
        for i in range(7):
            keep[begins + i] = False
        joined = np.frombuffer(span, np.uint8).copy()
        joined[begins + 7] = 0
        texts = joined[keep].tobytes().decode("utf-8", "surrogateescape").split("\0")[1:]
        if len(texts) == len(begins):
            return texts
        return [text.decode("utf-8", "surrogateescape") for text in self.read(buffer)]  # a string holds a NUL

    def _span(self, buffer: Buffer) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The bytes of the array, and where each string's length field begins in them."""
        bounds = np.concatenate([[self.start], self.ends])
        return buffer[self.start : int(bounds[-1])], bounds[:-1] - self.start


@dataclass(frozen=True, slots=True)
class Numbers:
    """A numeric array in the file."""

    start: int
    dtype: np.dtype[Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        values = np.frombuffer(buffer, self.dtype, self.count, self.start).copy()  # a view would pin the mapping
        values.flags.writeable = False
        return values


class GgufMetadata(Mapping[str, Any]):
    """The key-values of a GGUF file; arrays are decoded at first use and kept.

    A value is an int, float, bool or str, a read-only NumPy array for an array of numbers or bools, and a `list[str]`
    for an array of strings. Bytes that are not UTF-8 become U+FFFD in a single string and lone surrogates
    (`surrogateescape`, which loses nothing) in an array, because a token may be any bytes.
    """

    def __init__(self, values: dict[str, Any], types: dict[str, str], buffer: Buffer, where: str) -> None:
        self._values, self._types, self._where = values, types, where
        self._buffer: Buffer | None = buffer

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Strings):
            value = value.decode(self._open(key))
        elif isinstance(value, Numbers):
            value = value.read(self._open(key))
        self._values[key] = value
        return value

    def __contains__(self, key: object) -> bool:  # the one of Mapping would decode the value
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def type_of(self, key: str) -> str:
        """The type of a value in the file: `u32`, `string`, `array of f32` and so on."""
        return self._types[key]

    def count(self, key: str) -> int:
        """Elements of an array, without decoding it; `ConfigError` if the value is no array."""
        self._require(key, "array of ")
        return len(self._values[key])

    def metadata_bytes(self, key: str) -> list[bytes]:
        """The strings of an array as they stand in the file; `ConfigError` if the value is no array of strings."""
        self._require(key, "array of string")
        value = self._values[key]
        if isinstance(value, Strings):
            return value.read(self._open(key))
        return [text.encode("utf-8", "surrogateescape") for text in value]

    def close(self) -> None:
        """Drops the file. Values that were read stay; reading another array raises an error."""
        self._buffer = None

    def _require(self, key: str, kind: str) -> None:
        found = self._types.get(key)
        if found is None:
            raise ConfigError(f"there is no metadata key {key!r}", where=self._where)
        if not found.startswith(kind):
            raise ConfigError(f"metadata key {key!r} has type {found}, expected {kind.rstrip()}", where=self._where)

    def _open(self, key: str) -> Buffer:
        if self._buffer is None:
            raise GgufError(f"key {key!r} is read after the file was closed", where=self._where)
        return self._buffer
