"""EAGLE-3 heads of the golden llama checkpoint: random ones and one that is right, in both published layouts, and their
equations in float64 (arXiv 2503.01840).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

HIDDEN, HEADS, KV_HEADS, SIZE, FFN, VOCAB, BASE, EPS = 64, 4, 2, 32, 96, 512, 10_000.0, 1e-5
LAYERS = (1, 2, 4)  # of the model, whose inputs a head reads; the last one stands for what the last layer returns
SHAPES = {
    "fc": (HIDDEN, 3 * HIDDEN),
    "norm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * SIZE, 2 * HIDDEN),
    "self_attn.k_proj": (KV_HEADS * SIZE, 2 * HIDDEN),
    "self_attn.v_proj": (KV_HEADS * SIZE, 2 * HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "hidden_norm": (HIDDEN,),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "intermediate_size": FFN, "num_hidden_layers": 1,
    "vocab_size": VOCAB, "rms_norm_eps": EPS, "rope_theta": BASE, "max_position_embeddings": 1024, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- checkpoints


def model(goldens: Path, folder: Path, *, layers: bool = True, tied: bool = False) -> Path:
    """The golden checkpoint with plain rope and, unless it is tied, an output matrix of its own.

    Without layers, the next token depends on the last one only.
    """
    shutil.copytree(goldens / "llama" / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": tied, "rope_parameters": {"rope_type": "default", "rope_theta": BASE}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(12)
    if not tied:
        weights["lm_head.weight"] = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    for name in [name for name in weights if not layers and name.endswith(("o_proj.weight", "down_proj.weight"))]:
        weights[name] = np.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors")
    return folder


def random_head(drafted: int = 100, seed: int = 6) -> Weights:
    """Random weights; the tokens that it drafts are any of the model's, in order."""
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal(shape) * (0.2 if len(shape) > 1 else 1.0) for name, shape in SHAPES.items()}
    made["lm_head"] = rng.standard_normal((drafted, HIDDEN))
    made = {name: value.astype(np.float32) for name, value in made.items()}
    return made | labels(np.sort(rng.permutation(VOCAB)[:drafted]))


def labels(tokens: Array) -> Weights:
    """The two tables of a head that drafts these tokens."""
    return {"d2t": (tokens - np.arange(len(tokens))).astype(np.int64), "t2d": np.isin(np.arange(VOCAB), tokens)}


def right_head(folder: Path) -> Weights:
    """The head of a model without layers that is always right, with `norm_before_residual`.

    Attention of each token looks at the token itself, whose embedding goes through the last norm to the model's matrix.
    Nothing else is left: the norm of the hidden states is 0.
    """
    weights = load_file(folder / "model.safetensors")
    table, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    made = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    eye = np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)
    made["self_attn.v_proj"] = eye
    made["self_attn.k_proj"] = 30 * eye
    made["self_attn.q_proj"] = np.repeat((30 * eye).reshape(KV_HEADS, SIZE, -1), HEADS // KV_HEADS, 0).reshape(-1, 128)
    take = np.zeros((HEADS, SIZE, HIDDEN), np.float32)
    for head in range(KV_HEADS):
        take[head * HEADS // KV_HEADS, :, head * SIZE : (head + 1) * SIZE] = np.eye(SIZE)
    made["self_attn.o_proj"] = take.reshape(-1, HIDDEN).T.copy()
    made["input_layernorm"] += 1
    made["norm"] = weights["model.norm.weight"]
    likeliest = np.unique((normed(table.astype(np.float64), made["norm"]) @ output.T).argmax(-1))
    return made | {"lm_head": output[likeliest]} | labels(likeliest)


def write(head: Mapping[str, Array], folder: Path, *, speculators: bool = False, **config: Any) -> Path:
    """The folder of a head as its authors publish them, or in the layout of speculators.

    Args:
        config: further keys.
    """
    folder.mkdir()
    layer, drafted = "layers.0." if speculators else "midlayer.", {"draft_vocab_size": len(head["lm_head"])}
    tensors = {
        f"{layer * name.startswith(('self_attn', 'mlp', 'hidden', 'input_l', 'post'))}{name}"
        f"{'.weight' * (name not in ('d2t', 't2d'))}": np.ascontiguousarray(value)
        for name, value in head.items()
    }
    save_file(tensors, folder / "model.safetensors")
    if speculators:
        own = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [*LAYERS]}
        text = {**own, "transformer_layer_config": CONFIG, **drafted, **config}
    else:
        own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]}}
        text = {**CONFIG, **own, **drafted, **config}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


# --------------------------------------------------------------------------------------------------------- equations


def normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turned(x: Array) -> Array:
    """Rotary embedding of x [n, heads, size] at positions 0 to n - 1, in halves."""
    angles = np.arange(len(x))[:, None, None] * BASE ** (-np.arange(0, SIZE, 2) / SIZE)
    a, b = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def layer(w: Mapping[str, Array], x: Array, y: Array) -> Array:
    """A decoder layer over the residual stream x [n, HIDDEN], whose attention reads y."""
    n = len(x)
    q, k, v = ((y @ w[f"self_attn.{name}_proj"].T).reshape(n, -1, SIZE) for name in "qkv")
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (turned(k), v))
    scores = np.einsum("ihd,jhd->hij", turned(q), k) / np.sqrt(SIZE)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    seen = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
    x = x + seen.reshape(n, -1) @ w["self_attn.o_proj"].T
    z = normed(x, w["post_attention_layernorm"])
    gate = z @ w["mlp.gate_proj"].T
    return x + (gate / (1 + np.exp(-gate)) * (z @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def read_by_head(folder: Path, ids: Sequence[int]) -> Array:
    """What a head reads of the model for each token, side by side: float64 [n, 3 * HIDDEN]."""
    weights = {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}
    x, entering = weights["model.embed_tokens.weight"][[*ids]], []
    for number in range(max(LAYERS)):
        entering.append(x)
        begin = f"model.layers.{number}."
        own = {n.removeprefix(begin).removesuffix(".weight"): w for n, w in weights.items() if n.startswith(begin)}
        x = layer(own, x, normed(x, own["input_layernorm"]))
    return np.concatenate([[*entering, x][number] for number in LAYERS], -1)


def head_states(
    w: Mapping[str, Array],
    table: Array,
    tokens: Sequence[int],
    read: Array,
    own: Sequence[Array] = (),
    **switches: bool,
) -> Array:
    """What the head computes for each token, of what it reads of the rows before them and then of its own states."""
    wide = read
    if switches.get("norm_before_fc"):
        wide = normed(wide, w["input_norm"])
    if switches.get("fc_norm"):
        wide = np.concatenate([normed(part, w[f"fc_norm.{i}"]) for i, part in enumerate(np.split(wide, 3, -1))], -1)
    x = np.concatenate([wide @ w["fc"].T, *(state[None] for state in own)])
    y = normed(x, w["hidden_norm"])
    joined = np.concatenate([normed(table[[*tokens]], w["input_layernorm"]), y], -1)
    x = layer(w, y if switches.get("norm_before_residual") else x, joined)
    return normed(x, w["norm"]) if switches.get("norm_output") else x


def draft(w: Mapping[str, Array], state: Array, **switches: bool) -> int:
    """The token that the head drafts from its state."""
    logits = w["lm_head"] @ (state if switches.get("norm_output") else normed(state, w["norm"]))
    return int(logits.argmax() + w["d2t"][logits.argmax()])
