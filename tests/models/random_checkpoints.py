"""Tiny checkpoints of every model type, sizes and weights drawn at random; names and shapes are the published ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MODEL_TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
)  # fmt: skip
_OFFSET = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")  # norms store w - 1
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def checkpoint(folder: Path, model_type: str, seed: int, **changes: Any) -> Config:
    """Writes `config.json` and `model.safetensors` of float32; returns the configuration, in which `changes` win."""
    rng = np.random.default_rng([seed, MODEL_TYPES.index(model_type)])
    config = {**draw_config(model_type, rng), **changes}
    tensors = {name: _values(name, shape, config, rng) for name, shape in shapes(config)}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config


# -- configurations ---------------------------------------------------------------------------------------------------


def draw_config(model_type: str, rng: np.random.Generator) -> Config:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    kv, layers, gemma = one_of(1, 2, 3), int(rng.integers(1, 4)), model_type.startswith("gemma")
    heads, head_dim = kv * one_of(1, 2, 4), one_of(16, 24, 32, 40)
    config: Config = {
        "model_type": model_type, "hidden_size": one_of(48, 64, 80, 96), "vocab_size": one_of(64, 67, 90),
        "num_hidden_layers": layers, "intermediate_size": one_of(40, 77, 96), "max_position_embeddings": 256,
        "rms_norm_eps": one_of(1e-6, 1e-4), "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": head_dim, "tie_word_embeddings": one_of(True, False), "sliding_window": one_of(4, 7, 20),
        "attention_bias": one_of(True, False) and model_type not in ("mistral", "mixtral", "qwen2"),
        "rope_parameters": _rope(one_of("default", "linear", "llama3", "yarn")),
        **({"hidden_activation": "gelu_pytorch_tanh"} if gemma else {"hidden_act": "silu"}),
    }  # fmt: skip
    kinds = (SLIDING, FULL) if gemma or model_type in ("qwen2", "qwen3") else (LINEAR, LINEAR, FULL)
    types = [one_of(*kinds) for _ in range(layers)]
    shared = one_of(*(n for n in range(layers) if set(types[: layers - n]) == set(types)))
    experts = int(rng.integers(3, 9))
    moe = {"num_experts": experts, "num_experts_per_tok": one_of(1, 2, 3), "moe_intermediate_size": one_of(16, 24, 36)}
    if model_type == "llama":
        return {**config, "mlp_bias": one_of(True, False), "sliding_window": None}
    if model_type == "mistral":
        return config
    if model_type == "mixtral":
        return {**config, "num_local_experts": experts, "num_experts_per_tok": 2}
    if model_type in ("qwen2", "qwen3"):
        return {**config, "use_sliding_window": True, "layer_types": types}
    if model_type == "qwen3_moe":
        norm, dense = one_of(True, False), [0] if layers > 1 else []
        slides = {"use_sliding_window": one_of(True, False)}
        return {**config, **moe, **slides, "norm_topk_prob": norm, "mlp_only_layers": dense}
    if model_type.startswith("qwen3_5"):
        keys, rope = one_of(1, 2), {"partial_rotary_factor": one_of(0.25, 0.5, 1.0), **_PLAIN_ROPE}
        config |= {
            "linear_num_key_heads": keys, "linear_num_value_heads": keys * one_of(1, 2, 3),
            "linear_key_head_dim": one_of(16, 32), "linear_value_head_dim": one_of(16, 32, 48),
            "linear_conv_kernel_dim": one_of(2, 4), "layer_types": types, "rope_parameters": rope,
        }  # fmt: skip
        return config if "moe" not in model_type else {**config, **moe, "shared_expert_intermediate_size": 24}
    if model_type == "gemma":
        return config
    config["layer_types"] = types
    if model_type == "gemma2":
        caps = {"attn_logit_softcapping": one_of(6.0, None), "final_logit_softcapping": one_of(8.0, None)}
        return {**config, **caps, "query_pre_attn_scalar": one_of(head_dim, 100)}
    config["rope_parameters"] = {FULL: config["rope_parameters"], SLIDING: {**_PLAIN_ROPE, "rope_theta": 100.0}}
    if model_type == "gemma3_text":
        return {**config, "query_pre_attn_scalar": one_of(head_dim, 100)}
    config |= {"num_kv_shared_layers": shared, "final_logit_softcapping": one_of(8.0, 30.0)}
    if model_type == "gemma3n_text":
        return {
            **config, "altup_num_inputs": one_of(2, 3, 4), "altup_correct_scale": one_of(True, False),
            "laurel_rank": 12, "hidden_size_per_layer_input": one_of(16, 20),
            "activation_sparsity_pattern": [one_of(0.0, 0.5, 0.9) for _ in types],
            "vocab_size_per_layer_input": config["vocab_size"] - one_of(0, 3),
        }  # fmt: skip
    types[-1] = FULL
    shared = shared if set(types[: layers - shared]) == set(types) else 0
    same, full = one_of(True, False), one_of(16, 32, 48)
    rope = {"rope_type": "proportional", "partial_rotary_factor": one_of(0.25, 0.5, 1.0), "rope_theta": 1e6}
    config |= {
        "attention_k_eq_v": same, "global_head_dim": full, "num_global_key_value_heads": 1 if same else None,
        "num_kv_shared_layers": shared, "use_double_wide_mlp": one_of(True, False),
        "rope_parameters": {**config["rope_parameters"], FULL: rope},
    }  # fmt: skip
    if model_type == "gemma4_unified_text":
        return config
    config |= {"hidden_size_per_layer_input": one_of(0, 20), "vocab_size_per_layer_input": config["vocab_size"]}
    mixed = {"enable_moe_block": True, "top_k_experts": moe.pop("num_experts_per_tok"), **moe}
    return {**config, **(mixed if one_of(True, False) else {})}


def _rope(kind: str) -> dict[str, Any]:
    found = {**_PLAIN_ROPE, "rope_type": kind}
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "llama3":
        return {**found, **scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        return {**found, **scaling, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
    return found if kind == "default" else {**found, "factor": 2.0}


# -- tensors ----------------------------------------------------------------------------------------------------------


def shapes(config: Config) -> Shapes:
    """Names and shapes of all tensors."""
    hidden, vocab, kind = config["hidden_size"], config["vocab_size"], config["model_type"]
    extra, layers = config.get("hidden_size_per_layer_input", 0), config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    if extra:
        yield "model.embed_tokens_per_layer.weight", (config["vocab_size_per_layer_input"], layers * extra)
        yield "model.per_layer_model_projection.weight", (layers * extra, hidden)
        yield "model.per_layer_projection_norm.weight", (extra,)
    for i in range(config.get("altup_num_inputs", 1) - 1):
        yield f"model.altup_projections.{i}.weight", (hidden, hidden)
        yield f"model.altup_unembed_projections.{i}.weight", (hidden, hidden)
    for i in range(layers):
        recurrent = config.get("layer_types", [FULL] * layers)[i] == LINEAR
        parts = [_norms(config), _delta(config) if recurrent else _attention(config, i), _feed_forward(config, i)]
        parts += [_per_layer(config)] if extra else []
        parts += [_altup(config)] if kind == "gemma3n_text" else []
        yield from ((f"model.layers.{i}.{name}", shape) for part in parts for name, shape in part)


def _norms(config: Config) -> Shapes:
    kind = config["model_type"]
    names = ["input_layernorm", "post_attention_layernorm"]
    if kind.startswith("gemma") and kind != "gemma":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if config.get("enable_moe_block"):
        names += [f"{where}_feedforward_layernorm_{n}" for where, n in (("pre", 2), ("post", 1), ("post", 2))]
    yield from ((f"{name}.weight", (config["hidden_size"],)) for name in names)
    if kind.startswith("gemma4"):
        yield "layer_scalar", (1,)


def _attention(config: Config, layer: int) -> Shapes:
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    size, kv, same = config["head_dim"], config["num_key_value_heads"], False
    if kind.startswith("gemma4") and config["layer_types"][layer] == FULL:
        size, same = config["global_head_dim"], config["attention_k_eq_v"]
        kv = config["num_global_key_value_heads"] or kv
    shared = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    rows = {"q": heads * size * (2 if kind.startswith("qwen3_5") else 1), "k": kv * size, "v": kv * size}
    rows = {part: n for part, n in rows.items() if part == "q" or not (shared or (same and part == "v"))}
    yield "self_attn.o_proj.weight", (hidden, heads * size)
    if config["attention_bias"]:
        yield "self_attn.o_proj.bias", (hidden,)
    for part, n in rows.items():
        yield f"self_attn.{part}_proj.weight", (n, hidden)
        if config["attention_bias"] or kind == "qwen2":
            yield f"self_attn.{part}_proj.bias", (n,)
        if part != "v" and kind.startswith(("qwen3", "gemma3", "gemma4")):
            yield f"self_attn.{part}_norm.weight", (size,)


def _delta(config: Config) -> Shapes:
    hidden, heads, dim = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * dim
    width = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    for name, rows in (("qkv", width), ("z", values), ("a", heads), ("b", heads)):
        yield f"linear_attn.in_proj_{name}.weight", (rows, hidden)
    yield "linear_attn.conv1d.weight", (width, 1, config["linear_conv_kernel_dim"])
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (dim,)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _feed_forward(config: Config, layer: int) -> Shapes:
    kind, hidden = config["model_type"], config["hidden_size"]
    count, ffn = config.get("num_experts", 0), config.get("moe_intermediate_size", 0)
    shared = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    wide = config["intermediate_size"] * (2 if shared and config.get("use_double_wide_mlp") else 1)
    if kind == "mixtral":
        yield from _one_by_one("block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"], wide, hidden)
    elif kind == "qwen3_moe" and layer not in config["mlp_only_layers"]:
        yield from _one_by_one("mlp", ("gate_proj", "up_proj", "down_proj"), count, ffn, hidden)
    elif kind == "qwen3_5_moe_text":
        yield "mlp.gate.weight", (count, hidden)
        yield "mlp.shared_expert_gate.weight", (1, hidden)
        yield from _mlp("mlp.shared_expert", config["shared_expert_intermediate_size"], hidden)
        yield "mlp.experts.gate_up_proj", (count, 2 * ffn, hidden)
        yield "mlp.experts.down_proj", (count, hidden, ffn)
    else:
        yield from _mlp("mlp", wide, hidden, bias=config.get("mlp_bias", False))
    if config.get("enable_moe_block"):
        yield "router.proj.weight", (count, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (count,)
        yield "experts.gate_up_proj", (count, 2 * ffn, hidden)
        yield "experts.down_proj", (count, hidden, ffn)


def _one_by_one(at: str, names: tuple[str, str, str], count: int, ffn: int, hidden: int) -> Shapes:
    yield f"{at}.gate.weight", (count, hidden)
    for expert in range(count):
        for name, shape in zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
            yield f"{at}.experts.{expert}.{name}.weight", shape


def _mlp(at: str, ffn: int, hidden: int, *, bias: bool = False) -> Shapes:
    for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        yield f"{at}.{name}_proj.weight", (rows, columns)
        if bias:
            yield f"{at}.{name}_proj.bias", (rows,)


def _per_layer(config: Config) -> Shapes:
    hidden, extra = config["hidden_size"], config["hidden_size_per_layer_input"]
    yield "per_layer_input_gate.weight", (extra, hidden)
    yield "per_layer_projection.weight", (hidden, extra)
    yield "post_per_layer_input_norm.weight", (hidden,)


def _altup(config: Config) -> Shapes:
    hidden, rank, streams = config["hidden_size"], config["laurel_rank"], config["altup_num_inputs"]
    yield "laurel.linear_left.weight", (rank, hidden)
    yield "laurel.linear_right.weight", (hidden, rank)
    yield "laurel.post_laurel_norm.weight", (hidden,)
    yield "altup.correction_coefs.weight", (streams, streams)
    yield "altup.prediction_coefs.weight", (streams**2, streams)
    yield "altup.modality_router.weight", (streams, hidden)
    yield "altup.router_norm.weight", (hidden,)
    yield "altup.correct_output_scale", (hidden,)


def _values(name: str, shape: tuple[int, ...], config: Config, rng: np.random.Generator) -> np.ndarray:
    """Weights that keep every activation near 1, and none at the value at which it would not matter."""
    x = rng.standard_normal(shape)
    kind = config["model_type"]
    if "norm" in name:
        offset = kind in _OFFSET and "linear_attn" not in name
        x = 0.2 * x + (0.0 if offset else 0.6 if "self_attn" in name and "gemma" in kind else 1.0)
    elif name.endswith(("scale", "scalar")):
        x = 1 + 0.2 * x
    elif "dt_bias" in name:
        x = x - 2
    elif "coefs" in name:
        x = 0.1 * x
    elif "router.proj" in name:
        x = 3 * x
    elif not name.endswith(("bias", "A_log", "per_layer.weight")):
        x = x * shape[-1] ** -0.5
    return (x * (0.3 if name.endswith("bias") else 1)).astype(np.float32)
