"""Checkpoints of every model type in random sizes: compiled, in chunks and token by token, against the interpreter in
float64 over the same file. What the equations are is for the goldens to say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_files import logits_of
from random_checkpoints import FULL, LINEAR, MODEL_TYPES, Config, checkpoint

from rlx.engine.opening.opened import open_model
from rlx.ir.dtypes import F32
from rlx.models import build
from rlx.store.cache import CompileCache
from rlx.weights import open_weights
from tests.single_sequence import SingleEngine

CHUNKS = (7, 1, 9, 8, 1, 1)  # tokens at a time; the largest window is 20
LADDER = {"buckets": {"seq": [1, 8]}}
CEILING = 2e-5  # largest error of a logit as a share of the largest


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache(capacity=512, policy="off")


#: Their blocks are among those of the other types.
REPEATED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "gemma", "gemma2", "gemma3_text",
    "gemma4_unified_text",
)  # fmt: skip


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=pytest.mark.slow if each in REPEATED else ()) for each in MODEL_TYPES]
)
def test_random_shapes(model_type: str, tmp_path: Path, cache: CompileCache) -> None:
    check(tmp_path, checkpoint(tmp_path, model_type, 1), CHUNKS, cache)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES)[::4])
def test_other_sizes_token_by_token(model_type: str, tmp_path: Path, cache: CompileCache) -> None:
    check(tmp_path, checkpoint(tmp_path, model_type, 2), (1,) * 27, cache)


def test_a_model_without_attention_has_no_positions(tmp_path: Path, cache: CompileCache) -> None:
    config = checkpoint(tmp_path, "qwen3_5_text", 1, num_hidden_layers=1, layer_types=[LINEAR])
    check(tmp_path, config, CHUNKS, cache)


def test_unit_vectors_have_an_eps_of_their_own(tmp_path: Path) -> None:
    """In transformers it is 1e-6 under the root of the sum of squares, whatever the norms have."""
    hybrid = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL], "linear_key_head_dim": 16, "rms_norm_eps": 1e-3}
    checkpoint(tmp_path, "qwen3_5_text", 1, **hybrid)
    with open_weights(tmp_path) as loader:
        graph = build(*open_model(loader), F32)
    assert {n["eps"] for n in graph.nodes() if n.op == "rms_norm"} == {1e-3, 1e-6 / 16}


def check(folder: Path, config: Config, chunks: tuple[int, ...], cache: CompileCache) -> None:
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"] - 3, sum(chunks)).astype(np.int32)
    expected = logits_of(folder, tokens)
    found = in_chunks(folder, tokens.tolist(), chunks, cache)
    assert np.abs(found - expected).max() <= CEILING * np.abs(expected).max(), config


def in_chunks(folder: Path, tokens: list[int], chunks: tuple[int, ...], cache: CompileCache) -> np.ndarray:
    engine = SingleEngine.open(folder, precision="exact", profile=LADDER, max_seq=40, threads=2, cache=cache)
    rows, at = [], 0
    try:
        for count in chunks:
            rows.append(engine.forward(tokens[at : at + count], all_rows=True))
            at += count
    finally:
        engine.close()
    return np.concatenate(rows)
