"""`rlx inspect` of vision towers: mmproj files, and models with a tower inside or beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner
from gguf import GGUFWriter
from random_towers import FAMILIES, H, write

from rlx.cli.main import cli
from rlx.export.convert import convert


def shown(path: Path, *args: str) -> str:
    result = CliRunner().invoke(cli, ["inspect", str(path), *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(path, "--json"), parse_constant=pytest.fail)
    return found


def mmproj(folder: Path, model_type: str, name: str = "mmproj-tower.gguf") -> Path:
    """The mmproj file of a random tower."""
    with TemporaryDirectory() as made:
        source = write(Path(made) / "model", model_type, FAMILIES[model_type]().tensors)
        return convert(source, folder / name, "F16", part="mmproj").path


@pytest.mark.parametrize(("model_type", "family", "limits", "row"), [
    ("qwen3_5", "qwen35", {"min_pixels": 256, "max_pixels": 4096, "own_max_pixels": 4096}, ([64, 64], 256, 64)),
    ("gemma3", "gemma3", {"size": [24, 24]}, ([24, 24], 36, 4)),
    ("gemma4_unified", "gemma4_unified", {"tokens": 70}, ([96, 96], 64, 64)),
])  # fmt: skip
def test_an_mmproj_file(
    tmp_path: Path, model_type: str, family: str, limits: dict[str, Any], row: tuple[list[int], int, int]
) -> None:
    """A square image of 512 pixels becomes what the reference processors make of it."""
    found = facts(mmproj(tmp_path, model_type))
    tower = found["vision"]
    assert (found["kind"], found["runnable"], tower["family"]) == ("mmproj", True, family)
    assert (tower["config"]["hidden"], tower["config"]["out_hidden"], tower["limits"]) == (16, H, limits)
    square = next(each for each in tower["images"] if each["width"] == each["height"] == 512)
    assert (square["resized"], square["patches"], square["tokens"]) == row
    assert tower["memory"] > 0


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "mmproj-llava.gguf", "clip")
    writer.add_string("clip.projector_type", "mlp")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = facts(tmp_path / "mmproj-llava.gguf")
    assert found["runnable"] is False
    assert "'mlp'" in found["reason"]


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(goldens: Path, tmp_path: Path) -> Path:
    """The golden Gemma 3, whose hidden size is that of the random towers."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(goldens / "gemma3" / "model-f16.gguf", folder / "gemma3-F16.gguf")
    return folder / "gemma3-F16.gguf"


def test_a_model_without_its_tower(model: Path) -> None:
    found = facts(model)
    assert found["runnable"] is True
    assert "no mmproj file lies beside the model" in found["vision"]["reason"]
    assert "\nimages: no. " in shown(model)


def test_the_tower_beside_a_model(model: Path) -> None:
    mmproj(model.parent, "gemma3", "mmproj-F16.gguf")
    tower = facts(model)["vision"]
    assert (tower["usable"], Path(tower["path"]).name) == (True, "mmproj-F16.gguf")
    assert "\nvision tower\n" in shown(model)
