"""From a path to tokens on the newer golden checkpoints, compiled: float files against transformers, quantized ones
against llama.cpp on the same file dequantized. The older families, of `tests/e2e/test_engine.py`, are slow here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import error

from rlx.runners import GemmaRunner, Llama32Runner, Model, Qwen3Runner, Qwen35Runner, auto_runner

Array = np.ndarray[Any, Any]

PAIR = {"buckets": {"seq": [1, 32]}}
TOLERANCE = 3e-5  # of the largest logit: float32 against float32
FLOATS = [
    ("qwen3moe", "hf", Qwen3Runner),
    ("qwen35", "hf", Qwen35Runner),
    pytest.param("qwen35", "model-f16.gguf", Qwen35Runner, marks=pytest.mark.slow),
    ("qwen35moe", "model-f16.gguf", Qwen35Runner),
    ("qwen3next", "hf", Qwen35Runner),
    ("deepseek-v2", "hf", Llama32Runner),
    ("cohere2", "hf", Llama32Runner),
    ("hunyuan-moe", "hf", Llama32Runner),
    ("gemma3n", "hf", GemmaRunner),
    ("gemma4-e2b", "model-f16.gguf", GemmaRunner),
    ("gemma4-moe", "hf", GemmaRunner),
    pytest.param("llama", "model-f16.gguf", Llama32Runner, marks=pytest.mark.slow),
    pytest.param("qwen2", "model-f16.gguf", Qwen3Runner, marks=pytest.mark.slow),
    pytest.param("qwen3", "model-f16.gguf", Qwen3Runner, marks=pytest.mark.slow),
    pytest.param("gemma", "model-f16.gguf", GemmaRunner, marks=pytest.mark.slow),
    pytest.param("gemma2", "model-f16.gguf", GemmaRunner, marks=pytest.mark.slow),
    pytest.param("gemma3", "model-f16.gguf", GemmaRunner, marks=pytest.mark.slow),
]
QUANTIZED = [
    pytest.param("llama-k256", "Q4_K_M", Llama32Runner, marks=pytest.mark.slow),
    ("qwen35-k256", "Q4_K_M", Qwen35Runner),
    ("gemma4-k256", "Q4_K_M", GemmaRunner),
]


def opened(path: Path, **options: Any) -> Model:
    return auto_runner(path, max_seq=96, profile=PAIR, **options)


def golden(folder: Path, name: str = "golden.npz") -> dict[str, Array]:
    return {"positions": np.arange(48), **np.load(folder / name)}


def spread(found: Array, expected: Array) -> float:
    """Root mean square of the differences as a share of that of the logits."""
    assert found.shape == expected.shape
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize(("family", "file", "kind"), FLOATS)
def test_float_files_compute_what_transformers_does(goldens: Path, family: str, file: str, kind: type) -> None:
    """Prompts in one chunk and in several, token by token, and the tokens it chose."""
    expected = golden(goldens / family)
    tokens, at = expected["tokens"].tolist(), expected["positions"].tolist()
    with opened(goldens / family / file, precision="exact") as runner:
        assert type(runner) is kind
        chunks = np.stack([runner.predict_logits(tokens[: i + 1]) for i in at])
        assert error(chunks, expected["logits"]) <= TOLERANCE
        rows = [runner.prefill_logits(tokens[:1]), *map(runner.decode_logits, tokens[1:])]
        assert error(np.stack(rows)[at], expected["logits"]) <= TOLERANCE
        chosen = [runner.decode_logits(token) for token in expected["greedy"][: len(expected["gen_logits"])].tolist()]
        assert error(np.stack(chosen), expected["gen_logits"]) <= TOLERANCE
        greedy = expected["greedy"].tolist()
        assert runner.generate(tokens, len(greedy), stop_at_eog=False) == greedy
        seen: list[int] = []
        assert runner.generate(tokens, 9, lambda t: (seen.append(t), len(seen) < 3)[1]) == seen == greedy[:3]


@pytest.mark.parametrize(("family", "quant", "kind"), QUANTIZED)
def test_quantized_files_in_both_precisions(goldens: Path, family: str, quant: str, kind: type) -> None:
    """Exact arithmetic is that of llama.cpp on dequantized weights; with 8-bit activations the error is no larger than
    llama.cpp's own.
    """
    tokens = golden(goldens / family)["tokens"].tolist()
    reference = golden(goldens / family, "golden_llamacpp.npz")
    at, expected = reference["quant_positions"].tolist(), reference[f"logits_dequant_{quant}"]
    path = goldens / family / f"model-{quant}.gguf"
    with opened(path, precision="exact") as runner:
        assert type(runner) is kind
        assert error(np.stack([runner.prefill_logits(tokens[: i + 1]) for i in at]), expected) <= TOLERANCE
        greedy = reference[f"greedy_dequant_{quant}"].tolist()
        assert runner.generate(tokens, len(greedy), stop_at_eog=False) == greedy
    with opened(path, precision="auto", kv_dtype="f32") as runner:
        found = np.stack([runner.prefill_logits(tokens[: i + 1]) for i in at])
        assert error(found, expected) > TOLERANCE, "activations of 8 bits show"
        assert spread(found, expected) <= spread(reference[f"logits_{quant}"], expected)
        rows = [runner.prefill_logits(tokens[:1]), *map(runner.decode_logits, tokens[1:])]
        assert spread(np.stack(rows)[at], expected) <= spread(reference[f"logits_{quant}"], expected)


@pytest.mark.parametrize(("family", "file"), [("gemma3n", "hf")])
def test_embeddings_are_what_the_head_multiplies(goldens: Path, family: str, file: str) -> None:
    """The logits of the golden file are the head's products with them; here least squares finds them from those."""
    expected = golden(goldens / family)
    tokens = expected["tokens"].tolist()[:20]
    with opened(goldens / family / file, precision="exact") as runner:
        vectors = np.stack([runner.embed(tokens[:n], "last", normalize=False) for n in range(1, 21)])
        head = runner._engine._weights.array("token_embd.weight")  # type: ignore[attr-defined]
        logits = np.stack([runner.predict_logits(tokens[:n]) for n in range(1, 21)])
        cap = runner.config.logit_softcap
    found = vectors @ head.T
    assert error(found if cap is None else cap * np.tanh(found / cap), logits) <= TOLERANCE
