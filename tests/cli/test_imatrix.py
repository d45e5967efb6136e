"""`rlx imatrix`, its file as the `gguf` package reads it, and `rlx quantize --imatrix`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGUFReader, GGUFWriter

from rlx import demo
from rlx.cli.main import cli
from rlx.errors import ModelFileError
from rlx.weights.importance import read_importance

TEXT = "Once upon a time there was a brave fox. The fox lived in a forest. One day the fox found a lamp.\n" * 12


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The importance matrix of the demo model, from two windows of 64 tokens."""
    folder = tmp_path_factory.mktemp("imatrix")
    (folder / "text.txt").write_text(TEXT)
    done = run("imatrix", folder / "text.txt", folder / "imatrix.gguf", "demo", "--window", 64, "--windows", 2)
    assert done.exit_code == 0, done.output
    assert f"{folder / 'imatrix.gguf'}: 43 tensors, 2 windows of 64 tokens" in done.stdout
    return folder / "imatrix.gguf"


def test_the_form_of_the_file(made: Path) -> None:
    """As llama.cpp's `llama-imatrix` writes it: keys, names and shapes (the fastest axis first)."""
    reader = GGUFReader(made)
    keys = {name: reader.fields[name].contents() for name in reader.fields if name.startswith(("general.t", "imatrix"))}
    assert keys == {
        "general.type": "imatrix", "imatrix.datasets": ["text.txt"], "imatrix.chunk_count": 2, "imatrix.chunk_size": 64,
    }  # fmt: skip
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.0.ffn_down.weight.in_sum2"] == [768, 1]
    assert shapes["blk.0.ffn_down.weight.counts"] == [1, 1]
    assert len(shapes) == 2 * 43
    values = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert (values["blk.5.attn_q.weight.counts"] == 128).all() and (values["blk.5.attn_q.weight.in_sum2"] > 0).all()
    found = read_importance(made)["blk.5.attn_q.weight"]
    np.testing.assert_array_equal(found.squares, values["blk.5.attn_q.weight.in_sum2"])


def test_a_quantized_file_by_importance(made: Path, tmp_path: Path) -> None:
    words = ["quantize", demo.path(), tmp_path / "a.gguf", "Q4_K_M", "--requantize", "--json"]
    done = run(*words, "--imatrix", made)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["by_importance"] == 43
    plain = run(*words[:2], tmp_path / "b.gguf", *words[3:])
    assert json.loads(plain.stdout)["by_importance"] == 0
    a, b = (GGUFReader(tmp_path / name).tensors for name in ("a.gguf", "b.gguf"))
    differ = [x.name for x, y in zip(a, b, strict=True) if not np.array_equal(x.data, y.data)]
    assert len(differ) == 43 and all(x.tensor_type == y.tensor_type for x, y in zip(a, b, strict=True))
    shown = run(*words[:2], tmp_path / "a.gguf", "Q8_0", "--imatrix", made, "--force", "--requantize")
    assert "0 tensors rounded by importance" in shown.stderr


def wrong(path: Path, **tensors: np.ndarray) -> Path:
    writer = GGUFWriter(path, "imatrix")
    for name, values in tensors.items():
        writer.add_tensor(name.replace("__", "."), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SUM = "blk__0__attn_q__weight__in_sum2"
COUNT = "blk__0__attn_q__weight__counts"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": np.ones((1, 2))}, "this is no importance matrix"),
        ({SUM: np.ones((1, 256))}, "attn_q.weight.counts: it is no tensor of f32"),
        ({SUM: np.ones((2, 256)), COUNT: np.ones((1, 1))}, "2 matrices and 1 counts"),
        ({SUM: np.full((1, 256), np.nan), COUNT: np.ones((1, 1))}, "a number is negative or not finite"),
        ({SUM: np.full((1, 256), -1), COUNT: np.ones((1, 1))}, "a number is negative or not finite"),
    ],
)
def test_files_that_are_no_importance_matrix(tensors: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=said):
        read_importance(wrong(tmp_path / "wrong.gguf", **tensors))
