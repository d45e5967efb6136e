"""Speculative decoding gives the logits of steps of one token, whatever is guessed and wherever it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest
from fake_engine import FakeEngine
from toy_engine import give
from toy_engine import job as toy_job

from rlx.backends.program import Program
from rlx.engine.kv.sequence import Sequence as PoolSequence
from rlx.engine.loop.executor import Executor
from rlx.engine.loop.job import Job
from rlx.engine.loop.scheduler import Scheduler
from rlx.engine.programs.programs import Programs, ProgramSpec
from rlx.engine.speculation.drafts import MOST, Counters, Drafts, PromptLookup
from rlx.errors import ResourceError
from rlx.passes.capabilities import Layouts
from rlx.runners import auto_runner
from rlx.sampling import SampleOpts, Sampler

Array = np.ndarray[Any, Any]

PAIR = {"buckets": {"seq": [1, 32]}}
PROMPT = [3, 1, 4, 1, 5]
CEILING = 2e-5  # of the largest logit: float32 through four layers
SURE_PAIRS = 66.6  # chi-square of 35 degrees of freedom exceeds it once in a thousand


class Guesses:
    """A drafter that is told what to say: tokens that come, and after some of them one that does not.

    Args:
        right: the tokens to come, the first of them the one after the prompt.
        runs: how many of each proposal are right; then a wrong one follows.
    """

    def __init__(self, right: Sequence[int], runs: Sequence[int], wrong: int = 0) -> None:
        self.right, self.runs, self.wrong, self.seen, self.asked = list(right), list(runs), wrong, 0, 0
        self.next: list[int] = []

    def observe(self, token: int) -> None:
        self.seen += 1
        self.asked += 1
        self.next = []

    def acceptance_probs(self, limit: int) -> list[float]:
        count = self.runs[self.asked % len(self.runs)]
        good = self.right[self.seen : self.seen + count]
        after = self.right[self.seen + count : self.seen + count + 1]
        self.next = [*good, self.wrong if after != [self.wrong] else self.wrong + 1][:limit]
        return [1.0] * len(self.next)

    def propose(self, count: int) -> list[int]:
        return self.next[:count]


class Same:
    """A drafter that always says the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def observe(self, token: int) -> None: ...

    def acceptance_probs(self, limit: int) -> list[float]:
        return [1.0] * min(limit, len(self.tokens))

    def propose(self, count: int) -> list[int]:
        return self.tokens[:count]


def generated(
    engine: FakeEngine, count: int, drafter: Any = None, sampler: Sampler | None = None, **options: Any
) -> tuple[Job, Counters]:
    """A job after PROMPT, with a drafter or token by token."""
    counters = Counters()
    limit = min(count, engine.max_seq - len(PROMPT) + 1)
    drafts_of = None if drafter is None else lambda sequence: Drafts(drafter, counters)
    sampler = sampler or Sampler(SampleOpts.greedy())
    job = toy_job(PROMPT, limit, sampler=sampler, drafts_of=drafts_of, keeps=True, **options)
    executor = Executor(engine, Scheduler(8, 0.2, engine.most_rows, engine.shared_rows), lambda: 0.0)
    give(executor, job)
    while executor.turn():
        pass
    assert job.ended
    return job, counters


def tokens(engine: FakeEngine, count: int, opts: SampleOpts, drafter: Any = None) -> list[int]:
    """The tokens of such a job; its sequence then holds all of them but the last."""
    job, _ = generated(engine, count, drafter, Sampler(opts, PROMPT))
    assert job.error is None
    assert job.sequence.ids == [*PROMPT, *job.tokens[:-1]]
    return job.tokens


@pytest.mark.parametrize("opts", [SampleOpts.greedy(), SampleOpts(seed=5), SampleOpts(seed=5, repetition_penalty=1.4)])
@pytest.mark.parametrize("runs", [[0], [1, 3], [5, 0, 2]])
def test_the_tokens_are_those_of_single_steps(opts: SampleOpts, runs: list[int]) -> None:
    """Sampled ones too: a seed gives the same tokens with and without drafts."""
    engine = FakeEngine(max_seq=60)
    want = tokens(engine, 40, opts)
    engine.calls.clear()
    assert tokens(engine, 40, opts, Guesses(want, runs)) == want
    assert (len(engine.calls) < 40) == any(runs)
    assert tokens(engine, 40, opts, Same(7, 7, 7)) == want


@pytest.mark.parametrize("stop", [1, 2, 5, 9])
def test_whoever_stops_finds_the_sequence_at_its_last_token_but_one(stop: int) -> None:
    engine = FakeEngine(max_seq=60)
    want = tokens(engine, 20, SampleOpts.greedy())
    assert tokens(engine, stop, SampleOpts.greedy(), Guesses(want, [4])) == want[:stop]
    job, _ = generated(engine, 20, Guesses(want, [4]), stop_ids=[want[stop]])
    assert job.tokens == want[: want.index(want[stop]) + 1]
    assert job.sequence.ids == [*PROMPT, *job.tokens[:-1]]


def test_broken_logits_behind_a_wrong_draft_do_no_harm() -> None:
    """The row of a draft that was not chosen is nobody's business; a row that is used is checked."""

    def rule(ids: list[int], logits: Array) -> Array:
        return np.full_like(logits, np.nan) if ids[-1] == 39 else logits

    engine = FakeEngine(max_seq=60, rule=rule)
    want = tokens(engine, 10, SampleOpts.greedy())
    assert 39 not in want
    assert tokens(engine, 10, SampleOpts.greedy(), Same(39)) == want


def test_sampled_tokens_follow_the_distribution_of_the_model() -> None:
    """Pearson's chi-square of pairs of tokens against the product of their probabilities, with drafts that the model
    takes now and then.
    """
    opts = SampleOpts(temperature=1.5, seed=11)
    engine = FakeEngine(vocab_size=6, seed=2)
    sampler, runs, sums = Sampler(opts), 3000, Counters()
    ids = range(6)

    def after(*more: int) -> Array:
        return sampler.distribution(engine.logits([*PROMPT, *more]))[1]

    start, second = after(), np.stack([after(t) for t in ids])
    want = {(t, u): start[t] * second[t][u] for t, u in product(ids, repeat=2)}
    found = dict.fromkeys(want, 0)
    for _ in range(runs):
        job, counters = generated(engine, 2, Same(2), sampler)
        found[tuple(job.tokens)] += 1
        sums.accepted, sums.drafted = sums.accepted + counters.accepted, sums.drafted + counters.drafted
    several = 0
    for _ in range(runs // 10):
        job, counters = generated(engine, 4, Same(2, 1), sampler)
        several += counters.accepted
    assert several, "some are taken"
    assert sum((found[pair] - runs * p) ** 2 / (runs * p) for pair, p in want.items()) < SURE_PAIRS


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen35"])
def test_native_programs_verify(goldens: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Full caches, rings, recurrent states; drafts that are right for a while: the tokens are those without."""
    with auto_runner(goldens / family / "model-f16.gguf", precision="exact", max_seq=96, profile=PAIR) as runner:
        prompt = list(range(5, 45))
        plain = runner.generate(prompt, 40, stop_at_eog=False)
        guesses, text = Guesses(plain[1:], [3, 0, 5, 1]), list[int]()

        def observe(self: PromptLookup, token: int) -> None:
            text.append(token)
            guesses.seen = len(text) - len(prompt) - 1

        monkeypatch.setattr(PromptLookup, "observe", observe)
        monkeypatch.setattr(PromptLookup, "acceptance_probs", lambda self, limit: guesses.acceptance_probs(limit))
        monkeypatch.setattr(PromptLookup, "propose", lambda self, count: guesses.propose(count))
        assert runner.generate(prompt, 40, stop_at_eog=False, speculative="prompt-lookup") == plain
        assert runner.past_seq == len(prompt) + 39
        counters = runner.stats()["speculation"]
        assert counters["accepted"] > 20
        assert counters["drafted"] > counters["accepted"]


# ---------------------------------------------------------------------------------------------------- prompt lookup


def test_the_text_goes_on_as_it_did_before() -> None:
    drafter = PromptLookup([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6])
    assert drafter.propose(len(drafter.acceptance_probs(6)))[:2] == [7, 8]
    drafter.observe(0)
    assert drafter.acceptance_probs(6) == drafter.propose(6) == []


def test_guesses_that_fail_are_not_made_any_more() -> None:
    """Text in which every pair comes again, but never with what followed it."""
    rng = np.random.default_rng(0)
    drafter, proposed = PromptLookup([]), 0
    for token in rng.integers(0, 12, 3000).tolist():
        drafter.observe(token)
        proposed += len(drafter.acceptance_probs(MOST))
    assert proposed < 60


# ---------------------------------------------------------------------------------------------------- sessions

GRAPHS = {
    "full": hybrid.graph(("full", "full")),
    "ring": hybrid.graph(("ring", "full")),
    "recurrent": hybrid.graph(("conv", "delta")),
    "all": hybrid.graph(),
}


@pytest.fixture(params=GRAPHS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hybrid.InterpretedEngine]:
    monkeypatch.setattr(hybrid, "LAYOUTS", Layouts(page=16))
    made = hybrid.InterpretedEngine(GRAPHS[request.param])
    yield made
    made.close()


def test_every_kind_of_state_goes_back_behind_a_wrong_draft(engine: hybrid.InterpretedEngine) -> None:
    """The rows are those of one pass over the ids in float64, and no step is spent on going back."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, hybrid.VOCAB, 120).tolist()
    engine.forward(ids[:30])
    want = hybrid.reference(engine.graph, ids)
    at, runs = 30, cycle([0, 3, 1, 7, 2, 2])
    while at < 100:
        right = min(next(runs), 99 - at)
        end = at + right + 1
        rows = engine.verify([*ids[at:end], (ids[end] + 1) % hybrid.VOCAB])
        assert np.abs(rows[:-1] - want[at:end]).max() <= CEILING * np.abs(want).max()
        engine.trim(end)
        at = end
    assert engine.ids == ids[:100]
    assert np.abs(engine.forward(ids[100:103]) - want[102]).max() <= CEILING * np.abs(want).max()


@pytest.mark.parametrize("verb", ["forward", "snapshot", "verify", "beside"])
def test_whatever_follows_a_verification_finds_its_rows(engine: hybrid.InterpretedEngine, verb: str) -> None:
    ids = np.random.default_rng(2).integers(0, hybrid.VOCAB, 40).tolist()
    want = hybrid.reference(engine.graph, ids)
    engine.forward(ids[:30])
    engine.verify([*ids[30:34], 1, 2])
    engine.trim(34)
    if verb == "snapshot":
        engine.restore(engine.snapshot())
    if verb == "beside":
        engine.beside([3, 4, 5])
    engine.trim(33)
    row = engine.verify(ids[33:36])[2] if verb == "verify" else engine.forward(ids[33:36])
    assert np.abs(row - want[35]).max() <= CEILING * np.abs(want).max()


@pytest.mark.parametrize("method", ["begin", "end"])
@pytest.mark.parametrize("call", range(4))
def test_an_interrupt_around_a_verification(
    engine: hybrid.InterpretedEngine, monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    """Whichever step it hits, the ids and the states agree afterwards."""
    ids = np.random.default_rng(2).integers(0, hybrid.VOCAB, 40).tolist()
    want, done, calls = hybrid.reference(engine.graph, ids), getattr(PoolSequence, method), []
    engine.forward(ids[:30])

    def hooked(self: PoolSequence, *args: Any, **named: Any) -> None:
        calls.append(args)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        done(self, *args, **named)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PoolSequence, method, hooked)
        for at in (30, 33, 36):
            engine.verify([*ids[at : at + 3], 5, 6])
            engine.trim(at + 3)
        engine.forward([5])
        engine.forward([6])
    if len(engine.ids) > 38:  # the interrupt hit the two ids that were not to come
        engine.trim(38)
    assert engine.ids == ids[: engine.past]
    row = engine.forward(ids[engine.past :])
    assert np.abs(row - want[39]).max() <= CEILING * np.abs(want).max()


def test_a_program_without_the_one_that_follows_is_closed(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, made = Programs._instance, list[tuple[Program, int]]()

    def instance(programs: Programs, spec: ProgramSpec) -> tuple[Program, int]:
        if spec.drafts == "advance":
            raise ResourceError("no memory")
        made.append(usual(programs, spec))
        return made[-1]

    with auto_runner(goldens / "qwen35" / "hf", max_seq=64, profile=PAIR, compile_ahead=False) as runner:
        programs = runner._engine._programs
        monkeypatch.setattr(Programs, "_instance", instance)
        with pytest.raises(ResourceError, match="no memory"):
            _ = programs[ProgramSpec((2, 32), "all", drafts="verify")]
        assert [program.closed for program, _ in made] == [True]
