"""Names of vision towers: those of published checkpoints beside those of published mmproj files."""

from __future__ import annotations

import pytest

from rlx.errors import WeightError
from rlx.vision.weights import checkpoint_names, tower_name, tower_names

SIGLIP = "vision_tower.vision_model."
NAMES = {  # family, name in a checkpoint -> name in an mmproj
    ("qwen35", "model.visual.patch_embed.proj.weight"): "v.patch_embd.weight",
    ("qwen35", "model.visual.blocks.26.attn.qkv.bias"): "v.blk.26.attn_qkv.bias",
    ("qwen35", "visual.merger.linear_fc2.weight"): "mm.2.weight",
    ("qwen35", "model.visual.deepstack_merger_list.1.linear_fc1.bias"): "v.deepstack.7.fc1.bias",
    ("gemma3", f"{SIGLIP}encoder.layers.0.self_attn.out_proj.weight"): "v.blk.0.attn_out.weight",
    ("gemma3", "model.vision_tower.embeddings.position_embedding.weight"): "v.position_embd.weight",
    ("gemma3", "multi_modal_projector.mm_input_projection_weight"): "mm.input_projection.weight",
    ("gemma4", "model.vision_tower.encoder.layers.15.mlp.gate_proj.linear.weight"): "v.blk.15.ffn_gate.weight",
    ("gemma4", "model.vision_tower.encoder.layers.15.mlp.gate_proj.input_max"): "v.blk.15.ffn_gate.input_max",
    ("gemma4", "model.vision_tower.patch_embedder.position_embedding_table"): "v.position_embd.weight",
    ("gemma4", "model.vision_tower.std_scale"): "v.std_scale",
    ("gemma4_unified", "model.vision_embedder.pos_norm.bias"): "v.patch_norm.3.bias",
}


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_names_of_checkpoints_and_mmproj_files(family: str, name: str) -> None:
    canonical = NAMES[family, name]
    assert tower_name(name, family, (5, 7)) == canonical
    assert name in checkpoint_names(canonical, family, (5, 7))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen35", "model.language_model.layers.0.mlp.gate_proj.weight"),
        ("qwen35", "model.visual.deepstack_merger_list.0.norm.weight"),
        ("gemma3", f"{SIGLIP}head.probe"),
        ("gemma4", "model.language_model.layers.0.self_attn.q_proj.weight"),
        ("gemma4", "model.audio_tower.layers.0.self_attn.q_proj.linear.weight"),
        ("gemma4_unified", "model.embed_audio.embedding_projection.weight"),
    ],
)
def test_other_tensors_are_no_part_of_the_tower(family: str, name: str) -> None:
    assert tower_name(name, family) is None


def test_two_tensors_of_one_meaning_are_an_error() -> None:
    twice = [f"{prefix}std_bias" for prefix in ("model.vision_tower.", "vision_tower.")]
    with pytest.raises(WeightError, match=r"both v\.std_bias"):
        tower_names(twice, "gemma4", "here")
