"""Weights that do not fit the configuration, and how a file's optional tensors enter the graph."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from golden_files import CASES, Session, Tensor, Tensors, read
from golden_folder import goldens

from rlx.errors import WeightError
from rlx.ir.dtypes import F32, F64, I32, Q8_0, DType
from rlx.models import ModelConfig, build

TOKENS = np.array([5, 300, 7, 11], np.int32)


@cache
def load(family: str, file: str = "model-f16.gguf") -> tuple[ModelConfig, Tensors]:
    return read(goldens() / family / file)


def with_tensor(tensors: Tensors, name: str, values: np.ndarray, dtype: DType = F32) -> Tensors:
    return Tensors(tensors | {name: Tensor(dtype, values.astype(np.float32))})


def without(tensors: Tensors, *names: str) -> Tensors:
    return Tensors({n: t for n, t in tensors.items() if n not in names})


def logits(config: ModelConfig, tensors: Tensors) -> np.ndarray:
    return Session(build(config, tensors, F32), config, tensors).feed(TOKENS)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "file"), CASES)
def test_every_tensor_is_needed(family: str, file: str) -> None:
    """But scales of linear layers, and what layers have that read the keys and values of others."""
    config, tensors = load(family, file)
    unread = {f"blk.{i}.attn_k" for i, x in enumerate(config.each) if x.source != i}
    unread |= {name.replace("attn_k", "attn_v") for name in unread}

    def is_optional(name: str) -> bool:
        if name.startswith(f"blk.{config.layers}.") or (config.arch == "glm4moe" and ".attn_q_norm." in name):
            return True  # what predicts a further token is not used, and not every model normalizes its queries
        if ".ssm_conv_" in name and name.endswith(".bias"):  # only a `config.json` says that there is one
            return file != "hf"
        return name.endswith("_exps.scale") or name.rpartition(".")[0].removesuffix("_norm") in unread

    of_each_kind = {(re.sub(r"\d+", "", name), is_optional(name)): name for name in tensors}
    for (_, optional), name in of_each_kind.items():  # in the last layer that has it
        missing = rf"^{re.escape(name)}: the tensor is missing, expected shape \[\d"
        with nullcontext() if optional else pytest.raises(WeightError, match=missing):
            build(config, without(tensors, name), F32)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("token_embd.weight", (511, 64), "expected shape [512, 64], found [511, 64]"),
        ("output_norm.weight", (63,), "expected shape [64], found [63]"),
        ("output_norm.weight", (64, 1), "expected shape [64], found [64, 1]"),
        ("blk.2.attn_q.weight", (64, 128), "expected shape [128, 64], found [64, 128]"),
        ("blk.0.attn_k.weight", (128, 64), "expected shape [64, 64], found [128, 64]"),
        ("blk.3.attn_q_norm.weight", (64,), "expected shape [32], found [64]"),
        ("blk.1.ffn_down.weight", (64, 128), "expected shape [64, 96], found [64, 128]"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], message: str) -> None:
    config, tensors = load("qwen3")
    with pytest.raises(WeightError, match=re.escape(f"{name}: {message}")):
        build(config, with_tensor(tensors, name, np.zeros(shape)), F32)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("blk.0.attn_q.weight", I32, "f32, f16, bf16 or a block format"),
        ("token_embd.weight", F64, "f32, f16, bf16 or a block format"),
        ("blk.0.attn_norm.weight", Q8_0, "f32, f16, bf16"),
    ],
)
def test_wrong_dtypes(name: str, dtype: DType, expected: str) -> None:
    config, tensors = load("qwen3")
    with pytest.raises(WeightError, match=f"^{re.escape(name)}: expected {expected}, found {dtype}$"):
        build(config, with_tensor(tensors, name, tensors[name].values, dtype), F32)


# -- what is optional -------------------------------------------------------------------------------------------------


def test_a_bias_on_the_head_shifts_the_logits() -> None:
    config, tensors = load("qwen2")
    bias = np.linspace(-1, 1, config.vocab_size)
    np.testing.assert_allclose(
        logits(config, with_tensor(tensors, "output.bias", bias)), logits(config, tensors) + bias, atol=1e-6
    )


def test_a_bias_on_v_is_one_behind_attention() -> None:
    """Attention weights sum to one, so it reaches the output as W_o times the bias of each head's group."""
    config, tensors = load("llama")
    layer = config.each[1]
    bias = np.linspace(-1, 1, layer.kv_heads * layer.head_dim)
    groups = bias.reshape(layer.kv_heads, -1).repeat(config.heads // layer.kv_heads, 0).reshape(-1)
    behind = tensors["blk.1.attn_output.weight"].values @ groups
    found = logits(config, with_tensor(tensors, "blk.1.attn_v.bias", bias))
    expected = logits(config, with_tensor(tensors, "blk.1.attn_output.bias", behind))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - logits(config, tensors)).max() > 0.1


def test_tied_safetensors_ignore_a_head_of_their_own() -> None:
    """As transformers does: `tie_word_embeddings` decides."""
    config, tensors = load("qwen3", "hf")
    assert config.tied and "output.weight" not in tensors
    more = with_tensor(tensors, "output.weight", np.ones((config.vocab_size, config.hidden)))
    assert "output.weight" not in build(config, more, F32).leaves("weight")
    with pytest.raises(WeightError, match=r"^output\.weight: the tensor is missing, expected shape \[512, 64\]"):
        build(replace(config, tied=False), tensors, F32)


def test_layers_with_a_window_turn_by_the_local_rope() -> None:
    config, tensors = load("gemma3")
    graph = build(config, tensors, F32)
    assert set(graph.constants) == {"rope.global.inv_freq", "rope.local.inv_freq"}
    windows = [n["window"] for n in graph.nodes() if n.op == "attention"]
    turns = [n.inputs[0].inputs[-1].inputs[1].name for n in graph.nodes() if n.op == "attention"]
    assert windows == [16, 16, 16, 16, 16, None, 16]
    assert turns == [f"rope.{'global' if w is None else 'local'}.inv_freq" for w in windows]
    shared = build(replace(config, each=tuple(replace(x, window=None) for x in config.each)), tensors, F32)
    assert set(shared.constants) == {"rope.global.inv_freq"}


@pytest.mark.parametrize(("family", "norms"), [("gemma", 2 * 4 + 1), ("gemma2", 4 * 4 + 1), ("gemma3", 6 * 7 + 1)])
def test_the_norms_of_the_gemmas(family: str, norms: int) -> None:
    assert sum(n.op == "rms_norm" for n in build(*load(family), F32).nodes()) == norms
