"""Benchmark models: tensors, keys and type mixes as `llama-quantize` and the converters write them, sane weights."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
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


def test_gemma4_has_the_tensors_of_a_converted_checkpoint_in_both_kinds_of_layers(
    maker: ModuleType, goldens: Path, tmp_path: Path
) -> None:
    ours = GGUFReader(write(maker, tmp_path / "m.gguf", "tiny-gemma4", "F16"))
    theirs = GGUFReader(goldens / "gemma4-e2b" / "model-f16.gguf")

    def layer(reader: GGUFReader, number: int) -> set[str]:
        return {t.name.split(".", 2)[2] for t in reader.tensors if t.name.startswith(f"blk.{number}.")}

    keys = {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}
    assert layer(ours, 0) == layer(theirs, 0) and layer(ours, 2) == layer(theirs, 2)
    # The checkpoint keeps keys and values of layers that share others', which nobody reads.
    assert layer(ours, 8) == layer(theirs, 7) - keys
    assert {t.name for t in ours.tensors if "blk" not in t.name} == {
        t.name for t in theirs.tensors if "blk" not in t.name
    }
    needed = {k: f.types for k, f in theirs.fields.items() if k.startswith("gemma4.")}
    assert {k: ours.fields[k].types for k in needed if k in ours.fields} == needed
    assert ours.fields["gemma4.feed_forward_length"].contents() == [256] * 6 + [512] * 3


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_the_mix_of_types_is_that_of_a_quantized_file(maker: ModuleType, goldens: Path, kind: str) -> None:
    table = json.loads((goldens / "llama-k256" / "types.json").read_text())
    shape = replace(maker.SHAPES["tiny-llama"], layers=2)
    found = {t.name: t.type.name for t in maker.plan(shape, kind)}
    assert found == {name: tensor[kind] for name, tensor in table["tensors"].items()}
    assert maker.FILE_TYPES[kind].ggml == table["file_types"][kind]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen2"])
def test_a_hugging_face_folder_reads_back(maker: ModuleType, tmp_path: Path, name: str) -> None:
    """Its sizes are the shape's, its tensors those that the family needs, and its tokenizer gives a text back."""
    from safetensors import safe_open
    from tokenizers import Tokenizer

    from rlx.models.hf_config import from_hf
    from rlx.weights.names import canonical_name

    s = maker.SHAPES[name]
    count = maker.write_checkpoint(tmp_path, s, "BF16")
    config = from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert (config.arch, config.hidden, len(config.each), config.vocab_size) == (s.arch, s.hidden, s.layers, s.vocab)
    assert (config.tied, config.heads, config.each[0].kv_heads, config.eps) == (s.tied, s.heads, s.kv_heads, s.eps)
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 no dict
    assert {canonical_name(key, s.arch): shape for key, shape in shapes.items()} == {
        t.name: t.shape for t in maker.plan(s, "BF16")
    }
    assert sum(map(prod, shapes.values())) == count
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("the fox said: Größe").ids) == "the fox said: Größe"
    assert tokenizer.get_vocab_size() == s.vocab
    assert tokenizer.token_to_id("<|im_end|>") == json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
