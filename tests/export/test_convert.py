"""`rlx convert`: the files it writes, read by the `gguf` package and compared with those of the reference converter."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from rlx.cli.main import cli
from rlx.errors import ArgumentError, ModelFileError, TokenizerError, WeightError
from rlx.export.convert import convert
from rlx.export.hf import open_model
from rlx.ir.dtypes import F8_E4M3


def field(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def tensors(reader: GGUFReader) -> dict[str, tuple[Type, bytes]]:
    return {each.name: (each.tensor_type, each.data.tobytes()) for each in reader.tensors}


Stored = dict[str, tuple[str, list[int], bytes]]


def stored(folder: Path) -> Stored:
    """Name -> (type, shape, bytes) of a checkpoint: a length, JSON, and the data."""
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (info["dtype"], info["shape"], content[start + info["data_offsets"][0] : start + info["data_offsets"][1]])
        for name, info in header.items()
    }


def store(file: Path, tensors: Stored) -> None:
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def checkpoint(goldens: Path, tmp_path: Path) -> Path:
    shutil.copytree(goldens / "qwen3" / "hf", tmp_path / "Tiny-Qwen")
    return tmp_path / "Tiny-Qwen"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "bert"])
def test_f16_is_what_the_reference_converter_writes(goldens: Path, tmp_path: Path, family: str) -> None:
    """Byte for byte, from checkpoints in BF16 and (llama) F32."""
    done = convert(goldens / family / "hf", tmp_path / "out.gguf", "F16")
    written, expected = GGUFReader(done.path), GGUFReader(goldens / family / "model-f16.gguf")
    assert tensors(written) == tensors(expected)
    assert done.nbytes == done.path.stat().st_size
    for key in ("general.file_type", "general.quantization_version", "general.size_label", "general.architecture"):
        assert field(written, key) == field(expected, key)


def test_auto_keeps_the_bits_of_a_bf16_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    done = convert(checkpoint, tmp_path / "out.gguf")
    written, source = GGUFReader(done.path), stored(checkpoint)
    assert (done.type, field(written, "general.file_type")) == ("BF16", 32)
    found = tensors(written)
    names = {
        "token_embd": "embed_tokens",
        "blk.1.ffn_up": "layers.1.mlp.up_proj",
        "blk.0.attn_q": "layers.0.self_attn.q_proj",
    }
    for name, old in names.items():
        assert found[f"{name}.weight"] == (Type.BF16, source[f"model.{old}.weight"][2])
    kinds = Counter(kind for kind, _ in found.values())
    assert kinds == {Type.BF16: 29, Type.F32: 17}
    assert {str(dtype): count for dtype, count in done.types.items()} == {"bf16": 29, "f32": 17}
    assert field(written, "general.name") == "Tiny-Qwen"


def test_a_written_file_is_read_back_as_the_checkpoint_was(checkpoint: Path, tmp_path: Path) -> None:
    done = convert(checkpoint, tmp_path / "out.gguf", "F32")
    with open_model(done.path) as written, open_model(checkpoint) as source:
        assert set(written.metadata) == set(source.metadata)
        for mine, theirs in zip(written.tensors, source.tensors, strict=True):
            assert (mine.name, mine.shape) == (theirs.name, theirs.shape)
            assert np.array_equal(mine.values(), theirs.values())


def test_shards(checkpoint: Path, goldens: Path, tmp_path: Path) -> None:
    """Two files under an index, as large models come."""
    whole = stored(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    weight_map = {}
    for part in range(2):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        names = sorted(whole)[part::2]
        store(checkpoint / file, {name: whole[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    done = convert(checkpoint, tmp_path / "out.gguf", "F16")
    assert tensors(GGUFReader(done.path)) == tensors(GGUFReader(goldens / "qwen3" / "model-f16.gguf"))


def e4m3(code: int) -> float:
    """A number of 8 bits: sign, exponent of 4 with bias 7, mantissa of 3; no infinities (arXiv 2209.05433)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -size if code & 128 else size


def test_fp8_becomes_bf16(checkpoint: Path, tmp_path: Path) -> None:
    """Codes with a scale for blocks of 32 by 32; powers of two, so that the product is exact."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (96, 64), np.uint8) | rng.integers(0, 2, (96, 64), np.uint8) << np.uint8(7)
    scales = np.exp2(rng.integers(-8, 0, (3, 2))).astype(np.float32)
    copied, name = stored(checkpoint), "model.layers.0.mlp.gate_proj.weight"
    copied[name] = "F8_E4M3", [96, 64], codes.tobytes()
    copied[f"{name}_scale_inv"] = "F32", [3, 2], scales.tobytes()
    store(checkpoint / "model.safetensors", copied)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    done = convert(checkpoint, tmp_path / "out.gguf")
    assert done.left_out == ()
    assert ("blk.0.ffn_gate.weight", F8_E4M3) in {(name, dtype) for name, dtype, _ in done.tensors}
    kind, data = tensors(GGUFReader(done.path))["blk.0.ffn_gate.weight"]
    found = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(96, 64)
    numbers: npt.NDArray[np.float64] = np.array([[e4m3(code) for code in row] for row in codes.tolist()])
    assert kind == Type.BF16
    assert np.array_equal(found, numbers * np.kron(scales, np.ones((32, 32))))


def test_what_does_not_fit_half_precision_is_refused_and_nothing_is_left(checkpoint: Path, tmp_path: Path) -> None:
    copied, name = stored(checkpoint), "model.layers.3.mlp.up_proj.weight"
    dtype, shape, raw = copied[name]
    copied[name] = dtype, shape, np.array([70_000.0], np.float32).tobytes()[2:] + raw[2:]
    store(checkpoint / "model.safetensors", copied)
    (tmp_path / "target").mkdir()
    with pytest.raises(WeightError, match=r"blk\.3\.ffn_up\.weight.*BF16"):
        convert(checkpoint, tmp_path / "target" / "out.gguf", "F16")
    assert list((tmp_path / "target").iterdir()) == []
    assert convert(checkpoint, tmp_path / "target" / "out.gguf").type == "BF16"


def test_what_cannot_be_converted(checkpoint: Path, goldens: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(ModelFileError, match=r"GGUF file already.*rlx quantize"):
        convert(goldens / "qwen3" / "model-f16.gguf", out)
    with pytest.raises(ModelFileError, match="no such file"):
        convert(tmp_path / "nothing", out)
    with pytest.raises(ArgumentError, match=r"'Q4_K_M'.*rlx quantize"):
        convert(checkpoint, out, "Q4_K_M")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        convert(checkpoint, out)
    assert not out.exists()


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(cli, ["convert", str(checkpoint), str(out), "--type", "f16"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: qwen3, F16, 427 kB (29 f16, 17 f32)\n"
    assert field(GGUFReader(out), "general.file_type") == 1
    again = CliRunner().invoke(cli, ["convert", str(checkpoint), str(out)])
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    assert CliRunner().invoke(cli, ["convert", str(checkpoint), str(out), "--force"]).exit_code == 0
