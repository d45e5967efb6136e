"""A model's configuration from GGUF metadata.

Part of the models stage. Sources: the GGUF registry's keys, and llama.cpp's defaults for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.models import rope
from rlx.models.architectures import Architecture, by_period
from rlx.models.config import Experts, Layer, ModelConfig
from rlx.models.keys import HEADS, WIDTH, Keys, is_integer, known
from rlx.models.reader import Reader, Sizes
from rlx.models.registry import ARCHITECTURES, ENCODERS
from rlx.models.settings import Key

HasTensor = Callable[[str], bool]
ROUTERS = {1: "softmax", 2: "sigmoid"}  # expert_gating_func -> what makes scores of the router's logits
MMPROJ = "clip"  # general.architecture of the file with a model's towers

# Keys that change the computation -> (the only supported value, why others are not supported).
_ONLY: dict[str, tuple[Any, str]] = {
    "pooling_type": (0, "this is an embedding or ranking model"),
    "attention.causal": (True, "attention in both directions is not supported"),
}
_PLAIN: dict[str, tuple[Any, str]] = {  # for architectures without such layers
    "expert_count": (0, "mixtures of experts are not supported for this architecture"),
    "nextn_predict_layers": (0, "layers for multi-token prediction are not supported for this architecture"),
    "attention.shared_kv_layers": (0, "sharing keys and values between layers is not supported for this architecture"),
}


def from_gguf(metadata: Mapping[str, Any], has_tensor: HasTensor, *, where: object = "GGUF metadata") -> ModelConfig:
    """Reads GGUF key-values.

    Args:
        has_tensor: whether the file has a tensor of this name.
        where: shown in errors: the file.

    Raises:
        ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModelError: an unknown architecture, or a feature that rlx does not support.
    """
    check_language_model(metadata, where)
    outer = Keys(metadata, where)
    row = known(outer, "general.architecture", ARCHITECTURES, ENCODERS)
    return _Gguf(metadata, where, outer.text("general.architecture"), row, has_tensor).read()


def check_language_model(metadata: Mapping[str, Any], where: object) -> None:
    """Refuses an mmproj file, which holds what a model needs beside its language model to take images or audio.

    Raises:
        UnsupportedModelError: the message says how to use the file.
    """
    if metadata.get("general.architecture") == MMPROJ:
        what = "this file (mmproj) holds a model's tower for images or audio, not its language model"
        hint = "open the file of the language model, and pass this one as `mmproj`"
        raise UnsupportedModelError(what, where=where, hint=hint)


def vocab_size(keys: Keys) -> int:
    """The number of tokens: the file's key, else the length of its vocabulary."""
    tokens = "tokenizer.ggml.tokens"
    if "vocab_size" in keys or tokens not in keys.mapping:
        return keys.integer("vocab_size", WIDTH)
    count = getattr(keys.mapping, "count", None)  # readers can count an array without decoding it
    found = int(count(tokens) if count else len(keys.mapping[tokens]))
    if not found:
        raise ConfigError(f"'{tokens}' is empty, expected the vocabulary", where=keys.where)
    return found


class _Gguf(Reader):
    """The settings of a GGUF file."""

    def __init__(
        self, metadata: Mapping[str, Any], where: object, arch: str, row: Architecture, has_tensor: HasTensor
    ) -> None:
        defaults = {f"{arch}.{key}": value for key, value in row.gguf_defaults.items()}
        super().__init__(Keys({**defaults, **metadata} if defaults else metadata, where, f"{arch}."), arch, row)
        self._metadata, self._has_tensor = metadata, has_tensor

    def spelled(self, name: str, key: Key) -> str:
        return key.gguf

    def refuse(self) -> None:
        keys, row = self.keys, self.row
        has = {"expert_count": row.experts != "none", "nextn_predict_layers": row.predicts}
        has["attention.shared_kv_layers"] = row.shares_kv
        for key, (value, because) in {**_ONLY, **{k: v for k, v in _PLAIN.items() if not has[k]}}.items():
            keys.require(key, value, because)
        if row.streams:
            keys.require("altup.active_idx", 0, "another active stream than the first is not supported")

    def vocab_size(self) -> int:
        return vocab_size(self.keys)

    def tied(self) -> bool:
        return not self._has_tensor("output.weight")

    def activation(self) -> str:
        return self.row.activation

    def router(self) -> str:
        """By its number. Older files of DeepSeek have none: there only sigmoids have a bias."""
        key, row = "expert_gating_func", self.row
        if row.router == "softmax":
            return row.router
        if row.router == "either" and key not in self.keys:
            biased = self._has_tensor(f"blk.{self.integer('dense_layers')}.exp_probs_b.bias")
            return "sigmoid" if biased else "softmax"
        known = {number: each for number, each in ROUTERS.items() if row.router in (each, "either")}
        found = self.keys.integer(key, (0, 255), 2)
        if found not in known:
            self.keys.unsupported(key, found, f"for this architecture {' and '.join(map(str, known))} are supported")
        return known[found]

    def two_way(self) -> str:
        """GGUF has no key for it. The models with per-layer embeddings (E2B, E4B) are the causal ones."""
        return "none" if self.integer("per_layer") else self.row.two_way

    def _local_head_dim(self) -> int:
        return self.keys.even("attention.key_length_swa", HEADS) if self.row.gguf_local_heads else self.head_dim

    def ropes(self, each: tuple[Layer, ...], context: int) -> tuple[rope.Rope, rope.Rope | None]:
        keys, row = self.keys, self.row
        if self.latent is not None:
            return rope.from_gguf(keys, self.latent.rope, None, self._has_tensor, context)
        full, local = self.head_dim, self._local_head_dim()
        only = "only the size of a head, {}, is supported"
        for key, size in (("value_length", full), ("key_length_swa", local), ("value_length_swa", local)):
            keys.require(f"attention.{key}", size, only.format(size))
        turns = any(layer.has_rope for layer in each)
        if row.partial_rope is not None or not turns:
            full = keys.even("rope.dimension_count", (2, full), full)
        for key, size in (("rope.dimension_count", full), ("rope.dimension_count_swa", local)):
            keys.require(key, size, only.format(size))
        second = local if row.local_base is not None else None
        return rope.from_gguf(keys, full, second, self._has_tensor, context, row.rope_sections)

    def find_windows(self) -> list[int | None]:
        """Reads the window key and the pattern, only for architectures with windows; a window of 0 means none."""
        keys, row, layers = self.keys, self.row, self.layers
        window = keys.integer("attention.sliding_window", (0, 1 << 31), row.gguf_window) if row.gguf_period else 0
        if not window:
            return [None] * layers
        key = "attention.sliding_window_pattern"
        if is_integer(keys.get(key, row.gguf_period)):
            slides = by_period(keys.integer(key, (1, 1 << 31), row.gguf_period), layers)
        else:
            slides = keys.elements(key, lambda each: each.flag(key), layers)
        return [window if s else None for s in slides]

    def recurrent(self) -> list[bool]:
        """The array wins over the period; both may cover blocks after the layers."""
        key = "attention.recurrent_layers"
        if not self.row.hybrid:
            return [False] * self.layers
        if key in self.keys:
            return self.keys.elements(key, lambda each: each.flag(key), self.integer("layers"))[: self.layers]
        if self.row.hybrid == "delta rule":
            return by_period(self.integer("period"), self.layers)
        widths = self.widths() if self.row.single_blocks else [0] * self.layers
        return [not heads and not width for heads, width in zip(self._kv_heads(), widths, strict=True)]

    def value_dim(self, heads: int) -> int:
        key, inner = "ssm.inner_size", self.keys.integer("ssm.inner_size", WIDTH)
        if inner % heads:
            self.keys.wrong(key, inner, f"a multiple of {self.at('value_heads')}, which is {heads}")
        return inner // heads

    def _kv_heads(self) -> tuple[int, ...]:
        return self.keys.integers(self.at("kv_heads"), (0, HEADS[1]), self.layers, self.heads)

    def sizes(self) -> list[Sizes]:
        kv_heads = self._kv_heads()
        dims = [self.head_dim if window is None else self._local_head_dim() for window in self.windows]
        return list(zip(kv_heads, dims, self.widths(), strict=True))

    def keys_as_values(self, layer: int) -> bool:
        """For architectures that allow it: layers without a window that have no projection for values."""
        may = self.row.gguf_local_heads and self.windows[layer] is None and self.source[layer] == layer
        return may and not any(self._has_tensor(f"blk.{layer}.{name}.weight") for name in ("attn_v", "attn_qkv"))

    def sparse(self, experts: Experts | None) -> list[bool]:
        found = super().sparse(experts)
        if not self.row.single_blocks:
            return found
        return [each and self._has_tensor(f"blk.{i}.ffn_gate_inp.weight") for i, each in enumerate(found)]

    def sparsity(self) -> list[float | None]:
        """Standard deviations; minus infinity means no sparsity."""
        key = "activation_sparsity_scale"
        if key not in self.keys:
            return [None] * self.layers
        found = self.keys.elements(key, lambda each: each.number(key, (-inf, 1e6)), self.layers)
        return [None if scale == -inf else scale for scale in found]
