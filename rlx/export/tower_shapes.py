"""The tensors that a checkpoint's tower must have, with their shapes.

Export stage, read by `tower.py`.
"""

from __future__ import annotations

from rlx.models.vision_config import VisionConfig

Shapes = dict[str, tuple[int, ...]]


def tower_shapes(config: VisionConfig) -> Shapes:
    """Canonical name -> shape in a safetensors checkpoint, of all required tensors."""
    return _FAMILIES[config.family](config)


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _qwen35(config: VisionConfig) -> Shapes:
    hidden, inner, merged = config.hidden, config.heads * config.head_dim, config.patches_per_row * config.hidden
    found: Shapes = {
        "v.patch_embd.weight": (hidden, 3, config.frames, config.patch, config.patch),
        "v.patch_embd.bias": (hidden,),
        "v.position_embd.weight": (config.positions, hidden),
        **_norm("v.post_ln", hidden),
        **_linear("mm.0", merged, merged),
        **_linear("mm.2", config.out_hidden, merged),
    }
    for prefix in _layers(config):
        found |= _norm(f"{prefix}ln1", hidden) | _norm(f"{prefix}ln2", hidden) | _mlp(prefix, config)
        found |= _linear(f"{prefix}attn_qkv", 3 * inner, hidden) | _linear(f"{prefix}attn_out", hidden, inner)
    return found


def _gemma3(config: VisionConfig) -> Shapes:
    hidden, inner = config.hidden, config.heads * config.head_dim
    found: Shapes = {
        "v.patch_embd.weight": (hidden, 3, config.patch, config.patch),
        "v.patch_embd.bias": (hidden,),
        "v.position_embd.weight": (config.positions, hidden),
        **_norm("v.post_ln", hidden),
        "mm.soft_emb_norm.weight": (hidden,),
        "mm.input_projection.weight": (hidden, config.out_hidden),
    }
    for prefix in _layers(config):
        found |= _norm(f"{prefix}ln1", hidden) | _norm(f"{prefix}ln2", hidden) | _mlp(prefix, config)
        for name in ("attn_q", "attn_k", "attn_v"):
            found |= _linear(f"{prefix}{name}", inner, hidden)
        found |= _linear(f"{prefix}attn_out", hidden, inner)
    return found


def _gemma4(config: VisionConfig) -> Shapes:
    hidden, inner, ffn = config.hidden, config.heads * config.head_dim, config.ffn
    found: Shapes = {
        "v.patch_embd.weight": (hidden, config.patch_values),
        "v.position_embd.weight": (2, config.positions, hidden),
        "mm.input_projection.weight": (config.out_hidden, hidden),
    }
    if config.standardize:
        found |= {"v.std_bias": (hidden,), "v.std_scale": (hidden,)}
    linears = {
        "attn_q": (inner, hidden), "attn_k": (inner, hidden), "attn_v": (inner, hidden), "attn_out": (hidden, inner),
        "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
    }  # fmt: skip
    for prefix in _layers(config):
        found |= {f"{prefix}{name}.weight": shape for name, shape in linears.items()}
        for name in ("ln1", "attn_post_norm", "ln2", "ffn_post_norm"):
            found[f"{prefix}{name}.weight"] = (hidden,)
        for name in ("attn_q_norm", "attn_k_norm"):
            found[f"{prefix}{name}.weight"] = (config.head_dim,)
        if config.clipped:
            ends = ("input_min", "input_max", "output_min", "output_max")
            found |= {f"{prefix}{name}.{end}": () for name in linears for end in ends}
    return found


def _gemma4_unified(config: VisionConfig) -> Shapes:
    hidden, values = config.hidden, config.patch_values
    return {
        **_norm("v.patch_norm.1", values),
        **_linear("v.patch_embd", hidden, values),
        **_norm("v.patch_norm.2", hidden),
        "v.position_embd.weight": (config.positions, 2, hidden),
        **_norm("v.patch_norm.3", hidden),
        "mm.input_projection.weight": (config.out_hidden, hidden),
    }


def _mlp(prefix: str, config: VisionConfig) -> Shapes:
    up = _linear(f"{prefix}ffn_up", config.ffn, config.hidden)
    return up | _linear(f"{prefix}ffn_down", config.hidden, config.ffn)


def _layers(config: VisionConfig) -> list[str]:
    return [f"v.blk.{layer}." for layer in range(config.layers)]


_FAMILIES = {"qwen35": _qwen35, "gemma3": _gemma3, "gemma4": _gemma4, "gemma4_unified": _gemma4_unified}
