"""The generator: its invariants, its cache modes, embeddings and biases, on golden checkpoints of several families."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_checks import error

import rlx
from rlx import models
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.engine.opening.setup import open_model
from rlx.engine.programs.programs import past_bucket, past_buckets
from rlx.errors import ArgumentError, PromptError, SnapshotError
from rlx.ir import dims, interp
from rlx.ir.dtypes import F32
from rlx.models import variants
from rlx.runners.generator import GemmaGenerator, TokenGenerator
from rlx.store.cache import CompileCache
from rlx.weights import open_weights
from tests.single_sequence import SingleEngine

Array = np.ndarray[Any, Any]
Mode = Callable[[TokenGenerator], TokenGenerator]

FILES = {"gemma3": "model-f16.gguf", "gemma3n": "hf", "llama": "model-f16.gguf", "qwen35": "model-f16.gguf"}
PAIR = {"buckets": {"seq": [1, 32]}}
TOLERANCE = 3e-5  # of the largest logit: float32 against float32
GREEDY, SAMPLED = rlx.SampleOpts.greedy(), rlx.SampleOpts(temperature=0.9, top_p=0.95, seed=7)

MODES: dict[str, Mode] = {
    "default": lambda g: g,
    "exact": lambda g: g.with_prefill_cache(2).with_exact_decode_cache(3),
    "dynamic": lambda g: g.with_dynamic_prefill_cache(2).with_dynamic_decode_cache(2),
    "buckets": lambda g: g.with_prefill_cache(2).with_decode_cache(64),
    "inference": lambda g: g.with_inference_caches(64),
}


@pytest.fixture(scope="module")
def cache() -> CompileCache:
    return CompileCache.default(capacity=256)


Open = Callable[..., TokenGenerator]


@pytest.fixture
def opened(goldens: Path, cache: CompileCache) -> Any:
    """A generator of a family, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(family: str, **options: Any) -> TokenGenerator:
            chosen = {"precision": "exact", "max_seq": 96, "profile": PAIR, "cache": cache, "threads": 2, **options}
            return stack.enter_context(GemmaGenerator.from_path(goldens / family / FILES[family], **chosen))

        yield make


def golden(goldens: Path, family: str) -> tuple[list[int], list[int], Array]:
    """(prompt, greedy tokens that follow, logits of its last position)."""
    found = np.load(goldens / family / "golden.npz")
    return found["tokens"].tolist(), found["greedy"].tolist(), found["logits"][-1]


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "qwen35"])
def test_cached_steps_are_those_of_the_reference(family: str, goldens: Path, opened: Open) -> None:
    """Both against the tokens of transformers, and the sampled ones against each other."""
    prompt, greedy, logits = golden(goldens, family)
    g = opened(family)
    assert error(g.prefill_get_last_logits(prompt), logits) <= TOLERANCE
    assert g.past_seq == len(g.tokens) == len(prompt)
    g.decode_get_logits(greedy[0])
    assert g.past_seq == len(g.tokens) == len(prompt) + 1
    found = []
    for method in (g.step, g.step_cached):
        g.prefill(prompt)
        assert (g.past_seq, g.tokens) == (0, prompt)
        tokens = []
        for _ in range(5):
            tokens.append(method(GREEDY))
            assert g.past_seq == len(g.tokens) - 1
        assert tokens == greedy[:5]
        g.prefill(prompt)
        found.append([method(SAMPLED) for _ in range(5)])
    assert found[0] == found[1] != greedy[:5]
    g.prefill(prompt)
    assert g.generate_cached(2, SAMPLED) + g.generate_cached(3, SAMPLED) == found[0]
    g.prefill(prompt)
    assert g.generate(5, SAMPLED) == found[0]
    g.prefill(prompt)
    assert g.generate_cached(5, rlx.SampleOpts(temperature=0.9, top_p=0.95, seed=8)) != found[0]


def test_callbacks_and_stop_ids_end_a_generation(goldens: Path, opened: Open) -> None:
    prompt, greedy, _ = golden(goldens, "llama")
    g = opened("llama")
    g.prefill(prompt)
    seen: list[int] = []
    assert g.generate_cached_with(9, GREEDY, lambda t: (seen.append(t), len(seen) < 3)[1]) == greedy[:3] == seen
    assert g.generate_cached(0) == []
    assert g.generate_cached(9, stop_ids={greedy[3]}) == greedy[3:4]
    assert g.generate_cached(2, stop_ids={10**9}) == greedy[4:6]

    def fail(token: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        g.generate_cached_with(3, GREEDY, fail)
    assert g.tokens == prompt + greedy[:7]  # the token was chosen; the generator goes on from it
    assert g.past_seq == len(g.tokens) - 1
    assert g.generate_cached(2) == greedy[7:9]


# -- cache modes -------------------------------------------------------------------------------------------------------


def programs(g: TokenGenerator, phase: str) -> Any:
    return g.stats()["programs"][phase]


def test_what_each_mode_makes(goldens: Path, opened: Open) -> None:
    """Of prompts of 3, 5 and 5 tokens, each with 3 more: the programs that are made, kept and dropped, and in each mode
    the same tokens. `test_seed_api.py` has them after a golden prompt.
    """
    found, tokens, prompt = {}, list[Any](), golden(goldens, "llama")[0]
    for name, mode in MODES.items():
        g = mode(opened("llama"))
        for length in (3, 5, 5):
            g.prefill(prompt[:length])
            tokens.append((length, g.generate_cached(4)))
        stats = [programs(g, phase) for phase in ("prefill", "decode")]
        assert all(s.misses >= s.compiles and s.seconds > 0 and s.code_bytes > 0 for s in stats)
        found[name] = [(s.misses, s.hits, s.evictions) for s in stats]
    assert tokens == tokens[:3] * len(MODES)
    assert found["default"] == [(1, 2, 0), (1, 8, 0)]
    assert found["dynamic"] == [(1, 2, 0), (1, 8, 0)]
    assert found["exact"] == [(2, 1, 0), (5, 4, 2)]  # pasts of 3, 4, 5, then twice 5, 6, 7: three are kept
    assert found["buckets"] == [(2, 1, 0), (2, 7, 0)]  # 3..4, 5..8
    assert found["inference"] == [(1, 2, 0), (2, 7, 0)]


def test_a_dynamic_program_moves_to_a_length_without_the_compiler(opened: Open) -> None:
    g = opened("llama").with_dynamic_prefill_cache(1).with_dynamic_decode_cache(1)
    g.prefill([1, 2, 3])
    g.generate_cached(3)
    before = g.stats()["cache"]
    for length in range(4, 40):
        g.prefill(range(1, length))
        g.generate_cached(3)
    after = g.stats()
    assert after["cache"] == before
    assert (after["programs"]["prefill"].misses, after["programs"]["decode"].misses) == (1, 1)


def test_buckets_of_the_past() -> None:
    """They follow each other without gap or overlap, and there are as many as the logarithm says."""
    assert [past_bucket(p) for p in range(10)] == [
        (0, 1), (0, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (5, 8), (5, 8), (9, 16),
    ]  # fmt: skip
    for most in (1, 2, 3, 4, 5, 300, 512, 513):
        found = {past_bucket(p) for p in range(most + 1)}
        assert all(low <= p <= high for p in range(most + 1) for low, high in [past_bucket(p)])
        assert len(found) == past_buckets(most) <= most.bit_length() + 1


# -- embeddings and biases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_the_embeddings_of_tokens_stand_for_them(family: str, goldens: Path, opened: Open) -> None:
    prompt, greedy, logits = golden(goldens, family)
    g = opened(family)
    embeds = g.embed(prompt)
    assert g.generate_from_embeds(prompt, embeds, 4) == greedy[:4]
    assert g.past_seq == len(g.tokens) - 1
    g.prefill_from_embeds(prompt, embeds)
    embeds[:] = np.nan  # the generator has its own
    assert [g.step(GREEDY) for _ in range(3)] == greedy[:3]
    assert [g.step_cached(GREEDY) for _ in range(2)] == greedy[3:5]
    assert error(g.prefill_get_last_logits(prompt), logits) <= TOLERANCE  # tokens again


def reference(path: Path, ids: list[int], embeds: Array, bias: Array) -> Array:
    """The logits of the last row by the interpreter, in float64."""
    with open_weights(path) as loader:
        config, weights = open_model(loader)
        graph = variants.with_bias(variants.with_rows(models.build(config, weights, F32)), bias.shape[1])
        names = [name for name in graph.leaves("weight") if name not in graph.constants]
        feeds = {name: config.value(name, weights.array(name)) for name in names}
    env = {"SEQ": len(ids), "PAST_SEQ": 0, "CTX": 96, "WINDOW_CTX": 96}
    feeds |= {n: np.zeros([dims.value(d, env) for d in s.shape]) for n, s in graph.leaves("state").items()}
    every = np.arange(len(ids))
    feeds |= {"tokens": np.array(ids), "positions": every, "rows": embeds, "row_index": every, "bias": bias}
    return interp.run(graph, feeds, env, dtype=np.float64)[0]["logits"][-1]


def test_a_bias_against_the_interpreter(goldens: Path, opened: Open) -> None:
    """Random numbers on open keys, a span whose tokens see each other, closed keys; windowed layers among others."""
    family = "gemma3"
    prompt, _, _ = golden(goldens, family)
    g, n, rng = opened(family), len(prompt), np.random.default_rng(3)
    heads = g.config.heads
    later = np.arange(n) > np.arange(n)[:, None]
    later[10:15, 10:15] = False
    bias = np.where(later, -np.inf, rng.standard_normal((heads, n, n))).astype(np.float32)
    bias[:, 20:, 4:8] = -1e9
    embeds = g.embed(prompt) * np.float32(1.1)
    g.prefill_from_embeds(prompt, embeds, bias)
    found = g._loop.call(g._last_logits)
    want = reference(goldens / family / FILES[family], prompt, embeds, bias.swapaxes(0, 1))
    assert error(found, want) <= TOLERANCE
    g.prefill_from_embeds(prompt, embeds)
    assert error(g._loop.call(g._last_logits), want) > 100 * TOLERANCE
    small = opened(family, profile={"buckets": {"seq": [1, 7]}})  # so many rows a call, none of which cuts the span
    small.prefill_from_embeds(prompt, embeds, bias)
    assert error(small._loop.call(small._last_logits), want) <= TOLERANCE
    assert small.step_cached() == want.argmax()


def test_a_session_that_began_with_embeddings(goldens: Path, opened: Open, cache: CompileCache) -> None:
    """It goes back and is computed again as it began, also where states cannot go back by themselves."""
    prompt, _, _ = golden(goldens, "qwen35")
    embeds = opened("qwen35").embed(prompt) * np.float32(1.2)
    path = goldens / "qwen35" / FILES["qwen35"]
    engine = SingleEngine.open(path, precision="exact", max_seq=96, profile=PAIR, cache=cache, threads=2)
    embeddings = engine.prompt_embeddings(len(prompt), embeds)
    engine.forward_embeddings(prompt, embeddings)
    want = engine.forward([5, 6])
    engine.trim(10)
    engine.forward([5, 6])
    engine.trim(10)
    engine.forward_embeddings(prompt, embeddings)
    engine.trim(len(prompt) - 3)  # no checkpoint there: ten to begin with are computed again
    assert error(engine.forward([7]), engine.forward([7])) > 0
    engine.forward_embeddings(prompt, embeddings)
    assert error(engine.forward([5, 6]), want) <= TOLERANCE
    engine.trim(len(prompt))
    snapshot = engine.snapshot()
    engine.reset()
    engine.restore(snapshot)
    assert error(engine.forward([5, 6]), want) <= TOLERANCE
    with pytest.raises(SnapshotError, match="the snapshot's embedded rows are not 64 wide"):
        engine.restore(replace(snapshot, embeddings=PromptEmbeddings((EmbeddedSpan(0, np.zeros((1, 9), np.float32)),))))
    engine.close()


N, HIDDEN = 12, 64
BAD_EMBEDS = {
    "another width": (np.zeros((N, HIDDEN + 1)), r"embeds: expected numbers \[12, 64\], found float64 \[12, 65\]"),
    "another length": (np.zeros((N - 1, HIDDEN)), r"found float64 \[11, 64\]"),
    "another size": (np.zeros(N * HIDDEN + 1), r"found float64 \[769\]"),
    "texts": (np.full((N, HIDDEN), "x"), r"embeds: expected numbers"),
    "a NaN": (np.where(np.eye(N, HIDDEN), np.nan, 1), r"nan at \[0, 0\] is not finite"),
    "an infinity": (np.full((N, HIDDEN), np.inf), "is not finite"),
}
BAD_BIASES = {
    "another length": (np.zeros((N, N + 1)), r"attn_bias: expected numbers \[12, 12\] or \[\d, 12, 12\], found"),
    "heads": (np.zeros((3, N, N)), r"found float64 \[3, 12, 12\]"),
    "a NaN": (np.full((N, N), np.nan), "is neither a number nor -inf"),
    "an infinity": (np.full((N, N), np.inf), "is neither a number nor -inf"),
    "nothing is open": (
        np.where(np.arange(N)[:, None] == 3, -np.inf, np.zeros((N, N))),
        r"at \[0, 3\] closes every key",
    ),
}


@pytest.mark.parametrize("case", BAD_EMBEDS)
def test_embeddings_that_do_not_fit(case: str, opened: Open) -> None:
    g = opened("llama")
    assert g.config.hidden == HIDDEN
    g.prefill([1, 2])
    embeds, message = BAD_EMBEDS[case]
    with pytest.raises(PromptError, match=message):
        g.prefill_from_embeds(range(N), embeds)
    assert g.tokens == [1, 2]  # what was there stays


@pytest.mark.parametrize("case", BAD_BIASES)
def test_biases_that_do_not_fit(case: str, opened: Open) -> None:
    g = opened("llama")
    bias, message = BAD_BIASES[case]
    with pytest.raises(PromptError, match=message):
        g.prefill_from_embeds(range(N), np.zeros((N, HIDDEN)), bias)


# -- use and misuse ----------------------------------------------------------------------------------------------------


def test_what_needs_a_history_says_so(opened: Open) -> None:
    g = opened("llama")
    for call in (g.step, g.step_cached, lambda: g.generate(1), lambda: g.decode_get_logits(1)):
        with pytest.raises(PromptError, match="there is no history"):
            call()
    with pytest.raises(PromptError, match="empty"):
        g.prefill([])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        g.prefill([10**6])
    g.prefill([1, 2])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        g.decode_get_logits(-1)
    with pytest.raises(ArgumentError, match="n is -1"):
        g.generate_cached(-1)
    assert g.tokens == [1, 2]


def test_the_weights_as_numbers(goldens: Path, opened: Open) -> None:
    """Each tensor as the `gguf` package reads it; the norms of Gemma as the model multiplies by them."""
    from gguf import GGUFReader, dequantize

    g = opened("gemma3")
    stored = {
        t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(goldens / "gemma3" / FILES["gemma3"]).tensors
    }
    table = g.weights_cache
    assert set(table) == stored.keys() and len(table) == len(stored)
    for name, values in stored.items():
        assert table[name].dtype == np.float32
        np.testing.assert_array_equal(table[name], values)
    assert table["blk.0.attn_q.weight"] is not table["blk.0.attn_q.weight"]  # nothing is kept
    assert "blk.0.nothing" not in table
    with pytest.raises(KeyError):
        table["blk.0.nothing"]
    want = stored["token_embd.weight"][[3, 1, 3]] * np.float32(g.config.hidden**0.5)
    np.testing.assert_allclose(g.embed([3, 1, 3]), want, rtol=1e-6)
