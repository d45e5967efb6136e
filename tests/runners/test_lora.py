"""LoRA adapters: each request has the logits of a model whose matrices were changed in NumPy, whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import Array, Pairs, merged, random_pairs, write_gguf, write_peft

from rlx.engine.request import Request
from rlx.errors import ArgumentError, UnsupportedModelError, WeightError
from rlx.models.rope import by_neighbours
from rlx.runners import Model, auto_runner

IDS = np.random.default_rng(7).integers(5, 400, 20).tolist()
CEILING = 1e-4  # of log-probabilities: float32 through some layers, in another order of sums
LINEARS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
#: Family -> modules: matrices that hold several, and the head; those of one matrix each, and of recurrent layers.
TARGETS = {
    "phi3": ("qkv_proj", "gate_up_proj", "lm_head"),
    "qwen35": (*LINEARS, "in_proj_qkv", "in_proj_z", "out_proj"),
    "qwen3": LINEARS,
    "gemma3": ("k_proj", "up_proj"),
    "glm4-moe": ("q_proj", "o_proj"),
}
REPEATED = ("qwen3", "gemma3", "glm4-moe")


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[Model]:
    options = {"precision": "exact", "max_seq": 96, "profile": {"buckets": {"seq": [1, 32]}}, **options}
    with auto_runner(model, **options) as runner:
        yield runner


def answer(runner: Model, ids: list[int] = IDS, n: int = 8, **options: Any) -> list[tuple[int, float]]:
    """Tokens, and their log-probabilities."""
    steps = runner.generate(ids, n, stop_at_eog=False, top_logprobs=0, **options).steps
    return [(step.token, step.logprob or 0.0) for step in steps]


def check_close(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected]
    np.testing.assert_allclose([each for _, each in found], [each for _, each in expected], atol=CEILING)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f in REPEATED)) for f in TARGETS])
def test_an_answer_is_that_of_merged_weights(goldens: Path, tmp_path: Path, family: str) -> None:
    """Of several adapters of different ranks, one after the other and in the same steps, natively and with drafts."""
    checkpoint = goldens / family / "hf"
    pairs = [random_pairs(checkpoint, TARGETS[family], rank, seed=rank) for rank in (4, 20)]
    adapters = {
        "one": write_peft(tmp_path / "one", pairs[0]),
        "two": write_peft(tmp_path / "two", pairs[1], lora_alpha=10, use_rslora=True),
    }
    with opened(checkpoint) as runner:
        plain = answer(runner)
    expected = {None: plain}
    for name, each, scale in (("one", pairs[0], 2.0), ("two", pairs[1], 10 / 20**0.5)):
        with opened(merged(tmp_path / f"merged {name}", checkpoint, each, scale)) as runner:
            expected[name] = answer(runner)
    assert len({str(each) for each in expected.values()}) == 3
    with opened(checkpoint, adapters=adapters) as runner:
        assert runner.adapters == ("one", "two")
        assert answer(runner) == plain, "to the bit"
        alone = {name: answer(runner, adapter=name) for name in expected}
        for name, found in alone.items():
            check_close(found, expected[name])
            tokens = [token for token, _ in found]
            assert runner.generate(IDS, 8, stop_at_eog=False, adapter=name) == tokens
            assert runner.generate(IDS, 8, stop_at_eog=False, adapter=name, speculative="prompt-lookup") == tokens
        names = [None, "one", "two", None, "one"]
        handles = [runner.submit(Request(IDS, 8, stop_at_eog=False, adapter=name, top_logprobs=0)) for name in names]
        for name, handle in zip(names, handles, strict=True):
            assert [(step.token, step.logprob) for step in handle] == alone[name], "the bits of a request alone"


def test_rounded_activations_too(demo_model: Path, tmp_path: Path) -> None:
    """A quantized model: the bits of a row are the same beside others, and without an adapter those of the model."""
    rounds = {"precision": "auto", "deterministic": True}  # which some rows in tiles are not
    with opened(demo_model, **rounds) as runner:
        plain = answer(runner)
        sizes = {n.removesuffix(".weight"): info.shape for n, info in runner.weights.loader.tensors.items()}
    rng = np.random.default_rng(1)
    pairs: Pairs = {
        f"model.layers.{i}.self_attn.{name}_proj": (
            rng.standard_normal((8, sizes[f"blk.{i}.attn_{name}"][1])).astype(np.float16) * np.float16(0.1),
            rng.standard_normal((sizes[f"blk.{i}.attn_{name}"][0], 8)).astype(np.float16) * np.float16(0.1),
        )
        for i in range(6)
        for name in "qv"
    }
    with opened(demo_model, **rounds, adapters={"one": write_peft(tmp_path, pairs)}) as runner:
        alone = answer(runner, adapter="one")
        assert alone != plain
        names = [None, "one", None]
        handles = [runner.submit(Request(IDS, 8, stop_at_eog=False, adapter=name, top_logprobs=0)) for name in names]
        found = [[(step.token, step.logprob) for step in handle] for handle in handles]
        assert found == [plain, alone, plain]
        assert {str(dtype) for dtype in runner._engine.adapters.low_rank.dtypes.values()} == {"f16"}


@pytest.mark.parametrize("kind", ["peft", "gguf"])
@pytest.mark.parametrize("model", ["peft", "gguf"])
def test_both_formats_on_both_formats(goldens: Path, tmp_path: Path, kind: str, model: str) -> None:
    """Llama's files order the rows of queries and keys differently."""
    folder = goldens / "llama"
    pairs = random_pairs(folder / "hf", ("q_proj", "k_proj", "o_proj"))
    with opened(merged(tmp_path / "merged", folder / "hf", pairs, 2.0)) as runner:
        expected, config = answer(runner), runner.config

    def in_gguf(module: str, half: Array) -> Array:
        heads = {"q_proj": config.heads, "k_proj": config.each[0].kv_heads}.get(module.split(".")[-1])
        return half if heads is None else by_neighbours(half, heads)

    if kind == "peft":
        adapter = write_peft(tmp_path / "adapter", pairs)
    else:
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "o_proj": "attn_output"}
        renamed = {
            f"blk.{module.split('.')[2]}.{names[module.split('.')[-1]]}": (a, in_gguf(module, b))
            for module, (a, b) in pairs.items()
        }
        adapter = write_gguf(tmp_path / "adapter.gguf", "llama", renamed)
    with opened(folder / ("hf" if model == "peft" else "model-f16.gguf"), adapters={"one": adapter}) as runner:
        check_close(answer(runner, adapter="one"), expected)


def test_what_is_measured_of_a_text(goldens: Path, tmp_path: Path) -> None:
    """Vectors and log-probabilities of a model that generates."""
    checkpoint = goldens / "qwen3" / "hf"
    pairs = random_pairs(checkpoint, LINEARS)

    def measured(runner: Model, **chosen: Any) -> list[Array]:
        found = [runner.embed(IDS, **chosen), runner.score(IDS, **chosen), runner.predict_logits(IDS, **chosen)]
        steps = [step.logprob or 0.0 for step in runner.score_steps(IDS, **chosen)]
        return [*found, np.array(steps)]

    with opened(merged(tmp_path / "merged", checkpoint, pairs, 2.0)) as runner:
        expected = measured(runner)
    with opened(checkpoint) as runner:
        plain = measured(runner)
        with pytest.raises(ArgumentError, match=r"there is no adapter 'one'\. Open the model with adapters"):
            runner.score(IDS, adapter="one")
    with opened(checkpoint, adapters={"one": write_peft(tmp_path / "one", pairs)}) as runner:
        for found, others in ((measured(runner, adapter="one"), expected), (measured(runner), plain)):
            for each, other in zip(found, others, strict=True):
                np.testing.assert_allclose(each, other, atol=CEILING)
        assert np.abs(plain[1] - expected[1]).max() > 0.1


@pytest.mark.parametrize(
    ("family", "targets", "pooled"),
    [("qwen3-embedding", LINEARS, True), ("modernbert", ("Wqkv", "Wi"), True), ("bert-reranker", ("query",), False)],
)
def test_encoders(goldens: Path, tmp_path: Path, family: str, targets: tuple[str, ...], pooled: bool) -> None:
    checkpoint = goldens / family / "hf"
    pairs = random_pairs(checkpoint, targets)
    texts = ["a text", "another one that is longer", "a third"]

    def vectors(runner: Any, **chosen: Any) -> Array:
        if pooled:
            return np.asarray(runner.embed(texts, pooling="mean", **chosen))
        return np.array(runner.rerank("a query", texts, **chosen))

    with opened(merged(tmp_path / "merged", checkpoint, pairs, 2.0)) as runner:
        expected = vectors(runner)
    adapters = {"one": write_peft(tmp_path / "one", pairs)}
    with opened(checkpoint) as runner:
        plain = vectors(runner)
    with opened(checkpoint, adapters=adapters) as runner:
        found = vectors(runner, adapter="one")
        np.testing.assert_allclose(found, expected, atol=CEILING)
        np.testing.assert_array_equal(vectors(runner), plain)
        with pytest.raises(ArgumentError, match="there is no adapter 'two'"):
            vectors(runner, adapter="two")
    assert np.abs(plain - expected).max() > 10 * CEILING


def test_what_is_known_of_a_prompt_is_known_for_its_adapter_only(goldens: Path, tmp_path: Path) -> None:
    checkpoint, ids = goldens / "qwen3" / "hf", IDS * 4
    adapters = {
        name: write_peft(tmp_path / name, random_pairs(checkpoint, LINEARS, seed=seed))
        for name, seed in (("one", 1), ("same", 1), ("two", 2))
    }

    def reused(runner: Model, **options: Any) -> int:
        before = runner.stats()["prefix_tokens_hit"]
        answer(runner, ids, 2, **options)
        return int(runner.stats()["prefix_tokens_hit"] - before)

    with opened(checkpoint, adapters=adapters) as runner:
        assert reused(runner) == reused(runner, adapter="one") == reused(runner, adapter="two") == 0
        assert reused(runner) == reused(runner, adapter="one") == reused(runner, adapter="same") >= 64
        crafted = f"\0{runner._engine.adapters._digests['one']}\0"
        request = Request(ids, 2, stop_at_eog=False, cache_salt=crafted)
        before = runner.stats()["prefix_tokens_hit"]
        list(runner.submit(request))
        assert runner.stats()["prefix_tokens_hit"] == before, "no salt reaches what an adapter computed"


def test_an_adapter_that_does_not_fit(goldens: Path, tmp_path: Path) -> None:
    """Everything is said when the model is opened."""
    checkpoint = goldens / "qwen3" / "hf"
    pairs = random_pairs(checkpoint, ("q_proj",))
    wide = {module: (np.zeros((4, 999), np.float32), b) for module, (_, b) in pairs.items()}
    other = write_peft(tmp_path / "other", wide)
    with pytest.raises(WeightError, match=r"a matrix \[\d+, 999\], the model's blk.0.attn_q.weight is .* another base"):
        auto_runner(checkpoint, adapters={"one": other})
    beyond = {module.replace("layers.0", "layers.77"): pair for module, pair in pairs.items()}
    with pytest.raises(UnsupportedModelError, match=r"blk.77.attn_q.weight, which is no plain linear layer"):
        auto_runner(checkpoint, adapters={"one": write_peft(tmp_path / "beyond", beyond)})
    embeddings = random_pairs(checkpoint, ("embed_tokens",))
    with pytest.raises(UnsupportedModelError, match="changes the embeddings of tokens"):
        auto_runner(checkpoint, adapters={"one": write_peft(tmp_path / "embeddings", embeddings)})
    hybrid = goldens / "qwen35"
    delta = write_peft(tmp_path / "delta", random_pairs(hybrid / "hf", ("in_proj_qkv",)))
    with pytest.raises(UnsupportedModelError, match="safetensors and gguf order the rows"):
        auto_runner(hybrid / "model-f16.gguf", adapters={"one": delta})
    with pytest.raises(UnsupportedModelError, match=r"the model has no 'model\.layers\.0\.self_attn\.q_proj' to adapt"):
        auto_runner(goldens / "bert" / "hf", adapters={"one": other})
