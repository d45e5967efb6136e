"""Hybrid models in forms that no fixture has: made of a fixture, with the same logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from golden_files import Edited, logits_of, rewrite, write_gguf
from safetensors.numpy import save_file

from rlx.errors import ConfigError, UnsupportedModelError
from rlx.export.convert import convert
from rlx.ir.stored import to_float32
from rlx.models import from_hf
from rlx.weights import ModelWeights, open_weights

TOKENS = np.array([5, 300, 7, 11, 90, 3, 3, 250], np.int32)
U32, F32, BOOL = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL


def checkpoint(source: Path, target: Path, change: Callable[[Edited], object], **config: Any) -> Path:
    """A copy of a checkpoint in float32 after `change` edited its tensors, with other values of some keys."""
    target.mkdir()
    with open_weights(source) as loader:
        infos = loader.tensors.items()
        tensors = {name: to_float32(loader.raw(name), info.dtype).reshape(info.shape) for name, info in infos}
    change(tensors)
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **config}))
    return target


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


# -- Qwen 3 Next ------------------------------------------------------------------------------------------------------


def test_older_files_of_qwen_3_next_have_one_projection(goldens: Path, tmp_path: Path) -> None:
    """Its rows lie as in a checkpoint, key head by key head; newer files have two tensors instead."""
    source, name = goldens / "qwen3next" / "hf", "blk.0.ssm_in.weight"
    with ModelWeights(open_weights(source), "qwen3next") as weights:
        whole = to_float32(weights.raw(name), weights.info(name).dtype).reshape(weights.info(name).shape)

    def older(tensors: Edited) -> None:
        assert len(tensors.pop("blk.0.attn_qkv.weight")) + len(tensors.pop("blk.0.attn_gate.weight")) == len(whole)
        tensors[name] = whole

    done = convert(source, tmp_path / "new.gguf", "F32")
    assert_same(logits_of(rewrite(done.path, tmp_path / "old.gguf", older), TOKENS), logits_of(done.path, TOKENS))


# -- MiniCPM ----------------------------------------------------------------------------------------------------------


def test_minicpm_has_the_equations_of_granite(goldens: Path, tmp_path: Path) -> None:
    """Two of its factors are in the depth and the width; the scores have the usual one."""
    source = goldens / "granite" / "hf"
    granite = json.loads((source / "config.json").read_text())
    layers, hidden = granite["num_hidden_layers"], granite["hidden_size"]
    usual = (hidden // granite["num_attention_heads"]) ** -0.5
    expected = logits_of(checkpoint(source, tmp_path / "granite", lambda _: None, attention_multiplier=usual), TOKENS)
    words = {
        "model_type": "minicpm",
        "scale_emb": granite["embedding_multiplier"],
        "scale_depth": granite["residual_multiplier"] * sqrt(layers),
        "dim_model_base": round(hidden / granite["logits_scaling"]),
    }
    removed = dict.fromkeys(key for key in granite if key.endswith("multiplier") or key == "logits_scaling")
    folder = checkpoint(source, tmp_path / "minicpm", lambda _: None, **words, **removed)
    assert_same(logits_of(folder, TOKENS), expected)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    assert_same(logits_of(convert(folder, tmp_path / "model.gguf", "F32").path, TOKENS), expected)


# -- experts ----------------------------------------------------------------------------------------------------------


def as_experts(up: np.ndarray, down: np.ndarray, parts: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """A part of a dense block as an expert; one more, behind the first part, is never chosen."""
    if number == 1:
        return np.full((len(up) // parts, up.shape[1]), 9, np.float32), np.full((len(down), len(up) // parts), 9, "f4")
    at = max(number - 1, 0)
    return np.split(up, parts)[at], np.split(down, parts, axis=1)[at]


def lfm2_experts(tensors: Edited) -> None:
    """All layers but the first one: two experts of three, each of which counts half."""
    for layer in range(1, 99):
        path = f"model.layers.{layer}.feed_forward"
        if f"{path}.w1.weight" not in tensors:
            return
        w1, w3, w2 = (tensors.pop(f"{path}.w{i}.weight") for i in (1, 3, 2))
        for number in range(3):
            for name, matrix in (("w1", w1), ("w3", w3)):
                tensors[f"{path}.experts.{number}.{name}.weight"], down = as_experts(matrix, w2, 2, number)
            tensors[f"{path}.experts.{number}.w2.weight"] = 2 * down
        tensors[f"{path}.gate.weight"] = np.zeros((3, w1.shape[1]), np.float32)
        tensors[f"{path}.expert_bias"] = np.array([0, -1, 0], np.float32)


def test_lfm2_with_experts(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "lfm2" / "hf"
    width = next(layer.ffn for layer in from_hf(json.loads((source / "config.json").read_text())).each)
    keys = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": width // 2, "num_dense_layers": 1}
    made = checkpoint(
        source, tmp_path / "m", lfm2_experts, model_type="lfm2_moe", intermediate_size=width,
        block_auto_adjust_ff_dim=None, block_ff_dim=None, norm_topk_prob=True, use_expert_bias=True, **keys,
    )  # fmt: skip
    assert_same(logits_of(made, TOKENS), logits_of(source, TOKENS))


def nemotron_experts(
    tensors: Edited, up: str, down: str, put: Callable[[str, int, np.ndarray, np.ndarray], None]
) -> None:
    """Two experts of three, and one that every token uses."""
    for name in [name for name in tensors if name.endswith(up)]:
        first, last = tensors.pop(name), tensors.pop(name.replace(up, down))
        for number in range(4):
            put(name.removesuffix(up), number, *as_experts(first, last, 3, number))


def nemotron_in_safetensors(tensors: Edited) -> None:
    def put(path: str, number: int, up: np.ndarray, down: np.ndarray) -> None:
        place = "shared_experts" if number == 3 else f"experts.{number}"
        tensors[f"{path}{place}.up_proj.weight"], tensors[f"{path}{place}.down_proj.weight"] = up, down
        tensors[f"{path}gate.weight"] = np.zeros((3, up.shape[1]), np.float32)
        tensors[f"{path}gate.e_score_correction_bias"] = np.array([0, -1, 0], np.float32)

    nemotron_experts(tensors, "up_proj.weight", "down_proj.weight", put)


def nemotron_in_gguf(tensors: Edited) -> None:
    stacks: dict[str, list[np.ndarray]] = {}

    def put(block: str, number: int, up: np.ndarray, down: np.ndarray) -> None:
        for name, part in ((f"{block}ffn_up", up), (f"{block}ffn_down", down)):
            if number == 3:
                tensors[f"{name}_shexp.weight"] = part
            else:
                stacks.setdefault(f"{name}_exps.weight", []).append(part)
        tensors[f"{block}ffn_gate_inp.weight"] = np.zeros((3, up.shape[1]), np.float32)
        tensors[f"{block}exp_probs_b.bias"] = np.array([0, -1, 0], np.float32)

    nemotron_experts(tensors, "ffn_up.weight", "ffn_down.weight", put)
    tensors |= {name: np.stack(parts).astype(np.float32) for name, parts in stacks.items()}


def test_nemotron_h_with_experts(goldens: Path, tmp_path: Path) -> None:
    """From both kinds of file: two experts count half, times a factor of 2."""
    source = goldens / "nemotron-h"
    keys = {"n_routed_experts": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
    kinds = [
        {"mlp": "moe"}.get(k, k) for k in json.loads((source / "hf" / "config.json").read_text())["layers_block_type"]
    ]
    made = checkpoint(
        source / "hf",
        tmp_path / "m",
        nemotron_in_safetensors,
        layers_block_type=kinds,
        routed_scaling_factor=2.0,
        **keys,
    )
    expected = logits_of(source / "hf", TOKENS)
    assert_same(logits_of(made, TOKENS), expected)

    reader = GGUFReader(source / "model-f16.gguf")
    fields = {
        n.replace("nemotron_h.", "nemotron_h_moe."): f for n, f in reader.fields.items() if not n.startswith("GGUF.")
    }
    metadata: dict[str, Any] = {name: (field.contents(), list(field.types)) for name, field in fields.items()}
    metadata["general.architecture"] = ("nemotron_h_moe", [GGUFValueType.STRING])
    counts = {
        "count": 3,
        "used_count": 2,
        "feed_forward_length": 32,
        "shared_feed_forward_length": 32,
        "group_count": 1,
    }
    metadata |= {f"nemotron_h_moe.expert_{name}": (number, [U32]) for name, number in counts.items()}
    metadata["nemotron_h_moe.expert_weights_scale"] = (2.0, [F32])
    metadata["nemotron_h_moe.expert_weights_norm"] = (True, [BOOL])
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    nemotron_in_gguf(tensors)
    assert_same(logits_of(write_gguf(tmp_path / "m.gguf", metadata, tensors), TOKENS), expected)


# -- Granite 4 --------------------------------------------------------------------------------------------------------


def test_a_dense_granite_calls_its_block_the_shared_expert(goldens: Path, tmp_path: Path) -> None:
    """In checkpoints; GGUF files call it what other models do."""

    def without_experts(tensors: Edited) -> None:
        for name in [name for name in tensors if "block_sparse" in name or "_exps" in name or "ffn_gate_inp" in name]:
            del tensors[name]
        for name in [name for name in tensors if "_shexp" in name]:
            tensors[name.replace("_shexp", "")] = tensors.pop(name)

    source = goldens / "granite-hybrid"
    made = checkpoint(source / "hf", tmp_path / "m", without_experts, num_local_experts=0, num_experts_per_tok=0)
    keys = {
        f"granitehybrid__{key}": n
        for key, n in {"expert_count": 0, "expert_used_count": 0, "feed_forward_length": 64}.items()
    }
    other = rewrite(source / "model-f16.gguf", tmp_path / "m.gguf", without_experts, **keys)
    assert_same(logits_of(made, TOKENS), logits_of(other, TOKENS))


def test_rope_in_granite_where_the_file_has_it(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "granite-hybrid"
    config = json.loads((source / "hf" / "config.json").read_text())
    assert not any(layer.has_rope for layer in from_hf(config).each)
    made = checkpoint(source / "hf", tmp_path / "m", lambda tensors: None, position_embedding_type="rope")
    keys = {"granitehybrid__rope__scaling__finetuned": True}
    other = rewrite(source / "model-f16.gguf", tmp_path / "m.gguf", lambda tensors: None, **keys)
    found = logits_of(made, TOKENS)
    assert_same(found, logits_of(other, TOKENS))
    assert np.abs(found - logits_of(source / "hf", TOKENS)).max() > 1e-3 * np.abs(found).max()


# -- published models -------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"time_step_limit": [0.2, 0.1]},
        "'time_step_limit' is [0.2, 0.1], expected the shortest time step, then the longest",
    ),
    ({"time_step_limit": [0.1]}, "'time_step_limit' is [0.1], expected 2 elements"),
    ({"time_step_limit": 0.1}, "'time_step_limit' is 0.1, expected 2 elements"),
    ({"layers_block_type": ["mamba", "window"]}, "'layers_block_type' is 'window': supported are"),
    ({"layers_block_type": None, "hybrid_override_pattern": "MX"}, "'hybrid_override_pattern' is 'X': supported are M"),
    ({"layers_block_type": None}, "the key 'hybrid_override_pattern' is missing, expected the kinds of the layers"),
    ({"layers_block_type": 7}, "'layers_block_type' is 7, expected an array"),
    ({"n_groups": 3}, "'mamba_num_heads' is 4, expected a multiple of n_groups, which is 3"),
    ({"mamba_hidden_act": "gelu"}, "'mamba_hidden_act' is 'gelu': only SiLU is supported there"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_wrong_configurations(goldens: Path, keys: dict[str, Any], message: str) -> None:
    family = "granite-hybrid" if "time_step_limit" in keys else "nemotron-h"
    config = {**json.loads((goldens / family / "hf" / "config.json").read_text()), **keys}
    with pytest.raises((ConfigError, UnsupportedModelError)) as error:
        from_hf(config)
    assert message in str(error.value)
