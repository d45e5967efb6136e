"""The cached runner over an engine that is a small recurrent net: state, sessions, threads, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

from rlx.errors import (
    ArgumentError,
    BusyError,
    NumericalError,
    PromptError,
    SamplingError,
)
from rlx.runners import Model
from rlx.runners.base import LmRunner
from rlx.sampling import SampleOpts

PROMPT = [3, 1, 4, 1, 5]


def naive(engine: FakeEngine, ids: list[int], n_new: int, **options: Any) -> list[int]:
    """The tokens over the same net when every one is computed from the whole context."""
    with Model(engine) as runner:
        runner.disable_decode_compile_cache()
        return runner.generate(ids, n_new, **options)


# ---------------------------------------------------------------------------------------------------- logits


def test_all_positions_are_the_rows_of_every_prefix() -> None:
    runner = Model(FakeEngine())
    rows = runner.predict_logits(PROMPT, all_positions=True)
    assert rows.shape == (5, 40)
    for end in range(1, 6):
        np.testing.assert_array_equal(runner.predict_logits(PROMPT[:end]), rows[end - 1])


def test_decoding_continues_the_session() -> None:
    runner = Model(FakeEngine())
    rows = runner.predict_logits(PROMPT, all_positions=True)
    np.testing.assert_array_equal(runner.prefill_logits(PROMPT[:2]), rows[1])
    for at in range(2, 5):
        np.testing.assert_array_equal(runner.decode_logits(PROMPT[at]), rows[at])
        assert runner.past_seq == at + 1


def test_predict_leaves_a_session_alone() -> None:
    runner = Model(FakeEngine())
    rows = runner.predict_logits(PROMPT, all_positions=True)
    runner.prefill_logits(PROMPT[:3])
    runner.predict_logits([9, 9, 9, 9, 9, 9])
    with pytest.raises(PromptError):
        runner.predict_logits([99])
    assert runner.past_seq == 3
    np.testing.assert_array_equal(runner.decode_logits(PROMPT[3]), rows[3])


def test_prefill_starts_anew_and_a_refused_prompt_does_not() -> None:
    runner = Model(FakeEngine())
    first = runner.prefill_logits(PROMPT)
    with pytest.raises(PromptError, match="is empty"):
        runner.prefill_logits([])
    assert runner.past_seq == 5
    np.testing.assert_array_equal(runner.prefill_logits(PROMPT), first)
    assert runner.past_seq == 5
    runner.reset()
    assert runner.past_seq == 0


def test_decoding_without_a_session_or_beyond_the_context_is_an_error() -> None:
    runner = Model(FakeEngine(max_seq=6))
    with pytest.raises(PromptError, match=r"there is no session.*prefill_logits"):
        runner.decode_logits(1)
    runner.prefill_logits(PROMPT)
    for wrong in (40, -1, 1.5, "x", None):
        with pytest.raises(PromptError, match="token: "):
            runner.decode_logits(wrong)  # type: ignore[arg-type]
    runner.decode_logits(1)
    with pytest.raises(PromptError, match="the context is full: it holds 6 tokens"):
        runner.decode_logits(1)
    assert runner.past_seq == 6


# ---------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("sample", [SampleOpts.greedy(), SampleOpts(0.9, 12, 0.95, 0.01, 1.2, seed=4)])
@pytest.mark.parametrize("n_new", [0, 1, 7, 99])
def test_cached_generation_equals_the_naive_one(sample: SampleOpts, n_new: int) -> None:
    engine = FakeEngine()
    got = Model(engine).generate(PROMPT, n_new, sample=sample)
    assert got == naive(FakeEngine(), PROMPT, n_new, sample=sample)
    assert len(got) == min(n_new, 24 - 5 + 1)
    assert engine.calls == [5] * (n_new > 0) + [1] * (len(got) - 1)


def test_a_runner_is_greedy_unless_told_otherwise() -> None:
    """What the model's files recommend is there to be asked for: by the runner's choice, or by a call's."""
    hot, warm = SampleOpts(5.0, seed=1), SampleOpts(3.0, seed=2)
    engine = FakeEngine()
    assert Model(engine).recommended_sample is None
    greedy = Model(engine).generate(PROMPT, 9)
    assert Model(engine).generate(PROMPT, 9, sample="recommended") == greedy, "there is no recommendation"
    engine.recommended = hot
    runner = Model(engine)
    assert (runner.recommended_sample, runner.default_sample) == (hot, SampleOpts.greedy())
    assert runner.generate(PROMPT, 9) == [step.token for step in runner.stream(PROMPT, 9)] == greedy
    drawn = [Model(FakeEngine()).generate(PROMPT, 9, sample=sample) for sample in (hot, warm)]
    assert drawn[0] != drawn[1] and greedy not in drawn
    assert runner.generate(PROMPT, 9, sample="recommended") == drawn[0]
    assert Model(engine, sample="recommended").generate(PROMPT, 9) == drawn[0]
    assert Model(engine, sample=warm).generate(PROMPT, 9) == drawn[1]
    assert Model(engine, sample=warm).generate_batch([PROMPT], 9) == [drawn[1]]
    with pytest.raises(SamplingError, match="found 'best'"):
        runner.generate(PROMPT, 1, sample="best")  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match="found 5, expected a SampleOpts"):
        Model(engine, sample=5)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_step_is_undone(error: type[BaseException]) -> None:
    def rule(ids: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if ids[-1] == 7:
            raise error
        return logits

    runner = Model(FakeEngine(rule=rule))
    with pytest.raises(error):
        runner.prefill_logits([1, 7])
    assert runner.past_seq == 0
    runner.prefill_logits([1, 2])
    with pytest.raises(error):
        runner.decode_logits(7)
    assert runner.past_seq == 2
    np.testing.assert_array_equal(runner.decode_logits(3), runner.predict_logits([1, 2, 3]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sample", [SampleOpts.greedy(), SampleOpts(seed=1)])
def test_broken_arithmetic_is_an_error_not_token_zero(bad: float, sample: SampleOpts) -> None:
    def rule(ids: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(np.arange(len(logits)) == 11, bad, logits) if len(ids) >= 7 else logits

    runner = Model(FakeEngine(rule=rule))
    seen: list[int] = []
    with pytest.raises(NumericalError, match=f"position 6: logit 11 is {bad}"):
        runner.generate(PROMPT, 9, seen.append, sample)
    assert len(seen) == 2
    with pytest.raises(NumericalError):
        runner.predict_logits([1] * 8)
    with pytest.raises(NumericalError):
        runner.predict_logits([1] * 8, all_positions=True)
    assert len(runner.generate(PROMPT, 2)) == 2


# ---------------------------------------------------------------------------------------------------- threads, closing


def in_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(20)
    return found[0]


CALLS: list[Callable[[Model], Any]] = [
    lambda runner: runner.generate([7, 8], 3),
    lambda runner: list(runner.stream([7, 8], 3)),
    lambda runner: runner.generate_batch([PROMPT, [2]], 3),
    lambda runner: runner.predict_logits(PROMPT).tolist(),
    lambda runner: runner.score(PROMPT).tolist(),
    lambda runner: runner.prefill_logits(PROMPT).tolist(),
]


def test_threads_and_callbacks_may_call_it_at_any_time() -> None:
    expected = [call(Model(FakeEngine())) for call in CALLS]
    runner, found = Model(FakeEngine()), list[Any]()

    def on_token(token: int) -> None:
        if not found:
            found.extend(in_thread(partial(call, runner)) for call in CALLS)
            found.extend(call(runner) for call in CALLS)
            found.append(runner.stats()["threads"])

    assert runner.generate(PROMPT, 3, on_token) == Model(FakeEngine()).generate(PROMPT, 3)
    assert found == [*expected, *expected, 1]


def test_closing_while_others_wait() -> None:
    runner, errors = Model(FakeEngine()), list[BaseException]()
    begun, closed = threading.Event(), threading.Event()

    def on_token(token: int) -> None:
        begun.set()
        assert closed.wait(20)

    def work() -> None:
        try:
            runner.generate(PROMPT, 19, on_token)
        except BusyError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(20)
    runner.close()
    closed.set()
    thread.join(20)
    assert "the runner was closed" in str(errors[0])


def test_a_closed_runner_refuses_everything() -> None:
    engine = FakeEngine()
    with Model(engine) as runner:
        runner.generate(PROMPT, 1)
    assert engine.closed
    runner.close()
    for call in (lambda: runner.generate(PROMPT, 1), lambda: runner.predict_logits(PROMPT), runner.__enter__):
        with pytest.raises(BusyError, match=r"the runner was closed.*Open the model again"):
            call()


# ---------------------------------------------------------------------------------------------------- prefixes


def test_what_a_prompt_shares_with_the_session_is_not_computed_again() -> None:
    engine = FakeEngine()
    runner = Model(engine)
    expected = [naive(FakeEngine(), prompt, 3) for prompt in (PROMPT, [*PROMPT, 9, 2], [3, 1, 7], [8, 8])]
    assert runner.generate(PROMPT, 3) == expected[0]
    engine.calls.clear()
    assert runner.generate([*PROMPT, 9, 2], 3) == expected[1]
    assert engine.calls[0] == 2, "the session held the first five"
    engine.calls.clear()
    assert runner.generate([3, 1, 7], 3) == expected[2]
    assert engine.calls[0] == 1
    assert runner.generate([8, 8], 3) == expected[3]
    assert runner.stats()["reused_tokens"] == 5 + 2


# ---------------------------------------------------------------------------------------------------- streams


def test_a_stream_gives_what_generate_gives() -> None:
    runner = Model(FakeEngine())
    steps = list(runner.stream(PROMPT, 6))
    assert [step.token for step in steps] == naive(FakeEngine(), PROMPT, 6)
    assert [step.finish_reason for step in steps] == [None] * 5 + ["length"]
    context = list(PROMPT)
    for step in steps:
        logits = FakeEngine().logits(context).astype(np.float64)
        expected = logits[step.token] - np.log(np.exp(logits).sum())
        assert step.logprob == pytest.approx(expected, abs=1e-5)
        context.append(step.token)


def test_a_stream_starts_with_its_first_step_and_a_closed_one_leaves_a_session() -> None:
    engine = FakeEngine()
    runner = Model(engine)
    stream = runner.stream(PROMPT, 6)
    assert engine.calls == []
    tokens = [next(stream).token for _ in range(3)]
    stream.close()
    stream.close()
    assert list(stream) == []
    assert runner.past_seq == 7
    np.testing.assert_array_equal(runner.decode_logits(tokens[-1]), runner.predict_logits(PROMPT + tokens))


def test_closing_a_runner_ends_its_stream() -> None:
    engine = FakeEngine(max_seq=200)
    with Model(engine) as runner:
        stream = runner.stream(PROMPT, 100)
        next(stream)
    assert engine.closed
    with pytest.raises(BusyError, match="the runner was closed"):
        list(stream)
    finished = Model(FakeEngine()).stream(PROMPT, 1)
    assert len(list(finished)) == 1 and list(finished) == []


def test_a_stream_checks_its_arguments_at_once() -> None:
    runner = Model(FakeEngine())
    with pytest.raises(PromptError, match="empty"):
        runner.stream([], 3)
    with pytest.raises(ArgumentError, match="n_new is -1"):
        runner.stream(PROMPT, -1)
    with pytest.raises(ArgumentError, match=r"speculative is 'guess'.*'prompt-lookup', 'mtp'"):
        runner.stream(PROMPT, 1, speculative="guess")
    with pytest.raises(ArgumentError, match=r"speculative is ''"):
        runner.generate(PROMPT, 1, speculative="")


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [({}, 6, "length"), ({"on_token": lambda token: False}, 1, "callback"), ({"min_tokens": 2}, 3, "stop")],
)
def test_a_generation_knows_why_it_ended(options: Any, count: int, reason: str) -> None:
    ends = naive(FakeEngine(), PROMPT, 3)[-1:] if reason == "stop" else []
    runner = Model(FakeEngine(tokenizer=SimpleNamespace(eog_ids=frozenset(ends))))
    generation = runner.generate(PROMPT, 6, **options)
    assert (len(generation), generation.finish_reason) == (count, reason)


# ---------------------------------------------------------------------------------------------------- scores


def test_scores_are_log_probabilities_of_the_next_tokens() -> None:
    runner = Model(FakeEngine())
    runner.prefill_logits([7])
    rows = FakeEngine().logits(PROMPT, True).astype(np.float64)
    expected = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    np.testing.assert_allclose(runner.score(PROMPT), expected[np.arange(4), PROMPT[1:]], atol=1e-5)
    np.testing.assert_allclose(LmRunner.score(runner, PROMPT), runner.score(PROMPT), atol=1e-6)
    assert runner.past_seq == 1, "the session stays"
    with pytest.raises(PromptError, match="no predecessor"):
        runner.score([3])


# ---------------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_is_a_vector_of_its_hidden_states(pooling: str) -> None:
    runner = Model(FakeEngine())
    runner.prefill_logits([7])
    engine = FakeEngine()
    rows = engine.hidden(engine.open_sequence(), PROMPT).astype(np.float64)
    expected = rows.mean(0) if pooling == "mean" else rows[-1]
    np.testing.assert_allclose(runner.embed(PROMPT, pooling, normalize=False), expected, atol=1e-6)
    np.testing.assert_allclose(runner.embed(PROMPT, pooling), expected / np.linalg.norm(expected), atol=1e-6)
    assert runner.past_seq == 1, "the session stays"
    with pytest.raises(ArgumentError, match="pooling is 'max'"):
        runner.embed(PROMPT, "max")
