"""Benchmark models: tensors, keys and type mixes as `llama-quantize` and the converters write them, sane weights."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from rlx.ir.dtypes import BY_GGML

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "make_model.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write(maker: ModuleType, out: Path, shape: str, kind: str, seed: int = 0) -> Path:
    maker.write_model(out, shape, maker.SHAPES[shape], kind, seed)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_same_tensors_and_keys_as_a_converted_checkpoint(
    maker: ModuleType, goldens: Path, tmp_path: Path, family: str
) -> None:
    ours = GGUFReader(write(maker, tmp_path / "m.gguf", f"tiny-{family}", "F16"))
    theirs = GGUFReader(goldens / family / "model-f16.gguf")
    assert {t.name for t in ours.tensors} == {t.name for t in theirs.tensors}
    needed = {k: f.types for k, f in theirs.fields.items() if k.startswith(f"{family}.")}
    assert {k: ours.fields[k].types for k in needed if k in ours.fields} == needed
    tokenizer = {"model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "add_space_prefix"}
    wanted = {k for k in theirs.fields if k.removeprefix("tokenizer.ggml.") in tokenizer}
    assert wanted <= set(ours.fields)
    for name in ("model", "pre"):
        assert ours.fields[f"tokenizer.ggml.{name}"].contents() == theirs.fields[f"tokenizer.ggml.{name}"].contents()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_the_mix_of_types_is_that_of_a_quantized_file(maker: ModuleType, goldens: Path, kind: str) -> None:
    shape = replace(maker.SHAPES["tiny-llama"], layers=2)
    table = json.loads((goldens / "llama-k256" / "types.json").read_text())
    found = {n: maker.tensor_type(n, tuple(t["shape"]), kind, shape).name for n, t in table["tensors"].items()}
    assert found == {name: tensor[kind] for name, tensor in table["tensors"].items()}
    assert maker.KINDS[kind][1] == table["file_types"][kind]


def test_six_bits_go_to_the_outer_and_every_third_layer(maker: ModuleType) -> None:
    chosen = [i for i in range(28) if maker.more_bits(f"blk.{i}.ffn_down.weight", 28)]
    assert chosen == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert not maker.more_bits("blk.0.ffn_up.weight", 28)


@pytest.mark.parametrize("shape", ["tiny-qwen3", "tiny-gemma3"])  # rows of 256 and of 288, which K-quants cannot hold
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_weights_are_finite_and_of_the_stated_deviation(
    maker: ModuleType, tmp_path: Path, shape: str, kind: str
) -> None:
    path = write(maker, tmp_path / "m.gguf", shape, kind)
    reader = GGUFReader(path)
    for t in reader.tensors:
        stored = BY_GGML[int(t.tensor_type)]
        assert t.n_bytes == stored.size(tuple(reversed(t.shape.tolist()))), t.name
        values = dequantize(t.data, t.tensor_type)
        assert np.isfinite(values).all(), t.name
        if t.name.endswith("norm.weight"):
            assert 0.7 < values.min() <= values.max() < 1.3, t.name
        elif t.name.endswith(".weight") and len(t.shape) == 2:
            assert values.std() == pytest.approx(0.02, rel=0.05), (t.name, t.tensor_type)
            assert abs(values.mean()) < 2e-3, (t.name, t.tensor_type)
    last = max(reader.tensors, key=lambda t: t.data_offset)
    assert path.stat().st_size == last.data_offset + -(-last.n_bytes // 32) * 32


def test_llama_divisors_are_those_of_the_converted_checkpoint(maker: ModuleType, goldens: Path) -> None:
    reader = GGUFReader(goldens / "llama" / "model-f16.gguf")
    theirs = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    config = json.loads((goldens / "llama" / "hf" / "config.json").read_text())
    rope = config["rope_parameters"]
    shape = replace(maker.SHAPES["tiny-llama"], head_dim=config["head_dim"], rope_factor=rope["factor"])
    ours = maker.rope_divisors(
        shape, rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_seed_names_a_file(maker: ModuleType, tmp_path: Path) -> None:
    paths = [write(maker, tmp_path / f"{i}.gguf", "tiny-qwen3", "Q8_0", seed) for i, seed in enumerate((1, 1, 2))]
    first, again, other = (p.read_bytes() for p in paths)
    assert first == again
    assert first != other
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_byte_level_vocabulary_encodes_any_text(maker: ModuleType, tmp_path: Path, family: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(write(maker, tmp_path / "m.gguf", f"tiny-{family}", "Q8_0")).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    assert len(set(tokens)) == len(tokens) == 512
    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges]))  # refuses unknown parts
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for text in ("Once upon a time there was a fox.", "naïve 你好 🦊\n\t\x00"):
        assert bpe.decode(bpe.encode(text).ids) == text
    assert bpe.encode(" the story").tokens == ["Ġthe", "Ġstory"]


def test_the_sentencepiece_vocabulary_holds_bytes_and_every_step_of_a_merge(maker: ModuleType, tmp_path: Path) -> None:
    fields = GGUFReader(write(maker, tmp_path / "m.gguf", "tiny-gemma3", "Q8_0")).fields
    tokens, types, scores = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "scores"))
    assert len(set(tokens)) == len(tokens) == len(types) == len(scores) == 512
    assert [t for t, kind in zip(tokens, types, strict=True) if kind == 6] == [f"<0x{b:02X}>" for b in range(256)]
    pieces = {t for t, kind in zip(tokens, types, strict=True) if kind == 1}
    assert all(piece[:-1] in pieces and piece[-1] in pieces for piece in pieces if len(piece) > 1)
    assert "▁story" in pieces


def test_too_small_a_vocabulary_is_refused(maker: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="at least"):
        maker.write_model(tmp_path / "m.gguf", "tiny", replace(maker.SHAPES["tiny-qwen3"], vocab=100), "F16")
    assert not list(tmp_path.iterdir())
