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


def test_audio_is_named(goldens: Path, tmp_path: Path) -> None:
    """A file with a matrix for audio beside its vision tower: the tower is used."""
    path = goldens / "gemma4-unified-mm" / "mmproj-f16.gguf"
    assert (facts(path)["audio"], facts(path)["runnable"]) == ("not supported", True)
    assert "audio: not supported\n" in shown(path)
    assert "audio" not in facts(mmproj(tmp_path, "gemma4_unified"))


def test_images_beyond_the_position_table(tmp_path: Path) -> None:
    """A budget of 70 tokens has up to 66 patches along a side; this table has 10."""
    image = facts(mmproj(tmp_path, "gemma4"))["vision"]["images"][0]
    assert "position table has 10" in image["reason"]


def test_the_page(tmp_path: Path) -> None:
    page = shown(mmproj(tmp_path, "gemma3"))
    assert "language model   gemma3 with hidden size 64\n" in page
    assert "any  resized to 24 x 24  36 patches  4 tokens\n" in page
    assert page.endswith("runnable: yes, as the vision tower of a language model: "
                         "rlx run MODEL --mmproj FILE --image IMAGE PROMPT\n")  # fmt: skip


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


def test_a_text_model_has_no_tower(goldens: Path) -> None:
    assert "vision" not in facts(goldens / "qwen3" / "model-f16.gguf")


def test_the_tower_beside_a_model(model: Path) -> None:
    mmproj(model.parent, "gemma3", "mmproj-F16.gguf")
    tower = facts(model)["vision"]
    assert (tower["usable"], Path(tower["path"]).name) == (True, "mmproj-F16.gguf")
    assert "\nvision tower\n" in shown(model)


@pytest.mark.parametrize(("names", "chosen"), [
    (["mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "mmproj-F16.gguf"),  # the type that rounds less
    (["mmproj-a-F16.gguf", "mmproj-gemma3-F16.gguf"], "mmproj-gemma3-F16.gguf"),  # the model's own name
    (["mmproj-a-F16.gguf", "mmproj-b-Q8_0.gguf"], None),  # may be towers of different models
])  # fmt: skip
def test_several_files_beside_a_model(model: Path, names: list[str], chosen: str | None) -> None:
    for name in names:
        mmproj(model.parent, "gemma3", name)
    tower = facts(model)["vision"]
    assert tower["usable"] is (chosen is not None)
    if chosen is None:
        assert "there are 2 mmproj files" in tower["reason"]
    else:
        assert Path(tower["path"]).name == chosen


def test_towers_of_other_models_do_not_count(model: Path) -> None:
    mmproj(model.parent, "qwen3_5", "mmproj-qwen-F16.gguf")
    mmproj(model.parent, "gemma3", "mmproj-other-F16.gguf")
    assert Path(facts(model)["vision"]["path"]).name == "mmproj-other-F16.gguf"
