"""DeepSeek in GGUF files, against the golden logits: with the matrices of heads apart, and as in older files; and the
models whose settings its architecture has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from golden_files import logits_of, write_gguf

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.ir.stored import dequantize
from rlx.models import from_gguf, from_hf
from rlx.models.config import Experts, Latent
from rlx.weights import ModelWeights, open_weights

SIZES: dict[str, Any] = {
    "block_count": 3, "context_length": 1024, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 512,
    "attention.head_count": 4, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.q_lora_rank": 48, "attention.kv_lora_rank": 32, "attention.key_length": 48, "attention.value_length": 32,
    "attention.key_length_mla": 48, "attention.value_length_mla": 32, "rope.dimension_count": 16,
    "rope.freq_base": 10000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 0.1,
    "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3, "expert_group_count": 4,
    "expert_group_used_count": 2, "expert_gating_func": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
    "expert_weights_scale": 2.5, "expert_weights_norm": True,
}  # fmt: skip
KINDS = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


def metadata(**keys: Any) -> dict[str, Any]:
    sizes = {**SIZES, **{name.replace("__", "."): value for name, value in keys.items()}}
    return {f"deepseek2.{name}": value for name, value in sizes.items() if value is not None}


def check(path: Path, goldens: Path, tensors: dict[str, np.ndarray], **keys: Any) -> None:
    typed = {name: (value, [KINDS[type(value)]]) for name, value in metadata(**keys).items()}
    write_gguf(path, {"general.architecture": ("deepseek2", []), **typed}, tensors)
    golden = np.load(goldens / "deepseek-v3" / "golden.npz")
    found = logits_of(path, golden["tokens"].astype(np.int32))[golden["positions"]]
    assert np.abs(found - golden["logits"]).max() < 2e-5 * np.abs(golden["logits"]).max()


@pytest.fixture(scope="module")
def published(goldens: Path) -> dict[str, np.ndarray]:
    """The checkpoint's tensors under the names of GGUF, which has the same ones but for `attn_kv_b`."""
    with ModelWeights(open_weights(goldens / "deepseek-v3" / "hf"), "deepseek2") as weights:
        infos = {name: weights.info(name) for name in weights.names if not name.startswith("blk.3.")}
        return {name: dequantize(weights.raw(name), info.dtype, info.shape) for name, info in infos.items()}


def test_matrices_of_heads(goldens: Path, published: dict[str, np.ndarray], tmp_path: Path) -> None:
    tensors = dict(published)
    for layer in range(3):
        both = tensors.pop(f"blk.{layer}.attn_kv_b.weight").reshape(4, 64, 32)
        tensors[f"blk.{layer}.attn_k_b.weight"] = np.ascontiguousarray(both[:, :32].swapaxes(1, 2))
        tensors[f"blk.{layer}.attn_v_b.weight"] = both[:, 32:].copy()
    check(tmp_path / "m.gguf", goldens, tensors)


def test_an_older_file(goldens: Path, published: dict[str, np.ndarray], tmp_path: Path) -> None:
    older = {"attention.head_count_kv": 4, "attention.key_length_mla": None, "attention.value_length_mla": None}
    check(tmp_path / "m.gguf", goldens, published, **older)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"expert_group_count": 3}, ConfigError, r"'deepseek2\.expert_group_count' is 3, expected a divisor of"),
        ({"expert_group_count": 8}, ConfigError, r"'deepseek2\.expert_group_count' is 8, expected a divisor of"),
        ({"expert_group_used_count": 1}, ConfigError, r"_used_count' is 1, expected from 2 to 4, of 4 groups"),
        ({"expert_gating_func": 1}, UnsupportedModelError, r"group_count' is 4: experts in groups are only supported"),
        ({"expert_gating_func": 3}, UnsupportedModelError, r"gating_func' is 3: .* 1 and 2 are supported"),
        (
            {"attention.key_length_mla": 16},
            ConfigError,
            r"key_length_mla' is 16, expected more than rope\.dimension_count",
        ),
    ],
)
def test_sizes_that_do_not_fit(keys: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_gguf({"general.architecture": "deepseek2", **metadata(**keys)}, lambda name: True)


@pytest.mark.parametrize(
    ("number", "biased", "router"),
    [(1, True, "softmax"), (2, True, "sigmoid"), (None, False, "softmax"), (None, True, "sigmoid")],
)
def test_the_router_is_the_one_of_the_number_or_else_of_the_bias(number: int | None, biased: bool, router: str) -> None:
    keys = metadata(expert_gating_func=number, expert_group_count=1, expert_group_used_count=1)
    found = from_gguf({"general.architecture": "deepseek2", **keys}, lambda name: biased or "exp_probs_b" not in name)
    assert found.experts is not None and found.experts.router == router
    assert ("exp_probs_b" in found.biases) == (router == "sigmoid")


V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
GLM_47_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
    "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip


def test_v2_lite() -> None:
    found = from_hf(V2_LITE)
    assert found.arch == "deepseek2" and "exp_probs_b" not in found.biases
    assert found.experts == Experts(64, 6, 1408, 2816, normalize=False, router="softmax")
    assert found.latent == Latent(512, 64, 128, 128, 0) and found.rope.yarn is not None and found.rope.scale == 1
    with pytest.raises(UnsupportedModelError, match="'n_group' is 8: experts in groups are only supported"):
        from_hf({**V2_LITE, "n_group": 8, "topk_group": 3})


def test_glm_47_flash_is_the_architecture_of_deepseek() -> None:
    """Newer files name the kind of each layer."""
    found = from_hf(GLM_47_FLASH)
    assert found.arch == "deepseek2" and "exp_probs_b" in found.biases
    assert found.experts == Experts(64, 4, 1536, 1536, scale=1.8, router="sigmoid")
    assert [layer.sparse for layer in found.each] == [False] + [True] * 46
    assert from_hf({**GLM_47_FLASH, "mlp_layer_types": ["dense"] + ["sparse"] * 46}) == found


def test_mistral_4_in_a_model_that_sees(goldens: Path) -> None:
    """Its file names the model around the text part, and how large a part of a head has rope."""
    text = json.loads((goldens / "mistral4" / "hf" / "config.json").read_text())
    found = from_hf(text)
    assert found.own == {"query_growth": 0.1, "original_context": 16} and found.rope.dims == 16
    assert from_hf({"model_type": "mistral3", "text_config": text, "vision_config": {}}) == found
    wrong = {**text["rope_parameters"], "partial_rotary_factor": 0.25}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor' is 0\.25: it is not that of"):
        from_hf({**text, "rope_parameters": wrong})
