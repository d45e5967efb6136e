"""The sizes of published models by name, as their `config.json` says them.

Part of the models stage. `rlx compile --shape NAME` compiles for one without its weights; `benchmarks/make_model.py`
writes files of them with random weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.models.registry import MODEL_TYPES


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model.

    Attributes:
        model_type: of `config.json`.
        head_dim: of layers with a window, where others have another size.
        more: further keys of `config.json`.
    """

    model_type: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float = 1e6
    eps: float = 1e-6
    tied: bool = True
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def arch(self) -> str:
        """A key of `registry.ARCHITECTURES`."""
        return MODEL_TYPES[self.model_type][0]

    @property
    def config(self) -> dict[str, Any]:
        """The `config.json`."""
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_base,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",  # Gemma has another key
            **self.more,
        }


def _experts(count: int, used: int, ffn: int) -> dict[str, Any]:
    return {
        "num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": ffn, "norm_topk_prob": True,
    }  # fmt: skip


def _delta(key_heads: int, value_heads: int, dim: int, **rope: Any) -> dict[str, Any]:
    """Layers with a gated delta rule, three of four: their heads, and the size of these."""
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    turning = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, **rope}} if rope else {}
    return {**heads, "linear_key_head_dim": dim, "linear_value_head_dim": dim, **turning}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **scaling}}


def _windows(size: int, factor: float = 0.0, head_dim: int = 256) -> dict[str, Any]:
    """Gemma 3: the window, the scale of positions in the layers without one, and what scores are scaled by."""
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}
    return {"sliding_window": size, "query_pre_attn_scalar": head_dim, **scaling}


def _gemma4(window: int, period: int, shared: int, head_dim: int, per_layer: int, cap: float = 30.0) -> dict[str, Any]:
    """Layers that share keys and values and are twice as wide, larger heads in layers without a window."""
    own = {"num_kv_shared_layers": shared, "use_double_wide_mlp": True, "global_head_dim": head_dim}
    windows = {"sliding_window": window, "sliding_window_pattern": period}
    return {**own, **windows, "hidden_size_per_layer_input": per_layer, "final_logit_softcapping": cap}


_QWEN3_MOE = ("qwen3_moe", 2048, 6144)
SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960),
    "qwen3-1.7b": Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, tied=False),
    "qwen3-14b": Shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, 40960, tied=False),
    "qwen3-30b-a3b": Shape(*_QWEN3_MOE, 48, 32, 4, 128, 151936, 40960, tied=False, more=_experts(128, 8, 768)),
    # The same with fewer layers and experts: a token reads as much of a layer as in the whole model.
    "qwen3-30b-a3b-cut": Shape(*_QWEN3_MOE, 8, 32, 4, 128, 151936, 40960, tied=False, more=_experts(32, 8, 768)),
    "qwen3.5-0.8b": Shape("qwen3_5_text", 1024, 3584, 24, 8, 2, 256, 248320, 262144, 1e7, more=_delta(16, 16, 128)),
    "qwen3.5-2b": Shape("qwen3_5_text", 2048, 6144, 24, 8, 2, 256, 248320, 262144, 1e7, more=_delta(16, 16, 128)),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5, more=_llama3(32.0)),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, 5e5, 1e-5, more=_llama3(32.0)),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False, _llama3(8.0)),
    "gemma-3-270m": Shape("gemma3_text", 640, 2048, 18, 4, 1, 256, 262144, 32768, more=_windows(512)),
    "gemma-3-1b": Shape("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, 32768, more=_windows(512)),
    "gemma-3-4b": Shape("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, 131072, more=_windows(1024, 8.0)),
    "gemma-4-e2b": Shape("gemma4_text", 1536, 6144, 35, 8, 1, 256, 262144, 131072, more=_gemma4(512, 5, 20, 512, 256)),
    "tiny-qwen3": Shape("qwen3", 256, 512, 4, 4, 2, 64, 512, 1024),
    "tiny-qwen2": Shape("qwen2", 256, 512, 4, 4, 2, 64, 512, 1024, tied=False),
    "tiny-qwen3moe": Shape("qwen3_moe", 256, 512, 4, 4, 2, 64, 512, 1024, tied=False, more=_experts(8, 2, 256)),
    "tiny-qwen35": Shape(
        "qwen3_5_text", 256, 512, 5, 4, 2, 64, 512, 1024, more=_delta(2, 4, 64, rope_theta=1e7, mrope_section=[3, 3, 2])
    ),
    "tiny-llama": Shape("llama", 256, 512, 4, 4, 2, 64, 512, 1024, 5e5, 1e-5, more=_llama3(8.0)),
    "tiny-gemma3": Shape("gemma3_text", 288, 512, 7, 4, 1, 64, 512, 1024, more=_windows(32, 8.0, 64)),
    "tiny-gemma4": Shape("gemma4_text", 256, 256, 9, 4, 1, 64, 512, 1024, more=_gemma4(32, 3, 3, 128, 256, 8.0)),
}

#: Runner family -> the shape to compile for if no model is named: the one that most people try first.
USUAL = {"llama32": "llama-3.2-1b", "qwen3": "qwen3-0.6b", "qwen35": "qwen3.5-0.8b", "gemma": "gemma-3-1b"}
