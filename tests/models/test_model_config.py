"""Variants of configurations, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import re
from math import inf
from typing import Any

import numpy as np
import pytest
from configs import (
    GEMMA_2_27B,
    GEMMA_2_27B_GGUF,
    GEMMA_3_27B_TEXT,
    GEMMA_3N_E2B,
    GEMMA_4_E2B,
    GEMMA_4_GGUF,
    GEMMA_GGUF,
    LLAMA_GGUF,
    MIXTRAL_8X7B,
    QWEN_3_06B,
    QWEN_3_30B_A3B,
    QWEN_25_05B,
    QWEN_35_08B,
    QWEN_35_GGUF,
    REMOVED,
    gguf,
    hf,
)
from golden_files import Tensor, Tensors
from golden_folder import PACKED

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.ir.dtypes import BF16, Q4_K, DType
from rlx.models import ModelConfig, cache_dtype, from_hf
from rlx.models.keys import Keys
from rlx.models.registry import ARCHITECTURES, ENCODER_TYPES, MODEL_TYPES
from rlx.models.rope import Rope, Yarn

# -- variants ---------------------------------------------------------------------------------------------------------


def test_text_config_may_nest_and_shares_the_outer_tie() -> None:
    inner = json.loads((PACKED / "gemma3" / "hf" / "config.json").read_text())
    nested = {"model_type": "gemma3", "text_config": inner, "vision_config": {}}
    assert from_hf(nested) == from_hf(inner)
    del inner["tie_word_embeddings"]
    assert not from_hf({**nested, "tie_word_embeddings": False}).tied
    inner["tie_word_embeddings"] = False
    assert from_hf({**nested, "tie_word_embeddings": True}).tied


def test_the_text_part_of_mistral_3_is_mistral_where_it_does_not_say() -> None:
    """As in transformers 5.24; its default was Ministral's, whose queries grow."""
    inner = json.loads((PACKED / "ministral3" / "hf" / "config.json").read_text())
    inner |= {"rope_parameters": None, "sliding_window": None}
    named = from_hf({"model_type": "mistral3", "text_config": {**inner, "model_type": "mistral"}})
    del inner["model_type"]
    assert from_hf({"model_type": "mistral3", "text_config": inner}) == named
    assert named.arch == "llama"


def test_gpt_oss_has_its_scaling_with_another_base() -> None:
    c = golden("gpt-oss", rope_parameters=REMOVED, rope_scaling=REMOVED, rope_theta=321.5)
    assert (c.rope.base, c.rope.yarn) == (321.5, Yarn(32.0, 32.0, 1.0, 4096, whole=False))
    assert golden("gpt-oss", rope_parameters=REMOVED, rope_scaling=REMOVED, rope_theta=REMOVED).rope.base == 150_000.0


def test_qwen_windows_of_the_upper_layers() -> None:
    c = hf(QWEN_25_05B, use_sliding_window=True, max_window_layers=21)
    assert c.windows == (None,) * 21 + (32768,) * 3
    assert c.rope_of(23) == c.rope
    types = ["sliding_attention"] + ["full_attention"] * 23
    assert hf(QWEN_25_05B, use_sliding_window=True, layer_types=types).windows == (32768,) + (None,) * 23


def golden(family: str, **changes: Any) -> ModelConfig:
    """The configuration of a golden checkpoint, with changes."""
    found = {**json.loads((PACKED / family / "hf" / "config.json").read_text()), **changes}
    return from_hf({key: value for key, value in found.items() if value is not REMOVED})


def test_what_transformers_does_with_rare_settings() -> None:
    """Each was found by comparing logits with transformers 5.24."""
    assert set(golden("ministral3").windows) == {None}
    assert set(golden("ministral3", sliding_window=7).windows) == {7}
    window = {"use_sliding_window": True, "sliding_window": 6}
    types = ["sliding_attention", *["full_attention"] * 4]
    assert golden("smollm3", **window, layer_types=types).windows == (6, None, None, None, None)
    assert golden("smollm3", **window, layer_types=None).windows == (None, None, None, 6, None)
    experts = golden("granitemoe-shared", shared_intermediate_size=0).experts
    assert experts is not None and experts.shared == 0
    nemotron = golden("nemotron-h", tie_word_embeddings=True, attention_bias=True, time_step_min=0.02)
    assert not nemotron.tied and "attn_q" not in nemotron.biases
    assert nemotron.recurrence is not None and nemotron.recurrence.steps == (0.02, inf)
    assert "ffn_up_shexp" in golden("nemotron-h", mlp_bias=True).biases
    head = golden("granite-hybrid", mamba_d_head="auto").recurrence
    assert head == golden("granite-hybrid").recurrence


def test_what_transformers_does_with_layers() -> None:
    """Found in the same way: windows, and which layers have rope."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    for family in ("phi3", "ministral3", "qwen3moe"):
        layers = golden(family).layers
        changes = {"sliding_window": 6, "use_sliding_window": True, "layer_types": ["full_attention"] * layers}
        assert golden(family, **changes).windows == (6,) * layers
    assert hf(MIXTRAL_8X7B, sliding_window=6, layer_types=["full_attention"] * 32).windows == (6,) * 32
    mistral = golden("llama", model_type="mistral", sliding_window=6, num_hidden_layers=3, layer_types=types)
    assert mistral.windows == (6, None, 6)
    assert golden("gemma3", attn_logit_softcapping=3.0).attention_softcap is None
    layers = golden("exaone4-swa").layers
    assert not any(each.has_rope for each in golden("exaone4-swa", layer_types=["full_attention"] * layers).each)
    for said, has in ((None, False), ("nope", False), ("rope", True)):
        assert golden("granite-hybrid", position_embedding_type=said).each[0].has_rope is has
    assert golden("lfm2", layer_types=None, full_attn_idxs=None).recurrence is None


def test_what_transformers_does_with_layers_of_later_families() -> None:
    """Found in the same way."""
    window = {"use_sliding_window": True, "sliding_window": 6, "layer_types": None, "num_hidden_layers": 6}
    assert golden("qwen2moe", **window, max_window_layers=4).windows == (6, None, 6, None, None, None)
    assert golden("dots1", sliding_window=6, max_window_layers=1, layer_types=None).windows == (None, 6)
    sparse = {"num_hidden_layers": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}
    layers = golden("ernie4.5-moe", **sparse).each
    assert [layer.sparse for layer in layers] == [False, True, False, True, False, False]
    assert not golden("ernie4.5-moe", num_hidden_layers=6).each[0].sparse
    part = golden("minimax-m2", rope_parameters=REMOVED, rope_theta=1e4, rotary_dim=8).rope
    assert (part.dims, part.base) == (8, 1e4)
    older = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    assert golden("cohere2", layer_types=None, num_hidden_layers=5).windows == (8, 8, 8, None, 8)
    assert [layer.has_rope for layer in golden("cohere2").each] == [True, False]
    named = golden("hunyuan", rope_parameters=REMOVED, rope_theta=1e4, rope_scaling=older, num_experts=1)
    assert named.rope.base == pytest.approx(1e4 * 1000 ** (32 / 30)) and named == golden("hunyuan")


def test_what_transformers_takes_for_absent_keys() -> None:
    assert golden("ernie4.5", tie_word_embeddings=REMOVED).tied
    assert golden("smollm3", tie_word_embeddings=REMOVED).tied
    assert not golden("lfm2", tie_embedding=False).tied
    assert golden("exaone4-swa", rope_parameters=REMOVED).rope.base == golden("qwen35", rope_parameters={}).rope.base
    assert golden("gpt-oss", rope_parameters=REMOVED).rope.yarn == Yarn(32.0, 32.0, 1.0, 4096, whole=False)
    linear = golden("gpt-oss", rope_parameters=REMOVED, rope_scaling={"rope_type": "linear", "factor": 4.0}).rope
    assert (linear.yarn, linear.factor) == (None, 4.0)


def test_what_changes_the_computation_in_a_way_that_no_family_has_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'clip_qkv' is 8\.0: bounds of q, k and v"):
        golden("olmoe", clip_qkv=8.0)
    with pytest.raises(UnsupportedModelError, match=r"'score_function' is 'softmax': only Ling 2\.0"):
        golden("ling2", score_function=REMOVED)
    with pytest.raises(UnsupportedModelError, match="'use_parallel_residual' is True: parallel blocks"):
        golden("stablelm", use_parallel_residual=True)
    with pytest.raises(UnsupportedModelError, match="'use_qk_norm' is True: norms on the heads of q and k"):
        golden("command-r", use_qk_norm=True)
    part = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    for family in ("llama", "qwen3", "gemma2", "gpt-oss"):
        with pytest.raises(UnsupportedModelError, match="rotating a part of each head is not supported"):
            golden(family, rope_parameters=part)
    for family in ("qwen35", "granite-hybrid"):
        with pytest.raises(UnsupportedModelError, match="only SiLU is supported in the recurrent layers"):
            golden(family, hidden_act="gelu_pytorch_tanh")


def test_names_that_are_no_text() -> None:
    """Whoever asks whether a name is known gets no TypeError."""
    assert not any([] in names for names in (ARCHITECTURES, MODEL_TYPES, ENCODER_TYPES))


def test_encoders_have_no_scaled_ropes() -> None:
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    config = {**dict.fromkeys((*sizes, "max_position_embeddings"), 64), "rope_parameters": {"rope_theta": 9.0}}
    assert set(ENCODER_TYPES["nomic_bert"](Keys(config, "config.json")).bases) == {9.0}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
    ropes = {"modernbert": {"full_attention": scaled, "sliding_attention": {"rope_theta": 10.0}}, "nomic_bert": scaled}
    for model_type, parameters in ropes.items():
        with pytest.raises(UnsupportedModelError, match="scaled ropes of encoders are not supported"):
            ENCODER_TYPES[model_type](Keys({**config, "rope_parameters": parameters}, "config.json"))


def test_an_encoder_is_no_decoder() -> None:
    """As a draft model, or for an importance matrix."""
    with pytest.raises(UnsupportedModelError, match="the model is a text encoder: it generates no text"):
        from_hf({"model_type": "bert"})
    with pytest.raises(UnsupportedModelError, match="the model is a text encoder: it generates no text"):
        gguf({"general.architecture": "nomic-bert"})


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


def test_yarn_in_both_formats() -> None:
    yarn = gguf(LLAMA_GGUF, rope__scaling__type="yarn", rope__scaling__factor=4.0).rope
    assert yarn == Rope(1e4, 16, yarn=Yarn(4.0, 32.0, 1.0, 4096), scale=yarn.scale)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert hf(QWEN_3_06B, rope_scaling=scaling).rope.yarn == Yarn(4.0, 32.0, 1.0, 32768)


def test_values_that_files_store_otherwise() -> None:
    """Of safetensors, the Gemmas up to 3 lack one in norms, Qwen 3.5 in all norms but that of the delta rule, whose
    decay it stores as a logarithm.
    """
    x = np.array([-1.0, 0.0, 2.0], np.float32)
    norms = ("output_norm", "blk.0.attn_norm", "blk.3.attn_q_norm", "blk.3.post_ffw_norm", "blk.3.ffn_norm")
    others = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.0.ssm_dt.bias")
    gemma, qwen = hf(GEMMA_3_27B_TEXT), hf(QWEN_35_08B)
    for config in (gemma, qwen):
        for name in norms:
            assert (config.value(f"{name}.weight", x) == x + 1).all()
        assert all(config.value(name, x) is x for name in others)
    assert qwen.value("blk.0.ssm_norm.weight", x) is x
    np.testing.assert_allclose(qwen.value("blk.0.ssm_a", x), -np.exp(x), rtol=1e-7)
    for config in (gguf(GEMMA_GGUF), gguf(QWEN_35_GGUF), hf(QWEN_3_06B), hf(GEMMA_3N_E2B), hf(GEMMA_4_E2B)):
        assert (config.value("output_norm.weight", x) == x).all() and config.value("blk.0.ssm_a", x) is x


@pytest.mark.parametrize(
    ("config", "dtype", "wanted"),
    [
        (hf(GEMMA_3N_E2B), BF16, "f32"),
        (hf(GEMMA_4_E2B), BF16, "f16"),
        (hf(QWEN_3_30B_A3B), BF16, "f32"),
        (hf(QWEN_3_30B_A3B), Q4_K, "f16"),
        (hf(QWEN_3_06B), BF16, "f16"),
    ],
)
def test_streams_and_routers_over_unrounded_weights_want_f32_caches(
    config: ModelConfig, dtype: DType, wanted: str
) -> None:
    experts = Tensors({"blk.0.ffn_down_exps.weight": Tensor(dtype, np.zeros((1, 1, 1), np.float32))})
    assert cache_dtype(config, experts) == wanted


# -- mistakes ---------------------------------------------------------------------------------------------------------

GGUF_WRONG = [
    ("general__architecture", REMOVED, "'general.architecture' is missing, expected a string"),
    ("block_count", REMOVED, "'llama.block_count' is missing, expected an integer from 1 to 1024"),
    ("block_count", 0, "'llama.block_count' is 0, expected an integer from 1 to 1024"),
    ("block_count", "3", "'llama.block_count' is '3'"),
    ("block_count", True, "'llama.block_count' is True"),
    ("embedding_length", 66, "'llama.embedding_length' is 66, expected a multiple of attention.head_count"),
    (
        "attention__head_count_kv",
        3,
        "head_count_kv' is 3, expected a divisor of attention.head_count, which is 4, for layer 0",
    ),
    ("attention__key_length", 15, "'llama.attention.key_length' is 15, expected an even number"),
    ("vocab_size", REMOVED, "'llama.vocab_size' is missing"),
    ("attention__layer_norm_rms_epsilon", REMOVED, "'llama.attention.layer_norm_rms_epsilon' is missing"),
    ("attention__layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon' is nan"),
    ("rope__freq_base", float("inf"), "'llama.rope.freq_base' is inf"),
    ("feed_forward_length", [128, 128], "'llama.feed_forward_length' is [128, 128], expected 3 elements"),
    (
        "attention__head_count_kv",
        [2, 3, 2],
        "is 3, expected a divisor of attention.head_count, which is 4, for layer 1",
    ),
    ("expert_count", 8, "'llama.expert_used_count' is missing, expected an integer from 1 to 8"),
    ("rope__scaling__factor", -1.0, "'llama.rope.scaling.factor' is -1.0"),
]
GGUF_UNSUPPORTED = [
    ("general__architecture", "mamba", "'mamba' (general.architecture) is not supported. Supported are "),
    ("pooling_type", 3, "'llama.pooling_type' is 3: this is an embedding"),
    ("nextn_predict_layers", 1, "'llama.nextn_predict_layers' is 1"),
    ("attention__causal", False, "'llama.attention.causal' is False"),
    ("attention__value_length", 8, "'llama.attention.value_length' is 8: only the size of a head, 16"),
    ("rope__dimension_count", 8, "'llama.rope.dimension_count' is 8"),
    ("rope__scaling__type", "su", "'llama.rope.scaling.type' is 'su': supported are none, linear, yarn"),
    ("attention__head_count", [2, 4, 2], "'llama.attention.head_count' is [2, 4, 2]: layers of different sizes"),
    ("attention__shared_kv_layers", 1, "'llama.attention.shared_kv_layers' is 1: sharing keys and values between"),
]
HF_WRONG = [
    ("model_type", REMOVED, "'model_type' is missing"),
    ("hidden_size", REMOVED, "'hidden_size' is missing"),
    ("hidden_size", "1024", "'hidden_size' is '1024'"),
    ("rope_theta", 10**400, "'rope_theta' is 1000"),
    ("num_key_value_heads", 5, "'num_key_value_heads' is 5, expected a divisor of num_attention_heads, which is 16"),
    ("tie_word_embeddings", 1, "'tie_word_embeddings' is 1, expected true or false"),
    ("text_config", [1], "'text_config' is [1], expected an object"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "'rope_scaling.low_freq_factor' is missing"),
    ("rope_parameters", {"sliding_attention": {}}, "'rope_parameters.full_attention' is missing"),
    ("layer_types", ["full_attention"], "'layer_types' is ['full_attention'], expected 28 elements"),
    ("layer_types", ["sliding_attention"] * 28, "'use_sliding_window' is False, expected true"),
]
HF_UNSUPPORTED = [
    ("model_type", "gpt2", "'gpt2' (model_type) is not supported. Supported are "),
    ("num_experts", 64, "'num_experts' is 64: mixtures of experts"),
    ("hidden_act", "relu", "'hidden_act' is 'relu': supported are silu"),
    ("rope_scaling", {"type": "dynamic", "factor": 4.0}, "'rope_scaling.type' is 'dynamic'"),
    ("rope_local_base_freq", 1e4, "'rope_local_base_freq' is 10000.0: a separate rope for some layers"),
    ("use_bidirectional_attention", True, "'use_bidirectional_attention' is True"),
    ("layer_types", ["linear_attention"] * 28, "'layer_types' is 'linear_attention': supported are full_attention"),
    ("text_config", {"model_type": "llama"}, "'text_config.model_type' is 'llama': expected one of qwen3"),
]


# -- mistakes of experts, hybrids, shared keys and values -------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
NEW_WRONG = [  # what reads it, what it reads, changes, the error
    (gguf, LLAMA_GGUF, {"expert_count": 4, "expert_used_count": 5},
     "expert_used_count' is 5, expected an integer from 1"),
    (hf, MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, expected an integer from 1 to 8"),
    (hf, MIXTRAL_8X7B, {"num_local_experts": REMOVED}, "'num_experts' is missing"),
    (gguf, QWEN_35_GGUF, {"ssm__inner_size": 2047}, "'qwen35.ssm.inner_size' is 2047, expected a multiple of ssm."),
    (gguf, QWEN_35_GGUF, {"ssm__group_count": 3},
     "'qwen35.ssm.time_step_rank' is 16, expected a multiple of ssm.group"),
    (gguf, QWEN_35_GGUF, {"attention__recurrent_layers": [True] * 23}, "recurrent_layers' is [True, True"),
    (gguf, QWEN_35_GGUF, {"rope__dimension_count": 258},
     "'qwen35.rope.dimension_count' is 258, expected an integer from"),
    (hf, GEMMA_4_E2B, {"num_kv_shared_layers": 35}, "'num_kv_shared_layers' is 35, expected an integer from 0 to 34"),
    (hf, GEMMA_4_E2B, {"num_kv_shared_layers": 31},
     "layer 4 shares the keys and values of an earlier layer of its kind"),
    (gguf, GEMMA_4_GGUF, {"attention__shared_kv_layers": 31}, "layer 4 shares the keys and values of an earlier layer"),
    (hf, GEMMA_4_E2B, {"layer_types": [FULL] * 16 + [SLIDING] * 19},
     "layer 16 shares the keys and values of an earlier"),
    (hf, GEMMA_4_E2B, {"per_layer_config": [1]}, "'per_layer_config' is [1], expected an object"),
    (gguf, GEMMA_4_GGUF, {"feed_forward_length": [6144] * 34}, "feed_forward_length' is [6144"),
    (gguf, GEMMA_4_GGUF, {"attention__key_length_swa": REMOVED}, "'gemma4.attention.key_length_swa' is missing"),
    (gguf, GEMMA_4_GGUF, {"attention__sliding_window_pattern": [True] * 34}, "pattern' is [True, True"),
    (hf, GEMMA_3N_E2B["text_config"], {"activation_sparsity_pattern": [1.0] * 30},
     "expected a number from 0 to 0.999999"),
    (hf, QWEN_3_30B_A3B, {"mlp_only_layers": ["x"]}, "'mlp_only_layers' is 'x', expected an integer from 0"),
    (gguf, GEMMA_GGUF, {"attention__sliding_window_pattern": ["x"] * 7}, "pattern' is 'x', expected true or false"),
]  # fmt: skip
NEW_UNSUPPORTED = [
    (hf, GEMMA_3N_E2B["text_config"], {"altup_active_idx": 1}, "'altup_active_idx' is 1: another active stream"),
    (hf, GEMMA_4_E2B, {"per_layer_config": {"3": {"sliding_window": 9}}},
     "'per_layer_config.3.sliding_window' is 9: supp"),
    (hf, GEMMA_4_E2B, {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
    (hf, QWEN_35_08B["text_config"], {"layer_types": [SLIDING] * 24},
     "'layer_types' is 'sliding_attention': supported"),
    (hf, QWEN_35_08B["text_config"], {"attn_output_gate": False},
     "'attn_output_gate' is False: attention without a gate"),
    (gguf, QWEN_35_GGUF, {"expert_count": 4}, "'qwen35.expert_count' is 4: mixtures of experts"),
    (gguf, GEMMA_4_GGUF, {"rope__dimension_count_swa": 128}, "'gemma4.rope.dimension_count_swa' is 128"),
]  # fmt: skip


def rows(read: Any, base: dict[str, Any], table: list[tuple[str, Any, str]]) -> list[tuple[Any, ...]]:
    return [(read, base, {key: value}, message) for key, value, message in table]


WRONG = [*rows(gguf, LLAMA_GGUF, GGUF_WRONG), *rows(hf, QWEN_3_06B, HF_WRONG), *NEW_WRONG]
WRONG += [
    (gguf, QWEN_35_GGUF, {f"ssm__{key}": REMOVED}, f"'qwen35.ssm.{key}' is missing")
    for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
]
UNSUPPORTED = [*rows(gguf, LLAMA_GGUF, GGUF_UNSUPPORTED), *rows(hf, QWEN_3_06B, HF_UNSUPPORTED), *NEW_UNSUPPORTED]
MISTAKES = [(*row, ConfigError) for row in WRONG] + [(*row, UnsupportedModelError) for row in UNSUPPORTED]


@pytest.mark.parametrize(("read", "base", "changes", "message", "kind"), MISTAKES)
def test_mistakes_are_named(
    read: Any, base: dict[str, Any], changes: dict[str, Any], message: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        read(base, **changes)


def test_gguf_files_of_gemma_3n() -> None:
    """Written by the reference converter: sparsity as deviations, minus infinity for none."""
    base = {k.replace("gemma4.", "gemma3n."): v for k, v in GEMMA_4_GGUF.items()} | {"general.architecture": "gemma3n"}
    base |= {"gemma3n.block_count": 5, "gemma3n.feed_forward_length": [64] * 5, "gemma3n.attention.key_length": 256}
    base |= {"gemma3n.attention.value_length": 256, "gemma3n.attention.sliding_window_pattern": [True] * 4 + [False]}
    base |= {"gemma3n.attention.shared_kv_layers": 0, "gemma3n.rope.dimension_count": 256}
    sparsity = np.array([1.5, 1.5, *[-np.inf] * 3], np.float32)
    base |= {
        "gemma3n.altup.num_inputs": 4,
        "gemma3n.altup.active_idx": 0,
        "gemma3n.activation_sparsity_scale": sparsity,
    }
    c = gguf(base)
    assert [x.sparsity for x in c.each] == [1.5, 1.5, None, None, None]
    assert (c.streams, c.attention_scale, c.logit_softcap, c.per_layer) == (4, 1.0, 30.0, 256)
    with pytest.raises(UnsupportedModelError, match=r"'gemma3n\.altup\.active_idx' is 2: another active stream"):
        gguf(base, altup__active_idx=2)
    with pytest.raises(ConfigError, match=r"'gemma3n\.activation_sparsity_scale' is nan, expected a number from -inf"):
        gguf(base, activation_sparsity_scale=[float("nan")] * 5)
    for wrong in ("1.5", np.inf, 1e9):
        with pytest.raises(
            ConfigError, match=r"'gemma3n\.activation_sparsity_scale' is .*, expected a number from -inf"
        ):
            gguf(base, activation_sparsity_scale=[wrong] * 5)
    with pytest.raises(ConfigError, match=r"'gemma3n\.activation_sparsity_scale' is .*, expected 5 elements"):
        gguf(base, activation_sparsity_scale=[1.0] * 4)
