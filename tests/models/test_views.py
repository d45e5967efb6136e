"""Tensors that a file keeps together, or scales: the same model as with each of them on its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden_files import Edited, Session, logits_of, read, rewrite

from rlx.errors import WeightError
from rlx.ir.dtypes import F32
from rlx.models import build

TOKENS = np.array([5, 300, 7, 11, 90], np.int32)
Array = np.ndarray


def plain(goldens: Path, family: str, change: Callable[[Edited], object] = lambda tensors: None) -> Array:
    """Logits of the fixture after `change`, which knows canonical names, without views or scales."""
    config, tensors = read(goldens / family / "model-f16.gguf")
    values = {name: tensor.values.copy() for name, tensor in tensors.items()}
    change(values)
    for name, array in values.items():
        tensors[name].values = array
    return Session(build(config, tensors, F32), config, tensors).feed(TOKENS)


def edited(goldens: Path, family: str, folder: Path, change: Callable[[Edited], object]) -> Array:
    """Logits of the fixture after `change`, which knows the file's names, read from end to end."""
    return logits_of(rewrite(goldens / family / "model-f16.gguf", folder / "m.gguf", change), TOKENS)


def assert_same(found: Array, expected: Array) -> None:
    assert np.abs(found - expected).max() <= 1e-7 * np.abs(expected).max()


def joined(tensors: Edited, whole: str, *parts: str, axis: int = 0) -> None:
    """The parts `blk.N.{part}` of every layer that has them become `blk.N.{whole}`."""
    for i in range(99):
        names = [f"blk.{i}.{part}" for part in parts]
        if set(names) <= tensors.keys():
            tensors[f"blk.{i}.{whole}"] = np.concatenate([tensors.pop(name) for name in names], axis)


def qkv(tensors: Edited) -> None:
    for end in ("weight", "bias"):
        joined(tensors, f"attn_qkv.{end}", f"attn_q.{end}", f"attn_k.{end}", f"attn_v.{end}")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_q_k_and_v_in_one_tensor(goldens: Path, tmp_path: Path, family: str) -> None:
    """Their biases, too, where they have any."""

    def change(tensors: Edited) -> None:
        before = len(tensors)
        qkv(tensors)
        layers = sum(name.endswith("attn_norm.weight") for name in tensors)
        assert before - len(tensors) == 2 * layers * (2 if family == "qwen2" else 1)

    assert_same(edited(goldens, family, tmp_path, change), plain(goldens, family))


def test_gates_and_ups_of_experts_in_one_tensor(goldens: Path, tmp_path: Path) -> None:
    def change(tensors: Edited) -> None:
        joined(tensors, "ffn_gate_up_exps.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", axis=1)
        assert "blk.3.ffn_gate_up_exps.weight" in tensors

    assert_same(edited(goldens, "qwen35moe", tmp_path, change), plain(goldens, "qwen35moe"))


# -- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"])
def test_a_scale_multiplies_the_product_and_not_the_bias(goldens: Path, tmp_path: Path, name: str) -> None:
    def change(tensors: Edited) -> None:
        tensors[f"blk.1.{name}.scale"] = np.array([0.5], np.float32)

    def half(tensors: Edited) -> None:
        tensors[f"blk.1.{name}.weight"] *= 0.5

    found = edited(goldens, "qwen2", tmp_path, change)
    assert_same(found, plain(goldens, "qwen2", half))
    assert np.abs(found - plain(goldens, "qwen2")).max() > 1e-2


def test_scales_in_a_hybrid_model(goldens: Path, tmp_path: Path) -> None:
    """Of q, k and v of a delta rule, of queries with their gates, of experts one by one and fused."""
    each = 2.0 ** np.arange(-4, 4, dtype=np.float32)

    def change(tensors: Edited) -> None:
        joined(tensors, "ffn_gate_up_exps.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", axis=1)
        tensors["blk.0.attn_qkv.scale"] = tensors["blk.3.attn_q.scale"] = np.array([0.5], np.float32)
        tensors["blk.1.ffn_gate_up_exps.scale"], tensors["blk.2.ffn_down_exps.scale"] = each, each[::-1].copy()

    def scaled(tensors: Edited) -> None:
        for name in ("blk.0.ssm_q", "blk.0.ssm_k", "blk.0.ssm_v", "blk.3.attn_query", "blk.3.attn_query_gate"):
            tensors[f"{name}.weight"] *= 0.5
        for name in ("blk.1.ffn_gate_exps", "blk.1.ffn_up_exps"):
            tensors[f"{name}.weight"] *= each[:, None, None]
        tensors["blk.2.ffn_down_exps.weight"] *= each[::-1, None, None]

    found = edited(goldens, "qwen35moe", tmp_path, change)
    assert_same(found, plain(goldens, "qwen35moe", scaled))
    assert np.abs(found - plain(goldens, "qwen35moe")).max() > 1e-2


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen35", "blk.0.attn_qkv.weight"),
        ("qwen35", "blk.0.ssm_conv1d.weight"),
        ("qwen35", "blk.3.attn_q.weight"),
        ("qwen35moe", "blk.1.ffn_gate_exps.weight"),
    ],
)
def test_a_missing_whole_is_named(goldens: Path, tmp_path: Path, family: str, name: str) -> None:
    with pytest.raises(WeightError, match=rf"m\.gguf, {name}.*: the tensor is missing") as raised:
        edited(goldens, family, tmp_path, lambda tensors: tensors.pop(name))
    assert ("is a part" in str(raised.value)) == (family == "qwen35")
