"""The cached runner over an engine that is a small recurrent net: state, sessions, threads, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    TokenizerError,
    UnsupportedModelError,
)
from rlx.runners.base import LmRunner
from rlx.runners.cached import CachedRunner
from rlx.runners.families import GemmaRunner, Llama32Runner, Qwen3Runner, Qwen35Runner
from rlx.sampling import SampleOpts

PROMPT = [3, 1, 4, 1, 5]


def naive(engine: FakeEngine, ids: list[int], n_new: int, **options: Any) -> list[int]:
    """`LmRunner.generate` over the same net."""
    return LmRunner.generate(CachedRunner(engine), ids, n_new, **options)


def boom(*args: Any) -> Any:
    raise RuntimeError("boom")


def test_it_is_a_runner_with_the_model_s_sizes() -> None:
    runner = CachedRunner(FakeEngine(40, 24, family="gemma"))
    assert isinstance(runner, LmRunner)
    assert (runner.family, runner.vocab_size, runner.max_seq, runner.config.layers) == ("gemma", 40, 24, 2)
    assert runner.stats()["threads"] == 1


# ---------------------------------------------------------------------------------------------------- logits


def test_all_positions_are_the_rows_of_every_prefix() -> None:
    runner = CachedRunner(FakeEngine())
    rows = runner.predict_logits(PROMPT, all_positions=True)
    assert rows.shape == (5, 40)
    for end in range(1, 6):
        np.testing.assert_array_equal(runner.predict_logits(PROMPT[:end]), rows[end - 1])


def test_decoding_continues_the_session() -> None:
    runner = CachedRunner(FakeEngine())
    rows = runner.predict_logits(PROMPT, all_positions=True)
    np.testing.assert_array_equal(runner.prefill_logits(PROMPT[:2]), rows[1])
    for at in range(2, 5):
        np.testing.assert_array_equal(runner.decode_logits(PROMPT[at]), rows[at])
        assert runner.past_seq == at + 1


def test_predict_leaves_a_session_alone() -> None:
    runner = CachedRunner(FakeEngine())
    rows = runner.predict_logits(PROMPT, all_positions=True)
    runner.prefill_logits(PROMPT[:3])
    runner.predict_logits([9, 9, 9, 9, 9, 9])
    with pytest.raises(PromptError):
        runner.predict_logits([99])
    assert runner.past_seq == 3
    np.testing.assert_array_equal(runner.decode_logits(PROMPT[3]), rows[3])


def test_prefill_starts_anew_and_a_refused_prompt_does_not() -> None:
    runner = CachedRunner(FakeEngine())
    first = runner.prefill_logits(PROMPT)
    with pytest.raises(PromptError, match="is empty"):
        runner.prefill_logits([])
    assert runner.past_seq == 5
    np.testing.assert_array_equal(runner.prefill_logits(PROMPT), first)
    assert runner.past_seq == 5
    runner.reset()
    assert runner.past_seq == 0


def test_decoding_without_a_session_or_beyond_the_context_is_an_error() -> None:
    runner = CachedRunner(FakeEngine(max_seq=6))
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
    got = CachedRunner(engine).generate(PROMPT, n_new, sample=sample)
    assert got == naive(FakeEngine(), PROMPT, n_new, sample=sample)
    assert len(got) == min(n_new, 24 - 5 + 1)
    assert engine.calls == [5] * (n_new > 0) + [1] * (len(got) - 1)


def test_a_runner_is_greedy_unless_told_otherwise() -> None:
    """What the model's files recommend is there to be asked for: by the runner's choice, or by a call's."""
    hot, warm = SampleOpts(5.0, seed=1), SampleOpts(3.0, seed=2)
    engine = FakeEngine()
    assert CachedRunner(engine).recommended_sample is None
    greedy = CachedRunner(engine).generate(PROMPT, 9)
    assert CachedRunner(engine).generate(PROMPT, 9, sample="recommended") == greedy, "there is no recommendation"
    engine.recommended = hot
    runner = CachedRunner(engine)
    assert (runner.recommended_sample, runner.default_sample) == (hot, SampleOpts.greedy())
    assert runner.generate(PROMPT, 9) == [step.token for step in runner.stream(PROMPT, 9)] == greedy
    drawn = [CachedRunner(FakeEngine()).generate(PROMPT, 9, sample=sample) for sample in (hot, warm)]
    assert drawn[0] != drawn[1] and greedy not in drawn
    assert runner.generate(PROMPT, 9, sample="recommended") == drawn[0]
    assert CachedRunner(engine, sample="recommended").generate(PROMPT, 9) == drawn[0]
    assert CachedRunner(engine, sample=warm).generate(PROMPT, 9) == drawn[1]
    assert CachedRunner(engine, sample=warm).generate_batch([PROMPT], 9) == [drawn[1]]
    with pytest.raises(SamplingError, match="found 'best'"):
        runner.generate(PROMPT, 1, sample="best")  # type: ignore[arg-type]


def test_the_session_of_a_generation_can_be_continued() -> None:
    runner = CachedRunner(FakeEngine())
    ids = runner.generate(PROMPT, 4)
    assert runner.past_seq == len(PROMPT) + 3
    np.testing.assert_array_equal(runner.decode_logits(ids[-1]), runner.predict_logits(PROMPT + ids))


def test_end_of_generation_tokens_stop_it() -> None:
    free = CachedRunner(FakeEngine()).generate(PROMPT, 9)
    stop = free[3]
    expected = free[: free.index(stop) + 1]
    tokenizer = SimpleNamespace(eog_ids=frozenset({stop}))
    assert CachedRunner(FakeEngine(tokenizer=tokenizer)).generate(PROMPT, 9) == expected
    assert CachedRunner(FakeEngine(tokenizer=tokenizer)).generate(PROMPT, 9, stop_at_eog=False) == free
    assert naive(FakeEngine(tokenizer=tokenizer), PROMPT, 9) == expected


def test_a_callback_stops_and_sees_every_token() -> None:
    free = CachedRunner(FakeEngine()).generate(PROMPT, 9)
    seen: list[int] = []
    assert CachedRunner(FakeEngine()).generate(PROMPT, 9, lambda t: (seen.append(t), len(seen) < 3)[1]) == free[:3]
    assert seen == free[:3]


def test_a_prompt_as_long_as_the_context_gets_one_token() -> None:
    runner = CachedRunner(FakeEngine(max_seq=5))
    assert len(runner.generate(PROMPT, 3)) == 1
    with pytest.raises(PromptError, match="prompt: it has 6 tokens, and the context holds 5"):
        runner.generate([*PROMPT, 1], 1)


def test_without_a_tokenizer_the_end_must_be_given_up_explicitly() -> None:
    class NoTokenizer:
        @property
        def eog_ids(self) -> frozenset[int]:
            raise TokenizerError("the key 'tokenizer.ggml.model' is missing", where="m.gguf")

    engine = FakeEngine(tokenizer=NoTokenizer())
    with pytest.raises(TokenizerError, match=r"m\.gguf: the key .* is missing.*stop_at_eog=False"):
        CachedRunner(engine).generate(PROMPT, 2)
    assert len(CachedRunner(engine).generate(PROMPT, 2, stop_at_eog=False)) == 2


def test_chat_ids_are_those_of_the_text_stage(demo_model: Any) -> None:
    from rlx.text import chat_ids, load_tokenizer

    tokenizer = load_tokenizer(demo_model)
    runner = CachedRunner(FakeEngine(tokenizer=tokenizer))
    messages = [{"role": "user", "content": "Hello <|im_end|>"}]
    ids = runner.chat_ids(messages)
    assert ids == chat_ids(tokenizer, messages)
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    assert ids.count(tokenizer.token_to_id("<|im_end|>") or -1) == 1  # the template's own, not the user's
    assert (
        runner.chat_ids(messages, add_generation_prompt=False)
        == ids[: -len(tokenizer.encode("<|im_start|>assistant\n", parse_special=True))]
    )


# ---------------------------------------------------------------------------------------------------- failures


def test_a_callback_that_raises_leaves_the_runner_usable() -> None:
    runner = CachedRunner(FakeEngine())
    expected = runner.generate(PROMPT, 5)
    with pytest.raises(RuntimeError, match="boom"):
        runner.generate(PROMPT, 5, boom)
    assert runner.generate(PROMPT, 5) == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_step_is_undone(error: type[BaseException]) -> None:
    def rule(ids: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if ids[-1] == 7:
            raise error
        return logits

    runner = CachedRunner(FakeEngine(rule=rule))
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

    runner = CachedRunner(FakeEngine(rule=rule))
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


def in_thread(call: Any) -> BaseException | None:
    """What `call` raises in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_a_second_thread_is_refused_while_the_first_is_at_work() -> None:
    runner = CachedRunner(FakeEngine())
    calls = (
        lambda: runner.generate(PROMPT, 1), lambda: runner.predict_logits(PROMPT), lambda: runner.decode_logits(1),
        lambda: runner.prefill_logits(PROMPT), runner.reset, runner.compile, runner.stats, runner.close,
    )  # fmt: skip
    errors: list[BaseException | None] = []

    def on_token(token: int) -> None:
        if not errors:
            errors.extend(in_thread(call) for call in calls)

    expected = CachedRunner(FakeEngine()).generate(PROMPT, 3)
    assert runner.generate(PROMPT, 3, on_token) == expected
    assert [type(error) for error in errors] == [BusyError] * len(calls)
    assert str(errors[0]).startswith("generate: the runner is in use: generate in thread MainThread")
    assert in_thread(lambda: runner.generate(PROMPT, 1)) is None  # one after the other is fine


def test_a_callback_may_not_call_its_own_runner() -> None:
    runner = CachedRunner(FakeEngine())
    with pytest.raises(BusyError, match="not from its own callback"):
        runner.generate(PROMPT, 3, lambda token: runner.reset())
    assert len(runner.generate(PROMPT, 3)) == 3


def test_a_closed_runner_refuses_everything() -> None:
    engine = FakeEngine()
    with CachedRunner(engine) as runner:
        runner.generate(PROMPT, 1)
    assert engine.closed
    runner.close()
    for call in (lambda: runner.generate(PROMPT, 1), lambda: runner.predict_logits(PROMPT), runner.__enter__):
        with pytest.raises(BusyError, match=r"the runner was closed.*Open the model again"):
            call()


# ---------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("runner", "family"),
    [(Qwen3Runner, "qwen3"), (Qwen35Runner, "qwen35"), (Llama32Runner, "llama32"), (GemmaRunner, "gemma")],
)
def test_a_family_s_runner_takes_its_own_family_only(runner: type[CachedRunner], family: str) -> None:
    assert runner(FakeEngine(family=family)).family == family
    with pytest.raises(UnsupportedModelError, match=f"{runner.__name__} runs the family '{family}', .* of 'other'"):
        runner(FakeEngine(family="other"))


# ---------------------------------------------------------------------------------------------------- prefixes


def test_what_a_prompt_shares_with_the_session_is_not_computed_again() -> None:
    engine = FakeEngine()
    runner = CachedRunner(engine)
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


def test_the_same_prompt_again_computes_its_last_token() -> None:
    engine = FakeEngine()
    runner = CachedRunner(engine)
    first = runner.prefill_logits(PROMPT)
    np.testing.assert_array_equal(runner.prefill_logits(PROMPT), first)
    assert engine.calls == [5, 1]


def test_a_snapshot_is_a_prefix_too() -> None:
    engine = FakeEngine()
    runner = CachedRunner(engine)
    runner.prefill_logits(PROMPT)
    saved = runner.snapshot()
    runner.prefill_logits([8, 8, 8])
    runner.restore(saved)
    assert runner.past_seq == 5
    engine.calls.clear()
    assert runner.generate([*PROMPT, 9], 3) == naive(FakeEngine(), [*PROMPT, 9], 3)
    assert engine.calls[0] == 1


# ---------------------------------------------------------------------------------------------------- streams


def test_a_stream_gives_what_generate_gives() -> None:
    runner = CachedRunner(FakeEngine())
    steps = list(runner.stream(PROMPT, 6))
    assert [step.token for step in steps] == naive(FakeEngine(), PROMPT, 6)
    assert [step.finish_reason for step in steps] == [None] * 5 + ["length"]
    context = list(PROMPT)
    for step in steps:
        logits = FakeEngine().forward(context).astype(np.float64)
        expected = logits[step.token] - np.log(np.exp(logits).sum())
        assert step.logprob == pytest.approx(expected, abs=1e-5)
        context.append(step.token)


def test_a_stream_is_lazy_and_keeps_other_threads_out() -> None:
    engine = FakeEngine()
    runner = CachedRunner(engine)
    stream = runner.stream(PROMPT, 6)
    assert engine.calls == []
    next(stream)
    assert engine.calls == [5], "the next token is not computed before anyone asks"
    assert isinstance(in_thread(lambda: runner.generate(PROMPT, 1)), BusyError)
    stream.close()
    stream.close()
    assert runner.past_seq == 5
    assert in_thread(lambda: runner.generate(PROMPT, 1)) is None


USES: list[Callable[[CachedRunner], Any]] = [
    lambda runner: runner.generate(PROMPT, 2),
    lambda runner: list(runner.stream(PROMPT, 2)),
    lambda runner: runner.generate_batch([PROMPT], 1),
    lambda runner: runner.predict_logits(PROMPT),
    lambda runner: runner.score(PROMPT),
    lambda runner: runner.reset(),
]


@pytest.mark.parametrize("use", USES)
def test_a_further_call_in_the_same_thread_ends_a_stream(use: Callable[[CachedRunner], Any]) -> None:
    runner = CachedRunner(FakeEngine())
    expected = use(CachedRunner(FakeEngine()))
    stream = runner.stream(PROMPT, 6)
    next(stream)
    np.testing.assert_array_equal(use(runner), expected)
    for _ in range(2):
        with pytest.raises(BusyError, match=r"this stream was ended by a call of \w+\. Finish or close a stream"):
            next(stream)
    assert len(runner.generate(PROMPT, 3)) == 3


def test_closing_a_runner_ends_its_stream() -> None:
    engine = FakeEngine()
    with CachedRunner(engine) as runner:
        stream = runner.stream(PROMPT, 6)
        next(stream)
    assert engine.closed
    with pytest.raises(BusyError, match="ended by a call of close"):
        next(stream)
    finished = CachedRunner(FakeEngine()).stream(PROMPT, 1)
    assert len(list(finished)) == 1 and list(finished) == []


def test_a_stream_that_nobody_has_any_more_keeps_nobody_out() -> None:
    runner = CachedRunner(FakeEngine())
    next(runner.stream(PROMPT, 6))
    assert in_thread(lambda: runner.generate(PROMPT, 1)) is None
    kept = []
    worker = threading.Thread(target=lambda: kept.append(runner.stream(PROMPT, 6)) or next(kept[0]))  # type: ignore[func-returns-value]
    worker.start()
    worker.join()
    assert len(runner.generate(PROMPT, 2)) == 2, "its thread is over"
    with pytest.raises(BusyError, match="ended by a call of generate"):
        next(kept[0])


def test_a_stream_may_go_on_in_another_thread() -> None:
    runner = CachedRunner(FakeEngine())
    stream = runner.stream(PROMPT, 6)
    tokens = [next(stream).token]
    assert in_thread(lambda: tokens.append(next(stream).token)) is None
    assert [*tokens, *(step.token for step in stream)] == CachedRunner(FakeEngine()).generate(PROMPT, 6)


def test_a_stream_checks_its_arguments_at_once() -> None:
    runner = CachedRunner(FakeEngine())
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
    runner = CachedRunner(FakeEngine(tokenizer=SimpleNamespace(eog_ids=frozenset(ends))))
    generation = runner.generate(PROMPT, 6, **options)
    assert (len(generation), generation.finish_reason) == (count, reason)


def test_the_context_s_end_is_a_reason() -> None:
    assert CachedRunner(FakeEngine(max_seq=6)).generate(PROMPT, 9).finish_reason == "context"


# ---------------------------------------------------------------------------------------------------- scores


def test_scores_are_log_probabilities_of_the_next_tokens() -> None:
    runner = CachedRunner(FakeEngine())
    runner.prefill_logits([7])
    rows = FakeEngine().forward(PROMPT, True).astype(np.float64)
    expected = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    np.testing.assert_allclose(runner.score(PROMPT), expected[np.arange(4), PROMPT[1:]], atol=1e-5)
    np.testing.assert_allclose(LmRunner.score(runner, PROMPT), runner.score(PROMPT), atol=1e-6)
    assert runner.past_seq == 1, "the session stays"
    with pytest.raises(PromptError, match="no predecessor"):
        runner.score([3])


# ---------------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_is_a_vector_of_its_hidden_states(pooling: str) -> None:
    runner = CachedRunner(FakeEngine())
    runner.prefill_logits([7])
    rows = np.concatenate(list(FakeEngine().hidden_rows(PROMPT))).astype(np.float64)
    expected = rows.mean(0) if pooling == "mean" else rows[-1]
    np.testing.assert_allclose(runner.embed(PROMPT, pooling, normalize=False), expected, atol=1e-6)
    np.testing.assert_allclose(runner.embed(PROMPT, pooling), expected / np.linalg.norm(expected), atol=1e-6)
    assert runner.past_seq == 1, "the session stays"
    with pytest.raises(ArgumentError, match="pooling is 'max'"):
        runner.embed(PROMPT, "max")


# ---------------------------------------------------------------------------------------------------- without a cache


def test_without_the_cache_every_token_is_a_prefill() -> None:
    engine = FakeEngine()
    runner = CachedRunner(engine)
    runner.disable_decode_compile_cache()
    assert runner.generate(PROMPT, 3) == naive(FakeEngine(), PROMPT, 3)
    assert engine.calls == [5, 6, 7]
    with pytest.raises(ArgumentError, match="needs a cache"):
        runner.generate(PROMPT, 3, speculative="prompt-lookup")


def test_the_original_s_names() -> None:
    runner = CachedRunner(FakeEngine())
    assert runner.generate_packed(PROMPT, 4) == runner.generate(PROMPT, 4)
    assert len(runner.generate_stoppable(PROMPT, 4, lambda token: False)) == 1
