"""Mistral and Mixtral as checkpoints in both spellings of experts and as GGUF, against equations in NumPy, float64."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from golden_files import logits_of, write_gguf
from safetensors.numpy import save_file

Array = np.ndarray
WIDTH, HEADS, KV, SIZE, FFN, EXPERTS, LAYERS, VOCAB = 32, 4, 2, 8, 24, 5, 2, 64
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 11).astype(np.int32)
CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": FFN,
    "max_position_embeddings": 128, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": VOCAB,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip


def made(experts: bool = True) -> dict[str, Array]:
    """Random weights, in the orders of a checkpoint; experts as stacks."""
    rng = np.random.default_rng(7)

    def matrix(*shape: int) -> Array:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm() -> Array:
        return rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)

    found = {"embed": matrix(VOCAB, WIDTH) * 4, "norm": norm(), "head": matrix(VOCAB, WIDTH) * 4}
    stack = (EXPERTS,) if experts else ()
    for i in range(LAYERS):
        found |= {f"{i}.attn_norm": norm(), f"{i}.ffn_norm": norm()}
        found |= {f"{i}.q": matrix(HEADS * SIZE, WIDTH) * 3, f"{i}.k": matrix(KV * SIZE, WIDTH) * 3}
        found |= {f"{i}.v": matrix(KV * SIZE, WIDTH), f"{i}.o": matrix(WIDTH, HEADS * SIZE)}
        found |= {f"{i}.gate": matrix(*stack, FFN, WIDTH), f"{i}.up": matrix(*stack, FFN, WIDTH)}
        found |= {f"{i}.down": matrix(*stack, WIDTH, FFN), f"{i}.router": matrix(EXPERTS, WIDTH) * 3}
    return found


# -- the equations ----------------------------------------------------------------------------------------------------


def reference(
    w: dict[str, Array], window: int | None = None, normalize: bool = True, scale: float = 1.0, theta: float = 1e6
) -> Array:
    """Logits [len(TOKENS), VOCAB] of Mixtral (arXiv 2401.04088), one token and one expert after the other."""
    w = {name: values.astype(np.float64) for name, values in w.items()}
    x = w["embed"][TOKENS]
    for i in range(LAYERS):
        x = x + attention({n: w[f"{i}.{n}"] for n in "qkvo"}, rms(x, w[f"{i}.attn_norm"]), window, theta)
        y = rms(x, w[f"{i}.ffn_norm"])
        parts = [w[f"{i}.{n}"] for n in ("gate", "up", "down")]
        if parts[0].ndim == 2:
            x = x + np.stack([expert(row, *parts) for row in y])
            continue
        x = x + np.stack([routed(row, w[f"{i}.router"], parts, normalize, scale) for row in y])
    return rms(x, w["norm"]) @ w["head"].T


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def routed(x: Array, router: Array, parts: list[Array], normalize: bool, scale: float) -> Array:
    scores = router @ x
    p = np.exp(scores - scores.max())
    p /= p.sum()
    chosen = sorted(range(EXPERTS), key=lambda e: -p[e])[:2]
    total = sum(p[e] for e in chosen) if normalize else 1.0
    return sum(scale * p[e] / total * expert(x, *(part[e] for part in parts)) for e in chosen)


def expert(x: Array, gate: Array, up: Array, down: Array) -> Array:
    g = gate @ x
    return down @ (g / (1 + np.exp(-g)) * (up @ x))


def attention(w: dict[str, Array], x: Array, window: int | None, theta: float) -> Array:
    count = len(x)
    q, k = (turned((x @ w[n].T).reshape(count, -1, SIZE), theta) for n in "qk")
    v = (x @ w["v"].T).reshape(count, -1, SIZE)
    out = np.zeros((count, HEADS, SIZE))
    for t in range(count):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(HEADS):
            scores = k[first : t + 1, h * KV // HEADS] @ q[t, h] / SIZE**0.5
            p = np.exp(scores - scores.max())
            out[t, h] = p / p.sum() @ v[first : t + 1, h * KV // HEADS]
    return out.reshape(count, -1) @ w["o"].T


def turned(x: Array, theta: float) -> Array:
    """Halves of a head as real and imaginary parts, turned by position times theta^(-2i/SIZE)."""
    angle = np.arange(len(x))[:, None] * theta ** (-2 * np.arange(SIZE // 2) / SIZE)
    z = (x[..., : SIZE // 2] + 1j * x[..., SIZE // 2 :]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


# -- the files --------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, w: dict[str, Array], spelling: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    tensors = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"], "lm_head.weight": w["head"]}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}self_attn.{n}_proj.weight": w[f"{i}.{n}"] for n in "qkvo"}
        tensors[f"{layer}input_layernorm.weight"] = w[f"{i}.attn_norm"]
        tensors[f"{layer}post_attention_layernorm.weight"] = w[f"{i}.ffn_norm"]
        tensors |= {layer + name: values for name, values in SPELLINGS[spelling](w, i)}
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def one_by_one(w: dict[str, Array], i: int) -> Iterable[tuple[str, Array]]:
    yield "block_sparse_moe.gate.weight", w[f"{i}.router"]
    for e in range(EXPERTS):
        for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            yield f"block_sparse_moe.experts.{e}.{name}.weight", w[f"{i}.{part}"][e]


def fused(w: dict[str, Array], i: int) -> Iterable[tuple[str, Array]]:
    yield "mlp.gate.weight", w[f"{i}.router"]
    yield "mlp.experts.gate_up_proj", np.concatenate([w[f"{i}.gate"], w[f"{i}.up"]], 1)
    yield "mlp.experts.down_proj", w[f"{i}.down"]


def dense(w: dict[str, Array], i: int) -> Iterable[tuple[str, Array]]:
    yield from ((f"mlp.{name}_proj.weight", w[f"{i}.{name}"]) for name in ("gate", "up", "down"))


SPELLINGS = {"one by one": one_by_one, "fused": fused, "dense": dense}


def gguf(path: Path, w: dict[str, Array], **keys: Any) -> Path:
    """The model as converters write it: rows of q and k in the order in which neighbours turn together."""
    sizes = {
        "context_length": 128, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "rope.dimension_count": SIZE, "vocab_size": VOCAB,
        "expert_count": EXPERTS, "expert_used_count": 2, "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    values = {f"llama.{name.replace('__', '.')}": value for name, value in {**sizes, **keys}.items()}
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    metadata: dict[str, Any] = {name: (value, [kinds[type(value)]]) for name, value in values.items()}
    tensors = {"token_embd.weight": w["embed"], "output_norm.weight": w["norm"], "output.weight": w["head"]}
    names = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps", "router": "ffn_gate_inp"}
    names |= {"v": "attn_v", "o": "attn_output", "attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}.weight": w[f"{i}.{part}"] for part, name in names.items()}
        for n in "qk":
            rows = w[f"{i}.{n}"].reshape(-1, 2, SIZE // 2, WIDTH).swapaxes(1, 2).reshape(-1, WIDTH)
            tensors[f"blk.{i}.attn_{n}.weight"] = rows
    return write_gguf(path, {"general.architecture": ("llama", []), **metadata}, tensors)


def assert_close(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["one by one", "fused"])
def test_a_checkpoint_of_mixtral(tmp_path: Path, spelling: str) -> None:
    w = made()
    assert_close(logits_of(checkpoint(tmp_path, w, spelling), TOKENS), reference(w))


def test_a_gguf_file_of_mixtral(tmp_path: Path) -> None:
    w = made()
    assert_close(logits_of(gguf(tmp_path / "m.gguf", w), TOKENS), reference(w))
    scaled = gguf(tmp_path / "s.gguf", w, expert_weights_scale=2.5)
    assert_close(logits_of(scaled, TOKENS), reference(w, scale=2.5))


@pytest.mark.parametrize("window", [None, 3, 4096])
def test_a_checkpoint_of_mistral(tmp_path: Path, window: int | None) -> None:
    """As published, version 0.1 has a window on all layers, later ones have none."""
    w = made(experts=False)
    changes = {"model_type": "mistral", "sliding_window": window, "num_local_experts": None}
    found = logits_of(checkpoint(tmp_path, w, "dense", **changes), TOKENS)
    assert_close(found, reference(w, window))
    assert (np.abs(found - reference(w)).max() > 0.1) == (window == 3)
