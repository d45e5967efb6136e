"""The sizes of published models by name, and the tensors and metadata of their GGUF files.

Part of the models stage. `rlx compile --shape NAME` compiles for one without its weights; `benchmarks/make_model.py`
writes files of them with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: number of experts, number used per token, and width of one."""

    count: int
    used: int
    ffn: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Layers with a gated delta rule: key and value heads, their size, and the taps of the convolution."""

    key_heads: int
    value_heads: int
    dim: int
    taps: int = 4

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def values(self) -> int:
        return self.value_heads * self.dim


@dataclass(frozen=True, slots=True)
class Shared:
    """Additions of gemma4: layers that share keys and values and are twice as wide, another head size for windowed
    layers, per-layer embeddings, a cap on the logits.
    """

    layers: int
    local_head_dim: int
    per_layer: int
    cap: float = 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model.

    `rope_factor` is llama's frequency divisor or gemma3's linear position scale. In models that mix two kinds of
    layers, the last of every `period` layers has full attention; the others have a window (gemma4) or a delta rule
    (qwen35).
    """

    arch: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float = 1e6
    eps: float = 1e-6
    tied: bool = True
    window: int = 0
    rope_factor: float = 0.0
    period: int = 0
    experts: Experts | None = None
    delta: Delta | None = None
    shared: Shared | None = None

    def full(self, layer: int) -> bool:
        """Whether a layer has full attention in a model that mixes two kinds of layers."""
        return not self.period or (layer + 1) % self.period == 0

    def shares(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of an earlier one."""
        return self.shared is not None and layer >= self.layers - self.shared.layers


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960),
    "qwen3-1.7b": Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, tied=False),
    "qwen3-14b": Shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, 40960, tied=False),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, tied=False, experts=Experts(128, 8, 768)
    ),
    # The same with fewer layers and experts: a token reads as much of a layer as in the whole model.
    "qwen3-30b-a3b-cut": Shape(
        "qwen3moe", 2048, 6144, 8, 32, 4, 128, 151936, 40960, tied=False, experts=Experts(32, 8, 768)
    ),
    "qwen3.5-0.8b": Shape("qwen35", 1024, 3584, 24, 8, 2, 256, 248320, 262144, 1e7, period=4, delta=Delta(16, 16, 128)),
    "qwen3.5-2b": Shape("qwen35", 2048, 6144, 24, 8, 2, 256, 248320, 262144, 1e7, period=4, delta=Delta(16, 16, 128)),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5, rope_factor=32.0),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, 131072, 5e5, 1e-5, rope_factor=32.0),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False, rope_factor=8.0),
    "gemma-3-270m": Shape("gemma3", 640, 2048, 18, 4, 1, 256, 262144, 32768, window=512),
    "gemma-3-1b": Shape("gemma3", 1152, 6912, 26, 4, 1, 256, 262144, 32768, window=512),
    "gemma-3-4b": Shape("gemma3", 2560, 10240, 34, 8, 4, 256, 262208, 131072, window=1024, rope_factor=8.0),
    "gemma-4-e2b": Shape(
        "gemma4", 1536, 6144, 35, 8, 1, 512, 262144, 131072, window=512, period=5, shared=Shared(20, 256, 256)
    ),
    "tiny-qwen3": Shape("qwen3", 256, 512, 4, 4, 2, 64, 512, 1024),
    "tiny-qwen2": Shape("qwen2", 256, 512, 4, 4, 2, 64, 512, 1024, tied=False),
    "tiny-qwen3moe": Shape("qwen3moe", 256, 512, 4, 4, 2, 64, 512, 1024, tied=False, experts=Experts(8, 2, 256)),
    "tiny-qwen35": Shape("qwen35", 256, 512, 5, 4, 2, 64, 512, 1024, 1e7, period=4, delta=Delta(2, 4, 64)),
    "tiny-llama": Shape("llama", 256, 512, 4, 4, 2, 64, 512, 1024, 5e5, 1e-5, rope_factor=8.0),
    "tiny-gemma3": Shape("gemma3", 288, 512, 7, 4, 1, 64, 512, 1024, window=32, rope_factor=8.0),
    "tiny-gemma4": Shape(
        "gemma4", 256, 256, 9, 4, 1, 128, 512, 1024, window=32, period=3, shared=Shared(3, 64, 256, 8.0)
    ),
}

#: Runner family -> the shape to compile for if no model is named: the one that most people try first.
USUAL = {"llama32": "llama-3.2-1b", "qwen3": "qwen3-0.6b", "qwen35": "qwen3.5-0.8b", "gemma": "gemma-3-1b"}

# ---------------------------------------------------------------------------------------------------- tensors

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def tensors(s: Shape) -> Tensors:
    """Names and row-major shapes of all tensors, in file order."""
    if not s.tied:
        yield "output.weight", (s.vocab, s.hidden)
    yield "token_embd.weight", (s.vocab, s.hidden)
    if (s.rope_factor and s.arch == "llama") or s.shared:
        yield "rope_freqs.weight", (s.head_dim // 2,)
    if s.shared:
        yield "per_layer_token_embd.weight", (s.vocab, s.shared.per_layer * s.layers)
        yield "per_layer_model_proj.weight", (s.shared.per_layer * s.layers, s.hidden)
        yield "per_layer_proj_norm.weight", (s.shared.per_layer,)
    for layer in range(s.layers):
        for name, shape in layer_tensors(s, layer):
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (s.hidden,)


def layer_tensors(s: Shape, layer: int) -> Tensors:
    """The tensors of one layer, without its prefix."""
    yield "attn_norm.weight", (s.hidden,)
    yield from delta_rule(s, s.delta) if s.delta and not s.full(layer) else attention(s, layer)
    if s.arch in ("gemma3", "gemma4"):
        yield "post_attention_norm.weight", (s.hidden,)
        yield "post_ffw_norm.weight", (s.hidden,)
    yield "post_attention_norm.weight" if s.delta else "ffn_norm.weight", (s.hidden,)
    yield from experts(s, s.experts) if s.experts else feed_forward(s, layer)
    if s.shared:
        yield "inp_gate.weight", (s.shared.per_layer, s.hidden)
        yield "proj.weight", (s.hidden, s.shared.per_layer)
        yield "post_norm.weight", (s.hidden,)
        yield "layer_output_scale.weight", (1,)


def attention(s: Shape, layer: int) -> Tensors:
    size = s.shared.local_head_dim if s.shared and not s.full(layer) else s.head_dim
    q, kv = s.heads * size, s.kv_heads * size
    rows = {"attn_q": 2 * q if s.delta else q}  # qwen35: with the gate of the output
    if not s.shares(layer):
        rows |= {"attn_k": kv, "attn_v": kv}
    for name, count in rows.items():
        yield f"{name}.weight", (count, s.hidden)
        if s.arch == "qwen2":
            yield f"{name}.bias", (count,)
    if s.arch not in ("llama", "qwen2"):
        for name in ("attn_q", "attn_k")[: len(rows)]:
            yield f"{name}_norm.weight", (size,)
    yield "attn_output.weight", (s.hidden, q)


def delta_rule(s: Shape, d: Delta) -> Tensors:
    yield "attn_qkv.weight", (2 * d.keys + d.values, s.hidden)
    yield "attn_gate.weight", (d.values, s.hidden)
    yield "ssm_conv1d.weight", (2 * d.keys + d.values, d.taps)
    yield "ssm_dt.bias", (d.value_heads,)
    yield "ssm_a", (d.value_heads,)
    yield "ssm_beta.weight", (d.value_heads, s.hidden)
    yield "ssm_alpha.weight", (d.value_heads, s.hidden)
    yield "ssm_norm.weight", (d.dim,)
    yield "ssm_out.weight", (s.hidden, d.values)


def feed_forward(s: Shape, layer: int) -> Tensors:
    width = feed_forward_width(s, layer)
    yield "ffn_gate.weight", (width, s.hidden)
    yield "ffn_up.weight", (width, s.hidden)
    yield "ffn_down.weight", (s.hidden, width)


def feed_forward_width(s: Shape, layer: int) -> int:
    return 2 * s.ffn if s.shares(layer) else s.ffn


def experts(s: Shape, e: Experts) -> Tensors:
    yield "ffn_gate_inp.weight", (e.count, s.hidden)
    yield "ffn_gate_exps.weight", (e.count, e.ffn, s.hidden)
    yield "ffn_up_exps.weight", (e.count, e.ffn, s.hidden)
    yield "ffn_down_exps.weight", (e.count, s.hidden, e.ffn)


# ---------------------------------------------------------------------------------------------------- metadata


def metadata(s: Shape) -> dict[str, Any]:
    """The sizes under the names of GGUF: booleans, integers, floats, strings, and lists of the first two."""
    widths = [feed_forward_width(s, layer) for layer in range(s.layers)]
    found: dict[str, Any] = {
        "block_count": s.layers,
        "context_length": s.context,
        "embedding_length": s.hidden,
        "feed_forward_length": widths if s.shared else s.ffn,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps,
        "rope.freq_base": s.rope_base,
        "vocab_size": s.vocab,
    }
    if s.arch == "llama":
        found["rope.dimension_count"] = s.head_dim
    if s.window:
        found |= {"attention.sliding_window": s.window, "rope.freq_base_swa": 10000.0}
    if s.arch == "gemma3" and s.rope_factor:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": s.rope_factor}
    if s.experts:
        found |= {
            "expert_count": s.experts.count,
            "expert_used_count": s.experts.used,
            "expert_feed_forward_length": s.experts.ffn,
        }
    if s.delta:
        found |= _delta_metadata(s, s.delta)
    if s.shared:
        found |= _shared_metadata(s, s.shared)
    return {f"{s.arch}.{key}": value for key, value in found.items()}


def _delta_metadata(s: Shape, d: Delta) -> dict[str, Any]:
    rotated = s.head_dim // 4
    third = -(-rotated // 6)  # pairs each for time, height and width of an image: 11, 11, 10 of 32
    return {
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [third, third, rotated // 2 - 2 * third, 0],
        "ssm.conv_kernel": d.taps,
        "ssm.state_size": d.dim,
        "ssm.group_count": d.key_heads,
        "ssm.time_step_rank": d.value_heads,
        "ssm.inner_size": d.values,
        "attention.recurrent_layers": [not s.full(layer) for layer in range(s.layers)],
        "full_attention_interval": s.period,
    }


def _shared_metadata(s: Shape, shared: Shared) -> dict[str, Any]:
    return {
        "final_logit_softcapping": shared.cap,
        "embedding_length_per_layer_input": shared.per_layer,
        "attention.shared_kv_layers": shared.layers,
        "attention.sliding_window_pattern": [not s.full(layer) for layer in range(s.layers)],
        "attention.key_length_swa": shared.local_head_dim,
        "attention.value_length_swa": shared.local_head_dim,
        "rope.dimension_count": s.head_dim,
        "rope.dimension_count_swa": shared.local_head_dim,
    }


# ---------------------------------------------------------------------------------------------------- values


def rope_freqs(s: Shape) -> npt.NDArray[np.float32]:
    """The values of `rope_freqs.weight`: the divisors of the frequencies, float32 [head_dim / 2]."""
    found = _quarter_rope(s) if s.shared else llama3_rope(s)
    return found.astype(np.float32)


def _quarter_rope(s: Shape) -> npt.NDArray[np.float64]:
    """Gemma 4's divisors: a quarter of the pairs is rotated, the others practically not."""
    pairs = s.head_dim // 2
    return np.where(np.arange(pairs) < pairs // 4, 1.0, 1e30)


def llama3_rope(s: Shape, low: float = 1.0, high: float = 4.0, original: int = 8192) -> npt.NDArray[np.float64]:
    """Llama 3's frequency divisors: 1 for short wavelengths, `rope_factor` for long ones, a ramp between."""
    wavelength = 2 * pi * s.rope_base ** (np.arange(0, s.head_dim, 2) / s.head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / s.rope_factor + smooth))
