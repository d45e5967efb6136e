"""Canonical names: against the converter's own map in the `gguf` package; weights and towers under those names."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import bf16, checkpoint

from rlx.errors import ModelFileError, WeightError
from rlx.models import ARCHITECTURES
from rlx.models.names import DECODER_PREFIXES, Row
from rlx.vision.weights import checkpoint_names, tower_name, tower_names
from rlx.weights import ModelWeights, open_weights
from rlx.weights.names import canonical_name, file_names

ARCHS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name in ARCHITECTURES}
# The converter renames these before it looks them up; test_tensors_without_a_suffix has them.
RENAMED = ("dt_bias", "_blocks", "down_proj_bias", "e_score_correction_bias", "router.scale", "router.per_expert_scale")
RESTACKED = r"\.(mixer|feed_forward)\.experts\."  # experts that it stacks under the names of others
HEADLESS = (
    "gemma",
    "gemma2",
    "lfm2moe",
    "command-r",
    "cohere2",
)  # GGUF has them tied; a checkpoint may have a head nonetheless


def canonical_of(family: str, layer: int) -> list[str]:
    """Every canonical name of a family, those of one layer included."""
    table = ARCHITECTURES[family].names
    names = [join(row, end) for row in (*table.decoder, *table.head) for end in row.suffixes]
    names += [f"blk.{layer}.{join(row, end)}" for row in table.layer for end in row.suffixes]
    return list(dict.fromkeys(names))


def join(row: Row, end: str) -> str:
    return f"{row.canonical}.{end}" if end else row.canonical


def base(canonical: str) -> str:
    """Without `.weight`, `.bias` or `.scale`, as the converter's map has it."""
    return re.sub(r"\.(weight|bias|scale)$", "", canonical)


def listed(family: str, layer: int) -> set[str]:
    """Every tensor that the `gguf` package lists for the architecture."""
    embeds = {gguf.MODEL_TENSOR.DENSE_2_OUT} if family == "lfm2" else set()  # only of models for embeddings
    names = {gguf.TENSOR_NAMES[each] for each in set(gguf.MODEL_TENSORS[ARCHS[family]]) - embeds}
    return {name.replace("{bid}", str(layer)) for name in names}


def latent(layer: int) -> set[str]:
    """Projections for experts in a latent space, which are not supported."""
    return {f"blk.{layer}.ffn_latent_{end}" for end in ("down", "up")}


def test_every_family_is_compared() -> None:
    assert ARCHS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("family", ARCHS)
def test_names_of_checkpoints_mean_what_the_converter_says(family: str) -> None:
    reference = gguf.get_tensor_name_map(ARCHS[family], 4)
    known, compared = listed(family, 3), set()
    assert ("output" not in known) == (family in HEADLESS)
    for canonical in canonical_of(family, 3):
        for name in file_names(canonical, family)[1:]:
            if not re.match(r"lm_head|backbone\.|transformer\.|model\.(layers|embed|norm|per_layer|altup)", name):
                continue  # the converter strips the longer prefixes before it looks names up
            if base(canonical) not in known or name.endswith(RENAMED) or re.search(RESTACKED, name):
                continue
            merged = re.sub(r"\.0(?=\.(gate|up|down)_proj|\.w[123]|\.weight)", "", name)  # what it stacks itself
            found = reference.get_name(merged, try_suffixes=(".weight", ".bias"))
            assert found is not None and base(found) == base(canonical)
            compared.add(base(canonical))
    # Only GGUF has them, or the converter renames them.
    unnamed = {"rope_freqs", "blk.3.attn_rot_embd", "blk.3.ssm_dt", "blk.3.exp_probs_b"} | latent(3)
    unnamed |= {"blk.3.ffn_down_exps"} if family == "gpt-oss" else set()  # its codes and its bias, above
    restacked = family in ("nemotron_h_moe", "lfm2moe")
    unnamed |= {f"blk.3.ffn_{part}_exps" for part in ("gate", "up", "down")} if restacked else set()
    unnamed |= {base(name) for name in canonical_of(family, 3) if len(file_names(name, family)) == 1}  # or cuts
    assert known - compared - unnamed == set()


@pytest.mark.parametrize("family", ARCHS)
def test_the_families_tensors_are_known(family: str) -> None:
    """Every tensor that the `gguf` package lists, but for per-layer rope factors, which no file has."""
    assert (
        not listed(family, 7) - {"blk.7.attn_rot_embd"} - latent(7) - {base(name) for name in canonical_of(family, 7)}
    )


@pytest.mark.parametrize(
    ("family", "name", "canonical"),
    [
        ("qwen35", "linear_attn.A_log", "ssm_a"),
        ("qwen35moe", "linear_attn.dt_bias", "ssm_dt.bias"),
        ("qwen35moe", "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
        ("qwen35moe", "mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ("qwen3moe", "mlp.experts.down_proj", "ffn_down_exps.weight"),
        ("gemma3n", "altup.correct_output_scale", "altup_correct_scale.weight"),
        ("gemma4", "layer_scalar", "layer_output_scale.weight"),
        ("gemma4", "router.scale", "ffn_gate_inp.scale"),
        ("gemma4", "router.per_expert_scale", "ffn_down_exps.scale"),
        ("gemma4", "experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ("llama", "block_sparse_moe.experts.7.w1.weight", "ffn_gate_exps.weight"),
        ("llama", "block_sparse_moe.experts.7.w3.weight", "ffn_up_exps.weight"),
        ("llama", "block_sparse_moe.experts.7.w2.weight", "ffn_down_exps.weight"),
        ("llama", "block_sparse_moe.gate.weight", "ffn_gate_inp.weight"),
    ],
)
def test_tensors_without_a_suffix_and_experts(family: str, name: str, canonical: str) -> None:
    for prefix in DECODER_PREFIXES:
        assert canonical_name(f"{prefix}layers.5.{name}", family) == f"blk.5.{canonical}"
    assert canonical_name(f"blk.5.{canonical}", family) == f"blk.5.{canonical}"


@pytest.mark.parametrize("family", ARCHS)
def test_every_accepted_name_leads_back(family: str) -> None:
    for canonical in canonical_of(family, 12):
        names = file_names(canonical, family)
        assert names[0] == canonical and len(set(names)) == len(names)
        assert [canonical_name(name, family) for name in names] == [canonical] * len(names)


def test_post_attention_layernorm_is_another_norm_in_gemma_2_and_3() -> None:
    name = "model.layers.0.post_attention_layernorm.weight"
    before = "model.layers.0.pre_feedforward_layernorm.weight"
    for family in ("llama", "qwen2", "gemma"):
        assert canonical_name(name, family) == "blk.0.ffn_norm.weight" and canonical_name(before, family) is None
    for family in ("gemma2", "gemma3"):
        assert canonical_name(name, family) == "blk.0.post_attention_norm.weight"
        assert canonical_name(before, family) == "blk.0.ffn_norm.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.-1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.scales",
        "model.layers.0.self_attn.q_norm.weight",  # qwen3 and gemma3 have it, llama has not
        "blk.0.attn_q_norm.weight",
        "blk.01.attn_q.weight",
        "blk.0.unheard_of.weight",
        "model.lm_head.weight.extra",
        "",
    ],
)
def test_other_names_are_nothing(name: str) -> None:
    assert canonical_name(name, "llama") is None


# --- weights under canonical names

NORM = np.array([1.5, -2.0, 0.25, 1e-3], np.float32)


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    prefix = "model.language_model."
    return checkpoint(
        tmp_path,
        {
            prefix + "embed_tokens.weight": ("float16", np.arange(8, dtype=np.float16).reshape(2, 4)),
            prefix + "norm.weight": ("bfloat16", bf16(NORM)),
            prefix + "layers.0.input_layernorm.weight": ("float32", NORM),
            "model.vision_tower.patch.weight": ("int64", np.arange(2)),
        },
    )


def test_weights_of_a_checkpoint(gemma: Path) -> None:
    with ModelWeights(open_weights(gemma), "gemma3") as weights:
        assert set(weights.names) == {"token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight"}
        assert weights.unused == ["model.vision_tower.patch.weight"]
        assert weights.format == "safetensors" and weights.has("token_embd.weight") and not weights.has("output.weight")
        info = weights.info("token_embd.weight")
        assert info.name == "model.language_model.embed_tokens.weight" and info.shape == (2, 4)
        assert weights.raw("blk.0.attn_norm.weight").tobytes() == NORM.tobytes()
        weights.release("blk.0.attn_norm.weight")
        np.testing.assert_array_equal(weights.array("blk.0.attn_norm.weight"), NORM)
        np.testing.assert_array_equal(weights.array("token_embd.weight"), np.arange(8).reshape(2, 4))
    with pytest.raises(ModelFileError, match="was closed"):
        weights.raw("token_embd.weight")


def test_weights_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quantize(np.ones((2, 32), np.float32), kind)
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", NORM)
    writer.add_tensor("rope_freqs.weight", NORM)
    writer.add_tensor("something.else", NORM)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ModelWeights(open_weights(tmp_path), "llama") as weights:
        assert list(weights.names) == ["blk.0.attn_q.weight", "output_norm.weight", "rope_freqs.weight"]
        assert weights.unused == ["something.else"] and weights.format == "gguf"
        np.testing.assert_array_equal(weights.array("output_norm.weight"), NORM)
        assert weights.raw("blk.0.attn_q.weight").tobytes() == blocks.tobytes()
        with pytest.raises(WeightError, match=r"blk\.0\.attn_q\.weight has type q8_0, expected f32, f16 or bf16"):
            weights.array("blk.0.attn_q.weight")


# ---------------------------------------------------------------------------------------------------- vision towers


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
