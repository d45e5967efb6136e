"""What a path means: which file of a directory is opened, and what is said about files that are no models."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rlx.errors import AmbiguousModelError, GgufError, ModelFileError, RlxError, SafetensorsError
from rlx.weights import open_weights, resolve_model_path
from rlx.weights.gguf import GgufFile
from rlx.weights.safetensors import SafetensorsFile

EMPTY_GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
SPLIT_GGUF = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 11) + b"split.count" + struct.pack("<IH", 2, 2)


def write(directory: Path, *names: str, data: bytes = EMPTY_GGUF) -> None:
    for name in names:
        (directory / name).write_bytes(data)


def save_safetensors(path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, path)
    (path.parent / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["x.gguf"], "x.gguf"),
        (["x.GGUF"], "x.GGUF"),
        (["mmproj-f16.gguf", "x-f16.gguf"], "x-f16.gguf"),
        (["mmproj-Q4_K_M.gguf", "x-f16.gguf"], "x-f16.gguf"),
        (["mmproj-f16.gguf"], "mmproj-f16.gguf"),
        (["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], "x-00001-of-00002.gguf"),
        (["x-00003-of-00003.gguf", "x-00002-of-00003.gguf"], "x-00002-of-00003.gguf"),  # says what is missing
        (["state-of-the-art.gguf"], "state-of-the-art.gguf"),
        (["model.safetensors", "model.safetensors.index.json"], "model.safetensors"),
        (["model.safetensors.index.json", "model-00001-of-00001.safetensors"], "model.safetensors.index.json"),
    ],
)
def test_the_file_of_a_directory(tmp_path: Path, names: list[str], chosen: str) -> None:
    write(tmp_path, "README.md", *names)
    assert resolve_model_path(tmp_path) == tmp_path / chosen
    assert resolve_model_path(str(tmp_path)) == tmp_path / chosen


@pytest.mark.parametrize(
    ("names", "listed", "example"),
    [
        (["a.gguf", "b.gguf"], "2 models here: a.gguf (24 B), b.gguf (24 B)", "/a.gguf"),
        (["x-Q8_0.gguf", "x-q4_k_m.gguf"], "x-Q8_0.gguf (Q8_0, 24 B), x-q4_k_m.gguf (Q4_K_M, 24 B)", ":Q8_0"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "a-Q4_0.gguf (Q4_0, 24 B), b-Q4_0.gguf (Q4_0, 24 B)", "/a-Q4_0.gguf"),
        (["x.gguf", "model.safetensors"], "x.gguf (24 B), model.safetensors (safetensors, 24 B)", "/x.gguf"),
        (["x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y.gguf"], "x-00001-of-00002.gguf (48 B)", "/x-00001-"),
    ],
)
def test_of_several_models_none_is_chosen(tmp_path: Path, names: list[str], listed: str, example: str) -> None:
    write(tmp_path, *names)
    with pytest.raises(AmbiguousModelError) as caught:
        resolve_model_path(tmp_path)
    assert listed in str(caught.value)
    assert f"Choose one, such as {tmp_path}{example}" in str(caught.value)
    assert caught.value.example.startswith(f"{tmp_path}{example}")
    assert len(caught.value.choices) == 2


def test_a_quantization_behind_a_directory_chooses(tmp_path: Path) -> None:
    write(tmp_path, "x-Q8_0.gguf", "x-UD-Q4_K_XL.gguf", "x-IQ2_XXS.gguf", "x-bf16.gguf", "model.safetensors")
    for quantization, name in (
        ("Q8_0", "x-Q8_0.gguf"),
        ("q8_0", "x-Q8_0.gguf"),
        ("UD-Q4_K_XL", "x-UD-Q4_K_XL.gguf"),
        ("IQ2_XXS", "x-IQ2_XXS.gguf"),
        ("BF16", "x-bf16.gguf"),
        ("safetensors", "model.safetensors"),
    ):
        assert resolve_model_path(f"{tmp_path}:{quantization}") == tmp_path / name
    with pytest.raises(ModelFileError, match=r"no Q4_0 model here\. There is x-IQ2_XXS\.gguf \(IQ2_XXS, 24 B\)"):
        resolve_model_path(f"{tmp_path}:Q4_0")
    write(tmp_path, "y:Q8_0")  # a path that is there is that path
    assert resolve_model_path(tmp_path / "y:Q8_0") == tmp_path / "y:Q8_0"


def test_the_reader_follows_the_content(tmp_path: Path) -> None:
    write(tmp_path, "m.gguf", "3f9ab2")  # the hub's cache names files by hash
    save_safetensors(tmp_path / "m.safetensors")
    (tmp_path / "77cd01").write_bytes((tmp_path / "m.safetensors").read_bytes())
    for name, kind in (
        ("m.gguf", GgufFile),
        ("3f9ab2", GgufFile),
        ("m.safetensors", SafetensorsFile),
        ("77cd01", SafetensorsFile),
    ):
        for mmap in (True, False):
            with open_weights(tmp_path / name, mmap=mmap) as found:
                assert type(found) is kind and found.path == tmp_path / name


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        (
            "m.txt",
            b"Hello, world, hello!!",
            ModelFileError,
            "neither a GGUF nor .* begins with b'Hello, world, hello!'",
        ),
        ("m.gguf", b"XXXX" + bytes(40), GgufError, "does not begin with b'GGUF' but with b'XXXX"),
        ("m.gguf", EMPTY_GGUF[:10], GgufError, "the tensor count needs 8 bytes, the file has 2 left"),
        ("m.gguf", b"", ModelFileError, "the file is empty"),
        ("m.txt", b"", ModelFileError, "the file is empty"),
        ("m.safetensors", b"", ModelFileError, "the file is empty"),
        ("m.safetensors", struct.pack("<Q", 640) + b"[" * 640, SafetensorsError, "does not begin with '{'"),
        ("m.safetensors", bytes(3), SafetensorsError, "3 bytes, too few"),
        ("pytorch_model.bin", b"PK\3\4" + bytes(40), ModelFileError, "pickle or an archive; .* can run any code"),
        ("m.pt", b"\x80\2}", ModelFileError, "pickle or an archive"),
        ("m.ckpt", b"whatever", ModelFileError, "pickle or an archive"),
        ("model", b"\x80\4\x95", ModelFileError, "pickle or an archive"),
        ("m.gguf", b"PK\3\4" + bytes(40), ModelFileError, "pickle or an archive"),
        ("m.gguf", b"version https://git-lfs.github.com/spec/v1\n", ModelFileError, "Git LFS pointer"),
        ("m.safetensors", b"\n <!DOCTYPE html><html>", ModelFileError, "looks like a web page"),
        ("m.bin", b"tjgg" + bytes(20), ModelFileError, "from before GGUF"),
        ("m.gguf", SPLIT_GGUF, GgufError, r"there is no key 'split\.no', but split\.count is 2"),
    ],
)
def test_files_that_are_no_models(tmp_path: Path, name: str, data: bytes, error: type[RlxError], message: str) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(error, match=message) as caught:
        open_weights(tmp_path / name)
    assert type(caught.value) is error and str(tmp_path / name) in str(caught.value)


def test_special_files_are_refused_without_reading_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for open_it in (open_weights, GgufFile):
        with pytest.raises(ModelFileError, match="not a regular file"):
            open_it(tmp_path / "m.gguf")
