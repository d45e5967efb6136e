"""Collects GGUF keys with their values and types.

Export stage, used by the readers of `config.json` and of tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Metadata = dict[str, tuple[Any, Any]]


class Writer:
    """Collects keys under the architecture's prefix, with their GGUF types."""

    def __init__(self, arch: str) -> None:
        self.arch, self.found = arch, Metadata()

    def u32(self, key: str, value: int) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = value, GGUFValueType.UINT32

    def f32(self, key: str, value: float) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = value, GGUFValueType.FLOAT32

    def text(self, key: str, value: str) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = value, GGUFValueType.STRING

    def flag(self, key: str, value: bool) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = value, GGUFValueType.BOOL

    def integers(self, key: str, values: Sequence[int]) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = list(values), (GGUFValueType.ARRAY, GGUFValueType.INT32)

    def floats(self, key: str, values: Sequence[float]) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = list(values), (GGUFValueType.ARRAY, GGUFValueType.FLOAT32)

    def flags(self, key: str, values: Sequence[bool]) -> None:
        from gguf import GGUFValueType

        self.found[f"{self.arch}.{key}"] = list(values), (GGUFValueType.ARRAY, GGUFValueType.BOOL)
