"""The head that predicts further tokens: its drafts are those of its equations in float64, and whatever they are, the
tokens are those without. The checkpoint is the golden one of Qwen 3.5 with a head of random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heads import BASE, EPS, HEADS, HIDDEN, KV_HEADS, LAYER, SIZE, TURNED, echo, random_head, with_head

from rlx.backends import backend
from rlx.backends.memory import Buffer
from rlx.backends.program import Program
from rlx.backends.verify import Verifier
from rlx.engine.kv.prefix import PageAllocator
from rlx.engine.kv.prompt_embeddings import EmbeddedSpan, PromptEmbeddings
from rlx.engine.request import FinishReason, Request
from rlx.engine.speculation import heads as drafted_runs
from rlx.engine.speculation.drafts import Counters
from rlx.engine.speculation.heads import HeadDrafter, Predictor
from rlx.errors import UnsupportedModelError
from rlx.runners import Model, auto_runner
from rlx.sampling import SampleOpts
from tests.single_sequence import SingleEngine

Array = np.ndarray[Any, Any]

CEILING = 1e-4  # of the largest element: float32 through one layer, of inputs that are bf16
PAIR = {"buckets": {"seq": [1, 32]}}
IDS = np.random.default_rng(5).integers(0, 500, 40).tolist()


@contextmanager
def predicting(engine: SingleEngine) -> Iterator[HeadDrafter]:
    """The MTP head follows the engine's own sequence."""
    drafts = engine.drafting("mtp").drafts(engine.current, [], "", Counters())
    assert drafts is not None
    yield drafts._drafter
    drafts.close()


@pytest.fixture(scope="module")
def head() -> dict[str, Array]:
    return random_head()


@pytest.fixture(scope="module")
def checkpoint(goldens: Path, head: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(goldens, tmp_path_factory.mktemp("predicting") / "hf", head)


@pytest.fixture(scope="module")
def guessable(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that depends on the last token more than on the others, and a head that sees little else."""
    return with_head(goldens, tmp_path_factory.mktemp("guessable") / "hf", echo(random_head()), share=0.6)


@pytest.fixture
def runner(checkpoint: Path) -> Iterator[Model]:
    with auto_runner(checkpoint, precision="exact", max_seq=128, profile=PAIR) as made:
        yield made


# ---------------------------------------------------------------------------------------------------- the equations


def normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (1 + weight)


# Which component of a position turns each pair of a head: time, row or column, in sections of 3, 3 and 2 pairs.
COMPONENT = [1 if i % 3 == 1 and i < 9 else 2 if i % 3 == 2 and i < 6 else 0 for i in range(TURNED // 2)]


def turned(x: Array, places: Array) -> Array:
    """Rotary embedding of the first elements of x [n, heads, size], in halves; places [n, 3]."""
    angles = places[:, None, COMPONENT] * BASE ** (-np.arange(0, TURNED, 2) / TURNED)
    a, b = x[..., : TURNED // 2], x[..., TURNED // 2 : TURNED]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., TURNED:]], -1)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def layer(w: dict[str, Array], embedded: Array, hidden: Array, places: Array | None = None) -> Array:
    """The whole block over n pairs, from the first on: what its head multiplies, float64 [n, HIDDEN]."""
    places = np.repeat(np.arange(len(hidden))[:, None], 3, axis=1) if places is None else places
    own = {name.removeprefix(LAYER).removesuffix(".weight"): value for name, value in w.items()}
    pair = normed(embedded, w["mtp.pre_fc_norm_embedding.weight"]), normed(hidden, w["mtp.pre_fc_norm_hidden.weight"])
    x = np.concatenate(pair, -1) @ w["mtp.fc.weight"].T
    y, n = normed(x, own["input_layernorm"]), len(x)
    both = (y @ own["self_attn.q_proj"].T).reshape(n, HEADS, 2, SIZE)
    q = turned(normed(both[:, :, 0], own["self_attn.q_norm"]), places)
    k = turned(normed((y @ own["self_attn.k_proj"].T).reshape(n, KV_HEADS, SIZE), own["self_attn.k_norm"]), places)
    v = (y @ own["self_attn.v_proj"].T).reshape(n, KV_HEADS, SIZE)
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(SIZE)
    scores = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
    seen = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
    x = x + (seen * sigmoid(both[:, :, 1])).reshape(n, -1) @ own["self_attn.o_proj"].T
    y = normed(x, own["post_attention_layernorm"])
    gate = y @ own["mlp.gate_proj"].T
    x = x + (gate * sigmoid(gate) * (y @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return normed(x, w["mtp.norm.weight"])


def in_memory(hidden: Array) -> Buffer:
    """Hidden states in memory of the CPU."""
    return backend().memory.adopt(hidden.astype(np.float32).reshape(-1).view(np.uint8))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """The hidden states that the head is told, as they come."""
    found: list[Array] = []
    hear = Predictor.hear

    def spy(self: Predictor, start: int, ids: Any, hidden: Buffer) -> None:
        found.append(hidden.read(np.float32, (len(ids), -1)).astype(np.float64))
        hear(self, start, ids, hidden)

    monkeypatch.setattr(Predictor, "hear", spy)
    return found


def test_drafts_are_those_of_the_equations(checkpoint: Path, head: dict[str, Array], heard: list[Array]) -> None:
    """After a prompt in several calls, and a draft of a draft; positions are counted from where the layer began."""
    engine = SingleEngine.open(checkpoint, precision="exact", max_seq=128, profile=PAIR)
    table = engine._weights.array("token_embd.weight").astype(np.float64)
    engine.forward(IDS[:4])
    with predicting(engine) as drafter:
        for part in (IDS[4:20], IDS[20:21], IDS[21:33]):
            engine.forward(part)
        drafter.observe(IDS[33])
        found = drafter.propose(2)
        hidden = np.concatenate(heard)
        first = layer(head, table[IDS[5:34]], hidden)
        assert found[0] == int((table @ first[-1]).argmax())
        second = layer(head, table[[*IDS[5:34], found[0]]], np.concatenate([hidden, first[-1:]]))
        assert found[1] == int((table @ second[-1]).argmax())
        program, extents = drafter.predictor.fed(32, [IDS[33]], in_memory(hidden[-1:]))
        program.run(**extents)
        own = program.output("next_hidden")
        assert np.abs(own[0] - first[-1]).max() <= CEILING * np.abs(first).max()
    engine.close()


def an_image(start: int = 5, rows: int = 3, columns: int = 4) -> PromptEmbeddings:
    values = np.random.default_rng(8).standard_normal((rows * columns, HIDDEN)).astype(np.float32) * 0.1
    return PromptEmbeddings((EmbeddedSpan(start, values, b"an image", (rows, columns)),))


def test_drafts_after_an_image_are_those_of_the_equations(
    checkpoint: Path, head: dict[str, Array], heard: list[Array]
) -> None:
    """The head takes the image's rows as the tokens that follow, and the positions of their rows and columns."""
    engine = SingleEngine.open(checkpoint, precision="exact", max_seq=128, profile=PAIR)
    table, image = engine._weights.array("token_embd.weight").astype(np.float64), an_image()
    ids = [*IDS[:5], *[510] * 12, *IDS[17:34]]
    with predicting(engine) as drafter:
        engine.forward_embeddings(ids[:20], image)
        engine.forward(ids[20:33])
        drafter.observe(ids[33])
        found = drafter.propose(2)
        places = np.repeat(np.r_[:5, [5] * 12, 9:25][:, None], 3, axis=1)  # text goes on at 5 + the larger side
        places[5:17, 1] += np.repeat(np.arange(3), 4)
        places[5:17, 2] += np.tile(np.arange(4), 3)
        embedded, hidden = table[ids], np.concatenate(heard)
        embedded[5:17] = image.spans[0].rows
        first = layer(head, embedded[1:], hidden, places)
        program, extents = drafter.predictor.fed(32, [ids[33]], in_memory(hidden[-1:]))
        program.run(**extents)
        own = program.output("next_hidden")
        assert np.abs(own[0] - first[-1]).max() <= CEILING * np.abs(first).max()
        assert found[0] == int((table @ first[-1]).argmax())
        assert np.abs(own[0] - layer(head, embedded[1:], hidden)[-1]).max() > 0.01 * np.abs(first).max()
    engine.close()


# ---------------------------------------------------------------------------------------------------- generations


def test_the_tokens_are_those_without(runner: Model) -> None:
    """Greedy and sampled; over a session that goes on, forgets its end, and was restored without the layer's cache."""
    for opts in (SampleOpts.greedy(), SampleOpts(seed=3, temperature=0.6, repetition_penalty=1.2)):
        for prompt in (IDS[:9], IDS[:9], [*IDS[:7], 1, 2], IDS[:30]):
            plain = runner.generate(prompt, 24, sample=opts, stop_at_eog=False)
            found = runner.generate(prompt, 24, sample=opts, stop_at_eog=False, speculative="mtp")
            assert found == plain
            assert runner.past_seq == len(prompt) + 23
    counters = runner.stats()["speculation"]
    assert counters["drafted"] >= 24
    assert counters["steps"] <= 8 * 23
    snapshot = runner.snapshot()
    runner.reset()
    runner.restore(snapshot)
    again = runner.generate(IDS[:30], 24, sample=opts, stop_at_eog=False, speculative="mtp")
    assert again == found


@pytest.fixture(scope="module")
def many(guessable: Path) -> Iterator[Model]:
    """A runner whose generations nobody watches, so that rounds of drafts are native."""
    with auto_runner(guessable, precision="exact", max_seq=96, profile=PAIR) as made:
        yield made


@pytest.mark.parametrize("way", ["reference", "RLX_JIT", "RLX_VERIFY"])
def test_where_no_native_loop_runs_steps_are_taken_one_by_one(
    way: str, guessable: Path, many: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts as without: on the reference device, without machine code, and where each step is verified."""
    if way != "reference":
        monkeypatch.setenv(way, "0" if way == "RLX_JIT" else "1")
    verified, after = list[Any](), Verifier.after

    def count(self: Verifier, program: Program, seconds: float, steps: int) -> None:
        after(self, program, seconds, steps)
        verified.append(program.manifest["outputs"])

    monkeypatch.setattr(Verifier, "after", count)
    options: dict[str, Any] = {"device": "reference"} if way == "reference" else {}
    with auto_runner(guessable, precision="exact", max_seq=96, profile=PAIR, compile_ahead=False, **options) as slow:
        tokens, (steps, drafted, accepted) = counted(slow, IDS[:9], 12, stop_at_eog=False)
    assert tokens == many.generate(IDS[:9], 12, stop_at_eog=False)
    assert drafted >= accepted > 0 and steps + accepted >= 11
    of_the_model, of_the_head = (sum(name in outputs for outputs in verified) for name in ("logits", "next_hidden"))
    assert (of_the_model > steps and of_the_head >= steps) == (way == "RLX_VERIFY")


def counted(runner: Model, *args: Any, **options: Any) -> tuple[list[int], list[int]]:
    """Tokens of a generation with drafts, and how many steps, drafts and accepted drafts there were."""
    before = runner.stats()["speculation"]
    found = runner.generate(*args, speculative="mtp", **options)
    after = runner.stats()["speculation"]
    return list(found), [after[name] - before[name] for name in ("steps", "drafted", "accepted")]


def test_native_rounds_are_those_of_python(many: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as without drafts and the same guesses, many of which are right and many wrong; in one native
    call and in several.
    """
    plain = many.generate(IDS[:9], 80, stop_at_eog=False)
    found, native = counted(many, IDS[:9], 80, stop_at_eog=False)
    watched, stepwise = counted(many, IDS[:9], 80, lambda token: True, stop_at_eog=False)
    assert found == watched == plain
    assert native == stepwise
    steps, drafted, accepted = native
    assert accepted > 20
    assert drafted - accepted > 20
    assert steps < 60
    assert many.past_seq == 9 + 79
    monkeypatch.setattr(drafted_runs, "TOKENS", 7)
    assert counted(many, IDS[:9], 80, stop_at_eog=False)[0] == plain
    assert many.generate([*IDS[:9], *plain, 3], 4, stop_at_eog=False) == many.generate(
        [*IDS[:9], *plain, 3], 4, stop_at_eog=False, speculative="mtp"
    )


def test_native_rounds_end_where_a_generation_ends(many: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of tokens, at any token that stops, and with the context."""
    plain = many.generate(IDS[:9], 30, stop_at_eog=False)
    for count in range(1, 30):
        assert many.generate(IDS[:9], count, stop_at_eog=False, speculative="mtp") == plain[:count]
        assert many.past_seq == 9 + count - 1
        end = plain.index(plain[count]) + 1
        monkeypatch.setattr(Model, "stop_ids", {plain[count]})
        found = many.generate(IDS[:9], 30, speculative="mtp")
        assert (found, found.finish_reason) == (plain[:end], FinishReason.STOP)
        assert many.past_seq == 9 + end - 1
    found = many.generate(IDS[:9], 200, stop_at_eog=False, speculative="mtp")
    assert (len(found), found.finish_reason) == (96 - 9 + 1, FinishReason.CONTEXT)
    assert found == many.generate(IDS[:9], 200, stop_at_eog=False)


def test_native_rounds_over_pages_that_others_hold(many: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share a page and part inside of it; the answers go on in pages that do not lie in a row."""
    pool = many._engine.pool  # type: ignore[attr-defined]
    take = PageAllocator.take
    monkeypatch.setattr(PageAllocator, "take", lambda self, after=None: take(self))  # never the page that follows
    prompts = (IDS[:50], [*IDS[:45], 3, 4], IDS[:50])
    plain = [many.generate(prompt, 40, stop_at_eog=False) for prompt in prompts]
    pool.index.clear()
    many.reset()
    waiting, tables = [], list[list[int]]()
    for prompt, tokens in zip(prompts, plain, strict=True):
        waiting.append(many.submit(Request(prompt, 30, stop_at_eog=False)))  # nobody reads: it keeps its pages
        next(iter(waiting[-1]))
        assert many.generate(prompt, 40, stop_at_eog=False, speculative="mtp") == tokens
        tables.append(many._kept.sequence.pages.tolist())
    assert any(second != first + 1 for first, second in tables), tables
    for handle, tokens in zip(waiting, plain, strict=True):
        assert handle.result() == tokens[:30], "their pages were not written"
    assert many.stats()["reused_tokens"] >= 45
    assert many.stats()["speculation"]["drafted"] > 0


def test_a_model_without_the_head_says_so(goldens: Path) -> None:
    with auto_runner(goldens / "qwen35" / "model-f16.gguf", max_seq=32) as runner:
        with pytest.raises(UnsupportedModelError, match=r"model-f16\.gguf: the model has no MTP head"):
            runner.generate([1, 2], 2, speculative="mtp")
        assert len(runner.generate([1, 2], 2, stop_at_eog=False)) == 2, "and stays usable"
    with pytest.raises(UnsupportedModelError, match="has no MTP head"):
        auto_runner(goldens / "qwen35" / "model-f16.gguf", max_seq=32, speculative="mtp")
