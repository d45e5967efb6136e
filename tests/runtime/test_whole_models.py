"""Toy models of every family, compiled, against the interpreter in float64: awkward shapes, chunks, every level. The
newer families are built from configurations by the models stage.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import toy

from rlx import models
from rlx.backends.cpu.target import Target, supported_levels
from rlx.compiler.executable import compile
from rlx.errors import WeightError
from rlx.ir import interp
from rlx.ir.dims import value
from rlx.ir.dtypes import F32
from rlx.ir.graph import Graph
from rlx.store.cache import CompileCache

LEVELS = supported_levels()
# Largest error of a logit as a share of the largest: float32 through two layers.
CEILING = 1e-5
SHAPES = {
    "one kv head": {"heads": 5, "kv_heads": 1, "head_dim": 16},
    "as many kv heads as heads": {"heads": 3, "kv_heads": 3, "head_dim": 48},
    "head dims of no whole vector": {"heads": 6, "kv_heads": 2, "head_dim": 20, "rotated": 12},
    "narrow and odd": {"width": 40, "hidden": 52, "vocab": 77, "heads": 2, "kv_heads": 1, "head_dim": 24},
    "wide heads": {"heads": 2, "kv_heads": 1, "head_dim": 256},
}


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(capacity=256, policy="off")


#: Gemma has head norms, windows and caps, Llama the other rope; what is left of the others are biases.
AWKWARD = [(("llama", "gemma")[i % 2], shape) for i, shape in enumerate(SHAPES)]
AWKWARD += [("gemma", "head dims of no whole vector"), ("qwen2", "narrow and odd"), ("qwen3", "one kv head")]


@pytest.mark.parametrize(("family", "shape"), AWKWARD)
def test_awkward_shapes_in_chunks(family: str, shape: str, cache: CompileCache) -> None:
    check(toy.FAMILIES[family].but(dtype=F32, cache=F32, **SHAPES[shape]), "native", cache)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_every_level(level: str, cache: CompileCache) -> None:
    """The families take turns; the tests above are on the widest level."""
    family = ("llama", "gemma")[LEVELS.index(level) % 2]
    check(toy.FAMILIES[family].but(dtype=F32, cache=F32), level, cache)


def check(model: toy.Toy, level: str, cache: CompileCache) -> None:
    graph = toy.build(model)
    arrays, _ = toy.feeds(graph, seq=21, ctx=32)
    compare(graph, {name: arrays[name] for name in graph.leaves("weight") if name in arrays}, level, cache)


def compare(graph: Graph, weights: dict[str, np.ndarray], level: str, cache: CompileCache) -> None:
    """Chunks of 1, 7 and 9 rows against one pass over all of them."""
    env = {"SEQ": 21, "PAST_SEQ": 0, "CTX": 32, "WINDOW_CTX": 64}
    vocab = graph.outputs["logits"].shape[1]
    tokens = np.random.default_rng(3).integers(0, int(str(vocab)), 21).astype(np.int32)
    rows = {"tokens": tokens, "positions": np.arange(21, dtype=np.int32)}
    weights = {name: values.astype(np.float32) for name, values in weights.items()}
    states = {n: np.zeros([value(d, env) for d in s.shape]) for n, s in graph.leaves("state").items()}
    want, _ = interp.run(graph, {**rows, **weights, **states}, env, dtype=np.float64)
    sizes = {name: env[name] for name in ("CTX", "WINDOW_CTX") if name in graph.symbols}
    got, at = [], 0
    with compile(graph, {**sizes, **weights}, target=Target.host(level), threads=2, cache=cache) as exe:
        for count in (7, 1, 9, 1, 1, 2):
            part = {n: each[at : at + count] for n, each in rows.items()}
            got.append(exe(**part, PAST_SEQ=at)["logits"])
            at += count
    error = np.abs(np.concatenate(got) - want["logits"]).max()
    assert error <= CEILING * np.abs(want["logits"]).max()


# -- newer families ---------------------------------------------------------------------------------------------------

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": 77, "hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 20, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
_QWEN35: dict[str, Any] = {
    **_COMMON, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_value_head_dim": 16, "layer_types": [LINEAR, FULL, LINEAR],
    "num_hidden_layers": 3, "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    **_COMMON, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5, "tie_word_embeddings": True,
    "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4, "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "experts of an odd width, and a dense layer": {
        **_COMMON, "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": False,
    },
    "every expert is used": {
        **_COMMON, "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 3,
        "sliding_window": 4,
    },
    "three value heads a key head": {**_QWEN35, "model_type": "qwen3_5_text"},
    "one of everything": {
        **_QWEN35, "model_type": "qwen3_5_text", "linear_num_key_heads": 1, "linear_num_value_heads": 1,
        "linear_key_head_dim": 16, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 2,
    },
    "experts in a hybrid": {
        **_QWEN35, "model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 28, "shared_expert_intermediate_size": 36, "tie_word_embeddings": False,
    },
    "streams": {
        **_GEMMA, "model_type": "gemma3n_text", "altup_num_inputs": 3, "final_logit_softcapping": 20.0,
        "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
    },
    "heads of two sizes": {**_GEMMA, "model_type": "gemma4_text", "global_head_dim": 40, "use_double_wide_mlp": True},
    "keys as values": {
        **_GEMMA, "model_type": "gemma4_text", "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "global_head_dim": 24, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12,
    },
}  # fmt: skip


class Drawn:
    """Random weights of the shapes that a builder asks for: it says which tensor is missing."""

    def __init__(self, config: models.ModelConfig) -> None:
        self.rng, self.arrays = np.random.default_rng(0), dict[str, np.ndarray]()
        self.draw("per_layer_token_embd.weight", (config.vocab_size, config.layers * max(config.per_layer, 1)))
        if not config.per_layer:
            self.arrays.clear()
        for layer in range(config.layers):
            self.draw(f"blk.{layer}.laurel_l.weight", (12, config.hidden))

    def graph(self, config: models.ModelConfig) -> Graph:
        while True:
            try:
                return models.build(config, self, F32)
            except WeightError as error:
                assert error.where is not None and "the tensor is missing" in error.what
                sizes = re.findall(r"\d+", error.what)
                self.draw(str(error.where), tuple(int(size) for size in sizes))

    def draw(self, name: str, shape: tuple[int, ...]) -> None:
        x = self.rng.standard_normal(shape)
        if name.endswith("ssm_a"):
            x = -np.exp(x)
        elif len(shape) == 1:
            x = 1 + 0.2 * x
        elif "token_embd" not in name:
            x = x * shape[-1] ** -0.5
        self.arrays[name] = x.astype(np.float32)

    def has(self, name: str) -> bool:
        return name in self.arrays

    def info(self, name: str) -> Any:
        return SimpleNamespace(dtype=F32, shape=self.arrays[name].shape)

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]


def check_config(values: dict[str, Any], level: str, cache: CompileCache) -> None:
    config = models.from_hf(values)
    drawn = Drawn(config)
    graph = drawn.graph(config)
    names = graph.leaves("weight").keys() - graph.constants.keys()
    compare(graph, {name: drawn.arrays[name] for name in names}, level, cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_newer_families_in_awkward_shapes(name: str, cache: CompileCache) -> None:
    check_config(CONFIGS[name], "native", cache)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_newer_families_on_every_level(level: str, cache: CompileCache) -> None:
    """They take turns; the tests above are on the widest level."""
    check_config(CONFIGS[("streams", "experts in a hybrid")[LEVELS.index(level) % 2]], level, cache)
