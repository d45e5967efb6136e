"""Drafters of the golden Gemma 4 checkpoint with random weights, and their equations in float64 (the published
implementation in transformers, `gemma4_assistant`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

WIDTH, HIDDEN, HEADS, FFN, VOCAB, WINDOW, EPS = 64, 32, 4, 48, 512, 16, 1e-6
KINDS = ("sliding", "sliding", "full")
SIZES, BASES = {"sliding": 32, "full": 64}, {"sliding": 10_000.0, "full": 1_000_000.0}
TURNED = {"sliding": 1.0, "full": 0.25}  # the share of a head's pairs that turn
CLUSTERS, USED = 32, 5
TEXT = {
    "model_type": "gemma4_text", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": SIZES["sliding"], "global_head_dim": SIZES["full"], "num_global_key_value_heads": 1,
    "intermediate_size": FFN, "num_hidden_layers": len(KINDS), "num_kv_shared_layers": len(KINDS), "vocab_size": VOCAB,
    "layer_types": [f"{kind}_attention" for kind in KINDS], "sliding_window": WINDOW, "rms_norm_eps": EPS,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 1024, "attention_k_eq_v": True,
    "enable_moe_block": False, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": BASES["sliding"]},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": BASES["full"], "partial_rotary_factor": TURNED["full"],
        },
    },
}  # fmt: skip


def random_drafter(*, ordered: bool = False) -> Weights:
    rng = np.random.default_rng(11)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "pre_projection": (HIDDEN, 2 * WIDTH),
        "post_projection": (WIDTH, HIDDEN),
    }  # fmt: skip
    for number, kind in enumerate(KINDS):
        begin, size = f"model.layers.{number}.", HEADS * SIZES[kind]
        shapes |= {
            f"{begin}self_attn.q_proj": (size, HIDDEN), f"{begin}self_attn.o_proj": (HIDDEN, size),
            f"{begin}self_attn.q_norm": (SIZES[kind],), f"{begin}layer_scalar": (1,),
            f"{begin}mlp.gate_proj": (FFN, HIDDEN), f"{begin}mlp.up_proj": (FFN, HIDDEN),
            f"{begin}mlp.down_proj": (HIDDEN, FFN),
            **{f"{begin}{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention", "pre_feedforward")},
            f"{begin}post_feedforward_layernorm": (HIDDEN,),
        }  # fmt: skip
    if ordered:
        shapes["masked_embedding.centroids"] = (CLUSTERS, HIDDEN)
    made = {n: (rng.standard_normal(s) * (0.3 if len(s) > 1 else 1)).astype(np.float32) for n, s in shapes.items()}
    if ordered:
        made["masked_embedding.token_ordering"] = rng.permutation(VOCAB).astype(np.int64)
    return made


def write(drafter: Mapping[str, Array], folder: Path, **config: Any) -> Path:
    folder.mkdir()
    whole = ("layer_scalar", "token_ordering")
    save_file({n if n.endswith(whole) else f"{n}.weight": w for n, w in drafter.items()}, folder / "model.safetensors")
    ordered = "masked_embedding.centroids" in drafter
    own = {"use_ordered_embeddings": ordered, "num_centroids": CLUSTERS, "centroid_intermediate_top_k": USED}
    text = {"model_type": "gemma4_assistant", "backbone_hidden_size": WIDTH, "text_config": TEXT, **own, **config}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turned(x: Array, kind: str, position: int) -> Array:
    """Rotary embedding of x [heads, size] in halves; the last pairs do not turn where only a share does."""
    size = x.shape[-1]
    frequencies = BASES[kind] ** (-np.arange(0, size, 2) / size)
    frequencies[int(TURNED[kind] * size / 2) :] = 0
    a, b = x[:, : size // 2], x[:, size // 2 :]
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def step(
    w: Mapping[str, Array], embedded: Array, hidden: Array, caches: Mapping[str, tuple[Array, Array]], position: int
) -> tuple[int, Array]:
    """A draft, and the hidden state for the next one.

    Args:
        embedded: of the token, with the model's factor.
        caches: keys and values of each kind, [heads, positions, size], the last of which is that before the token.
    """
    x = w["pre_projection"] @ np.concatenate([embedded, hidden])
    for number, kind in enumerate(KINDS):
        own = {n.split(".", 3)[3]: v for n, v in w.items() if n.startswith(f"model.layers.{number}.")}
        y = normed(x, own["input_layernorm"])
        q = normed((own["self_attn.q_proj"] @ y).reshape(HEADS, -1), own["self_attn.q_norm"])
        keys, values = caches[kind]
        if kind == "sliding":  # the distance to the last key is at most the window
            keys, values = keys[:, -WINDOW - 1 :], values[:, -WINDOW - 1 :]
        keys, values = (np.repeat(each, HEADS // len(each), 0) for each in (keys, values))
        scores = np.einsum("hd,htd->ht", turned(q, kind, position), keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        seen = np.einsum("ht,htd->hd", weights / weights.sum(-1, keepdims=True), values)
        x = x + normed(own["self_attn.o_proj"] @ seen.reshape(-1), own["post_attention_layernorm"])
        z = normed(x, own["pre_feedforward_layernorm"])
        z = own["mlp.down_proj"] @ (gelu(own["mlp.gate_proj"] @ z) * (own["mlp.up_proj"] @ z))
        x = (x + normed(z, own["post_feedforward_layernorm"])) * own["layer_scalar"]
    x = normed(x, w["model.norm"])
    logits = w["model.embed_tokens"] @ x
    if "masked_embedding.centroids" in w:
        best = np.argsort(-(w["masked_embedding.centroids"] @ x))[:USED]
        among = w["masked_embedding.token_ordering"].reshape(CLUSTERS, -1)[best].reshape(-1)
        return int(among[logits[among].argmax()]), w["post_projection"] @ x
    return int(logits.argmax()), w["post_projection"] @ x
