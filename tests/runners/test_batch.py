"""Batches: the loop over an engine that is a small recurrent net, and the real one on golden checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

from rlx.engine.request import FinishReason
from rlx.errors import ArgumentError, PromptError, SamplingError
from rlx.runners import Model
from rlx.runners.auto import auto_runner

PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 8], [2, 8], [1, 8, 2, 8, 1, 8]]


def alone(prompts: list[list[int]], n_new: int, **options: Any) -> list[list[int]]:
    """Each by a runner that recomputes the context for every token, over the same net."""
    with Model(FakeEngine()) as runner:
        runner.disable_decode_compile_cache()
        return [runner.generate(ids, n_new, **options) for ids in prompts]


def boom(*args: Any) -> Any:
    raise RuntimeError("boom")


def test_the_tokens_of_each_prompt_alone() -> None:
    engine = FakeEngine()
    runner = Model(engine)
    found = runner.generate_batch(PROMPTS, 7)
    assert found == alone(PROMPTS, 7)
    assert [g.finish_reason for g in found] == [FinishReason.LENGTH] * 5
    assert engine.steps[0] == 4 and max(engine.steps) == 5, "the prompts share a step, and so do their answers"
    assert len(engine.steps) <= 9
    assert runner.generate_batch(np.array(PROMPTS[0])[None], 7) == found[:1]  # type: ignore[arg-type]


def test_the_next_prompt_takes_the_place_of_a_sequence_that_ended() -> None:
    engine, seen = FakeEngine(), [0] * 5

    def until(i: int, token: int) -> bool:
        seen[i] += 1
        return seen[i] <= i  # prompt i ends with token i + 1

    found = Model(engine, slots=2).generate_batch(PROMPTS, 9, until)
    assert found == [tokens[: i + 1] for i, tokens in enumerate(alone(PROMPTS, 9))]
    assert [g.finish_reason for g in found] == [FinishReason.CALLBACK] * 5
    assert max(engine.steps) == 2


def test_what_the_callback_is_told_and_may_do() -> None:
    engine, told = FakeEngine(), list[tuple[int, int]]()
    runner = Model(engine)
    runner.prefill_logits([1, 2])
    found = runner.generate_batch(PROMPTS, 3, lambda i, token: told.append((i, token)))
    for i, tokens in enumerate(found):
        assert [token for at, token in told if at == i] == tokens
    inner = list[Any]()
    runner.generate_batch(PROMPTS, 3, lambda i, token: inner.append(runner.generate_batch([[token]], 2)))
    assert len(inner) == 15
    for error in (RuntimeError, KeyboardInterrupt):

        def stop(i: int, token: int, error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            runner.generate_batch(PROMPTS, 3, stop)
    assert runner.past_seq == 2
    np.testing.assert_array_equal(runner.decode_logits(3), Model(FakeEngine()).prefill_logits([1, 2, 3]))


def test_stop_tokens_and_counts() -> None:
    wanted = alone(PROMPTS, 9)
    stop = wanted[0][3]
    engine = FakeEngine()
    engine.tokenizer.eog_ids = frozenset([stop])
    runner = Model(engine)
    ends = [tokens.index(stop) + 1 if stop in tokens else 9 for tokens in wanted]
    assert runner.generate_batch(PROMPTS, 9) == [tokens[:end] for tokens, end in zip(wanted, ends, strict=True)]
    assert runner.generate_batch(PROMPTS, 9, stop_at_eog=False) == wanted
    least = runner.generate_batch(PROMPTS, 9, min_tokens=6)
    assert [len(tokens) >= 6 for tokens in least] == [True] * 5
    assert runner.generate_batch(PROMPTS, 0) == [[]] * 5
    steps = len(engine.steps)
    assert runner.generate_batch(PROMPTS, 0) == [[]] * 5
    assert len(engine.steps) == steps, "nothing is computed"
    runner.disable_decode_compile_cache()
    assert runner.generate_batch(PROMPTS, 9, stop_at_eog=False) == wanted


def test_bad_prompts_and_options() -> None:
    runner = Model(FakeEngine())
    for prompts, message in [
        ([], "there are no prompts"),
        (7, "expected several prompts, found a int"),
        ([1, 2], "prompt 0: expected a sequence"),
        ("text", "expected several prompts, found a str"),
        ([[1], []], "prompt 1: it is empty"),
        ([[1], [99]], "prompt 1: id 99"),
        ([[1], [2], [1] * 25], "prompt 2: it has 25 tokens, and the context holds 24"),
    ]:
        with pytest.raises(PromptError, match=message):
            runner.generate_batch(prompts, 3)  # type: ignore[arg-type]
    for n_new in (-1, 1.5, None):
        with pytest.raises(ArgumentError, match="n_new"):
            runner.generate_batch(PROMPTS, n_new)  # type: ignore[arg-type]
    with pytest.raises(SamplingError):
        runner.generate_batch(PROMPTS, 3, sample="greedy")  # type: ignore[arg-type]


def test_int8_activations_and_more_prompts_than_slots(goldens: Path) -> None:
    """A quantized hybrid: results are sums in the same order whatever the rows, so the tokens are those of one."""
    with np.load(goldens / "qwen35-k256" / "golden.npz") as file:
        ids = file["tokens"].tolist()
    prompts = [ids, ids[:7], ids[4:24], ids[:1], ids[9:]]
    path, options = next((goldens / "qwen35-k256").glob("*Q4_K_M.gguf")), {"seq": [1, 32]}
    with auto_runner(path, max_seq=96, profile={"buckets": options}, slots=3, deterministic=True) as runner:
        wanted = [runner.generate(prompt, 12, stop_at_eog=False) for prompt in prompts]
        before = runner.past_seq
        assert runner.generate_batch(prompts, 12, stop_at_eog=False) == wanted
        with pytest.raises(RuntimeError, match="boom"):
            runner.generate_batch(prompts, 12, boom, stop_at_eog=False)
        assert runner.past_seq == before
        assert runner.generate(prompts[1], 12, stop_at_eog=False) == wanted[1]
