"""The settings of a model, and the keys that GGUF and `config.json` have for each.

Part of the models stage, under `reader.py`. A setting of every architecture is a row here; one of a single architecture
is in `Architecture.keys`, in its family file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from rlx.models.architectures import Architecture
from rlx.models.keys import CAP, EPS, FACTOR, HEADS, POSITIVE, WIDTH, Keys


class Key(NamedTuple):
    """A setting: its keys in both kinds of file, and its range.

    Attributes:
        gguf: keys behind the architecture's name; several are alternatives, and the first that is there counts.
        hf: keys of `config.json`, likewise; a dot enters an object.
        allowed: the inclusive range.
        default: its value in files that have none of its keys; None: it must be there.
    """

    gguf: str
    hf: str
    allowed: Any
    default: float | None = None


#: The settings that architectures share. A family file may have further ones.
SETTINGS: dict[str, Key] = {
    "vocab_size": Key("vocab_size", "vocab_size", WIDTH),
    "layers": Key("block_count", "num_hidden_layers", (1, 1024)),
    "hidden": Key("embedding_length", "hidden_size", (1, 1 << 20)),
    "heads": Key("attention.head_count", "num_attention_heads", HEADS),
    "kv_heads": Key("attention.head_count_kv", "num_key_value_heads", HEADS),
    "head_dim": Key("attention.key_length", "head_dim", HEADS),
    "ffn": Key("feed_forward_length", "intermediate_size", WIDTH),
    "context": Key("context_length", "max_position_embeddings", (1, 1 << 31)),
    "eps": Key("attention.layer_norm_rms_epsilon attention.layer_norm_epsilon", "rms_norm_eps", EPS),
    "embedding_scale": Key("embedding_scale", "embedding_multiplier", POSITIVE),
    "attention_scale": Key("attention.scale", "attention_multiplier", (0.0, 1e6)),
    "query_scalar": Key("", "query_pre_attn_scalar", FACTOR),
    "attention_softcap": Key("attn_logit_softcapping", "attn_logit_softcapping", CAP),
    "logit_softcap": Key("final_logit_softcapping", "final_logit_softcapping", CAP),
    "shared_kv": Key("attention.shared_kv_layers", "num_kv_shared_layers", (0, 1023), 0),
    "per_layer": Key("embedding_length_per_layer_input", "hidden_size_per_layer_input", (0, 1 << 20), 0),
    "streams": Key("altup.num_inputs", "altup_num_inputs", (2, 64)),
    "active_stream": Key("altup.active_idx", "altup_active_idx", (0, 64)),
    "activation": Key("", "hidden_act", None),
    "experts": Key("expert_count", "num_experts num_local_experts n_routed_experts", (0, 1024), 0),
    "experts_used": Key("expert_used_count", "num_experts_per_tok", (1, 1024)),
    "expert_ffn": Key(
        "expert_feed_forward_length feed_forward_length", "moe_intermediate_size intermediate_size", WIDTH
    ),
    "expert_scale": Key("expert_weights_scale", "routed_scaling_factor", (0, 1e6), 0.0),
    "normalize": Key("expert_weights_norm", "norm_topk_prob", None),
    "expert_groups": Key("expert_group_count", "n_group", (1, 1024), 1),
    "kept_groups": Key("expert_group_used_count", "topk_group", (1, 1024), 1),
    "dense_layers": Key("leading_dense_block_count", "first_k_dense_replace", (0, 1024), 0),
    "expert_step": Key("interleave_moe_layer_step", "decoder_sparse_step moe_layer_interval", (1, 1024), 1),
    "shared_ffn": Key(
        "expert_shared_feed_forward_length", "shared_expert_intermediate_size shared_intermediate_size", WIDTH
    ),
    "shared_experts": Key("expert_shared_count", "n_shared_experts", (0, 1024), 0),
    "latent_keys": Key("attention.kv_lora_rank", "kv_lora_rank", WIDTH),
    "latent_queries": Key("attention.q_lora_rank", "q_lora_rank", (0, WIDTH[1]), 0),
    "latent_rope": Key("rope.dimension_count", "qk_rope_head_dim", HEADS),
    "latent_plain": Key("", "qk_nope_head_dim", HEADS),
    "latent_head": Key("attention.key_length_mla attention.key_length", "", HEADS),
    "latent_values": Key("attention.value_length_mla attention.value_length", "v_head_dim", HEADS),
    "period": Key("full_attention_interval", "full_attention_interval", (1, 1024), 4),
    "taps": Key("ssm.conv_kernel", "linear_conv_kernel_dim mamba_d_conv conv_kernel", (2, 64)),
    "value_heads": Key("ssm.time_step_rank", "linear_num_value_heads", HEADS),
    "key_heads": Key("ssm.group_count", "linear_num_key_heads", HEADS),
    "key_dim": Key("ssm.state_size", "linear_key_head_dim", HEADS),
    "value_dim": Key("", "linear_value_head_dim", HEADS),
}


class Settings(ABC):
    """The settings in one file.

    Attributes:
        arch, row: the architecture.
        layers: number of layers, once it is read.
    """

    layers: int

    def __init__(self, keys: Keys, arch: str, row: Architecture) -> None:
        self.keys, self.arch, self.row = keys, arch, row

    @abstractmethod
    def spelled(self, name: str, key: Key) -> str:
        """The keys of a setting in this kind of file."""

    def at(self, name: str) -> str:
        """The key that the file has for a setting, or would have."""
        return self._present(self.spelled(name, SETTINGS[name]))

    def integer(self, name: str, allowed: tuple[int, int] | None = None) -> int:
        """A setting that is an integer."""
        key = SETTINGS[name]
        default = None if key.default is None else int(key.default)
        return self.keys.integer(self.at(name), allowed or key.allowed, default)

    def same(self, name: str, allowed: tuple[int, int] | None = None) -> int:
        """A size that must be the same for all layers."""
        return self.keys.same(self.at(name), allowed or SETTINGS[name].allowed, self.layers)

    def number(self, name: str, default: float | None = None) -> float:
        """A setting that is a float."""
        return self.keys.number(self.at(name), SETTINGS[name].allowed, default)

    def _present(self, spelled: str) -> str:
        names = spelled.split() or [""]
        return next((name for name in names if self._holder(name)[1] in self._holder(name)[0]), names[0])

    def _holder(self, name: str) -> tuple[Keys, str]:
        """The object that has a key with dots in a `config.json`, and the key there."""
        outer, _, inner = name.rpartition(".")
        if outer and not self.keys.prefix:
            return self.keys.nested(outer, optional=True), inner
        return self.keys, name

    def own(self) -> dict[str, float]:
        """The settings that only this architecture has."""
        found = {}
        for name, key in self.row.keys.items():
            holder, inner = self._holder(self._present(self.spelled(name, key)))
            found[name] = holder.number(inner, key.allowed, key.default)
        return found
