"""What published models say of themselves, and readers of it with changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.models import ModelConfig, from_gguf, from_hf

REMOVED: Any = object()

# What the published files of these models say (keys that the reader does not use left out).
LLAMA_32_1B: dict[str, Any] = {
    "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
QWEN_25_05B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN_3_06B: dict[str, Any] = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA_2_27B: dict[str, Any] = {
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "head_dim": 128, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608,
    "intermediate_size": 36864, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 46,
    "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3", "image_token_index": 262144,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip
GEMMA_3_27B_TEXT: dict[str, Any] = {
    "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
    "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
# The keys of a GGUF file of Gemma 3 27B.
GEMMA_3_27B_GGUF: dict[str, Any] = {
    "general.architecture": "gemma3", "gemma3.context_length": 131072, "gemma3.embedding_length": 5376,
    "gemma3.block_count": 62, "gemma3.feed_forward_length": 21504, "gemma3.attention.head_count": 32,
    "gemma3.attention.head_count_kv": 16, "gemma3.attention.key_length": 128, "gemma3.attention.value_length": 128,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6, "gemma3.attention.sliding_window": 1024,
    "gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0,
    "tokenizer.ggml.tokens": ["a"] * 262144,
}  # fmt: skip
# The keys of an early GGUF file of Gemma 2 27B, which has neither caps nor a window.
GEMMA_2_27B_GGUF: dict[str, Any] = {
    "general.architecture": "gemma2", "gemma2.context_length": 8192, "gemma2.embedding_length": 4608,
    "gemma2.block_count": 46, "gemma2.feed_forward_length": 36864, "gemma2.attention.head_count": 32,
    "gemma2.attention.head_count_kv": 16, "gemma2.attention.key_length": 128, "gemma2.attention.value_length": 128,
    "gemma2.attention.layer_norm_rms_epsilon": 1e-6, "tokenizer.ggml.tokens": ["a"] * 256000,
}  # fmt: skip
LLAMA_GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 4096, "llama.embedding_length": 64,
    "llama.block_count": 3, "llama.feed_forward_length": 128, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16, "llama.vocab_size": 100,
}  # fmt: skip
GEMMA_GGUF = {**GEMMA_3_27B_GGUF, "gemma3.block_count": 7, "tokenizer.ggml.tokens": ["a"] * 10}
QWEN_3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2", "attention_bias": False, "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 204800,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
HUNYUAN_7B: dict[str, Any] = {
    "model_type": "hunyuan_v1_dense", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "num_attention_heads": 32, "num_experts": 1,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "dynamic", "alpha": 1000, "factor": 1}, "rope_theta": 10000, "tie_word_embeddings": True,
    "use_cla": False, "use_qk_norm": True, "vocab_size": 128167,
}  # fmt: skip
HUNYUAN_A13B: dict[str, Any] = {
    **HUNYUAN_7B, "model_type": "hunyuan_v1_moe", "head_dim": 128, "intermediate_size": 3072,
    "max_position_embeddings": 32768, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64,
    "num_shared_expert": [1] * 32,
}  # fmt: skip
ERNIE_21B_A3B: dict[str, Any] = {
    "model_type": "ernie4_5_moe", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05, "rope_theta": 500000, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
}  # fmt: skip
LING_MINI_2: dict[str, Any] = {
    "model_type": "bailing_moe", "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 5120, "max_position_embeddings": 32768, "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512, "n_group": 8,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 20, "num_key_value_heads": 4, "num_shared_experts": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "use_bias": False,
    "use_qk_norm": True, "use_qkv_bias": False, "vocab_size": 157184,
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
QWEN_3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# Sizes of Qwen 3.5 0.8B, keys as transformers 5 saves them.
QWEN_35_08B: dict[str, Any] = {
    "model_type": "qwen3_5", "image_token_id": 248056, "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": 248320,
    },
    "vision_config": {"depth": 12, "hidden_size": 768},
}  # fmt: skip
QWEN_35_GGUF: dict[str, Any] = {
    "general.architecture": "qwen35", "qwen35.block_count": 24, "qwen35.context_length": 262144,
    "qwen35.embedding_length": 1024, "qwen35.feed_forward_length": 3584, "qwen35.attention.head_count": 8,
    "qwen35.attention.head_count_kv": 2, "qwen35.attention.key_length": 256, "qwen35.attention.value_length": 256,
    "qwen35.attention.layer_norm_rms_epsilon": 1e-6, "qwen35.rope.dimension_count": 64,
    "qwen35.rope.dimension_sections": [11, 11, 10, 0], "qwen35.rope.freq_base": 1e7, "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.group_count": 16, "qwen35.ssm.inner_size": 2048, "qwen35.ssm.state_size": 128,
    "qwen35.ssm.time_step_rank": 16, "qwen35.full_attention_interval": 4, "qwen35.vocab_size": 248320,
}  # fmt: skip
GEMMA_3N_E2B: dict[str, Any] = {
    "model_type": "gemma3n", "audio_config": {"hidden_size": 1536}, "vision_config": {"hidden_size": 2048},
    "text_config": {
        "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4, "attention_bias": False,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048,
        "hidden_size_per_layer_input": 256, "intermediate_size": [8192] * 30, "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "max_position_embeddings": 32768,
        "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2, "num_kv_shared_layers": 10,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip
_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text", "attention_bias": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "use_bidirectional_attention": None, "vocab_size": 262144,
    "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                                           "rope_type": "proportional"},
                        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
}  # fmt: skip
GEMMA_4_26B_A4B: dict[str, Any] = {
    **_GEMMA_4, "attention_k_eq_v": True, "enable_moe_block": True, "hidden_size": 2816,
    "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "moe_intermediate_size": 704,
    "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "num_kv_shared_layers": 0, "sliding_window": 1024, "top_k_experts": 8,
    "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA_4_E2B: dict[str, Any] = {
    **_GEMMA_4, "attention_k_eq_v": False, "enable_moe_block": False, "hidden_size": 1536,
    "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "moe_intermediate_size": None,
    "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 35,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "sliding_window": 512, "top_k_experts": None,
    "use_double_wide_mlp": True,
}  # fmt: skip
GEMMA_4_GGUF: dict[str, Any] = {
    "general.architecture": "gemma4", "gemma4.block_count": 35, "gemma4.context_length": 131072,
    "gemma4.embedding_length": 1536, "gemma4.feed_forward_length": [6144] * 15 + [12288] * 20,
    "gemma4.attention.head_count": 8, "gemma4.attention.head_count_kv": 1, "gemma4.attention.key_length": 512,
    "gemma4.attention.value_length": 512, "gemma4.attention.key_length_swa": 256,
    "gemma4.attention.value_length_swa": 256, "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma4.attention.shared_kv_layers": 20, "gemma4.attention.sliding_window": 512,
    "gemma4.attention.sliding_window_pattern": ([True] * 4 + [False]) * 7,
    "gemma4.embedding_length_per_layer_input": 256, "gemma4.final_logit_softcapping": 30.0,
    "gemma4.rope.dimension_count": 512, "gemma4.rope.dimension_count_swa": 256, "gemma4.rope.freq_base": 1e6,
    "gemma4.rope.freq_base_swa": 1e4, "gemma4.vocab_size": 262144,
}  # fmt: skip


def gguf(base: Mapping[str, Any], tensors: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    """Reads `base` with changes; `__` in a name stands for a dot, a name without prefix belongs to the architecture."""
    return from_gguf(changed(base, changes, f"{base['general.architecture']}."), tensors.__contains__)


def hf(base: Mapping[str, Any], **changes: Any) -> ModelConfig:
    return from_hf(changed(base, changes, ""))


def changed(base: Mapping[str, Any], changes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    names = {name: name.replace("__", ".") for name in changes}
    full = {name: n if n.startswith(("general.", "tokenizer.")) else prefix + n for name, n in names.items()}
    merged = {**base, **{full[name]: value for name, value in changes.items()}}
    return {k: v for k, v in merged.items() if v is not REMOVED}
