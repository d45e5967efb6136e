"""Configurations: published files by what their model cards say, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.errors import ArgumentError, ConfigError, UnsupportedModelError
from rlx.models import FAMILIES, SUPPORTED, ModelConfig, config_from, from_gguf, from_hf
from rlx.models.architectures import ARCHITECTURES
from rlx.models.rope import Llama3, Rope

GOLDENS = Path(__file__).parent.parent / "data" / "goldens"
REMOVED = object()

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
GEMMA_1_2B: dict[str, Any] = {
    "model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None,
    "hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8,
    "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0, "vocab_size": 256000,
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


def test_tables_agree() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES)
    assert {row.runner for row in FAMILIES.values()} == {"llama32", "qwen3", "gemma"}
    assert SUPPORTED["gguf"] == ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
    assert SUPPORTED["safetensors"] == ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma3")


# -- published models -------------------------------------------------------------------------------------------------


def test_llama_32_1b() -> None:
    c = hf(LLAMA_32_1B)
    assert (c.arch, c.family, c.vocab_size, c.hidden, c.layers, c.ffn) == ("llama", "llama32", 128256, 2048, 16, 8192)
    assert (c.heads, c.kv_heads, c.head_dim, c.context, c.eps, c.tied) == (32, 8, 64, 131072, 1e-5, True)
    assert c.rope == Rope(500000.0, 64, llama3=Llama3(32.0, 1.0, 4.0, 8192)) and c.local_rope is None
    assert c.windows == (None,) * 16 and c.attention_scale == 0.125
    assert (c.activation, c.embedding_scale, c.norm_offset, c.biases) == ("silu", 1.0, 0.0, ())


def test_qwen_25_05b() -> None:
    c = hf(QWEN_25_05B)
    assert (c.arch, c.family, c.heads, c.kv_heads, c.head_dim) == ("qwen2", "qwen3", 14, 2, 64)
    assert c.windows == (None,) * 24 and c.rope == Rope(1e6, 64) and c.biases == ("attn_q", "attn_k", "attn_v")


def test_qwen_3_06b() -> None:
    c = hf(QWEN_3_06B)
    assert (c.arch, c.family, c.hidden, c.heads, c.head_dim, c.biases) == ("qwen3", "qwen3", 1024, 16, 128, ())
    assert c.rope == Rope(1e6, 128) and c.attention_scale == pytest.approx(128**-0.5)
    assert hf(QWEN_3_06B, head_dim=REMOVED).head_dim == 128


def test_gemma_1_2b_means_the_approximation_when_it_says_gelu() -> None:
    c = hf(GEMMA_1_2B)
    assert (c.arch, c.family, c.vocab_size, c.hidden, c.layers, c.ffn) == ("gemma", "gemma", 256000, 2048, 18, 16384)
    assert (c.heads, c.kv_heads, c.head_dim, c.context, c.eps, c.tied) == (8, 1, 256, 8192, 1e-6, True)
    assert c.rope == Rope(1e4, 256) and c.local_rope is None and c.windows == (None,) * 18
    assert (c.activation, c.norm_offset, c.attention_scale) == ("gelu_tanh", 1.0, 0.0625)
    assert c.embedding_scale == pytest.approx(2048**0.5)
    assert c.attention_softcap is None is c.logit_softcap
    assert hf(GEMMA_1_2B, hidden_act=REMOVED).activation == "gelu_tanh"
    assert hf(GEMMA_1_2B, hidden_act="gelu_pytorch_tanh").activation == "gelu_tanh"
    assert hf(GEMMA_1_2B, hidden_activation="silu").activation == "silu"
    for changes in ({"hidden_act": "relu"}, {"hidden_activation": "relu"}):
        with pytest.raises(UnsupportedModelError, match=r"is 'relu': supported are"):
            hf(GEMMA_1_2B, **changes)
    with pytest.raises(UnsupportedModelError, match=r"'hidden_activation' is 'gelu'"):
        hf(GEMMA_2_27B, hidden_activation="gelu")


def test_gemma_1_7b_is_what_a_config_without_sizes_means() -> None:
    c = hf({"model_type": "gemma"})
    assert (c.hidden, c.layers, c.heads, c.kv_heads, c.ffn, c.tied) == (3072, 28, 16, 16, 24576, True)


def test_gemma_2_27b_in_both_formats() -> None:
    from_hf, from_gguf = hf(GEMMA_2_27B), gguf(GEMMA_2_27B_GGUF)
    assert from_hf.attention_scale == pytest.approx(144**-0.5) == from_gguf.attention_scale
    assert (from_hf.arch, from_hf.family, from_hf.attention_softcap, from_hf.logit_softcap) == (
        "gemma2", "gemma", 50.0, 30.0,
    )  # fmt: skip
    assert from_hf.windows == (4096, None) * 23 and from_hf.local_rope is None
    same = set(vars(from_hf)) - {"attention_scale", "norm_offset"}
    assert {k: vars(from_gguf)[k] for k in same} == {k: vars(from_hf)[k] for k in same}
    assert gguf(GEMMA_2_27B_GGUF, block_count=42).attention_scale == pytest.approx(128**-0.5)


def test_gemma_2_2b_is_what_a_config_without_sizes_means() -> None:
    c = hf({"model_type": "gemma2"})
    assert (c.hidden, c.layers, c.heads, c.kv_heads, c.ffn, c.context) == (2304, 26, 8, 4, 9216, 8192)
    assert (c.windows, c.attention_softcap, c.logit_softcap) == ((4096, None) * 13, 50.0, 30.0)


def test_softcaps_of_gemma_2_can_be_switched_off() -> None:
    """A null in `config.json` is no default but none, as is a zero in GGUF."""
    off = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert (hf(GEMMA_2_27B, **off).attention_softcap, hf(GEMMA_2_27B, **off).logit_softcap) == (None, None)
    zero = gguf(GEMMA_2_27B_GGUF, attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
    assert (zero.attention_softcap, zero.logit_softcap) == (None, None)
    capped = gguf(GEMMA_2_27B_GGUF, attn_logit_softcapping=6.0, final_logit_softcapping=8.0)
    assert (capped.attention_softcap, capped.logit_softcap) == (6.0, 8.0)


def test_gemma_3_4b_leaves_most_keys_to_defaults() -> None:
    c = hf(GEMMA_3_4B)
    assert (c.arch, c.family, c.vocab_size, c.hidden, c.layers, c.ffn) == ("gemma3", "gemma", 262208, 2560, 34, 10240)
    assert (c.heads, c.kv_heads, c.head_dim, c.context, c.eps, c.tied) == (8, 4, 256, 131072, 1e-6, True)
    assert c.rope == Rope(1e6, 256, factor=8.0) and c.local_rope == Rope(1e4, 256)
    assert [i for i, w in enumerate(c.windows) if w is None] == [5, 11, 17, 23, 29] and c.windows[0] == 1024
    assert (c.activation, c.norm_offset, c.attention_scale) == ("gelu_tanh", 1.0, 0.0625)
    assert c.embedding_scale == pytest.approx(2560**0.5)
    assert c.rope_of(5) == c.rope and c.rope_of(6) == c.local_rope


def test_gemma_3_27b_scales_attention_by_its_own_rule_in_both_formats() -> None:
    from_gguf, from_hf = gguf(GEMMA_3_27B_GGUF), hf(GEMMA_3_27B_TEXT)
    assert from_gguf.attention_scale == pytest.approx(168**-0.5) == from_hf.attention_scale
    same = set(vars(from_hf)) - {"attention_scale", "norm_offset", "vocab_size"}
    assert {k: vars(from_gguf)[k] for k in same} == {k: vars(from_hf)[k] for k in same}
    assert gguf(GEMMA_GGUF).attention_scale == pytest.approx(128**-0.5)


# -- variants ---------------------------------------------------------------------------------------------------------


def test_text_config_may_nest_and_shares_the_outer_tie() -> None:
    inner = json.loads((GOLDENS / "gemma3" / "hf" / "config.json").read_text())
    nested = {"model_type": "gemma3", "text_config": inner, "vision_config": {}}
    assert from_hf(nested) == from_hf(inner)
    del inner["tie_word_embeddings"]
    assert not from_hf({**nested, "tie_word_embeddings": False}).tied


def test_qwen_windows_of_the_upper_layers() -> None:
    c = hf(QWEN_25_05B, use_sliding_window=True, max_window_layers=21)
    assert c.windows == (None,) * 21 + (32768,) * 3
    assert c.rope_of(23) == c.rope
    types = ["sliding_attention"] + ["full_attention"] * 23
    assert hf(QWEN_25_05B, use_sliding_window=True, layer_types=types).windows == (32768,) + (None,) * 23


def test_gemma_patterns() -> None:
    assert gguf(GEMMA_GGUF).windows == (1024,) * 5 + (None, 1024)
    assert gguf(GEMMA_GGUF, attention__sliding_window=0).windows == (None,) * 7
    assert gguf(GEMMA_GGUF, attention__sliding_window=REMOVED).windows == (None,) * 7
    assert gguf(GEMMA_GGUF, attention__sliding_window_pattern=2).windows == (1024, None) * 3 + (1024,)
    flags = np.array([True, False, False, True, False, False, False])
    assert gguf(GEMMA_GGUF, attention__sliding_window_pattern=flags).windows == (1024, None, None, 1024) + (None,) * 3
    assert gguf(GEMMA_2_27B_GGUF, attention__sliding_window=16).windows == (16, None) * 23
    types = ["full_attention"] * 45 + ["sliding_attention"]
    assert hf(GEMMA_2_27B, layer_types=types).windows == (None,) * 45 + (4096,)
    assert hf(GEMMA_3_27B_TEXT, sliding_window_pattern=2).windows == (1024, None) * 31
    assert hf(GEMMA_3_27B_TEXT, _sliding_window_pattern=1).windows == (None,) * 62


def test_gguf_rope_scaling() -> None:
    assert gguf(LLAMA_GGUF).rope == Rope(10000.0, 16)
    assert gguf(LLAMA_GGUF, rope__scaling__factor=4.0).rope.factor == 4.0  # linear is the type's default
    assert gguf(LLAMA_GGUF, rope__scaling__type="none", rope__scaling__factor=4.0).rope.factor == 1.0
    assert gguf(LLAMA_GGUF, rope__scaling__factor=0.0).rope.factor == 1.0
    assert gguf(LLAMA_GGUF, rope__scale_linear=2.0).rope.factor == 2.0
    assert gguf(LLAMA_GGUF, ("rope_freqs.weight",)).rope.divisors == "rope_freqs.weight"
    gemma = gguf(GEMMA_GGUF, rope__freq_base_swa=5000.0)
    assert gemma.rope == Rope(1e6, 128, factor=8.0) and gemma.local_rope == Rope(5000.0, 128)


def test_hf_rope_spellings() -> None:
    legacy = {"type": "linear", "factor": 2.0}
    assert hf(QWEN_3_06B, rope_scaling=legacy).rope == Rope(1e6, 128, factor=2.0)
    assert hf(QWEN_3_06B, rope_scaling={"rope_type": "default"}).rope == Rope(1e6, 128)
    assert hf(QWEN_3_06B, rope_theta=REMOVED).rope == Rope(1e4, 128)
    new = {"rope_type": "linear", "factor": 2, "rope_theta": 7e5}
    assert hf(QWEN_3_06B, rope_theta=REMOVED, rope_scaling=REMOVED, rope_parameters=new).rope == Rope(7e5, 128, 2.0)


def test_gguf_sizes() -> None:
    assert gguf(LLAMA_GGUF).head_dim == 16 and gguf(LLAMA_GGUF).tied
    assert not gguf(LLAMA_GGUF, ("output.weight",)).tied
    assert gguf(LLAMA_GGUF, attention__head_count_kv=REMOVED).kv_heads == 4
    assert gguf(LLAMA_GGUF, attention__head_count_kv=np.array([2, 2, 2])).kv_heads == 2
    assert gguf(LLAMA_GGUF, vocab_size=REMOVED, tokenizer__ggml__tokens=["a"] * 9).vocab_size == 9
    assert gguf(LLAMA_GGUF, attention__scale=0.5).attention_scale == 0.5
    assert gguf(LLAMA_GGUF, attention__scale=0.0).attention_scale == 0.25
    assert gguf(GEMMA_GGUF, final_logit_softcapping=30.0).logit_softcap == 30.0
    assert gguf(GEMMA_GGUF, final_logit_softcapping=0.0).logit_softcap is None


def test_vocabulary_is_counted_without_being_decoded() -> None:
    class Metadata(dict[str, Any]):
        def count(self, key: str) -> int:
            return 12

        def __getitem__(self, key: str) -> Any:
            assert key != "tokenizer.ggml.tokens"
            return super().__getitem__(key)

    values = Metadata(changed(LLAMA_GGUF, {"vocab_size": REMOVED, "tokenizer.ggml.tokens": None}, "llama."))
    assert from_gguf(values, lambda _: False).vocab_size == 12


def test_norm_offset_is_for_norms_only() -> None:
    c = hf(GEMMA_3_27B_TEXT)
    norms = ("output_norm", "blk.0.attn_norm", "blk.3.attn_q_norm", "blk.3.post_ffw_norm", "blk.3.ffn_norm")
    assert [c.offset(f"{n}.weight") for n in norms] == [1.0] * 5
    assert [c.offset(n) for n in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_q.bias")] == [0.0] * 3
    assert gguf(GEMMA_GGUF).offset("output_norm.weight") == 0.0 == hf(QWEN_3_06B).offset("output_norm.weight")


def test_biases_that_a_config_promises() -> None:
    everywhere = hf(LLAMA_32_1B, attention_bias=True, mlp_bias=True).biases
    assert everywhere == ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert hf(QWEN_3_06B, attention_bias=True).biases == ("attn_q", "attn_k", "attn_v", "attn_output")


def test_config_from() -> None:
    assert config_from("gguf", LLAMA_GGUF, lambda _: False, where="f") == gguf(LLAMA_GGUF)
    assert config_from("safetensors", QWEN_3_06B, lambda _: False, where="f") == hf(QWEN_3_06B)
    with pytest.raises(ConfigError, match=r"^model\.gguf: "):
        config_from("gguf", {}, lambda _: False, where="model.gguf")
    with pytest.raises(ArgumentError, match="'onnx'"):
        config_from("onnx", {}, lambda _: False, where="f")


# -- mistakes ---------------------------------------------------------------------------------------------------------

GGUF_WRONG = [
    ("general__architecture", REMOVED, "'general.architecture' is missing, expected a string"),
    ("general__architecture", 3, "'general.architecture' is 3, expected a string"),
    ("block_count", REMOVED, "'llama.block_count' is missing, expected an integer from 1 to 1024"),
    ("block_count", 0, "'llama.block_count' is 0, expected an integer from 1 to 1024"),
    ("block_count", 1025, "'llama.block_count' is 1025"),
    ("block_count", "3", "'llama.block_count' is '3'"),
    ("block_count", 3.0, "'llama.block_count' is 3.0"),
    ("block_count", True, "'llama.block_count' is True"),
    ("embedding_length", -64, "'llama.embedding_length' is -64"),
    ("embedding_length", 66, "'llama.embedding_length' is 66, expected a multiple of attention.head_count"),
    ("feed_forward_length", REMOVED, "'llama.feed_forward_length' is missing"),
    ("feed_forward_length", [], "'llama.feed_forward_length' is [], expected 3 elements, one integer a layer"),
    ("feed_forward_length", ["a"] * 3, "'llama.feed_forward_length' is 'a', expected an integer"),
    ("block_count", [3], "'llama.block_count' is [3], expected an integer"),
    ("attention__head_count", REMOVED, "'llama.attention.head_count' is missing"),
    ("attention__head_count_kv", 3, "is 4, expected a multiple of attention.head_count_kv, which is 3"),
    ("attention__key_length", 15, "'llama.attention.key_length' is 15, expected an even number"),
    ("context_length", 0, "'llama.context_length' is 0"),
    ("vocab_size", 0, "'llama.vocab_size' is 0, expected an integer from 1"),
    ("vocab_size", REMOVED, "'llama.vocab_size' is missing"),
    ("attention__layer_norm_rms_epsilon", REMOVED, "'llama.attention.layer_norm_rms_epsilon' is missing"),
    ("attention__layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon' is nan"),
    ("attention__layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon' is 0.0"),
    ("rope__freq_base", float("inf"), "'llama.rope.freq_base' is inf"),
    ("rope__freq_base", 0.0, "'llama.rope.freq_base' is 0.0"),
    ("rope__scaling__type", 1, "'llama.rope.scaling.type' is 1, expected a string"),
    ("rope__scaling__factor", -1.0, "'llama.rope.scaling.factor' is -1.0"),
]
GGUF_UNSUPPORTED = [
    ("general__architecture", "mamba", "'mamba' (general.architecture) is not supported. Supported are llama, qwen2,"),
    ("expert_count", 8, "'llama.expert_count' is 8: mixtures of experts"),
    ("pooling_type", 3, "'llama.pooling_type' is 3: this is an embedding"),
    ("nextn_predict_layers", 1, "'llama.nextn_predict_layers' is 1"),
    ("attention__causal", False, "'llama.attention.causal' is False"),
    ("attention__value_length", 8, "'llama.attention.value_length' is 8: only the size of a head, 16"),
    ("rope__dimension_count", 8, "'llama.rope.dimension_count' is 8"),
    ("rope__scaling__type", "yarn", "'llama.rope.scaling.type' is 'yarn': supported are none, linear"),
    ("rope__scaling__attn_factor", 1.2, "'llama.rope.scaling.attn_factor' is 1.2"),
    ("attention__head_count_kv", [2, 4, 2], "'llama.attention.head_count_kv' is [2, 4, 2]: layers of different sizes"),
    ("feed_forward_length", np.array([1, 2, 3]), "'llama.feed_forward_length' is [1, 2, 3]"),
]
HF_WRONG = [
    ("model_type", REMOVED, "'model_type' is missing"),
    ("hidden_size", REMOVED, "'hidden_size' is missing"),
    ("hidden_size", None, "'hidden_size' is missing"),
    ("hidden_size", "1024", "'hidden_size' is '1024'"),
    ("vocab_size", 0, "'vocab_size' is 0"),
    ("rope_theta", 10**400, "'rope_theta' is 1000"),
    ("rope_theta", True, "'rope_theta' is True, expected a number"),
    ("num_hidden_layers", 5000, "'num_hidden_layers' is 5000, expected an integer from 1 to 1024"),
    ("num_key_value_heads", 5, "'num_attention_heads' is 16, expected a multiple of num_key_value_heads, which is 5"),
    ("head_dim", 127, "'head_dim' is 127, expected an even number"),
    ("rms_norm_eps", "1e-6", "'rms_norm_eps' is '1e-6'"),
    ("tie_word_embeddings", 1, "'tie_word_embeddings' is 1, expected true or false"),
    ("hidden_act", REMOVED, "'hidden_act' is missing"),
    ("text_config", [1], "'text_config' is [1], expected an object"),
    ("rope_scaling", "linear", "'rope_scaling' is 'linear', expected an object"),
    ("rope_scaling", {"rope_type": "linear"}, "'rope_scaling.factor' is missing"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "'rope_scaling.low_freq_factor' is missing"),
    ("rope_parameters", {"rope_theta": "x"}, "'rope_parameters.rope_theta' is 'x'"),
    ("rope_parameters", {"sliding_attention": {}}, "'rope_parameters.full_attention' is missing"),
    ("layer_types", ["full_attention"], "'layer_types' is ['full_attention'], expected 28 elements"),
    ("layer_types", ["sliding_attention"] * 28, "'use_sliding_window' is False, expected true"),
    ("use_sliding_window", "yes", "'use_sliding_window' is 'yes', expected true or false"),
]
HF_UNSUPPORTED = [
    ("model_type", "gpt2", "'gpt2' (model_type) is not supported. Supported are llama, qwen2, qwen3, gemma, gemma2,"),
    ("num_experts", 64, "'num_experts' is 64: mixtures of experts"),
    ("num_local_experts", 8, "'num_local_experts' is 8"),
    ("hidden_act", "relu", "'hidden_act' is 'relu': supported are silu"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "'rope_scaling.rope_type' is 'yarn': supported are default"),
    ("rope_scaling", {"type": "dynamic", "factor": 4.0}, "'rope_scaling.type' is 'dynamic'"),
    ("rope_parameters", {"partial_rotary_factor": 0.5}, "'rope_parameters.partial_rotary_factor' is 0.5"),
    ("partial_rotary_factor", 0.25, "'partial_rotary_factor' is 0.25"),
    ("use_bidirectional_attention", True, "'use_bidirectional_attention' is True"),
    ("layer_types", ["linear_attention"] * 28, "'layer_types' is 'linear_attention': supported are full_attention"),
    ("text_config", {"model_type": "llama"}, "'text_config.model_type' is 'llama': expected one of qwen3"),
]


@pytest.mark.parametrize(("key", "value", "message"), GGUF_WRONG)
def test_wrong_gguf_keys(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        gguf(LLAMA_GGUF, **{key: value})


@pytest.mark.parametrize(("key", "value", "message"), GGUF_UNSUPPORTED)
def test_unsupported_gguf_keys(key: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        gguf(LLAMA_GGUF, **{key: value})


@pytest.mark.parametrize(("key", "value", "message"), HF_WRONG)
def test_wrong_hf_keys(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hf(QWEN_3_06B, **{key: value})


@pytest.mark.parametrize(("key", "value", "message"), HF_UNSUPPORTED)
def test_unsupported_hf_keys(key: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        hf(QWEN_3_06B, **{key: value})


def test_other_mistakes() -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        gguf(LLAMA_GGUF, ("rope_factors_long.weight",))
    assert gguf(GEMMA_2_27B_GGUF, rope__freq_base_swa=1e4).rope == Rope(1e4, 128)
    with pytest.raises(UnsupportedModelError, match=r"'gemma2.rope.freq_base_swa' is 5000.0: a rope of its own for"):
        gguf(GEMMA_2_27B_GGUF, rope__freq_base_swa=5000.0)
    with pytest.raises(ConfigError, match=r"'gemma3.rope.freq_base' is missing"):
        gguf(GEMMA_GGUF, rope__freq_base=REMOVED)
    with pytest.raises(ConfigError, match=r"sliding_window_pattern' is \[True, False\], expected 7 elements"):
        gguf(GEMMA_GGUF, attention__sliding_window_pattern=[True, False])
    with pytest.raises(ConfigError, match=r"tokens' is empty"):
        gguf(LLAMA_GGUF, vocab_size=REMOVED, tokenizer__ggml__tokens=[])
    with pytest.raises(ConfigError, match=r"'sliding_window' is missing"):
        hf(QWEN_3_06B, use_sliding_window=True, max_window_layers=0)
    with pytest.raises(ConfigError, match=r"rope_scaling.high_freq_factor' is 1.0, expected more than"):
        hf(LLAMA_32_1B, rope_scaling={**LLAMA_32_1B["rope_scaling"], "high_freq_factor": 1.0})
