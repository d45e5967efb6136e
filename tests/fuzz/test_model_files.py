"""Crafted model files and folders: each breaks one rule, and each ends in an error with a name."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlx.engine.opening.setup import open_model
from rlx.errors import ModelFileError
from rlx.weights import open_weights
from rlx.weights.safetensors import parse_header


def open_(path: Path) -> None:
    with open_weights(path) as loader:
        open_model(loader)


@pytest.fixture
def checkpoint(goldens: Path, tmp_path: Path) -> Path:
    """A copy of a sound checkpoint."""
    return Path(shutil.copytree(goldens / "llama" / "hf", tmp_path / "hf"))


def header(tensors: int, data: int = 0) -> bytes:
    entry = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    raw = ("{" + ",".join(entry % i for i in range(tensors)) + "}").encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def test_many_tensors_are_opened_or_refused_by_a_limit() -> None:
    assert len(parse_header(header(20_000), "f")[0]) == 20_000
    with pytest.raises(ModelFileError, match=r"at most 33554432 are allowed"):
        parse_header(header(1_000_000), "f")


NAMES = [
    "../model.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "c:x",
    "x\0y",
    "\ud800",
    1,
    None,
    ["x"],
    {},
]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_files_of_its_folder_only(checkpoint: Path, name: Any) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "x.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="not a file name of this directory"):
        open_(checkpoint)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", [fifo, loop, dangling, folder, device, cut, empty])
def test_files_that_are_no_files(checkpoint: Path, name: str, change: Callable[[Path], None]) -> None:
    change(checkpoint / name)
    with pytest.raises(ModelFileError):
        open_(checkpoint)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan, expected a number from"),
    "infinite": ({"rope_theta": float("inf"), "rope_parameters": None, "rope_scaling": None}, "is inf, expected"),
    "many_layers": ({"num_hidden_layers": 10**9}, "expected an integer from 1 to 1024"),
    "many_digits": ({"hidden_size": 10**4000}, "'hidden_size' is 10000000000"),
    "large_vocabulary": ({"vocab_size": 1 << 40}, "'vocab_size' is 1099511627776"),
    "text_vocabulary": ({"vocab_size": "512"}, "'vocab_size' is '512'"),
    "true_heads": ({"num_attention_heads": True}, "'num_attention_heads' is True"),
    "long_text": ({"model_type": "x" * 100_000}, "is not supported"),
    "control_characters": ({"model_type": "\x1b[2J\ud800"}, r"'\x1b[2J\ud800' (model_type) is not supported"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_config_json(checkpoint: Path, name: str) -> None:
    changes, message = CONFIGS[name]
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelFileError) as caught:
        open_(checkpoint)
    text = str(caught.value)
    assert message in text and len(text) < 5_000 and text.isprintable()
