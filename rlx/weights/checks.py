"""Ranges of the hyper-parameters in a GGUF file: what the model builder may rely on.

Part of the weights stage, run when a file is opened, so that an absurd number is an error that names its key and not
an allocation later.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from rlx.errors import ConfigError
from rlx.weights.mapped import TensorInfo

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
