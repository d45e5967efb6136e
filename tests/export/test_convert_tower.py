"""Vision towers as mmproj files, from random checkpoints (`random_towers.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader
from random_towers import FAMILIES, PATCH, D, F, H, gemma3, qwen35, write

from rlx.cli.main import cli
from rlx.errors import ConfigError, UnsupportedModelError, WeightError
from rlx.export.convert import convert
from rlx.models.vision_config import vision_from_gguf
from rlx.weights import open_weights


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
    qwen: dict[str, Any] = {
        "projector_type": "qwen3vl_merger", "use_gelu": True, "vision.image_size": 24,
        "vision.spatial_merge_size": 2, "vision.is_deepstack_layers": [False, False],
        "vision.image_mean": [0.5, 0.25, 0.5], "vision.image_std": [0.5] * 3,
        "vision.image_min_pixels": 256, "vision.image_max_pixels": 4096,
    }  # fmt: skip
    expected = {
        "qwen3_5": same | layers | qwen,
        "qwen3_vl": same | layers | qwen | {"vision.is_deepstack_layers": [False, True]},
        "gemma3": same | layers | {
            "projector_type": "gemma3", "use_gelu": True, "vision.image_size": 24, "vision.projector.scale_factor": 3,
            "vision.image_mean": [0.5] * 3, "vision.image_std": [0.5] * 3,
        },
        "gemma4": same | layers | any_size | {"vision.projector_type": "gemma4v"},
        "gemma4_unified": same | any_size | {
            "vision.projector_type": "gemma4uv", "vision.block_count": 0, "vision.feed_forward_length": 0,
            "vision.attention.head_count": 0,
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


@pytest.mark.parametrize(("change", "error", "said"), [
    ("missing", WeightError, r"model\.visual\.blocks\.1\.attn\.qkv\.bias: the tensor is missing"),
    ("shape", WeightError, r"pos_embed\.weight: expected shape \[36, 16\], found \[35, 16\]"),
    ("more", UnsupportedModelError, r"'model\.visual\.deepstack_merger_list\.0\.norm\.weight' is no tensor"),
    ("deeper", UnsupportedModelError, r"blocks\.2\.norm1\.weight belongs to a layer beyond the 2"),
    ("deepstack", WeightError, r"visual\.deepstack_merger_list\.0\.norm\.weight: the tensor is missing"),
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
