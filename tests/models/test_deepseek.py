"""DeepSeek-V3 in GGUF files, against the golden logits: with the matrices of heads apart, and as in older files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from golden_files import logits_of, write_gguf

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.ir.stored import dequantize
from rlx.models import from_gguf
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
    "expert_weights_scale": 2.5,
}  # fmt: skip
KINDS = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


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
        ({"expert_gating_func": 1}, UnsupportedModelError, r"gating_func' is 1: a router without sigmoids"),
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
