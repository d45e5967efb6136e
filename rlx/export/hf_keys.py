"""Collects GGUF keys with their values and types.

Export stage, used by the readers of `config.json` and of tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class GgufType(IntEnum):
    """The type of a value, by its number in files."""

    UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


Metadata = dict[str, tuple[Any, Any]]


class Writer:
    """Collects keys under the architecture's prefix, with their GGUF types."""

    def __init__(self, arch: str) -> None:
        self.arch, self.found = arch, Metadata()

    def u32(self, key: str, value: int) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.UINT32

    def f32(self, key: str, value: float) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.FLOAT32

    def text(self, key: str, value: str) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.STRING

    def flag(self, key: str, value: bool) -> None:
        self.found[f"{self.arch}.{key}"] = value, GgufType.BOOL

    def integers(self, key: str, values: Sequence[int]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.INT32)

    def floats(self, key: str, values: Sequence[float]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.FLOAT32)

    def flags(self, key: str, values: Sequence[bool]) -> None:
        self.found[f"{self.arch}.{key}"] = list(values), (GgufType.ARRAY, GgufType.BOOL)
