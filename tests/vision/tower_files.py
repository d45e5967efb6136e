"""Files with vision towers: the fixtures, and the same tensors in the other format, as transformers and llama.cpp write
them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from drawn import drawn
from safetensors.numpy import save_file

Values = dict[str, np.ndarray]

# Canonical name -> module path, as transformers 5 saves the models.
_QWEN35 = {
    "v.patch_embd": "model.visual.patch_embed.proj", "v.position_embd": "model.visual.pos_embed",
    "v.post_ln": "model.visual.merger.norm",
    "mm.0": "model.visual.merger.linear_fc1", "mm.2": "model.visual.merger.linear_fc2",
    "ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
    "norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2",
}  # fmt: skip
_DEEPSTACK = (0, 2)  # the layers of Qwen 3 VL's tower with mergers of their own
_GEMMA3 = {
    "v.patch_embd": "vision_tower.vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.vision_model.embeddings.position_embedding",
    "v.post_ln": "vision_tower.vision_model.post_layernorm",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_UNIFIED = {
    "v.patch_norm.1": "model.vision_embedder.patch_ln1", "v.patch_norm.2": "model.vision_embedder.patch_ln2",
    "v.patch_norm.3": "model.vision_embedder.pos_norm", "v.patch_embd": "model.vision_embedder.patch_dense",
    "mm.input_projection": "model.embed_vision.embedding_projection",
    "mm.a.input_projection": "model.embed_audio.embedding_projection",
}  # fmt: skip
_PATHS = {"qwen35-mm": _QWEN35, "qwen3vl-mm": _QWEN35, "gemma3-mm": _GEMMA3, "gemma4-unified-mm": _UNIFIED}
_LAYERS = {
    "qwen35-mm": "model.visual.blocks",
    "qwen3vl-mm": "model.visual.blocks",
    "gemma3-mm": "vision_tower.vision_model.encoder.layers",
}
_GEMMA4 = {
    "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def golden(folder: Path) -> Values:
    """The image and its features; some images are drawn."""
    with np.load(folder / "golden.npz") as file:
        found = dict(file)
    return found if "image" in found else {**found, "image": drawn(*found["drawn"].tolist())}


def mmproj_values(file: Path) -> Values:
    """Every tensor of an mmproj as float32 in row-major order, as the `gguf` package dequantizes it."""
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = np.asarray(values, np.float32).reshape(tensor.shape.tolist()[::-1])
    return found


def mmproj_keys(file: Path) -> dict[str, Any]:
    """The key-values of an mmproj that are about its tower."""
    fields = gguf.GGUFReader(file).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("clip.")}


def as_checkpoint(folder: Path, mmproj: Path, to: Path) -> Path:
    """Writes the tensors of an mmproj as a checkpoint in float32, with the configuration of the fixture."""
    name, values = folder.name, mmproj_values(mmproj)
    tensors = dict(_unnamed(name, values))
    if name == "gemma3-mm":
        norm = "multi_modal_projector.mm_soft_emb_norm.weight"
        tensors[norm] = tensors[norm] - 1
    shutil.copytree(folder / "hf", to)
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, to / "model.safetensors")
    return to


def _unnamed(name: str, values: Values) -> Iterator[tuple[str, np.ndarray]]:
    for canonical, value in values.items():
        stem, _, end = canonical.rpartition(".")
        paths = _PATHS[name]
        if canonical.startswith("v.blk."):
            layer, inner = stem.removeprefix("v.blk.").split(".", 1)
            yield f"{_LAYERS[name]}.{layer}.{paths[inner]}.{end}", value
        elif canonical.startswith("v.deepstack."):
            layer, inner = stem.removeprefix("v.deepstack.").split(".")
            number = _DEEPSTACK.index(int(layer))
            yield f"model.visual.deepstack_merger_list.{number}.{paths[inner]}.{end}", value
        elif canonical == "v.patch_embd.weight" and name.startswith("qwen"):
            yield f"{paths[stem]}.weight", np.stack([value, values[f"{canonical}.1"]], axis=2)
        elif canonical == "v.patch_embd.weight.1":
            continue
        elif canonical == "mm.input_projection.weight" and name == "gemma3-mm":
            yield "multi_modal_projector.mm_input_projection_weight", value
        elif canonical == "v.position_embd.weight" and name == "gemma4-unified-mm":
            yield "model.vision_embedder.pos_embedding", value.transpose(1, 0, 2)
        elif name == "gemma4-unified-mm" and canonical in ("v.patch_embd.weight", *NORM_OF_PATCHES):
            yield f"{paths[stem]}.{end}", _colours_last(value)
        else:
            yield f"{paths[stem]}.{end}", value


NORM_OF_PATCHES = ("v.patch_norm.1.weight", "v.patch_norm.1.bias")


def _colours_last(value: np.ndarray) -> np.ndarray:
    """Of patches whose values are ordered by colour, row and column: by row, column and colour."""
    side = round((value.shape[-1] // 3) ** 0.5)
    return np.moveaxis(value.reshape(*value.shape[:-1], 3, side, side), -3, -1).reshape(value.shape)


def write_mmproj(to: Path, keys: dict[str, Any], values: Values, dtype: Any = np.float32) -> Path:
    """Writes an mmproj GGUF."""
    writer = gguf.GGUFWriter(to, "clip")
    writer.add_string("general.type", "mmproj")
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
    for name, value in values.items():
        writer.add_tensor(name, np.ascontiguousarray(value, dtype if value.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def gemma4_as_mmproj(folder: Path, to: Path) -> Path:
    """Writes the checkpoint of Gemma 4's tower as an mmproj in float16, which holds its values exactly."""
    config = json.loads((folder / "hf" / "config.json").read_text())["vision_config"]
    tensors = _bf16_file(folder / "hf" / "model.safetensors")
    values = {}
    for name, value in tensors.items():
        path = name.removeprefix("model.").removeprefix("vision_tower.")
        if path.startswith("encoder.layers."):
            layer, inner = path.removeprefix("encoder.layers.").split(".", 1)
            stem, _, end = inner.replace(".linear.", ".").rpartition(".")
            values[f"v.blk.{layer}.{_GEMMA4[stem]}.{end}"] = value.reshape(value.shape or (1,))
        else:
            values[_GEMMA4_OUTER[path]] = value
    table, side = "v.patch_embd.weight", config["patch_size"]
    values[table] = values[table].reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    keys = {
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4v",
        "clip.vision.projection_dim": 64,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": side,
        "clip.vision.embedding_length": config["hidden_size"],
        "clip.vision.feed_forward_length": config["intermediate_size"],
        "clip.vision.block_count": config["num_hidden_layers"],
        "clip.vision.attention.head_count": config["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": config["rms_norm_eps"],
        "clip.vision.image_mean": [0.0, 0.0, 0.0],
        "clip.vision.image_std": [1.0, 1.0, 1.0],
        "clip.vision.image_max_pixels": 70 * (3 * side) ** 2,
    }
    return write_mmproj(to, keys, values, np.float16)


_GEMMA4_OUTER = {
    "patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "patch_embedder.position_embedding_table": "v.position_embd.weight",
    "std_bias": "v.std_bias",
    "std_scale": "v.std_scale",
    "embed_vision.embedding_projection.weight": "mm.input_projection.weight",
}


def _bf16_file(path: Path) -> Values:
    """The tensors of a file in bf16 as float32; NumPy has no bf16, so the `safetensors` package gives none."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        begin, end = (8 + size + at for at in entry["data_offsets"])
        bits = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(entry["shape"])
    return found
