"""Files of vision towers: how the tower of a model is found, older forms of files, and files that are refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tower_files import Values, as_checkpoint, mmproj_keys, mmproj_values, write_mmproj

from rlx import models
from rlx.engine.engine import Engine
from rlx.errors import ConfigError, MultimodalError, RlxError, UnsupportedModelError, WeightError
from rlx.ir.stored import dequantize
from rlx.models import ModelConfig
from rlx.vision.opening import open_tower
from rlx.weights import WeightLoader, open_weights
from rlx.weights.composed import Composed


@pytest.fixture(scope="module")
def tower(goldens: Path) -> tuple[dict[str, Any], Values]:
    """Gemma 3's tower: key-values and tensors."""
    file = goldens / "gemma3-mm" / "mmproj-Q8_0.gguf"
    return mmproj_keys(file), mmproj_values(file)


@pytest.fixture(scope="module")
def text(goldens: Path) -> tuple[WeightLoader, ModelConfig]:
    """A text model of Gemma 3 in GGUF."""
    return opened(goldens / "gemma3" / "model-f16.gguf")


def opened(path: Path) -> tuple[WeightLoader, ModelConfig]:
    loader = open_weights(path)
    has = loader.tensors.__contains__
    return loader, models.config_from(loader.format, loader.metadata, has, where=loader.path)


# -- how it is found --------------------------------------------------------------------------------------------------


def beside(tmp_path: Path, goldens: Path, *names: str, family: str = "gemma3") -> Path:
    """A folder with a text model and mmproj files of these names."""
    (tmp_path / "model.gguf").symlink_to(goldens / family / "model-f16.gguf")
    for name in names:
        (tmp_path / name).symlink_to(goldens / "gemma3-mm" / "mmproj-Q8_0.gguf")
    return tmp_path / "model.gguf"


def test_the_only_mmproj_beside_a_model_is_its_tower(goldens: Path, tmp_path: Path) -> None:
    with closing(Engine.open(beside(tmp_path, goldens, "mmproj-Q8_0.gguf"), load=False)) as engine:
        assert engine.vision.tower is not None and engine.vision.tower is engine.vision.required()
        assert engine.vision.tower.config.family == "gemma3"
        assert engine.vision.tower.weights.loader.path == tmp_path / "mmproj-Q8_0.gguf"


def test_a_tower_is_compiled_with_its_model(goldens: Path, tmp_path: Path) -> None:
    model = beside(tmp_path, goldens, "mmproj-Q8_0.gguf")
    profile = {"buckets": {"seq": [1, 32]}}
    with closing(Engine.open(model, precision="exact", profile=profile, load=False)) as engine:
        assert not [program for program in engine.ready if program.record.phase == "tower"]
        records = engine.compile(phase="tower")
        assert [(record.phase, record.bucket) for record in records] == [("tower", (1, 32))] * 4
        assert [program.name for program in engine.ready] == [
            f"tower-{kind}-1-32" for kind in ("embedding", "keys", "layer", "head")
        ]
        assert "attention" in engine.ready["tower-layer-1-32"].ir("fuse")
        assert not engine.compile(phase="tower", rows=33)
    model = goldens / "qwen3" / "model-f16.gguf"
    with (
        closing(Engine.open(model, load=False)) as engine,
        pytest.raises(MultimodalError, match="take text only"),
    ):
        engine.compile(phase="tower")


def test_a_checkpoint_holds_its_own_tower(goldens: Path, tmp_path: Path) -> None:
    source = goldens / "gemma3-mm"
    loader, config = opened(as_checkpoint(source, source / "mmproj-Q8_0.gguf", tmp_path / "hf"))
    found, weights = open_tower(loader, config)
    assert found.family == "gemma3" and weights.loader is loader
    with pytest.raises(MultimodalError, match="Leave it out: a checkpoint holds its own tower"):
        open_tower(loader, config, source / "mmproj-Q8_0.gguf")
    loader, config = opened(goldens / "gemma3" / "hf")
    with pytest.raises(MultimodalError, match=r"takes text only: its config\.json has no vision tower"):
        open_tower(loader, config)


# -- forms of files ---------------------------------------------------------------------------------------------------


def test_old_files_have_the_names_of_two_matrices_exchanged(
    tower: tuple[dict[str, Any], Values], text: tuple[WeightLoader, ModelConfig], tmp_path: Path
) -> None:
    keys, values = tower
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    old = {".".join(swap.get(part, part) for part in name.split(".")): value for name, value in values.items()}
    _, weights = open_tower(*text, write_mmproj(tmp_path / "old.gguf", keys, old))
    for name in ("v.blk.1.ffn_up.weight", "v.blk.1.ffn_down.weight", "v.blk.1.ffn_up.bias", "v.blk.1.attn_q.bias"):
        assert np.array_equal(weights.raw(name).view(np.float32).reshape(weights.info(name).shape), values[name])


def test_parts_of_block_formats(goldens: Path) -> None:
    loader = open_weights(goldens / "llama-k256" / "model-Q4_K_M.gguf")
    name = "blk.0.attn_q.weight"
    whole, info = Composed.whole(loader, name), loader.tensors[name]
    values = dequantize(loader.raw(name), info.dtype, info.shape)
    order = np.array([5, 0, 255, 7])
    rows = whole.ordered(order)
    assert rows.info.dtype is info.dtype and rows.info.nbytes == len(rows.raw())
    assert np.array_equal(dequantize(rows.raw(), rows.info.dtype, rows.info.shape), values[order])
    turned = whole.moved(info.shape[::-1], np.transpose)
    assert turned.info.dtype.name == "f32"
    assert np.array_equal(turned.raw().view(np.float32).reshape(turned.info.shape), values.T)


# -- files that are refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clip.projector_type": "qwen2vl_merger"}, MultimodalError, "projector 'qwen2vl_merger' .* is not supported"),
        ({"clip.has_vision_encoder": False}, MultimodalError, "no vision tower, only one for sound"),
        ({"clip.vision.projection_dim": 96}, MultimodalError, "rows of 96 numbers, and the model's have 64"),
        ({"clip.use_gelu": False}, UnsupportedModelError, "clip.use_gelu"),
        ({"clip.vision.image_mean": [0.5]}, ConfigError, r"image_mean.* expected 3 elements"),
        ({"clip.vision.block_count": 0}, ConfigError, "block_count.* an integer from 1"),
        ({"clip.vision.projector.scale_factor": 5}, ConfigError, "a divisor of 12, the patches of a side"),
    ],
)
def test_other_towers_are_refused(
    change: dict[str, Any],
    error: type[RlxError],
    message: str,
    tower: tuple[dict[str, Any], Values],
    text: tuple[WeightLoader, ModelConfig],
    tmp_path: Path,
) -> None:
    file = write_mmproj(tmp_path / "mmproj.gguf", {**tower[0], **change}, tower[1])
    with pytest.raises(error, match=message):
        open_tower(*text, file)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("v.blk.2.attn_k.weight", None, r"v\.blk\.2\.attn_k\.weight: the tensor is missing"),
        ("v.post_ln.bias", None, r"v\.post_ln\.bias: the tensor is missing"),
        (
            "v.position_embd.weight",
            (100, 64),
            r"v\.position_embd\.weight: expected shape \[144, 64\], found \[100, 64\]",
        ),
    ],
)
def test_incomplete_files_are_refused_by_the_name_in_the_file(
    name: str,
    shape: tuple[int, ...] | None,
    message: str,
    tower: tuple[dict[str, Any], Values],
    goldens: Path,
    tmp_path: Path,
) -> None:
    values = {**tower[1], name: np.zeros(shape or (1,), np.float32)}
    if shape is None:
        del values[name]
    file = write_mmproj(tmp_path / "mmproj.gguf", tower[0], values)
    model = goldens / "gemma3" / "model-f16.gguf"
    with pytest.raises(WeightError, match=rf"mmproj\.gguf, {message}"):
        Engine.open(model, mmproj=file, load=False)


def test_a_convolution_without_its_second_frame_is_refused(goldens: Path, tmp_path: Path) -> None:
    source, file = goldens / "qwen3vl-mm", tmp_path / "mmproj.gguf"
    file.write_bytes((source / "mmproj-f16.gguf").read_bytes().replace(b"patch_embd.weight.1", b"patch_embd.weight.2"))
    with pytest.raises(WeightError, match=r"v\.patch_embd\.weight: the tensor has no equal second part"):
        Engine.open(source / "model-f16.gguf", mmproj=file, load=False)
