"""Every family's graph against the logits of transformers and llama.cpp, through the interpreter."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from golden_files import Session, Tensors, read_gguf, read_safetensors

from rlx.ir import text
from rlx.ir.dtypes import BF16, F16, F32
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.models import FAMILIES, ModelConfig, build

GOLDENS = Path(__file__).parent.parent / "data" / "goldens"
CASES = [(family, file) for family in FAMILIES for file in ("hf/config.json", "model-f16.gguf")]
QUANTS = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")

Loaded = tuple[ModelConfig, Tensors]


@cache
def load(family: str, file: str) -> Loaded:
    path = GOLDENS / family / file
    if path.suffix == ".gguf":
        metadata, tensors = read_gguf(path)
        return ModelConfig.from_gguf(metadata, tensors.has), tensors
    config = ModelConfig.from_hf(json.loads(path.read_text()))
    return config, read_safetensors(path.with_name("model.safetensors"), family)


def graph_of(loaded: Loaded) -> Graph:
    return build(*loaded, F32)


def session(loaded: Loaded) -> Session:
    return Session(graph_of(loaded), *loaded)


def golden(family: str, name: str = "golden.npz") -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / family / name))


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert found.shape == expected.shape and error <= tolerance, f"error {error:.2e} of the largest logit"


@pytest.mark.parametrize(("family", "file"), CASES)
def test_prefill_in_one_go(family: str, file: str) -> None:
    expected = golden(family)
    found = session(load(family, file)).feed(expected["tokens"])
    assert_close(found, expected["logits"], 1e-5)


@pytest.mark.parametrize(("family", "file"), CASES)
def test_prefill_in_chunks_then_decode(family: str, file: str) -> None:
    """Chunks of uneven size, one of a single token; then the 24 tokens that transformers chose, one by one."""
    expected = golden(family)
    run = session(load(family, file))
    chunks = np.split(expected["tokens"], [1, 18, 19, 40])
    assert_close(np.concatenate([run.feed(c) for c in chunks]), expected["logits"], 1e-5)
    decoded = np.concatenate([run.feed(expected["greedy"][i : i + 1]) for i in range(len(expected["greedy"]))])
    assert_close(decoded, expected["gen_logits"], 1e-5)
    assert (decoded.argmax(-1)[:-1] == expected["greedy"][1:]).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_quantized_files(quant: str) -> None:
    """llama.cpp ran the same file dequantized to float32."""
    expected = golden("llama-k256", "golden_llamacpp.npz")
    found = session(load("llama-k256", f"model-{quant}.gguf")).feed(golden("llama-k256")["tokens"])
    assert_close(found[expected["quant_positions"]], expected[f"logits_dequant_{quant}"], 5e-4)


@pytest.mark.parametrize("family", [*FAMILIES, "llama-k256"])
def test_hub_style_config_is_the_same_model(family: str) -> None:
    new, old = ((GOLDENS / family / "hf" / f"config{s}.json").read_text() for s in ("", ".hub_style"))
    assert ModelConfig.from_hf(json.loads(old)) == ModelConfig.from_hf(json.loads(new))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_and_hf_are_the_same_model(family: str) -> None:
    """They differ in what the two formats store: order of q and k rows, norms plus one, divisors, rounding of f32."""
    gguf, hf = (load(family, file)[0] for file in ("model-f16.gguf", "hf/config.json"))
    same = set(vars(gguf)) - {"eps", "norm_offset", "rope", "rope_style"}
    assert {k: vars(gguf)[k] for k in same} == {k: vars(hf)[k] for k in same}
    assert gguf.eps == pytest.approx(hf.eps, rel=1e-6) and gguf.rope.base == hf.rope.base
    assert (gguf.norm_offset, hf.norm_offset) == (0.0, 1.0 if family.startswith("gemma") else 0.0)
    assert (gguf.rope_style, hf.rope_style) == ("interleaved" if family == "llama" else "neox", "neox")


@pytest.mark.parametrize(("family", "file"), CASES)
@pytest.mark.parametrize("kv_dtype", [F32, F16, BF16])
def test_the_graph_is_well_formed(family: str, file: str, kv_dtype: object) -> None:
    config, tensors = load(family, file)
    graph = build(config, tensors, kv_dtype)  # type: ignore[arg-type]
    verify(graph)
    assert text.loads(text.dumps(graph)).outputs == graph.outputs
    assert graph.symbols == ["CTX", "PAST_SEQ", "SEQ"]
    assert list(graph.leaves("input")) == ["tokens", "positions"]
    states = graph.leaves("state")
    assert set(states) == {f"{kv}.{i}" for kv in "kv" for i in range(config.layers)}
    assert all(s.dtype is kv_dtype for s in states.values())


@pytest.mark.parametrize(("family", "file"), CASES)
def test_every_tensor_of_the_file_is_used(family: str, file: str) -> None:
    """Under the file's dtype if it is a matrix, as float32 if it is a vector; divisors lie in the frequencies."""
    config, tensors = load(family, file)
    graph = graph_of((config, tensors))
    weights = {n: w for n, w in graph.leaves("weight").items() if n not in graph.constants}
    ignored = {"rope_freqs.weight"} | ({"output.weight"} if config.tied else set())
    assert set(weights) == set(tensors) - ignored
    assert all(w.dtype is (tensors[n].dtype if len(w.shape) == 2 else F32) for n, w in weights.items())
