"""Checkpoints of every model type in odd and in random sizes: compiled, in chunks and token by token, against the
interpreter in float64 over the same file. What the equations are is for the goldens to say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_files import logits_of
from random_checkpoints import FULL, LINEAR, MODEL_TYPES, SLIDING, Config, checkpoint

from rlx.backends.cpu.target import supported_levels
from rlx.store.cache import CompileCache
from tests.single_sequence import SingleEngine

CHUNKS = (7, 1, 9, 8, 1, 1)  # tokens at a time; the largest window is 20
LADDER = {"buckets": {"seq": [1, 8]}}
CEILING = 2e-5  # largest error of a logit as a share of the largest


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(capacity=512, policy="off")


#: What sizes are odd: the drawn ones of a model type, and these instead.
ODD: Config = {
    "vocab_size": 77, "hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 20, "vocab_size_per_layer_input": 77,
}  # fmt: skip
HYBRID: Config = {
    **ODD, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
SHARED: Config = {
    **ODD, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2, "sliding_window": 5,
    "hidden_size_per_layer_input": 12, "attention_k_eq_v": False, "num_global_key_value_heads": None,
    "enable_moe_block": False, "num_experts": None,
}  # fmt: skip
AWKWARD: dict[str, tuple[str, Config]] = {
    "one kv head": ("qwen2", {
        **ODD, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16,
        "num_hidden_layers": 2, "layer_types": [SLIDING, FULL],
    }),
    "as many kv heads as heads": ("gemma2", {
        **ODD, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 48, "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL], "attn_logit_softcapping": 6.0, "final_logit_softcapping": 8.0,
    }),
    "wide heads": ("llama", {**ODD, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}),
    "experts of an odd width, and a dense layer": ("qwen3_moe", {
        **ODD, "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "mlp_only_layers": [1], "norm_topk_prob": False,
    }),
    "every expert is used": ("mixtral", {
        **ODD, "num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 4,
    }),
    "three value heads a key head": ("qwen3_5_text", HYBRID),
    "one of everything": ("qwen3_5_text", {
        **HYBRID, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16,
        "linear_value_head_dim": 48, "linear_conv_kernel_dim": 2,
    }),
    "experts in a hybrid": ("qwen3_5_moe_text", {
        **HYBRID, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 36, "tie_word_embeddings": False,
    }),
    "streams": ("gemma3n_text", {
        **SHARED, "altup_num_inputs": 3, "final_logit_softcapping": 20.0,
        "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
    }),
    "heads of two sizes": ("gemma4_text", {**SHARED, "global_head_dim": 40, "use_double_wide_mlp": True}),
    "keys as values": ("gemma4_text", {
        **SHARED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "global_head_dim": 24, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 5,
        "top_k_experts": 2, "moe_intermediate_size": 12,
    }),
}  # fmt: skip
#: What these show, others show, too.
REPEATED = ("every expert is used", "heads of two sizes")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in AWKWARD]
)
def test_awkward_shapes(name: str, tmp_path: Path, cache: CompileCache) -> None:
    model_type, changes = AWKWARD[name]
    check(tmp_path, checkpoint(tmp_path, model_type, 1, **changes), CHUNKS, cache)


@pytest.mark.slow  # kernels of odd sizes are tested on every level, and models of even ones
@pytest.mark.parametrize("level", supported_levels()[:-1])
def test_every_level(level: str, tmp_path: Path, cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns; the tests above are on the widest level."""
    monkeypatch.setenv("RLX_TARGET", level)
    model_type, changes = AWKWARD[
        ("streams", "experts in a hybrid", "one kv head")[supported_levels().index(level) % 3]
    ]
    check(tmp_path, checkpoint(tmp_path, model_type, 1, **changes), CHUNKS, cache)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_random_shapes(model_type: str, tmp_path: Path, cache: CompileCache) -> None:
    check(tmp_path, checkpoint(tmp_path, model_type, 1), CHUNKS, cache)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES)[::4])
def test_other_sizes_token_by_token(model_type: str, tmp_path: Path, cache: CompileCache) -> None:
    check(tmp_path, checkpoint(tmp_path, model_type, 2), (1,) * 27, cache)


def check(folder: Path, config: Config, chunks: tuple[int, ...], cache: CompileCache) -> None:
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"] - 3, sum(chunks)).astype(np.int32)
    expected = logits_of(folder, tokens)
    found = in_chunks(folder, tokens.tolist(), chunks, cache)
    assert np.abs(found - expected).max() <= CEILING * np.abs(expected).max(), config


def in_chunks(folder: Path, tokens: list[int], chunks: tuple[int, ...], cache: CompileCache) -> np.ndarray:
    engine = SingleEngine.open(folder, precision="exact", profile=LADDER, max_seq=40, threads=2, cache=cache)
    rows, at = [], 0
    try:
        for count in chunks:
            rows.append(engine.forward(tokens[at : at + count], all_rows=True))
            at += count
    finally:
        engine.close()
    return np.concatenate(rows)
