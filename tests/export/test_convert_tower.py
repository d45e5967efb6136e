"""Vision towers as mmproj files: random checkpoints under published names, each change of a tensor by its own formula.

The names on the right and the keys are those that llama.cpp's converter (0.3.36 Python release) wrote for such models.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from click.testing import CliRunner
from gguf import GGUFReader

from rlx.cli.main import cli
from rlx.errors import ArgumentError, ConfigError, MultimodalError, UnsupportedModelError, WeightError
from rlx.export.convert import convert
from rlx.models.vision_gguf_config import vision_from_gguf
from rlx.weights import open_weights

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
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5, 0.25, 0.5]},
    "gemma3": {"size": {"height": 24, "width": 24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "gemma4": {"max_soft_tokens": 70, "do_normalize": False},
    "gemma4_unified": {"max_soft_tokens": 70, "do_normalize": False},
}
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
    made.draw("model.embed_audio.embedding_projection.weight", H, 40, to="mm.a.input_projection.weight")
    return made


def by_colour(rows: Array, side: int) -> Array:
    """Columns (row, column, colour) of a patch as (colour, row, column)."""
    order = [(y * side + x) * 3 + c for c in range(3) for y in range(side) for x in range(side)]
    return rows[:, order]


FAMILIES = {"qwen3_5": qwen35, "gemma3": gemma3, "gemma4": gemma4, "gemma4_unified": gemma4_unified}


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


def keys(path: Path) -> dict[str, Any]:
    fields = GGUFReader(path).fields
    return {key.removeprefix("clip."): field.contents() for key, field in fields.items() if key.startswith("clip.")}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_shapes_and_values(tmp_path: Path, model_type: str) -> None:
    made = FAMILIES[model_type]()
    folder = write(tmp_path / "model", model_type, made.tensors)
    done = convert(folder, tmp_path / "out.gguf", "F32", part="mmproj")
    found = {t.name: t.data.reshape(tuple(reversed(t.shape.tolist()))) for t in GGUFReader(done.path).tensors}
    assert set(found) == set(made.expected)
    for name, array in made.expected.items():
        assert found[name].shape == array.shape, name
        assert np.array_equal(found[name], array), name
    fields = GGUFReader(done.path).fields
    told = [fields[f"general.{key}"].contents() for key in ("architecture", "type", "name")]
    assert told == ["clip", "mmproj", "model"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys(tmp_path: Path, model_type: str) -> None:
    folder = write(tmp_path / "model", model_type, FAMILIES[model_type]().tensors)
    found = keys(convert(folder, tmp_path / "out.gguf", part="mmproj").path)
    assert found.pop("vision.attention.layer_norm_epsilon") == pytest.approx(1e-6)
    same = {"has_vision_encoder": True, "vision.projection_dim": H, "vision.patch_size": PATCH}
    same |= {"vision.embedding_length": D, "vision.image_mean": [0.0] * 3, "vision.image_std": [1.0] * 3}
    layers = {"vision.block_count": 2, "vision.feed_forward_length": F, "vision.attention.head_count": 2}
    any_size = {"vision.image_size": 224, "vision.image_max_pixels": 70 * 12 * 12}
    expected = {
        "qwen3_5": same | layers | {
            "projector_type": "qwen3vl_merger", "use_gelu": True, "vision.image_size": 24,
            "vision.spatial_merge_size": 2, "vision.is_deepstack_layers": [False, False],
            "vision.image_mean": [0.5, 0.25, 0.5], "vision.image_std": [0.5] * 3,
            "vision.image_min_pixels": 256, "vision.image_max_pixels": 4096,
        },
        "gemma3": same | layers | {
            "projector_type": "gemma3", "use_gelu": True, "vision.image_size": 24, "vision.projector.scale_factor": 3,
            "vision.image_mean": [0.5] * 3, "vision.image_std": [0.5] * 3,
        },
        "gemma4": same | layers | any_size | {"vision.projector_type": "gemma4v"},
        "gemma4_unified": same | any_size | {
            "vision.projector_type": "gemma4uv", "vision.block_count": 0, "vision.feed_forward_length": 0,
            "vision.attention.head_count": 0, "has_audio_encoder": True, "audio.projector_type": "gemma4ua",
            "audio.projection_dim": H, "audio.embedding_length": 40, "audio.feed_forward_length": 0,
            "audio.block_count": 0, "audio.attention.head_count": 0, "audio.num_mel_bins": 128,
            "audio.attention.layer_norm_epsilon": pytest.approx(1e-6),
        },
    }[model_type]  # fmt: skip
    assert found == expected


@pytest.mark.parametrize(("model_type", "target", "kinds"), [
    ("qwen3_5", "F16", {"v.patch_embd.weight": "F16", "v.position_embd.weight": "F32", "mm.0.weight": "F16"}),
    ("qwen3_5", "BF16", {"v.patch_embd.weight.1": "F32", "v.position_embd.weight": "F32", "mm.0.weight": "BF16"}),
    ("gemma3", "F16", {"v.patch_embd.weight": "F32", "mm.input_projection.weight": "F16", "v.post_ln.bias": "F32"}),
    ("gemma3", "BF16", {"v.patch_embd.weight": "F32", "mm.input_projection.weight": "F16", "v.post_ln.bias": "F32"}),
    ("gemma4", "BF16", {"v.patch_embd.weight": "F32", "mm.input_projection.weight": "BF16", "v.std_bias": "F32"}),
])  # fmt: skip
def test_types_are_those_that_readers_take(tmp_path: Path, model_type: str, target: str, kinds: dict[str, str]) -> None:
    folder = write(tmp_path / "model", model_type, FAMILIES[model_type]().tensors)
    done = convert(folder, tmp_path / "out.gguf", target, part="mmproj")
    found = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(done.path).tensors}
    assert {name: found[name] for name in kinds} == kinds
    assert done.type == target


def test_the_file_has_the_configuration_of_the_checkpoint(tmp_path: Path) -> None:
    """What the readers of both formats make of them."""
    folder = write(tmp_path / "model", "qwen3_5", qwen35().tensors)
    with open_weights(convert(folder, tmp_path / "out.gguf", part="mmproj").path) as file:
        config = vision_from_gguf(file.metadata, lambda name: file.tensors[name].shape, {}, where=file.path)
    assert (config.min_pixels, config.max_pixels, config.mean) == (256, 4096, (0.5, 0.25, 0.5))
    assert (config.positions, config.merge, config.out_hidden) == (36, 2, H)


# -- beside the language model ----------------------------------------------------------------------------------------


@pytest.fixture
def seeing(goldens: Path, tmp_path: Path) -> Path:
    """The golden Gemma 3 with a tower in a second shard, as checkpoints of several files come."""
    text = goldens / "gemma3" / "hf"
    folder = write(tmp_path / "seeing", "gemma3", gemma3().tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text / name, folder / name)
    (folder / "model.safetensors").rename(folder / "tower.safetensors")
    shutil.copy(text / "model.safetensors", folder / "text.safetensors")
    with open_weights(text) as loader:
        weight_map = dict.fromkeys(loader.tensors, "text.safetensors")
    weight_map |= dict.fromkeys(gemma3().tensors, "tower.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = json.loads((text / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_tower_gets_a_file_beside_the_language_model(seeing: Path, goldens: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    result = CliRunner().invoke(cli, ["convert", str(seeing), str(out), "--type", "f16"])
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{out}: gemma3, F16, ")
    assert second.startswith(f"{tmp_path / 'mmproj-model.gguf'}: vision tower, F16, ")
    assert "left out: vision_tower" in result.stderr  # the head for classification
    text = {t.name: t.data.tobytes() for t in GGUFReader(goldens / "gemma3" / "model-f16.gguf").tensors}
    assert {t.name: t.data.tobytes() for t in GGUFReader(out).tensors} == text
    assert set(gemma3().expected) == {t.name for t in GGUFReader(tmp_path / "mmproj-model.gguf").tensors}


def test_one_part_alone(seeing: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert convert(seeing, out, part="model").mmproj is None
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["out.gguf"]
    done = convert(seeing, out, part="mmproj", force=True)
    assert (done.arch, done.path, done.mmproj) == ("clip", out, None)
    with pytest.raises(ArgumentError, match="'text' is no part"):
        convert(seeing, out, part="text")


def test_neither_file_is_written_if_one_exists(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "mmproj-out.gguf").write_bytes(b"precious")
    with pytest.raises(ArgumentError, match=r"mmproj-out\.gguf: the file exists"):
        convert(seeing, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["mmproj-out.gguf"]


def test_what_has_no_tower(goldens: Path, tmp_path: Path) -> None:
    with pytest.raises(MultimodalError, match="has no vision tower"):
        convert(goldens / "qwen3" / "hf", tmp_path / "out.gguf", part="mmproj")


def test_an_unknown_tower_is_not_written_and_named(goldens: Path, tmp_path: Path) -> None:
    shutil.copytree(goldens / "qwen3" / "hf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 2}}))
    result = CliRunner().invoke(cli, ["convert", str(tmp_path / "model"), str(tmp_path / "out.gguf")])
    assert result.exit_code == 0, result.output
    assert "the vision tower is not written" in result.stderr
    assert "'qwen3' is not supported" in result.stderr
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["out.gguf"]


@pytest.mark.parametrize(("change", "error", "said"), [
    ("missing", WeightError, r"no tensor for v\.blk\.1\.attn_qkv\.bias; names tried: model\.visual\.blocks\.1\.attn"),
    ("shape", WeightError, r"pos_embed\.weight: expected shape \[36, 16\], found \[35, 16\]"),
    ("more", UnsupportedModelError, r"'model\.visual\.deepstack_merger_list\.0\.norm\.weight' is no tensor"),
    ("deeper", UnsupportedModelError, r"blocks\.2\.norm1\.weight belongs to a layer beyond the 2"),
    ("deepstack", UnsupportedModelError, "deepstack"),
    ("width", ConfigError, "out_hidden_size"),
])  # fmt: skip
def test_damaged_towers(tmp_path: Path, change: str, error: type[Exception], said: str) -> None:
    tensors, at = qwen35().tensors, "model.visual."
    if change == "missing":
        del tensors[f"{at}blocks.1.attn.qkv.bias"]
    elif change == "shape":
        tensors[f"{at}pos_embed.weight"] = np.zeros((35, D), np.float32)
    elif change == "more":
        tensors[f"{at}deepstack_merger_list.0.norm.weight"] = np.zeros(D, np.float32)
    elif change == "deeper":
        tensors[f"{at}blocks.2.norm1.weight"] = np.zeros(D, np.float32)
    config = {"deepstack": {"deepstack_visual_indexes": [1]}, "width": {"out_hidden_size": 32}}.get(change, {})
    folder = write(tmp_path / "model", "qwen3_5", tensors, **config)
    with pytest.raises(error, match=said):
        convert(folder, tmp_path / "out.gguf", part="mmproj")
    assert not (tmp_path / "out.gguf").exists()
