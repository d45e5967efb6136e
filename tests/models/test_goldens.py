"""Every family's graph against the logits of transformers and llama.cpp, through the interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from golden_files import CASES, FILES, MAMBA, QUANTIZED, Session, Tensors, read
from golden_folder import PACKED, goldens

from rlx.ir import text
from rlx.ir.dtypes import BF16, F16, F32
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.models import ARCHITECTURES, MODEL_TYPES, ModelConfig, build, from_hf

BOTH = [family for family, files in FILES.items() if len(files) == 2]
HUB_STYLE = sorted(
    path.parent.parent.name
    for path in PACKED.glob("*/hf/config.hub_style.json")
    if json.loads(path.read_text())["model_type"] in MODEL_TYPES
)
# Largest error as a share of the largest logit. Scaled embeddings and no scale of the scores: float32 there, too,
# differs from float64 by this much.
TOLERANCE = {"gemma4-e2b": 3e-5}

# The logits of further ones are compared in `test_hybrids.py`, and with an image in `tests/runners/test_seeing.py`.
OTHERS = {"minicpm", "lfm2moe", "nemotron_h_moe", "qwen3vl", "qwen3vlmoe"}

RECURRENT = ("s", "conv_q", "conv_k", "conv_v")

Loaded = tuple[ModelConfig, Tensors]


@cache
def load(family: str, file: str) -> Loaded:
    return read(goldens() / family / file)


def graph_of(loaded: Loaded) -> Graph:
    return build(*loaded, F32)


def session(loaded: Loaded) -> Session:
    return Session(graph_of(loaded), *loaded)


def golden(family: str, name: str = "golden.npz") -> dict[str, np.ndarray]:
    """The expected values; `positions` are those that have `logits`."""
    found = dict(np.load(goldens() / family / name))
    return {"positions": np.arange(48), **found}


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert found.shape == expected.shape and error <= tolerance, f"error {error:.2e} of the largest logit"


@pytest.mark.parametrize(("family", "file"), CASES)
def test_prefill_in_chunks_then_decode(family: str, file: str) -> None:
    """Chunks of uneven size, one of a single token; then the tokens that transformers chose, one by one."""
    expected, tolerance = golden(family), TOLERANCE.get(family, 1e-5)
    run = session(load(family, file))
    chunks = np.split(expected["tokens"], [1, 18, 19, 40])
    logits = np.concatenate([run.feed(c) for c in chunks])
    assert_close(logits[expected["positions"]], expected["logits"], tolerance)
    count = len(expected["gen_logits"])
    decoded = np.concatenate([run.feed(expected["greedy"][i : i + 1]) for i in range(count)])
    assert_close(decoded, expected["gen_logits"], tolerance)
    assert (decoded.argmax(-1) == expected["greedy"][1 : count + 1]).all()


@pytest.mark.parametrize(
    ("family", "quant"), [(family, quant) for family, quants in QUANTIZED.items() for quant in quants]
)
def test_quantized_files(family: str, quant: str) -> None:
    """llama.cpp ran the same file dequantized to float32."""
    expected = golden(family, "golden_llamacpp.npz")
    found = session(load(family, f"model-{quant}.gguf")).feed(golden(family)["tokens"])
    assert_close(found[expected["quant_positions"]], expected[f"logits_dequant_{quant}"], 5e-4)


def test_every_family_has_a_fixture() -> None:
    """Among them those in whose GGUF files rows lie in another order than in safetensors."""
    there = {load(family, file)[0].arch for family, file in CASES}
    assert there | OTHERS == set(ARCHITECTURES)
    assert {"llama", "qwen35", "gemma3"} <= set(BOTH)


@pytest.mark.parametrize("family", HUB_STYLE)
def test_hub_style_config_is_the_same_model(family: str) -> None:
    new, old = ((PACKED / family / "hf" / f"config{s}.json").read_text() for s in ("", ".hub_style"))
    assert new != old and from_hf(json.loads(old)) == from_hf(json.loads(new))


@pytest.mark.parametrize("family", BOTH)
def test_gguf_and_hf_are_the_same_model(family: str) -> None:
    """They differ in what the two formats store: order of rows, norms plus one, divisors, rounding of f32."""
    gguf, hf = (load(family, file)[0] for file in ("model-f16.gguf", "hf"))
    differ = {"eps", "norm_offset", "plain_norms", "rope", "rope_style", "recurrence"}
    if hf.arch in MAMBA:  # GGUF has no key for their biases, and says 1048576 positions where there is no rope
        differ |= {"context", "biases", "own", "attention_scale"}
        assert gguf.own == pytest.approx(hf.own) and gguf.attention_scale == pytest.approx(hf.attention_scale)
    same = set(vars(gguf)) - differ
    assert {k: vars(gguf)[k] for k in same} == {k: vars(hf)[k] for k in same}
    assert gguf.eps == pytest.approx(hf.eps, rel=1e-6) and gguf.rope.base == hf.rope.base
    assert (gguf.norm_offset, hf.norm_offset) == (0.0, 1.0 if family.startswith(("gemma", "qwen35")) else 0.0)
    interleaved = family in ("llama", "granite-hybrid")
    assert (gguf.rope_style, hf.rope_style) == ("interleaved" if interleaved else "neox", "neox")
    if gguf.recurrence is not None and hf.recurrence is not None:
        assert replace(gguf.recurrence, heads="grouped", log_decay=True) == hf.recurrence
        assert (gguf.recurrence.heads == "tiled", gguf.recurrence.log_decay) == (hf.recurrence.corrects, False)


@pytest.mark.parametrize(("family", "file"), CASES)
@pytest.mark.parametrize("kv_dtype", [F32, F16, BF16])
def test_the_graph_is_well_formed(family: str, file: str, kv_dtype: object) -> None:
    config, tensors = load(family, file)
    graph = build(config, tensors, kv_dtype)  # type: ignore[arg-type]
    verify(graph)
    assert text.loads(text.dumps(graph)).outputs == graph.outputs
    windows = {"WINDOW_CTX"} if any(config.windows) else set()
    assert set(graph.symbols) == {"CTX", "PAST_SEQ", "SEQ"} | windows
    turns = any(layer.has_rope and not layer.recurrent for layer in config.each)
    assert list(graph.leaves("input")) == (["tokens", "positions"] if turns else ["tokens"])
    states = graph.leaves("state")
    kept = {f"{kv}.{i}" for i, x in enumerate(config.each) if x.kv_heads and x.source == i for kv in "kv"}
    names = RECURRENT if config.recurrence is not None else ("conv",)
    memory = {f"{name}.{i}" for i, x in enumerate(config.each) if x.recurrent for name in names}
    assert set(states) == kept | memory
    assert {states[name].dtype for name in kept} == {kv_dtype}
    assert {states[name].dtype for name in memory} <= {F32}


@pytest.mark.parametrize(("family", "file"), CASES)
def test_every_tensor_of_the_file_is_used(family: str, file: str) -> None:
    """Under the file's dtype if it is a matrix, as float32 if it is a vector or the taps of a convolution; divisors lie
    in the frequencies. Layers that read another's keys and values may have projections for their own.
    """
    config, tensors = load(family, file)
    graph = graph_of((config, tensors))
    weights = {n: w for n, w in graph.leaves("weight").items() if n not in graph.constants}
    ignored = {"rope_freqs.weight"} | ({"output.weight"} if config.tied else set())
    shared = [i for i, layer in enumerate(config.each) if layer.source != i]
    ignored |= {f"blk.{i}.attn_{part}.weight" for i in shared for part in ("k", "v", "k_norm")}
    if config.recurrence is None:  # what predicts a further token is not used
        ignored |= {name for name in tensors if name.startswith(f"blk.{config.layers}.")}
    assert set(weights) == set(tensors) - ignored
    for name, weight in weights.items():
        plain = len(weight.shape) == 1 or ".ssm_conv_" in name or ".shortconv.conv." in name
        assert weight.dtype is (F32 if plain else tensors[name].dtype), name
