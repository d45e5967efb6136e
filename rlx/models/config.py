"""What a model is: sizes and switches, read from GGUF metadata or from a `config.json`, checked once.

Part of the models stage, between the open file and the graph builders; `architectures.py` says how the architectures
differ. Sources: the GGUF registry's keys and llama.cpp's defaults for them; the configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.models import rope
from rlx.models.architectures import ARCHITECTURES, MODEL_TYPES, Architecture, by_period, none_slides
from rlx.models.keys import Keys, is_integer
from rlx.models.rope import Rope

HasTensor = Callable[[str], bool]

_WIDTH, _HEADS = (1, 1 << 24), (1, 1 << 14)
# Field -> inclusive range, key in GGUF, key in config.json.
_SIZES: dict[str, tuple[tuple[int, int], str, str]] = {
    "layers": ((1, 1024), "block_count", "num_hidden_layers"),
    "hidden": ((1, 1 << 20), "embedding_length", "hidden_size"),
    "ffn": (_WIDTH, "feed_forward_length", "intermediate_size"),
    "heads": (_HEADS, "attention.head_count", "num_attention_heads"),
    "kv_heads": (_HEADS, "attention.head_count_kv", "num_key_value_heads"),
    "head_dim": (_HEADS, "attention.key_length", "head_dim"),
    "context": ((1, 1 << 31), "context_length", "max_position_embeddings"),
}
_PER_LAYER = ("ffn", "heads", "kv_heads")  # GGUF may have an array of them
_EPS = (1e-12, 1.0)
_CAP = (0.0, 1e6)
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys that change what a model computes -> (the only value that rlx computes, why not another).
_GGUF_ONLY: dict[str, tuple[Any, str]] = {
    "expert_count": (0, "mixtures of experts are not supported for this architecture"),
    "nextn_predict_layers": (0, "layers for multi-token prediction are not supported for this architecture"),
    "pooling_type": (0, "this is an embedding or ranking model"),
    "attention.causal": (True, "attention in both directions is not supported"),
}
_HF_ONLY: dict[str, tuple[Any, str]] = {
    "num_experts": (0, "mixtures of experts are not supported for this architecture"),
    "num_local_experts": (0, "mixtures of experts are not supported for this architecture"),
    "use_bidirectional_attention": (False, "attention in both directions is not supported"),
    "partial_rotary_factor": (1.0, "rotating a part of each head is not supported for this architecture"),
}
_GGUF_HEAD_DIMS = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of one model, whatever file it came from.

    Attributes:
        arch: a key of `architectures.ARCHITECTURES`.
        family: the runner family: "llama32", "qwen3" or "gemma".
        vocab_size, hidden, layers, heads, kv_heads, head_dim, ffn: sizes.
        context: tokens the model was trained for.
        eps: of every RMS norm.
        activation: "silu" or "gelu_tanh".
        rope_style: "interleaved" or "neox".
        rope: of the layers without window, and of all where `local_rope` is None.
        local_rope: of the layers with a window, or None.
        windows: for each layer the number of positions a query sees, itself included, or None for all.
        attention_scale: factor of q k^T.
        attention_softcap, logit_softcap: c in c * tanh(x / c) on scores and on logits, or None.
        tied: the head is the embedding table.
        embedding_scale: factor of the embeddings.
        norm_offset: what must be added to the norm weights of the file.
        biases: linear layers that must have a bias; others use one if the file has it.
    """

    arch: str
    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float
    activation: str
    rope_style: str
    rope: Rope
    local_rope: Rope | None
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    tied: bool
    embedding_scale: float
    norm_offset: float
    biases: tuple[str, ...]

    def offset(self, name: str) -> float:
        """What must be added to the file's values of the tensor `name` (canonical): 0 for all but some norms."""
        return self.norm_offset if name.endswith("norm.weight") else 0.0

    def rope_of(self, layer: int) -> Rope:
        """The rope of one layer."""
        return self.rope if self.windows[layer] is None or self.local_rope is None else self.local_rope

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], has_tensor: HasTensor, *, where: object = "GGUF metadata"
    ) -> ModelConfig:
        """Reads GGUF key-values.

        Args:
            has_tensor: whether the file has a tensor of this name.
            where: shown in errors: the file.

        Raises:
            ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
            UnsupportedModelError: an unknown architecture, or behaviour that rlx does not have.
        """
        arch = _known(Keys(metadata, where), "general.architecture", {name: name for name in ARCHITECTURES})
        row, keys = ARCHITECTURES[arch], Keys(metadata, where, f"{arch}.")
        _require(keys, _GGUF_ONLY)
        sizes = _sizes(keys, 1)
        for key in _GGUF_HEAD_DIMS:
            keys.require(key, sizes["head_dim"], f"only the size of a head, {sizes['head_dim']}, is supported")
        ropes = rope.from_gguf(keys, sizes["head_dim"], has_tensor, row.local_base is not None)
        return cls(
            arch=arch,
            family=row.family,
            **sizes,
            vocab_size=_gguf_vocab_size(keys, metadata),
            eps=keys.number("attention.layer_norm_rms_epsilon", _EPS),
            activation=row.activation,
            rope_style=row.gguf_rope,
            rope=ropes[0],
            local_rope=ropes[1],
            windows=_gguf_windows(keys, row, sizes["layers"]),
            attention_scale=_gguf_attention_scale(keys, row, sizes),
            attention_softcap=_cap(keys, "attn_logit_softcapping", row.gguf_caps[0]),
            logit_softcap=_cap(keys, "final_logit_softcapping", row.gguf_caps[1]),
            tied=not has_tensor("output.weight"),
            embedding_scale=sqrt(sizes["hidden"]) if row.scales_embedding else 1.0,
            norm_offset=0.0,
            biases=row.biases,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, where: object = "config.json") -> ModelConfig:
        """Reads a parsed `config.json`, as transformers 5 or an earlier version wrote it; of a model with several
        parts, its `text_config`.

        Args:
            where: shown in errors: the file.

        Raises:
            ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
            UnsupportedModelError: an unknown model type, or behaviour that rlx does not have.
        """
        arch, keys = _hf_keys(config, where)
        row = ARCHITECTURES[arch]
        _require(keys, _HF_ONLY)
        sizes = _sizes(keys, 2)
        ropes = rope.from_hf(keys, sizes["head_dim"], row.hf_base, row.local_base)
        return cls(
            arch=arch,
            family=row.family,
            **sizes,
            vocab_size=keys.integer("vocab_size", _WIDTH),
            eps=keys.number("rms_norm_eps", _EPS),
            activation=_hf_activation(keys, row),
            rope_style="neox",
            rope=ropes[0],
            local_rope=ropes[1],
            windows=_hf_windows(keys, row, sizes["layers"]),
            attention_scale=keys.number("query_pre_attn_scalar", rope.FACTOR, float(sizes["head_dim"])) ** -0.5,
            attention_softcap=_cap(keys, "attn_logit_softcapping"),
            logit_softcap=_cap(keys, "final_logit_softcapping"),
            tied=keys.flag("tie_word_embeddings", False),
            embedding_scale=sqrt(sizes["hidden"]) if row.scales_embedding else 1.0,
            norm_offset=row.norm_offset,
            biases=_hf_biases(keys, row),
        )


# -- both formats -----------------------------------------------------------------------------------------------------


def _known(keys: Keys, key: str, names: Mapping[str, str]) -> str:
    """The architecture that the name under `key` stands for."""
    found = keys.text(key)
    if found not in names:
        hint = f"Supported are {', '.join(names)}."
        raise UnsupportedModelError(f"the architecture '{found}' ({key}) is not supported", where=keys.where, hint=hint)
    return names[found]


def _require(keys: Keys, only: Mapping[str, tuple[Any, str]]) -> None:
    for key, (value, because) in only.items():
        keys.require(key, value, because)


def _sizes(keys: Keys, column: int) -> dict[str, int]:
    """Layers, widths and heads; `column` of `_SIZES` names the keys."""
    names = {size: str(row[column]) for size, row in _SIZES.items()}
    sizes: dict[str, int] = {}
    for size, (allowed, *_) in _SIZES.items():
        if size == "head_dim" and names[size] not in keys:
            sizes[size] = _divided(keys, names, sizes)
        else:
            default = sizes["heads"] if size == "kv_heads" else None
            sizes[size] = keys.integer(names[size], allowed, default, sizes["layers"] if size in _PER_LAYER else None)
    if sizes["heads"] % sizes["kv_heads"]:
        keys.wrong(names["heads"], sizes["heads"], f"a multiple of {names['kv_heads']}, which is {sizes['kv_heads']}")
    if sizes["head_dim"] % 2:
        keys.wrong(names["head_dim"], sizes["head_dim"], "an even number")
    return sizes


def _divided(keys: Keys, names: Mapping[str, str], sizes: Mapping[str, int]) -> int:
    """The head size where no key says it: hidden / heads."""
    if sizes["hidden"] % sizes["heads"]:
        keys.wrong(names["hidden"], sizes["hidden"], f"a multiple of {names['heads']}, which is {sizes['heads']}")
    return sizes["hidden"] // sizes["heads"]


def _cap(keys: Keys, key: str, default: float = 0.0) -> float | None:
    """A softcap; 0 means none."""
    return keys.number(key, _CAP, default) or None


# -- GGUF -------------------------------------------------------------------------------------------------------------


def _gguf_vocab_size(keys: Keys, metadata: Mapping[str, Any]) -> int:
    tokens = "tokenizer.ggml.tokens"
    if "vocab_size" in keys or tokens not in metadata:
        return keys.integer("vocab_size", _WIDTH)
    count = getattr(metadata, "count", None)  # of a reader that need not decode the array for it
    found = int(count(tokens) if count else len(metadata[tokens]))
    if not found:
        raise ConfigError(f"'{tokens}' is empty, expected the vocabulary", where=keys.where)
    return found


def _gguf_windows(keys: Keys, row: Architecture, layers: int) -> tuple[int | None, ...]:
    """Key and pattern count only for architectures that have windows; a window of 0 is none."""
    window = keys.integer("attention.sliding_window", (0, 1 << 31), row.gguf_window) if row.gguf_period else 0
    if not window:
        return (None,) * layers
    key = "attention.sliding_window_pattern"
    pattern = keys.get(key, row.gguf_period)
    if is_integer(pattern):
        slides = by_period(keys.integer(key, (1, 1 << 31), row.gguf_period), layers)
    else:
        slides = [bool(s) for s in keys.array(key, layers, "one flag a layer, or a period")]
    return tuple(window if s else None for s in slides)


def _gguf_attention_scale(keys: Keys, row: Architecture, sizes: Mapping[str, int]) -> float:
    scale = keys.number("attention.scale", (0.0, 1e6), 0.0)
    wide = sizes["layers"] == row.wide_scale_layers
    return scale or float(sizes["hidden"] / sizes["heads"] if wide else sizes["head_dim"]) ** -0.5


# -- config.json ------------------------------------------------------------------------------------------------------


def _hf_keys(config: Mapping[str, Any], where: object) -> tuple[str, Keys]:
    """The architecture and the keys of the text part, with the model type's defaults for those that are absent.

    A null is not absent: of a softcap it means none, whatever the default.
    """
    outer = Keys(config, where)
    arch = _known(outer, "model_type", MODEL_TYPES)
    row, text = ARCHITECTURES[arch], outer.nested("text_config", optional=True)
    inner = text.text("model_type", row.model_types[0])
    if inner not in row.model_types:
        text.unsupported("model_type", inner, f"expected one of {', '.join(row.model_types)}")
    given = {**config, **config.get("text_config", {})} if text.mapping else config
    return arch, Keys({**row.hf_defaults, **given}, where)


def _hf_activation(keys: Keys, row: Architecture) -> str:
    key = next((key for key in row.hf_activation if key in keys), row.hf_activation[-1])
    return keys.choice(key, {**_ACTIVATIONS, **row.hf_activation_names})


def _hf_biases(keys: Keys, row: Architecture) -> tuple[str, ...]:
    """The linear layers that must have a bias: the architecture's, and those that two switches add."""
    attention = ("attn_q", "attn_k", "attn_v", "attn_output") if keys.flag("attention_bias", False) else ()
    mlp = ("ffn_gate", "ffn_up", "ffn_down") if keys.flag("mlp_bias", False) else ()
    return tuple(dict.fromkeys((*row.biases, *attention, *mlp)))


def _hf_windows(keys: Keys, row: Architecture, layers: int) -> tuple[int | None, ...]:
    """The window of each layer that slides, by `layer_types` or by the model type's rule."""
    if row.hf_sliding is none_slides:
        return (None,) * layers
    slides = _by_layer_types(keys, layers) if "layer_types" in keys else row.hf_sliding(keys, layers)
    if not any(slides):
        return (None,) * layers
    if keys.flag("use_sliding_window", True) is False:
        keys.wrong("use_sliding_window", False, "true, because 'layer_types' has sliding layers")
    window = keys.integer("sliding_window", (1, 1 << 31))
    return tuple(window if s else None for s in slides)


def _by_layer_types(keys: Keys, layers: int) -> list[bool]:
    known = {"full_attention": False, "sliding_attention": True}
    found = keys.array("layer_types", layers, "one attention type a layer")
    for kind in found:
        if kind not in known:
            keys.unsupported("layer_types", kind, f"supported are {', '.join(known)}")
    return [known[kind] for kind in found]
