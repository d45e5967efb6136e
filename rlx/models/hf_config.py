"""A model's configuration from a parsed `config.json`.

Part of the models stage. Source: the configuration classes of transformers, versions 4 and 5, whose keys differ in some
places.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from rlx.models import rope
from rlx.models.architectures import Architecture, by_period, none_slides
from rlx.models.config import Experts, Layer, ModelConfig
from rlx.models.keys import HEADS, WIDTH, Keys, known
from rlx.models.reader import Reader, Sizes
from rlx.models.registry import ENCODER_TYPES, MODEL_TYPES
from rlx.models.settings import SETTINGS, Key

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_MLP, _MOE = "mlp", "moe"  # of models whose layers are single blocks
_FORWARD = {"dense": _MLP, "sparse": _MOE}
_MIXERS = {_FULL: _FULL, "attention": _FULL, **dict.fromkeys((_LINEAR, "conv", "mamba"), _LINEAR)}
_OVERRIDES = {"head_dim", "num_key_value_heads", "intermediate_size"}  # keys allowed in `per_layer_config`
_PARTS = (0.0, 0.999999)  # range of the part of a normal distribution that is cut off
_TIED = "tie_word_embeddings"
_SPARSE_LAYERS = 10  # default of Gemma 3n
_TWO_WAY = "use_bidirectional_attention"
_VISION_ONLY = (None, False, "vision")  # bidirectional attention between image tokens does not affect text


def from_hf(config: Mapping[str, Any], *, where: object = "config.json") -> ModelConfig:
    """Reads a parsed `config.json` of transformers 5 or earlier; for a model with several parts, its `text_config`.

    Args:
        where: shown in errors: the file.

    Raises:
        ConfigError: a key is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModelError: an unknown model type, or a feature that rlx does not support.
    """
    arch, row, entries = text_part(config, where)
    return _Hf(Keys(with_defaults(row, entries, where), where), arch, row).read()


def text_part(config: Mapping[str, Any], where: object) -> tuple[str, Architecture, Mapping[str, Any]]:
    """The architecture of the text part, and its keys in one mapping.

    Raises:
        UnsupportedModelError: an unknown model type.
    """
    outer = Keys(config, where)
    arch, row = known(outer, "model_type", MODEL_TYPES, ENCODER_TYPES)
    text = outer.nested("text_config", optional=True)
    outermost = outer.text("model_type")
    inner = text.text("model_type", row.wrappers.get(outermost, row.model_types[0]))
    if outermost in row.wrappers and inner in MODEL_TYPES:
        arch, row = MODEL_TYPES[inner]
    if inner not in row.model_types:
        text.unsupported("model_type", inner, f"expected one of {', '.join(row.model_types)}")
    entries = {**config, **config.get("text_config", {}), "model_type": inner} if text.mapping else config
    return arch, row, {**entries, _TIED: True} if outer.flag(_TIED, False) else entries


def with_defaults(row: Architecture, entries: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """The keys of a text part, with the model type's defaults for absent ones.

    A null is not absent: for a softcap it means none, whatever the default.
    """
    defaults = dict(row.hf_defaults)
    if entries.get("rope_scaling"):
        defaults.pop("rope_parameters", None)  # two spellings of the same
    found = {**defaults, **entries}
    return {**found, **row.hf_spelling(Keys(found, where))} if row.hf_spelling else found


class _Hf(Reader):
    """The settings of a `config.json`."""

    def spelled(self, name: str, key: Key) -> str:
        return self.row.hf_keys.get(name, key.hf)

    def refuse(self) -> None:
        keys, row = self.keys, self.row
        if keys.get(_TWO_WAY, None) not in _VISION_ONLY:
            keys.unsupported(_TWO_WAY, keys.get(_TWO_WAY), "attention in both directions is not supported")
        for key, (only, because) in row.hf_only.items():
            keys.require(key, only, because)
        if row.experts == "none":
            for key in SETTINGS["experts"].hf.split():
                keys.require(key, 0, "mixtures of experts are not supported for this architecture")
        if row.latent:
            keys.require("rope_interleave", True, "rope over halves of a head is not supported for this architecture")
        if row.streams:
            keys.require("altup_active_idx", 0, "another active stream than the first is not supported")
        if row.hybrid == "delta rule":
            keys.require("attn_output_gate", True, "attention without a gate is not supported for this architecture")
        if row.hybrid in ("delta rule", "mamba") and not row.single_blocks and self.activation() != "silu":
            key = self.at("activation")
            keys.unsupported(key, keys.get(key), "only SiLU is supported in the recurrent layers of this architecture")

    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    def tied(self) -> bool:
        """What the file says. Where a model has several parts, one of them may say it; a head in the file wins."""
        return self.keys.flag(_TIED, False)

    def activation(self) -> str:
        return self.keys.choice(self.at("activation"), {**_ACTIVATIONS, **self.row.hf_activation_names})

    def router(self) -> str:
        known = ("softmax", "sigmoid") if self.row.router == "either" else (self.row.router,)
        return self.keys.choice("scoring_func", {each: each for each in known}, known[-1])

    def two_way(self) -> str:
        """Which layers let an image's rows see each other; where the key counts, null is not the same as none."""
        usual = self.row.two_way
        if usual == "sliding" and _TWO_WAY in self.keys.mapping:
            return usual if self.keys.get(_TWO_WAY, None) == "vision" else "none"
        return "none" if self.keys.get("hidden_size_per_layer_input", 0) else usual

    def ropes(self, each: tuple[Layer, ...], context: int) -> tuple[rope.Rope, rope.Rope | None]:
        full = {layer.head_dim for layer in each if layer.window is None and not layer.recurrent}
        local = {layer.head_dim for layer in each if layer.window is not None}
        dims, row = ((full or {self.head_dim}).pop(), (local or {self.head_dim}).pop()), self.row
        if self.latent is not None:
            dims = self.latent.rope, self.latent.rope
        usual = row.hf_base, row.local_base, row.partial_rope
        return rope.from_hf(self.keys, dims, *usual, context, row.rope_sections)

    def _kinds(self) -> list[str] | None:
        """`layer_types`, if the file has them and they count."""
        if "layer_types" not in self.keys or not self.row.hf_layer_types:
            return None
        names = _MIXERS if self.row.hybrid else {_FULL: _FULL, _SLIDING: _SLIDING}
        if self.row.single_blocks:
            names = {**names, _MLP: _MLP, _MOE: _MOE}
        return self.keys.elements("layer_types", lambda each: each.choice("layer_types", names), self.layers)

    def find_windows(self) -> list[int | None]:
        """The window of each layer that slides, by `layer_types` or by the model type's rule."""
        keys, row, kinds = self.keys, self.row, self._kinds()
        if row.hf_sliding is none_slides:
            return [None] * self.layers
        slides = [kind == _SLIDING for kind in kinds] if kinds else row.hf_sliding(keys, self.layers)
        slides[-1] &= not row.hf_ends_full
        if not any(slides):
            return [None] * self.layers
        if keys.flag("use_sliding_window", True) is False:
            keys.wrong("use_sliding_window", False, "true, because 'layer_types' has sliding layers")
        window = keys.integer("sliding_window", (1, 1 << 31))
        return [window if s else None for s in slides]

    def recurrent(self) -> list[bool]:
        kinds = self._kinds()
        if not self.row.hybrid:
            return [False] * self.layers
        return [kind == _LINEAR for kind in kinds] if kinds else by_period(self.integer("period"), self.layers)

    def value_dim(self, heads: int) -> int:
        return self.integer("value_dim")

    def sizes(self) -> list[Sizes]:
        kinds = (self._kinds() or []) if self.row.single_blocks else []
        widths, double = self.widths(), self.keys.flag("use_double_wide_mlp", False)
        found = []
        for i, usual in enumerate(widths):
            width = usual if not kinds or kinds[i] == _MLP else 0
            own, wide = self._keys_of(i), double and self.source[i] != i
            attends = not kinds or kinds[i] == _FULL
            kv_heads = own.integer("num_key_value_heads", HEADS, self.heads) if attends else 0
            ffn = own.integer("intermediate_size", (0, WIDTH[1]), width * (2 if wide else 1))
            found.append((kv_heads, own.even("head_dim", HEADS, self.head_dim), ffn))
        return found

    def _full(self, layer: int) -> bool:
        """Whether keys for layers without a window count for a layer."""
        return self.row.shares_kv and self.windows[layer] is None

    def _same_kv(self) -> bool:
        return self.keys.flag("attention_k_eq_v", False)

    def keys_as_values(self, layer: int) -> bool:
        return self._same_kv() and self._full(layer) and self.source[layer] == layer

    def _keys_of(self, layer: int) -> Keys:
        """The sizes of one layer: the file's, overridden for layers without a window and for this layer."""
        keys = self.keys
        found = {key: keys.get(key) for key in ("head_dim", "num_key_value_heads") if key in keys}
        full = self._full(layer) and "per_layer_config" not in keys
        if full and "global_head_dim" in keys:
            found["head_dim"] = keys.get("global_head_dim")
        if full and self._same_kv() and "num_global_key_value_heads" in keys:
            found["num_key_value_heads"] = keys.get("num_global_key_value_heads")
        own = keys.nested("per_layer_config", optional=True)
        if str(layer) in own:
            own = own.nested(str(layer))
            entries = {name.removeprefix(own.prefix): value for name, value in own.mapping.items()}
            for name in entries.keys() - _OVERRIDES:
                own.unsupported(name, entries[name], f"supported are {', '.join(sorted(_OVERRIDES))}")
            found |= entries
        return Keys(found, keys.where)

    def sparse(self, experts: Experts | None) -> list[bool]:
        found, keys, kinds = super().sparse(experts), self.keys, self._kinds()
        if kinds and self.row.single_blocks:
            return [kind == _MOE for kind in kinds]
        if experts and "mlp_layer_types" in keys:
            kinds = keys.elements("mlp_layer_types", lambda each: each.choice("mlp_layer_types", _FORWARD), self.layers)
            return [kind == _MOE for kind in kinds]
        key, last = "mlp_only_layers", (0, self.layers - 1)
        dense = keys.elements(key, lambda each: each.integer(key, last)) if experts and key in keys else []
        return [each and i not in dense for i, each in enumerate(found)]

    def sparsity(self) -> list[float | None]:
        """Reads the part of a normal distribution that is cut off; Gemma 3n has a default."""
        key, layers = "activation_sparsity_pattern", self.layers
        first = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        if key not in self.keys:
            parts = [0.95] * first + [0.0] * (layers - first)
        elif isinstance(self.keys.get(key), list):
            parts = self.keys.elements(key, lambda each: each.number(key, _PARTS), layers)
        else:
            parts = [self.keys.number(key, _PARTS)] * layers
        return [NormalDist().inv_cdf(part) if part else None for part in parts]
