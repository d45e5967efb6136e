"""Unknown keyword arguments are named, with our argument for those of other libraries."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

import rlx
from rlx.engine.opening.options import RunnerOptions
from rlx.errors import ArgumentError, UnknownArgumentError
from rlx.runners import Model
from rlx.text.chat import chat_ids

RUNNER = Model(FakeEngine())
GENERATE = RUNNER.generate

CALLS: list[tuple[Callable[..., Any], str, str]] = [
    (rlx.auto_runner, "n_ctx", "Use max_seq="),
    (rlx.auto_runner, "model_path", "Use path="),
    (rlx.auto_runner, "n_threads", "Use threads="),
    (rlx.auto_runner, "temperature", "Use sample=SampleOpts(temperature=...)"),
    (rlx.auto_runner, "top_k", "Use sample=SampleOpts(top_k=...)"),
    (rlx.auto_runner, "n_gpu_layers", "Leave it out: `device` has all layers"),
    (rlx.auto_runner, "max_sec", "Did you mean max_seq=?"),
    (GENERATE, "max_tokens", "Use n_new="),
    (GENERATE, "n_predict", "Use n_new="),
    (GENERATE, "temperature", "Use sample=SampleOpts(temperature=...)"),
    (GENERATE, "repeat_penalty", "Use sample=SampleOpts(repetition_penalty=...)"),
    (GENERATE, "max_seq", "Give max_seq= when the model is opened"),
    (GENERATE, "callback", "Use on_token="),
    (GENERATE, "do_sample", "Leave it out: tokens are drawn with sample=SampleOpts(temperature=...)"),
    (rlx.SampleOpts, "temp", "Use temperature="),
    (rlx.SampleOpts, "repeat_penalty", "Use repetition_penalty="),
    (rlx.SampleOpts, "nonsense", "There is temperature, top_k, top_p"),
    (rlx.Qwen3Runner.from_path, "n_ctx", "Use max_seq="),
    (rlx.TokenGenerator.from_path, "n_threads", "Use threads="),
]


@pytest.mark.parametrize(("call", "name", "hint"), CALLS, ids=lambda value: value if isinstance(value, str) else None)
def test_an_unknown_argument_is_named(call: Callable[..., Any], name: str, hint: str) -> None:
    required = ("x",) if "from_path" in repr(call) else ()
    with pytest.raises(UnknownArgumentError, match=re.escape(f"there is no argument '{name}'. {hint}")) as caught:
        call(*required, **{name: 1})
    assert isinstance(caught.value, ArgumentError) and isinstance(caught.value, TypeError)


def submit(**fields: Any) -> None:
    RUNNER.submit(rlx.Request([1], 2, **fields))


def decode(ids: Any, **options: Any) -> str:
    return rlx.load_tokenizer("demo").decode(ids, **options)


def encode(**options: Any) -> list[int]:
    return rlx.load_tokenizer("demo").encode("x", **options)


TWO, BARE = np.array([1, 2]), np.array(3)  # neither true nor false; no several values
NO_FLAG = ["false", None, 2, TWO]  # the text "false" counted as True

# A call, one of its arguments, and values that it cannot have.
WRONG: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (partial(GENERATE, [1], 2), "on_token", [1, "x", TWO]),
    (partial(GENERATE, [1], 2), "stop_at_eog", NO_FLAG),
    (partial(RUNNER.stream, [1], 2), "top_logprobs", [-1, TWO]),
    (partial(RUNNER.predict_logits, [1]), "all_positions", NO_FLAG),
    (partial(RUNNER.embed, [1]), "normalize", NO_FLAG),
    (partial(RUNNER.embed, [1]), "pooling", ["max", TWO]),
    (partial(RUNNER.rerank, "x", ["x"]), "truncate", NO_FLAG),
    (partial(RUNNER.chat, "Hi", 2), "parallel_tool_calls", NO_FLAG),
    (encode, "add_special_tokens", NO_FLAG),
    (encode, "parse_special", NO_FLAG),
    (partial(decode, [1]), "skip_special_tokens", NO_FLAG),
    (partial(RUNNER.generate_batch, [[1]], 2), "on_token", [1, "x"]),
    (submit, "priority", [None, "high", 1.5, True, TWO]),
    (submit, "stop_ids", [None, 1, "1", ["1"], [1.0], [40], BARE]),
    (submit, "keep_ids", [None, 1, "1", ["1"], [1.0], [-1]]),
    (submit, "cache_salt", [None, 1, b"x", TWO]),
    (submit, "stop", [1, [1], [""], np.array(["a"])]),
    (submit, "speculative", [1, [], np.array([1, 2])]),
    (partial(RUNNER.score_steps, [1, 2]), "top_logprobs", [-1, 1.5, "x"]),
    (RUNNER.compile, "on_program", [1, "x"]),
    (partial(RUNNER.chat, "Hi", 2), "variables", [1, "x", [1], {1: 2}]),
    (decode, "ids", [None, 1, "x", BARE]),
    (rlx.StreamDetokenizer, "tokenizer", [None, "model.gguf"]),
    (rlx.load_tokenizer, "path", [None, 1, b"x", "\0", "\ud800"]),
    (rlx.Snapshot.load, "path", [None, 1]),
    (lambda **given: rlx.trace(**given).__enter__(), "path", [None, 1, "\0"]),
    (rlx.auto_runner, "progress", [1, "x"]),
    (rlx.auto_runner, "dump_ir", [1, "\0"]),
    (rlx.auto_runner, "cache_kv", [1, "\0", "\ud800", ""]),
    (partial(rlx.auto_runner, "demo"), "config", [1, b"x"]),
    (rlx.auto_runner, "on_token", [1, "x"]),
]


@pytest.mark.parametrize(("call", "name", "value"), [(call, name, each) for call, name, all_ in WRONG for each in all_])
def test_a_value_of_another_kind_is_named(call: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        call(**{name: value})


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: RUNNER.generate_batch(BARE, 2), rlx.PromptError),
        (lambda: RUNNER.chat("Hi", 2, tools=TWO), rlx.ToolError),
        (lambda: RUNNER.chat("Hi", 2, tool_choice=TWO), rlx.ToolError),
        (lambda: chat_ids(rlx.load_tokenizer("demo"), [{"role": "user", "content": [{"type": TWO}]}]), rlx.RlxError),
        (lambda: rlx.SampleOpts(dry_sequence_breakers=BARE), rlx.SamplingError),
        (lambda: rlx.CompileProfile.preset(TWO), rlx.ProfileError),
        (lambda: rlx.Dim(5), rlx.GraphError),
        (lambda: rlx.load_tokenizer("x" * 300), rlx.ModelFileError),
    ],
)
def test_other_mistakes_have_their_own_errors(call: Callable[[], Any], error: type[rlx.RlxError]) -> None:
    with pytest.raises(error):
        call()


def test_none_is_the_default() -> None:
    usual = RunnerOptions()
    assert RunnerOptions(slots=None, stall_ms=None, streams=None, load=None) == usual  # type: ignore[arg-type]
    assert GENERATE([1], 2, min_tokens=None) == GENERATE([1], 2)
    assert submit(stop_ids=np.array([1, 2]), keep_ids=[3]) is None
