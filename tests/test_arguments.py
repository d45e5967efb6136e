"""Unknown keyword arguments are named, with our argument for those of other libraries."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine

import rlx
from rlx.errors import ArgumentError, UnknownArgumentError
from rlx.runners import CachedRunner

GENERATE = CachedRunner(FakeEngine()).generate

CALLS: list[tuple[Callable[..., Any], str, str]] = [
    (rlx.auto_runner, "n_ctx", "Use max_seq="),
    (rlx.auto_runner, "model_path", "Use path="),
    (rlx.auto_runner, "n_threads", "Use threads="),
    (rlx.auto_runner, "temperature", "Use sample=SampleOpts(temperature=...)"),
    (rlx.auto_runner, "top_k", "Use sample=SampleOpts(top_k=...)"),
    (rlx.auto_runner, "n_gpu_layers", "Leave it out: rlx runs on the CPU"),
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
