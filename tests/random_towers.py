"""Checkpoints with random vision towers under published names, and what their mmproj files are to hold.

Each change of a tensor is written as its own formula. Names and keys are those that llama.cpp's converter (0.3.36
Python release) wrote for such models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

Array = npt.NDArray[np.float32]
D, F, H, PATCH = 16, 24, 64, 4  # the tower's width, its feed-forward, the text's width, the side of a patch

TEXT = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TEXT |= {"intermediate_size": 48, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "vocab_size": 512}
SIZES = {"hidden_size": D, "intermediate_size": F, "patch_size": PATCH}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**SIZES, "depth": 2, "num_heads": 2, "num_position_embeddings": 36, "hidden_act": "gelu_pytorch_tanh",
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": H, "deepstack_visual_indexes": []},
    "gemma3": {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24, "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh"},
    "gemma4": {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "position_embedding_size": 10, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6, "standardize": True,
        "use_clipped_linears": True, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma4_unified": {"mm_embed_dim": D, "patch_size": PATCH, "pooling_kernel_size": 3, "mm_posemb_size": 10,
        "rms_norm_eps": 1e-6},
}  # fmt: skip
CONFIGS["qwen3_vl"] = {**CONFIGS["qwen3_5"], "deepstack_visual_indexes": [1]}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5, 0.25, 0.5]},
    "gemma3": {"size": {"height": 24, "width": 24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "gemma4": {"max_soft_tokens": 70, "do_normalize": False},
    "gemma4_unified": {"max_soft_tokens": 70, "do_normalize": False},
}
PROCESSORS["qwen3_vl"] = PROCESSORS["qwen3_5"]
LINEARS = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (D, D), "self_attn.v_proj": (D, D)}
GEMMA4_LINEARS = LINEARS | {
    "self_attn.o_proj": (D, D), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
}  # fmt: skip
GEMMA4_NORMS = {
    "input_layernorm": D, "post_attention_layernorm": D, "pre_feedforward_layernorm": D,
    "post_feedforward_layernorm": D, "self_attn.q_norm": 8, "self_attn.k_norm": 8,
}  # fmt: skip
SHORT = {
    "blocks": "v.blk", "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down", "layer_norm1": "ln1", "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out", "self_attn.o_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


class Drawn:
    """Tensors of a checkpoint, and what the mmproj file is to hold."""

    def __init__(self) -> None:
        self.tensors: dict[str, Array] = {}
        self.expected: dict[str, Array] = {}
        self._random = np.random.default_rng(0)

    def draw(self, name: str, *shape: int, to: str | None = None) -> Array:
        """A random tensor; `to` is its name in the mmproj file if it is there as it is."""
        array = np.asarray(self._random.standard_normal(shape), np.float32)
        self.tensors[name] = array
        if to is not None:
            self.expected[to] = array
        return array

    def both(self, name: str, to: str, *shape: int) -> None:
        """A weight and a bias of its rows."""
        self.draw(f"{name}.weight", *shape, to=f"{to}.weight")
        self.draw(f"{name}.bias", shape[0], to=f"{to}.bias")


def qwen35() -> Drawn:
    made, at = Drawn(), "model.visual."
    patches = made.draw(f"{at}patch_embed.proj.weight", D, 3, 2, PATCH, PATCH)
    made.expected["v.patch_embd.weight"] = patches[:, :, 0]
    made.expected["v.patch_embd.weight.1"] = patches[:, :, 1]
    made.draw(f"{at}patch_embed.proj.bias", D, to="v.patch_embd.bias")
    made.draw(f"{at}pos_embed.weight", 36, D, to="v.position_embd.weight")
    shapes = {"norm1": (D,), "norm2": (D,), "attn.qkv": (3 * D, D), "attn.proj": (D, D)}
    for layer in range(2):
        for name, shape in {**shapes, "mlp.linear_fc1": (F, D), "mlp.linear_fc2": (D, F)}.items():
            made.both(f"{at}blocks.{layer}.{name}", f"v.blk.{layer}.{SHORT[name]}", *shape)
    made.both(f"{at}merger.norm", "v.post_ln", D)
    made.both(f"{at}merger.linear_fc1", "mm.0", 4 * D, 4 * D)
    made.both(f"{at}merger.linear_fc2", "mm.2", H, 4 * D)
    return made


def qwen3vl() -> Drawn:
    """The first of the mergers of inner layers is that of layer 1."""
    made, at = qwen35(), "model.visual.deepstack_merger_list.0."
    made.both(f"{at}norm", "v.deepstack.1.norm", 4 * D)
    made.both(f"{at}linear_fc1", "v.deepstack.1.fc1", 4 * D, 4 * D)
    made.both(f"{at}linear_fc2", "v.deepstack.1.fc2", H, 4 * D)
    return made


def gemma3() -> Drawn:
    made, at = Drawn(), "vision_tower.vision_model."
    made.both(f"{at}embeddings.patch_embedding", "v.patch_embd", D, 3, PATCH, PATCH)
    made.draw(f"{at}embeddings.position_embedding.weight", 36, D, to="v.position_embd.weight")
    shapes = {"layer_norm1": (D,), "layer_norm2": (D,), **LINEARS, "self_attn.out_proj": (D, D), "mlp.fc1": (F, D)}
    for layer in range(2):
        for name, shape in {**shapes, "mlp.fc2": (D, F)}.items():
            made.both(f"{at}encoder.layers.{layer}.{name}", f"v.blk.{layer}.{SHORT[name]}", *shape)
    made.both(f"{at}post_layernorm", "v.post_ln", D)
    made.draw(f"{at}head.probe", 1, D)  # of a classifier: no part of the model
    made.draw("multi_modal_projector.mm_input_projection_weight", D, H, to="mm.input_projection.weight")
    made.expected["mm.soft_emb_norm.weight"] = made.draw("multi_modal_projector.mm_soft_emb_norm.weight", D) + 1
    return made


def gemma4() -> Drawn:
    made, at = Drawn(), "model.vision_tower."
    patches = made.draw(f"{at}patch_embedder.input_proj.weight", D, 3 * PATCH * PATCH)
    made.expected["v.patch_embd.weight"] = by_colour(patches, PATCH).reshape(D, 3, PATCH, PATCH)
    made.draw(f"{at}patch_embedder.position_embedding_table", 2, 10, D, to="v.position_embd.weight")
    for layer in range(2):
        for name, shape in GEMMA4_LINEARS.items():
            old, new = f"{at}encoder.layers.{layer}.{name}", f"v.blk.{layer}.{SHORT[name]}"
            made.draw(f"{old}.linear.weight", *shape, to=f"{new}.weight")
            for end in ("input_min", "input_max", "output_min", "output_max"):
                made.expected[f"{new}.{end}"] = made.draw(f"{old}.{end}").reshape(1)
        for name, width in GEMMA4_NORMS.items():
            made.draw(f"{at}encoder.layers.{layer}.{name}.weight", width, to=f"v.blk.{layer}.{SHORT[name]}.weight")
    made.draw(f"{at}std_bias", D, to="v.std_bias")
    made.draw(f"{at}std_scale", D, to="v.std_scale")
    made.draw("model.embed_vision.embedding_projection.weight", H, D, to="mm.input_projection.weight")
    return made


def gemma4_unified() -> Drawn:
    made, at, side = Drawn(), "model.vision_embedder.", 3 * PATCH
    values = 3 * side * side
    made.expected["v.patch_embd.weight"] = by_colour(made.draw(f"{at}patch_dense.weight", D, values), side)
    for end in ("weight", "bias"):
        norm = made.draw(f"{at}patch_ln1.{end}", values)
        made.expected[f"v.patch_norm.1.{end}"] = by_colour(norm[None], side)[0]
        made.draw(f"{at}patch_ln2.{end}", D, to=f"v.patch_norm.2.{end}")
        made.draw(f"{at}pos_norm.{end}", D, to=f"v.patch_norm.3.{end}")
    made.draw(f"{at}patch_dense.bias", D, to="v.patch_embd.bias")
    table = made.draw(f"{at}pos_embedding", 10, 2, D)
    made.expected["v.position_embd.weight"] = np.array([table[:, 0], table[:, 1]])
    made.draw("model.embed_vision.embedding_projection.weight", H, D, to="mm.input_projection.weight")
    made.draw("model.embed_audio.embedding_projection.weight", H, 40)  # audio is left out
    return made


def by_colour(rows: Array, side: int) -> Array:
    """Columns (row, column, colour) of a patch as (colour, row, column)."""
    order = [(y * side + x) * 3 + c for c in range(3) for y in range(side) for x in range(side)]
    return rows[:, order]


FAMILIES = {
    "qwen3_5": qwen35, "qwen3_vl": qwen3vl, "gemma3": gemma3, "gemma4": gemma4, "gemma4_unified": gemma4_unified,
}  # fmt: skip


def write(folder: Path, model_type: str, tensors: dict[str, Array], **changes: Any) -> Path:
    folder.mkdir()
    config = {"model_type": model_type, "text_config": TEXT, "vision_config": {**CONFIGS[model_type], **changes}}
    if model_type == "gemma3":
        config["mm_tokens_per_image"] = 4
    if model_type == "gemma4_unified":
        config["audio_config"] = {"audio_embed_dim": 40, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[model_type]))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder
