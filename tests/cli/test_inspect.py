"""`rlx inspect` against the gguf package's view of the same file, and on files that do not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from rlx import demo
from rlx.cli.main import cli


def rlx(*args: str) -> Result:
    return CliRunner().invoke(cli, ["inspect", *args])


def facts(*args: str) -> dict[str, Any]:
    result = rlx(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    return found


def small_llama(path: Path, **changes: Any) -> Path:
    """A llama of one layer; `changes` replace keys (None leaves one out), tensors or the type of the head."""
    keys: dict[str, Any] = {
        "context_length": 128, "embedding_length": 256, "block_count": 1, "feed_forward_length": 256,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    keys.update(changes.get("keys", {}))
    writer = GGUFWriter(path, changes.get("arch", "llama"))
    for key, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"llama.{key}", value)
        elif value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(32)])
    writer.add_string("general.name", changes.get("name", "small"))
    square, kv = (256, 256), (128, 256)
    shapes = {"attn_q": square, "attn_k": kv, "attn_v": kv, "attn_output": square}
    shapes |= {"ffn_gate": square, "ffn_up": square, "ffn_down": square}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (256,))
    tensors["token_embd.weight"] = (32, 256)
    for name, shape in tensors.items():
        if name != changes.get("without"):
            writer.add_tensor(name, np.zeros(changes.get("shapes", {}).get(name, shape), np.float32))
    head = changes.get("head", GGMLQuantizationType.Q8_0)
    if head is GGMLQuantizationType.Q8_K:  # a type of activations, which the package cannot write
        data = np.zeros((32, 292), np.uint8)
    else:
        data = quants.quantize(np.zeros((32, 256), np.float32), head)
    writer.add_tensor("output.weight", data, raw_dtype=head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_figures_are_those_of_the_gguf_package() -> None:
    found, reader = facts("--tensors"), GGUFReader(demo.path())
    expected = [
        {"name": t.name, "dtype": t.tensor_type.name.lower(), "shape": t.shape[::-1].tolist(), "bytes": int(t.n_bytes)}
        for t in reader.tensors
    ]
    assert found["tensor_list"] == expected
    assert found["tensors"] == len(expected)
    assert found["bytes"] == sum(t["bytes"] for t in expected)
    assert found["parameters"] == sum(int(t.n_elements) for t in reader.tensors)
    for row in found["formats"]:
        members = [t for t in expected if t["dtype"] == row["dtype"]]
        assert (row["tensors"], row["bytes"]) == (len(members), sum(t["bytes"] for t in members))
    assert sum(row["tensors"] for row in found["formats"]) == len(expected)
    for key, value in found["metadata"].items():
        original = reader.fields[key].contents()
        if isinstance(original, list):
            assert re.fullmatch(rf"array of \w+ \[{len(original)}\]", value)
        else:
            assert value == original
    assert set(found["metadata"]) == {key for key in reader.fields if not key.startswith("GGUF.")}


def test_memory_is_what_the_kernels_will_hold(tmp_path: Path) -> None:
    """Packed layouts keep the bits of the file, rows padded to 16, and an untied embedding table stays in the file; KV:
    2 x layers x KV heads x head size x bytes.
    """
    found = facts(str(small_llama(tmp_path / "m.gguf")))
    assert found["runnable"], found
    q8_0 = 32 * 256 * 34 // 32
    floats = 5 * 256 * 256 + 2 * 128 * 256 + 3 * 256
    ropes = found["memory"]["weights"] - q8_0 - 4 * floats
    assert 0 <= ropes <= 4 * 64, "beside the file's tensors at most the rope's frequencies"
    token = {"f16": 2 * 2 * 64 * 2, "f32": 2 * 2 * 64 * 4, "q8_0": 2 * 2 * 2 * 34, "q4_0": 2 * 2 * 2 * 18}
    assert found["memory"]["states_per_token"] == token
    assert found["memory"]["tokens"] == 128
    assert found["memory"]["states"] == {name: 128 * size for name, size in token.items()}
    assert (found["runner"], found["config"]["heads"], found["config"]["vocab_size"]) == ("Llama32Runner", 4, 32)


@pytest.mark.parametrize("file", ["hf", "model-f16.gguf"])
@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2", "qwen3"])
def test_every_golden_model_is_runnable(goldens: Path, family: str, file: str) -> None:
    found = facts(str(goldens / family / file))
    assert found["runnable"], found["reason"]
    assert found["config"]["arch"] == family
    if family == "gemma3":
        assert found["config"]["windows"] == [16]


def test_text_of_the_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = small_llama(tmp_path / "m.gguf", name="\x1b[2Jgone\nrunnable: yes\x07")
    result = rlx(str(path))
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout
    assert r"\x1b[2Jgone\nrunnable: yes\x07" in result.stdout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": "grok9"}, r"'grok9' \(general\.architecture\) is unknown\. Supported: "),
        ({"arch": "phimoe"}, r"'phimoe' .* is known but not supported yet: it is a mixture of experts"),
        ({"keys": {"block_count": None}}, r"block_count"),
        ({"keys": {"nextn_predict_layers": 1}}, r"nextn_predict_layers"),
        ({"without": "blk.0.attn_q.weight"}, r"blk\.0\.attn_q\.weight: the tensor is missing"),
        ({"shapes": {"output_norm.weight": (255,)}}, r"output_norm\.weight: expected shape \[256\], found \[255\]"),
        ({"head": GGMLQuantizationType.Q8_K}, r"output\.weight: no kernel reads it: .*q8_k"),
    ],
)
def test_why_a_model_does_not_run(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = small_llama(tmp_path / "m.gguf", **changes)
    found = facts(str(path))
    assert found["runnable"] is False
    assert re.search(reason, found["reason"]), found["reason"]
    assert found["tensors"] > 0
    assert f"\nrunnable: no. {found['reason']}\n" in rlx(str(path)).stdout


def test_it_imports_neither_compiler_nor_tokenizer() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from rlx.cli.main import cli;"
        "print(CliRunner().invoke(cli, ['inspect']).exit_code); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    exit_code, modules = done.stdout.splitlines()
    assert exit_code == "0"
    # llvmlite names the CPU's features, on which `deterministic` depends; nothing is compiled.
    assert not {"numba", "tokenizers", "jinja2", "rich"} & {m.split(".")[0] for m in modules.split()}
