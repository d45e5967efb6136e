"""Published models by what their model cards say, in both formats."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest
from configs import (
    ERNIE_21B_A3B,
    GEMMA_2_27B,
    GEMMA_2_27B_GGUF,
    GEMMA_3_4B,
    GEMMA_3_27B_GGUF,
    GEMMA_3_27B_TEXT,
    GEMMA_3N_E2B,
    GEMMA_4_26B_A4B,
    GEMMA_4_E2B,
    GEMMA_4_GGUF,
    GEMMA_GGUF,
    HUNYUAN_7B,
    HUNYUAN_A13B,
    LING_MINI_2,
    LLAMA_32_1B,
    MINIMAX_M2,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN_3_06B,
    QWEN_3_30B_A3B,
    QWEN_3_NEXT,
    QWEN_35_08B,
    QWEN_35_GGUF,
    REMOVED,
    gguf,
    hf,
)

from rlx.models.config import Experts, Layer, Recurrence
from rlx.models.rope import Llama3, Rope


def test_llama_32_1b() -> None:
    c = hf(LLAMA_32_1B)
    assert (c.arch, c.family, c.vocab_size, c.hidden, c.layers) == ("llama", "llama32", 128256, 2048, 16)
    assert (c.heads, c.each[0].kv_heads, c.each[0].head_dim, c.context, c.eps, c.tied) == (
        32,
        8,
        64,
        131072,
        1e-5,
        True,
    )
    assert c.rope == Rope(500000.0, 64, llama3=Llama3(32.0, 1.0, 4.0, 8192)) and c.local_rope is None
    assert c.windows == (None,) * 16 and c.attention_scale == 0.125
    assert (c.activation, c.embedding_scale, c.norm_offset, c.biases) == ("silu", 1.0, 0.0, ())


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
    assert (c.arch, c.family, c.vocab_size, c.hidden, c.layers) == ("gemma3", "gemma", 262208, 2560, 34)
    assert (c.heads, c.each[0].kv_heads, c.each[0].head_dim, c.context, c.eps, c.tied) == (
        8,
        4,
        256,
        131072,
        1e-6,
        True,
    )
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


# -- experts ----------------------------------------------------------------------------------------------------------


def test_mixtral_8x7b() -> None:
    c = hf(MIXTRAL_8X7B)
    assert (c.arch, c.family, c.layers, c.windows) == ("llama", "llama32", 32, (None,) * 32)
    assert c.experts == Experts(count=8, used=2, ffn=14336) and all(layer.sparse for layer in c.each)
    assert c.rope == hf(MIXTRAL_8X7B, rope_theta=REMOVED).rope == Rope(1e6, 128)
    renamed = hf(MIXTRAL_8X7B, num_local_experts=REMOVED, num_experts=8)  # as newer versions of transformers save it
    assert renamed == c


def test_qwen_3_30b_a3b() -> None:
    c = hf(QWEN_3_30B_A3B)
    assert (c.arch, c.family, c.layers, c.hidden, c.heads, c.tied) == ("qwen3moe", "qwen3", 48, 2048, 32, False)
    assert c.experts == Experts(count=128, used=8, ffn=768) and c.windows == (None,) * 48
    assert {(x.kv_heads, x.head_dim, x.sparse) for x in c.each} == {(4, 128, True)}
    plain = hf(QWEN_3_30B_A3B, norm_topk_prob=REMOVED).experts  # the default of transformers
    assert plain == replace(c.experts, normalize=False)


# -- hybrids ----------------------------------------------------------------------------------------------------------


def test_qwen_35_08b_in_both_formats() -> None:
    c, other = hf(QWEN_35_08B), gguf(QWEN_35_GGUF)
    assert (c.arch, c.family, c.vocab_size, c.hidden, c.heads) == ("qwen35", "qwen35", 248320, 1024, 8)
    assert [i for i, layer in enumerate(c.each) if not layer.recurrent] == [3, 7, 11, 15, 19, 23]
    assert c.each[3] == Layer(2, 256, 3584, source=3) and c.rope == Rope(1e7, 64, sections=(11, 11, 10))
    assert c.recurrence == Recurrence(16, 16, 128, 128, taps=4, heads="grouped", log_decay=True)
    assert (c.norm_offset, c.plain_norms, c.tied) == (1.0, ("ssm_norm",), True)
    assert other.recurrence == replace(c.recurrence, heads="tiled", log_decay=False)
    differ = {"recurrence", "norm_offset", "plain_norms"}
    assert {k: v for k, v in vars(other).items() if k not in differ} == {
        k: v for k, v in vars(c).items() if k not in differ
    }
    plain = {k: v for k, v in QWEN_35_08B["text_config"].items() if k not in ("layer_types", "head_dim")}
    assert hf(plain) == c


def test_gguf_files_of_qwen_35_may_carry_a_block_for_prediction() -> None:
    """It comes last; the array of recurrent layers covers it and counts before the period."""
    c = gguf(QWEN_35_GGUF)
    assert gguf(QWEN_35_GGUF, block_count=25, nextn_predict_layers=1) == c
    flags = [True, False] * 12 + [False]
    given = {"block_count": 25, "nextn_predict_layers": 1, "attention__recurrent_layers": flags}
    assert [x.recurrent for x in gguf(QWEN_35_GGUF, **given).each] == flags[:24]
    assert gguf(QWEN_35_GGUF, full_attention_interval=REMOVED) == c  # 4 by default
    heads = [0, 0, 0, 2] * 6  # some converters say that recurrent layers have none
    assert [x.kv_heads for x in gguf(QWEN_35_GGUF, attention__head_count_kv=heads).each] == heads


# -- shared keys and values -------------------------------------------------------------------------------------------


def test_gemma_3n_e2b() -> None:
    c = hf(GEMMA_3N_E2B)
    assert (c.arch, c.family, c.streams, c.per_layer, c.attention_scale) == ("gemma3n", "gemma", 4, 256, 1.0)
    assert (c.logit_softcap, c.norm_offset, c.tied, c.layers) == (30.0, 0.0, True, 30)
    assert c.rope == Rope(1e6, 256) and c.local_rope == Rope(1e4, 256)
    assert c.windows == ((512,) * 4 + (None,)) * 6
    assert [x.source for x in c.each] == [*range(20), 18, 18, 18, 18, 19, 18, 18, 18, 18, 19]
    assert c.each[0].sparsity == pytest.approx(1.6448536, rel=1e-6) == NormalDist().inv_cdf(0.95)
    assert c.each[10].sparsity is None and {x.ffn for x in c.each} == {8192}
    assert hf(GEMMA_3N_E2B["text_config"]) == c
    listed = {k: v for k, v in GEMMA_3N_E2B["text_config"].items() if k != "layer_types"}
    assert hf(listed, intermediate_size=8192) == c


def test_gemma_4_26b_a4b() -> None:
    c = hf(GEMMA_4_26B_A4B)
    assert (c.arch, c.family, c.hidden, c.per_layer, c.attention_scale) == ("gemma4", "gemma", 2816, 0, 1.0)
    assert c.experts == Experts(count=128, used=8, ffn=704)
    assert c.each[0] == Layer(8, 256, 2112, source=0, window=1024, sparse=True)
    assert c.each[5] == Layer(2, 512, 2112, source=5, sparse=True, keys_as_values=True)
    assert c.rope == Rope(1e6, 512, turning=128) and c.local_rope == Rope(1e4, 256)
    assert (c.logit_softcap, c.activation, c.norm_offset) == (30.0, "gelu_tanh", 0.0)
    own = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    newer = {"global_head_dim": REMOVED, "num_global_key_value_heads": REMOVED, "per_layer_config": own}
    assert hf(GEMMA_4_26B_A4B, **newer) == c


def test_gemma_4_e2b_in_both_formats() -> None:
    c = hf(GEMMA_4_E2B)
    assert (c.per_layer, c.experts, c.layers) == (256, None, 35)
    assert [x.ffn for x in c.each] == [6144] * 15 + [12288] * 20
    assert [x.source for x in c.each] == [*range(15), *([13] * 4 + [14]) * 4]
    assert {(x.kv_heads, x.head_dim) for x in c.each if x.window} == {(1, 256)}
    assert {(x.kv_heads, x.head_dim) for x in c.each if not x.window} == {(1, 512)}
    values = tuple(f"blk.{i}.attn_v.weight" for i in range(15))
    other = gguf(GEMMA_4_GGUF, ("rope_freqs.weight", *values))
    assert other.rope == Rope(1e6, 512, divisors="rope_freqs.weight")
    assert {k: v for k, v in vars(other).items() if k != "rope"} == {k: v for k, v in vars(c).items() if k != "rope"}
    without = gguf(GEMMA_4_GGUF, values[:14])
    assert [i for i, x in enumerate(without.each) if x.keys_as_values] == [14]


# -- what files leave out ---------------------------------------------------------------------------------------------


def test_defaults_of_windows() -> None:
    """Those of the configuration classes; a null is not left out."""
    asked = {"use_sliding_window": True, "max_window_layers": REMOVED, "sliding_window": REMOVED}
    assert hf(QWEN_3_06B, **{**asked, "num_hidden_layers": 30}).windows == (None,) * 28 + (4096,) * 2
    assert hf(QWEN_3_06B, **{**asked, "max_window_layers": 0, "sliding_window": None}).windows == (None,) * 28
    assert hf(QWEN_3_30B_A3B, use_sliding_window=True, sliding_window=99, max_window_layers=9).windows == (99,) * 48
    assert hf(MISTRAL_7B, sliding_window=REMOVED).windows == (4096,) * 32
    assert hf(MIXTRAL_8X7B, sliding_window=REMOVED).windows == (None,) * 32


def test_qwen_3_next() -> None:
    c = hf(QWEN_3_NEXT)
    assert (c.arch, c.family, c.layers, c.rope.dims) == ("qwen3next", "qwen35", 48, 64)
    assert c.recurrence == Recurrence(16, 32, 128, 128, 4, "grouped", log_decay=True)
    assert c.experts == Experts(512, 10, 512, 512, shared_gate=True)
    assert [layer.recurrent for layer in c.each] == [True, True, True, False] * 12


def test_experts_of_later_models() -> None:
    assert hf(MINIMAX_M2).experts == Experts(256, 8, 1536, router="sigmoid")
    assert hf(MINIMAX_M2).rope == Rope(5e6, 64) and hf(MINIMAX_M2).biases == ("exp_probs_b",)
    ling = hf(LING_MINI_2)
    assert ling.experts == Experts(256, 8, 512, 512, scale=2.5, router="sigmoid", groups=8, kept=4)
    assert (ling.biases, ling.rope.dims, ling.each[0].sparse, ling.each[1].sparse) == (
        ("exp_probs_b",),
        64,
        False,
        True,
    )
    ernie = hf(ERNIE_21B_A3B)
    assert ernie.experts == Experts(64, 6, 1536, 3072) and [x.sparse for x in ernie.each] == [False] + [True] * 27
    assert (ernie.biases, ernie.rope_style, ernie.tied) == (("exp_probs_b",), "interleaved", True)


def test_hunyuan() -> None:
    dense, sparse = hf(HUNYUAN_7B), hf(HUNYUAN_A13B)
    assert (dense.arch, dense.experts, dense.each[0].head_dim) == ("hunyuan-dense", None, 128)
    assert dense.rope.base == sparse.rope.base == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert (sparse.arch, sparse.experts) == ("hunyuan-moe", Experts(64, 8, 3072, 3072))
