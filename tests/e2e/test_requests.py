"""Requests of a runner over a real engine: from several threads, with a common prefix, in a pool that is too small."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import NumericalError, PoolFullError, PromptError

PROFILE: dict[str, Any] = {"buckets": {"seq": [1, 32]}}
FAMILIES = ("llama", "gemma3", "qwen35")
COMMON = np.random.default_rng(1).integers(3, 400, 200).tolist()

pytestmark = pytest.mark.filterwarnings("ignore::rlx.engine.opening.setup.ContextWarning")


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, goldens: Path) -> Path:
    return goldens / request.param / "model-f16.gguf"


def opened(path: Path, **options: Any) -> Any:
    return rlx.auto_runner(path, **{"precision": "exact", "profile": PROFILE, "max_seq": 320, "threads": 2, **options})


@pytest.fixture
def runner(path: Path) -> Iterator[Any]:
    with opened(path) as made:
        yield made


def test_threads_with_a_common_prefix(runner: Any) -> None:
    """Each gets the tokens of its prompt alone; the prefix is computed once."""
    prompts = [[*COMMON, i, 2 * i] for i in range(3, 9)]
    with opened(runner._engine.weights.loader.path) as other:
        alone = [other.generate(prompt, 12, stop_at_eog=False) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: runner.generate(prompt, 12, stop_at_eog=False), prompts))
    assert found == alone
    counters = runner.stats()["requests"]
    assert counters["prompt_tokens"] < 2 * len(COMMON), "once, and for a model with states from their last copy on"
    assert runner.stats()["reused_tokens"] > 3 * len(COMMON)


def test_a_pool_that_is_too_small_for_all(runner: Any) -> None:
    """Requests that find no room wait or are paused, and have their tokens in the end; too large ones are refused."""
    prompts = [COMMON[i : i + 48] for i in range(0, 96, 16)]
    alone = [runner.generate(prompt, 24, stop_at_eog=False) for prompt in prompts]
    sizes, path = runner._engine.pool.sizes, runner._engine.weights.loader.path
    kv_bytes = 4 * sizes.page_bytes + 3 * sizes.slot_bytes
    with opened(path, kv_bytes=kv_bytes) as small:
        assert small.generate_batch(prompts, 24, stop_at_eog=False) == alone
        assert small.stats()["requests"]["paused"] > 0
        if not sizes.slot_bytes:
            with pytest.raises(PoolFullError, match=r"300 tokens take .*, and the pool holds .*larger kv_bytes"):
                small.submit(rlx.Request((COMMON * 2)[:300], 4))
        assert small.generate(prompts[0], 24, stop_at_eog=False) == alone[0]


def test_one_that_fails_fails_alone(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in the logits of one, wrong embeddings, an abort: the others have the same tokens."""
    alone = [runner.generate([i, 5, 9], 16, stop_at_eog=False) for i in range(3)]
    compute, bad = runner._engine.compute, [7, 7, 7]

    def broken(segments: Any) -> Any:
        found = list(compute(segments))
        for i, (segment, logits) in enumerate(zip(segments, found, strict=True)):
            if logits is not None and list(segment.sequence.ids[:3]) == bad:
                found[i] = np.full_like(np.asarray(logits), np.nan)
        return found

    monkeypatch.setattr(runner._engine, "compute", broken)
    handles = [runner.submit(rlx.Request([i, 5, 9], 16, stop_at_eog=False)) for i in range(3)]
    failing = runner.submit(rlx.Request(bad, 16, stop_at_eog=False))
    gone = runner.submit(rlx.Request([8, 8], 300, stop_at_eog=False))
    next(iter(gone))
    gone.abort()
    with pytest.raises(PromptError, match="embeds: expected numbers"):
        runner.submit(rlx.Request([1, 2], 4, embeds=[[1.0, 2.0]]))
    with pytest.raises(NumericalError):
        failing.result()
    assert [handle.result() for handle in handles] == alone
    assert gone.result().finish_reason == "aborted"


@pytest.mark.parametrize("thinks", [False, True])
def test_each_turn_of_a_conversation_computes_only_what_is_new(runner: Any, thinks: bool) -> None:
    """Four conversations at once with one system prompt. A template that drops the thinking of earlier answers leaves
    their ends only: what stood before the answer is known.
    """
    rng, end, opening = np.random.default_rng(4), min(runner.tokenizer.eog_ids), [7, 9]

    def text(count: int) -> list[int]:
        return [token for token in rng.integers(3, 300, count).tolist() if token not in runner.stop_ids]

    system = [*text(90), end]
    chats = [list(system) for _ in range(4)]
    for turn in range(3):
        known = [len(system) if turn == 0 else len(chat) for chat in chats]
        for chat in chats:
            chat += [*text(12), end]
        prompts = [chat + opening for chat in chats]
        before = runner.stats()["requests"]["prompt_tokens"]
        options = {"min_tokens": 10} if turn % 2 else {"stop_at_eog": False}
        handles = [runner.submit(rlx.Request(prompt, 10, **options)) for prompt in prompts]
        answers = [handle.result() for handle in handles]
        computed = runner.stats()["requests"]["prompt_tokens"] - before
        lost = 10 if thinks else 1  # the last token of an answer is computed with what follows it
        new = sum(len(prompt) - count for prompt, count in zip(prompts, known, strict=True))
        again = len(system) if turn == 0 else len(chats) * (lost + len(opening))
        assert computed <= new + again, turn
        for i, (prompt, reply) in enumerate(zip(prompts, answers, strict=True)):
            chats[i] = [*chats[i], *reply[5:], end] if thinks else [*prompt, *reply, end]
