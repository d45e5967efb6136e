"""Values of a GGUF file's metadata: located when the header is read, decoded at first use.

Part of the weights stage, under `gguf.py`. A vocabulary of 150,000 strings costs nothing until it is read. The ranges
of hyper-parameters are checked when a file is opened, so that an absurd number is an error that names its key and not
an allocation later.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx.errors import ConfigError, GgufError
from rlx.weights.mapped import Buffer, TensorInfo


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


# Key after the architecture's name -> inclusive range of the value, or of every element where it is an array.
RANGES = {
    "block_count": (1, 1024),
    "embedding_length": (1, 1 << 20),
    "context_length": (1, 1 << 31),
    "vocab_size": (1, 1 << 24),
    "feed_forward_length": (0, 1 << 24),
    "attention.head_count": (0, 1 << 14),
    "attention.head_count_kv": (0, 1 << 14),
    "attention.key_length": (1, 1 << 14),
    "attention.value_length": (1, 1 << 14),
    "attention.key_length_swa": (1, 1 << 14),
    "attention.value_length_swa": (1, 1 << 14),
    "attention.shared_kv_layers": (0, 1024),
    "rope.dimension_count": (2, 1 << 14),
    "rope.dimension_count_swa": (2, 1 << 14),
    "embedding_length_per_layer_input": (0, 1 << 20),
    "nextn_predict_layers": (0, 1024),
    "expert_count": (0, 1024),
    "expert_used_count": (0, 1024),
    "expert_feed_forward_length": (0, 1 << 24),
    "expert_shared_feed_forward_length": (0, 1 << 24),
    "ssm.conv_kernel": (1, 256),
    "ssm.inner_size": (1, 1 << 24),
    "ssm.state_size": (1, 1 << 16),
    "ssm.time_step_rank": (1, 1 << 16),
    "ssm.group_count": (1, 1 << 16),
}


class Metadata(Protocol):
    """The part of `GgufMetadata` that is needed here."""

    def __contains__(self, key: object, /) -> bool: ...
    def __getitem__(self, key: str, /) -> Any: ...
    def count(self, key: str) -> int: ...


def check_hyperparameters(metadata: Metadata, tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Check what is present; a key that is missing is the model builder's question.

    Raises:
        ConfigError: a value out of range, of the wrong type, or two that contradict each other.
    """
    if "general.architecture" not in metadata:
        return
    arch = str(metadata["general.architecture"])
    found = {key: _integers(metadata, f"{arch}.{key}", where) for key in RANGES if f"{arch}.{key}" in metadata}
    for key, values in found.items():
        _check_range(f"{arch}.{key}", values, RANGES[key], where)
    _check_heads(arch, found, where)
    _check_rope(arch, found, where)
    _check_experts(arch, found, where)
    _check_vocab(arch, found, metadata, tensors, where)


def _integers(metadata: Metadata, key: str, where: str) -> list[int]:
    value = metadata[key]
    values = value.tolist() if isinstance(value, np.ndarray) else [value]
    if not all(type(each) is int for each in values):
        raise ConfigError(f"{key} is {reprlib.repr(values)}, expected integers", where=where)
    return values


def _check_range(key: str, values: list[int], allowed: tuple[int, int], where: str) -> None:
    for value in values:
        if not allowed[0] <= value <= allowed[1]:
            raise ConfigError(f"{key} is {value}, expected {allowed[0]} to {allowed[1]}", where=where)


def _check_heads(arch: str, found: dict[str, list[int]], where: str) -> None:
    heads, kv = found.get("attention.head_count", []), found.get("attention.head_count_kv", [])
    for index in range(max(len(heads), len(kv)) if heads and kv else 0):
        n, m = heads[min(index, len(heads) - 1)], kv[min(index, len(kv) - 1)]
        if m and n % m:  # a recurrent layer has no heads
            what = f"{arch}.attention.head_count {n} is no multiple of head_count_kv {m}"
            raise ConfigError(what, where=where)


def _check_rope(arch: str, found: dict[str, list[int]], where: str) -> None:
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        for value in found.get(key, []):
            if value % 2:
                raise ConfigError(f"{arch}.{key} is {value}, expected an even number", where=where)


def _check_experts(arch: str, found: dict[str, list[int]], where: str) -> None:
    count = max(found.get("expert_count") or [0])
    for used in found.get("expert_used_count", []):
        if used > count:
            raise ConfigError(f"{arch}.expert_used_count is {used}, more than expert_count {count}", where=where)


def _check_vocab(
    arch: str, found: dict[str, list[int]], metadata: Metadata, tensors: Mapping[str, TensorInfo], where: str
) -> None:
    sizes: dict[str, int] = {}
    if found.get("vocab_size"):
        sizes[f"{arch}.vocab_size"] = found["vocab_size"][0]
    if "tokenizer.ggml.tokens" in metadata:
        sizes["the token list"] = metadata.count("tokenizer.ggml.tokens")
    if "token_embd.weight" in tensors:
        sizes["token_embd.weight"] = tensors["token_embd.weight"].shape[0]
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"the sizes of the vocabulary differ: {listed}", where=where)
