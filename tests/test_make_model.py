"""Benchmark models: tensors, keys and type mixes as `llama-quantize` and the converters write them, sane weights."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from gguf import GGUFReader

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))  # as for a script that lies there
    yield importlib.import_module("make_model")
    sys.path.remove(str(FOLDER))


def write(maker: ModuleType, out: Path, shape: str, kind: str, seed: int = 0) -> Path:
    maker.write_model(out, shape, maker.SHAPES[shape], kind, seed)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen35", "gemma3"])
def test_same_tensors_and_keys_as_a_converted_checkpoint(
    maker: ModuleType, goldens: Path, tmp_path: Path, family: str
) -> None:
    ours = GGUFReader(write(maker, tmp_path / "m.gguf", f"tiny-{family}", "F16"))
    theirs = GGUFReader(goldens / family / "model-f16.gguf")
    dims = {t.name: (len(t.shape), t.tensor_type) for t in theirs.tensors}
    assert {t.name: (len(t.shape), t.tensor_type) for t in ours.tensors} == dims
    needed = {k: f.types for k, f in theirs.fields.items() if k.startswith(f"{family}.")}
    assert {k: ours.fields[k].types for k in needed if k in ours.fields} == needed
    tokenizer = {"model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "add_space_prefix"}
    wanted = {k for k in theirs.fields if k.removeprefix("tokenizer.ggml.") in tokenizer}
    assert wanted <= set(ours.fields)
    for name in ("model", "pre"):
        assert ours.fields[f"tokenizer.ggml.{name}"].contents() == theirs.fields[f"tokenizer.ggml.{name}"].contents()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_the_mix_of_types_is_that_of_a_quantized_file(maker: ModuleType, goldens: Path, kind: str) -> None:
    table = json.loads((goldens / "llama-k256" / "types.json").read_text())
    shape = replace(maker.SHAPES["tiny-llama"], layers=2)
    found = {t.name: t.type.name for t in maker.plan(shape, kind)}
    assert found == {name: tensor[kind] for name, tensor in table["tensors"].items()}
    assert maker.FILE_TYPES[kind].ggml == table["file_types"][kind]
