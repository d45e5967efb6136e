"""A smaller model that drafts for another one: whatever it drafts, the tokens are those without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.engine.request import Request
from rlx.engine.speculation import draft_model
from rlx.engine.speculation.drafts import ModelHits
from rlx.errors import ArgumentError, ModelFileError
from rlx.runners import Model, auto_runner
from rlx.runners.base import planned, submitted
from rlx.sampling import SampleOpts

IDS = np.random.default_rng(3).integers(5, 500, 30).tolist()
SAMPLES = [SampleOpts.greedy(), SampleOpts(temperature=1.2, seed=4, repetition_penalty=1.2)]


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[Model]:
    profile = {"buckets": {"seq": [1, 32]}}
    with auto_runner(model, precision="exact", profile=profile, **{"max_seq": 128, **options}) as runner:
        yield runner


def drafted(runner: Model, draft: Path, ids: list[int], count: int, **options: Any) -> tuple[list[int], dict[str, int]]:
    """The tokens with a draft model, and the counters of this call."""
    before = runner.stats()["speculation"]
    found = runner.generate(ids, count, stop_at_eog=False, speculative=f"model:{draft}", **options)
    after = runner.stats()["speculation"]
    return list(found), {name: after[name] - before[name] for name in after}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that is no smaller drafts as if it cost nothing."""
    init = ModelHits.__init__
    monkeypatch.setattr(ModelHits, "__init__", lambda self, most, cost=0.0: init(self, most, 0.0))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(
    ("model", "draft"),
    [("qwen3", "qwen3"), ("qwen3", "qwen2"), ("gemma2", "gemma2"), ("gemma2", "gemma"), ("qwen35", "qwen35")],
)
def test_the_tokens_are_those_without(goldens: Path, model: str, draft: str, sample: SampleOpts) -> None:
    """Full caches, rings and recurrent states, of the draft model too; one that is always right, one that never is."""
    with opened(goldens / model / "model-f16.gguf") as runner:
        plain = runner.generate(IDS, 40, stop_at_eog=False, sample=sample)
        found, counters = drafted(runner, goldens / draft / "model-f16.gguf", IDS, 40, sample=sample)
        assert found == plain
        assert counters["steps"] + counters["accepted"] == 39, "all but the first token, which the prompt gives"
        if model == draft and sample.is_plain_greedy:
            assert counters["accepted"] == counters["drafted"] > 30
        watched = list[int]()
        found, _ = drafted(runner, goldens / draft / "model-f16.gguf", IDS, 7, sample=sample, on_token=watched.append)
        assert found == watched == plain[:7]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("model", ["qwen3", "qwen35"])
def test_several_requests_draft_in_the_same_steps(goldens: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one ends before the others, and where the prompts begin with the same tokens."""
    path, together = goldens / model / "model-f16.gguf", list[int]()
    step = draft_model.DraftModel._step

    def watched(self: Any, rows: Any, *more: Any) -> Any:
        together.append(len(rows))
        return step(self, rows, *more)

    monkeypatch.setattr(draft_model.DraftModel, "_step", watched)
    with opened(path) as runner:
        runner._loop.scheduler.cost.share = 0.0
        monkeypatch.setattr(runner._loop.scheduler.cost, "update", lambda: None)
        prompts = [(IDS, 30), (IDS[:20], 12), ([*IDS[:20], 9, 8], 30)]
        plain = [runner.generate(ids, count, stop_at_eog=False) for ids, count in prompts]
        requests = [
            Request(ids, count, stop_at_eog=False, speculative=f"model:{path}", cache_salt=str(count))
            for ids, count in prompts
        ]
        handles = [planned(runner, request, has_texts=False) for request in requests]  # none waits for a consumer
        submitted(runner, *handles)
        assert [[step.token for step in handle] for handle in handles] == plain
        assert max(together) > 1
        counters = runner.stats()["speculation"]
        assert counters["accepted"] == counters["drafted"] > 30


def test_a_draft_model_without_room_drafts_nothing(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = goldens / "qwen3" / "model-f16.gguf"
    with opened(path) as runner:
        plain = runner.generate(IDS, 100, stop_at_eog=False)
        pool = runner._engine.drafting(f"model:{path}").engine.pool
        monkeypatch.setattr(pool, "kv_bytes", pool.sizes.bytes_of(1, 0))  # 64 positions
        found, counters = drafted(runner, path, IDS, 90)
        assert found == plain[:90]
        assert 0 < counters["accepted"] < 40
        monkeypatch.undo()
        found, counters = drafted(runner, path, IDS, 200)  # to the end of both contexts
        assert found == plain[: len(found)] and len(found) == 99


def test_it_is_opened_once_and_with_the_model_if_it_is_the_default(goldens: Path) -> None:
    path = goldens / "qwen3" / "model-f16.gguf"
    with opened(path, speculative=f"model:{path}") as runner:
        (made,) = runner._engine._draftings.values()
        plain = runner.generate(IDS, 6, speculative=None, stop_at_eog=False)
        assert runner.stats()["speculation"]["drafted"] > 0
        assert runner._engine.drafting(f"model:{path}") is made
        assert made.engine.max_seq == runner.max_seq and made.engine._setup.threads == runner._engine._setup.threads
        runner.disable_decode_compile_cache()
        assert runner.generate(IDS, 6, stop_at_eog=False) == plain


@pytest.mark.parametrize(
    ("draft", "kind", "message"),
    [
        ("gemma2/model-f16.gguf", ArgumentError, r"another vocabulary: token \d+ is .* Give a smaller model of the sa"),
        ("nothing.gguf", ModelFileError, "nothing.gguf"),
        ("bert/model-f16.gguf", ModelFileError, "bert"),
    ],
)
def test_a_model_that_cannot_draft(goldens: Path, draft: str, kind: type[Exception], message: str) -> None:
    model = goldens / "qwen3" / "model-f16.gguf"
    with pytest.raises(kind, match=message):
        auto_runner(model, speculative=f"model:{goldens / draft}")
    with opened(model) as runner:
        with pytest.raises(kind, match=message):
            runner.generate(IDS, 3, speculative=f"model:{goldens / draft}")
        assert len(runner.generate(IDS, 3, stop_at_eog=False)) == 3


def test_a_vocabulary_may_have_more_tokens_but_not_many(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(demo_model) as runner:
        ours, named = runner.tokenizer, draft_model._named(runner.tokenizer)
        for extra in (128, 129):
            seen = iter([named, {**named, **{9000 + i: "more" for i in range(extra)}}])
            monkeypatch.setattr(draft_model, "_named", lambda tokenizer, seen=seen: next(seen))
            if extra == 129:
                with pytest.raises(ArgumentError, match=f"it has {len(named) + 129} tokens, and the model's has"):
                    draft_model.check_vocabulary(ours, ours, "draft.gguf")
            else:
                draft_model.check_vocabulary(ours, ours, "draft.gguf")
