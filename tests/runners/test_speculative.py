"""Speculative decoding gives the logits of steps of one token, whatever is guessed and wherever it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest
from fake_engine import FakeEngine

from rlx.errors import NumericalError
from rlx.runners import auto_runner
from rlx.runners.generation.checks import check_finite
from rlx.runners.speculation.prompt_lookup import LookedUp
from rlx.runners.speculation.speculative import MOST, Counters, Hits, PromptLookup, Speculation
from rlx.runtime import kv
from rlx.runtime.sequence import Sequence as PoolSequence
from rlx.sampling import SampleOpts, Sampler

Array = np.ndarray[Any, Any]

PAIR = {"buckets": {"seq": [1, 32]}}
PROMPT = [3, 1, 4, 1, 5]
CEILING = 2e-5  # of the largest logit: float32 through four layers
SURE = 37.7  # chi-square of 15 degrees of freedom exceeds it once in a thousand


class Guesses:
    """A drafter that is told what to say: tokens that come, and after some of them one that does not.

    Args:
        right: the tokens to come, the first of them the one after the first step.
        runs: how many of each proposal are right; then a wrong one follows.
    """

    def __init__(self, right: Sequence[int], runs: Sequence[int], wrong: int = 0) -> None:
        self.right, self.runs, self.wrong, self.seen, self.asked = list(right), list(runs), wrong, 0, 0

    def observe(self, token: int) -> None:
        self.seen += 1

    def propose(self, limit: int) -> list[int]:
        count = self.runs[self.asked % len(self.runs)]
        self.asked += 1
        good = self.right[self.seen : self.seen + count]
        after = self.right[self.seen + count : self.seen + count + 1]
        return [*good, self.wrong if after != [self.wrong] else self.wrong + 1][:limit]


class Same:
    """A drafter that always says the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def observe(self, token: int) -> None: ...

    def propose(self, limit: int) -> list[int]:
        return self.tokens[:limit]


def tokens(engine: Any, count: int, opts: SampleOpts, drafter: Any = None, stop: int | None = None) -> list[int]:
    """A generation after PROMPT, with a drafter or token by token."""
    engine.reset()
    first, sampler = engine.forward(PROMPT), Sampler(opts, PROMPT)
    if drafter is None:
        return chosen(first, lambda token: engine.forward([token]), sampler, count)
    speculation = Speculation(engine, drafter, count - 1, check_finite)
    found = chosen(first, speculation.step, sampler, stop or count)
    speculation.finish()
    return found


def chosen(logits: Array, step: Callable[[int], Array], sampler: Sampler, count: int) -> list[int]:
    """Token by token."""
    found = [sampler.sample(logits)]
    while len(found) < count:
        found.append(sampler.sample(step(found[-1])))
    return found


@pytest.mark.parametrize("opts", [SampleOpts.greedy(), SampleOpts(seed=5), SampleOpts(seed=5, repetition_penalty=1.4)])
@pytest.mark.parametrize("runs", [[0], [1, 3], [5, 0, 2]])
def test_the_tokens_are_those_of_single_steps(opts: SampleOpts, runs: list[int]) -> None:
    """Sampled ones too: a seed gives the same tokens with and without drafts."""
    engine = FakeEngine(max_seq=60)
    want = tokens(engine, 40, opts)
    engine.calls.clear()
    assert tokens(engine, 40, opts, Guesses(want, runs)) == want
    assert engine._ids == [*PROMPT, *want[:-1]]
    assert (len(engine.calls) < 40) == any(runs)
    assert tokens(engine, 40, opts, Same(7, 7, 7)) == want


def test_a_generation_ends_with_the_context() -> None:
    engine = FakeEngine(max_seq=12)
    want = tokens(engine, 8, SampleOpts.greedy())
    assert tokens(engine, 8, SampleOpts.greedy(), Guesses(want, [9])) == want
    assert engine.past == 12


@pytest.mark.parametrize("stop", [1, 2, 5, 9])
def test_whoever_stops_finds_the_session_at_its_last_token_but_one(stop: int) -> None:
    engine = FakeEngine(max_seq=60)
    want = tokens(engine, 20, SampleOpts.greedy())
    assert tokens(engine, 20, SampleOpts.greedy(), Guesses(want, [4]), stop) == want[:stop]
    assert engine._ids == [*PROMPT, *want[: stop - 1]]


def test_no_draft_is_computed_that_nobody_can_want() -> None:
    engine = FakeEngine(max_seq=60)
    want = tokens(engine, 9, SampleOpts.greedy())
    counters = Counters()
    engine.reset()
    first = engine.forward(PROMPT)
    engine.calls.clear()
    speculation = Speculation(engine, Guesses(want, [50]), 8, check_finite, counters)
    assert chosen(first, speculation.step, Sampler(SampleOpts.greedy()), 9) == want
    assert engine.calls == [8], "one step for the eight rows"
    assert (counters.steps, counters.drafted, counters.accepted) == (1, 7, 7)
    assert max(len(Same(*range(40)).propose(n)) for n in (3, MOST)) == MOST


def test_drafts_are_no_more_than_a_program_has_rows_for(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "propose", lambda self, limit: [7] * limit)
    with auto_runner(demo_model, max_seq=96, profile={"buckets": {"seq": [1, 3]}}) as runner:
        plain = runner.generate([5, 6, 7], 20, stop_at_eog=False)
        assert runner.generate([5, 6, 7], 20, stop_at_eog=False, speculative="prompt-lookup") == plain
        counters = runner.stats()["speculation"]
        assert counters["steps"] < counters["drafted"] <= 2 * counters["steps"]


def test_broken_logits_behind_a_wrong_draft_do_no_harm() -> None:
    """The row of a draft that was not chosen is nobody's business; a row that is asked for is checked."""

    def rule(ids: list[int], logits: Array) -> Array:
        return np.full_like(logits, np.nan) if ids[-1] == 39 else logits

    engine = FakeEngine(max_seq=60, rule=rule)
    want = tokens(engine, 10, SampleOpts.greedy())
    assert 39 not in want
    assert tokens(engine, 10, SampleOpts.greedy(), Same(39)) == want
    engine.reset()
    engine.forward(PROMPT)
    speculation = Speculation(engine, Same(2), 5, check_finite)
    with pytest.raises(NumericalError, match="position 5"):
        speculation.step(39)
    speculation.finish()
    assert engine.past == len(PROMPT), "the token does not count"


def test_sampled_tokens_follow_the_distribution_of_the_model() -> None:
    """Pearson's chi-square of pairs of tokens against the product of their probabilities, with drafts that the model
    takes now and then.
    """
    opts = SampleOpts(temperature=1.5, seed=11)
    engine = FakeEngine(vocab_size=4, seed=2)
    sampler, counters, runs = Sampler(opts), Counters(), 3000
    engine.forward([1, 2])
    first = engine.forward([0])

    def after(token: int) -> Array:
        row = engine.forward([token])
        engine.trim(3)
        return sampler.distribution(row)[1]

    start = sampler.distribution(first)[1]
    second = np.stack([after(t) for t in range(4)])
    follow = {t: np.stack([_after_two(engine, sampler, t, u) for u in range(4)]) for t in range(4)}
    want = {(t, u, v): second[t][u] * follow[t][u][v] for t, u, v in product(range(4), repeat=3)}
    found = dict.fromkeys(want, 0)
    firsts = np.random.default_rng(3).choice(4, runs, p=start)
    for t in firsts.tolist():
        speculation = Speculation(engine, Same(2, 1), 2, check_finite, counters)
        u = sampler.sample(speculation.step(t))
        found[t, u, sampler.sample(speculation.step(u))] += 1
        speculation.finish()
        engine.trim(3)
    assert 0.05 < counters.accepted / counters.drafted < 0.95, "some are taken, some are not"
    for t in range(4):
        total = int((firsts == t).sum())
        expected = {pair: total * p for pair, p in want.items() if pair[0] == t}
        assert min(expected.values()) > 0
        assert sum((found[pair] - n) ** 2 / n for pair, n in expected.items()) < SURE


def _after_two(engine: FakeEngine, sampler: Sampler, *pair: int) -> Array:
    row = engine.forward(list(pair))
    engine.trim(3)
    return sampler.distribution(row)[1]


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
        monkeypatch.setattr(PromptLookup, "propose", lambda self, limit: guesses.propose(limit))
        assert runner.generate(prompt, 40, stop_at_eog=False, speculative="prompt-lookup") == plain
        assert runner.past_seq == len(prompt) + 39
        counters = runner.stats()["speculation"]
        assert counters["accepted"] > 20
        assert counters["drafted"] > counters["accepted"]


# ---------------------------------------------------------------------------------------------------- several at a time


def in_runs(engine: FakeEngine, count: int, drafter: Any, stops: Sequence[int] = ()) -> tuple[list[int], Counters]:
    """A greedy generation after PROMPT that comes some tokens at a time."""
    engine.reset()
    found, counters = [int(engine.forward(PROMPT).argmax())], Counters()
    looked_up = LookedUp(engine, drafter, counters)
    while len(found) < count and found[-1] not in stops:
        more = looked_up.more(found[-1], count - len(found), stops)
        assert 0 < len(more) <= count - len(found)
        found += more
        assert engine._ids == [*PROMPT, *found[:-1]]
    return found, counters


@pytest.mark.parametrize("runs", [[0], [1, 3], [5, 0, 2], [MOST]])
def test_tokens_that_come_some_at_a_time(runs: list[int]) -> None:
    """The same as one by one, for any number of them, and up to any that stops."""
    engine = FakeEngine(max_seq=60)
    want = tokens(engine, 40, SampleOpts.greedy())
    for count in (1, 2, 3, 7, 20, 40):
        found, counters = in_runs(engine, count, Guesses(want, runs))
        assert found == want[:count]
        assert counters.accepted <= counters.drafted
        assert counters.accepted + counters.steps == count - 1
    for stop in want[5:9]:
        assert in_runs(engine, 40, Guesses(want, runs), [stop])[0] == want[: want.index(stop) + 1]
    text = tokens(engine, 56, SampleOpts.greedy())
    assert in_runs(engine, 56, Guesses(text, runs))[0] == text, "to the end of the context"


def test_the_longer_nothing_is_guessed_the_longer_are_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = FakeEngine(max_seq=60), list[int]()
    greedy = engine.greedy

    def watched(sequence: Any, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        asked.append(count)
        return greedy(sequence, token, count, stops)

    monkeypatch.setattr(engine, "greedy", watched)
    want = tokens(engine, 40, SampleOpts.greedy())
    drafter = Same()
    assert in_runs(engine, 40, drafter)[0] == want
    assert asked == [1, 2, 4, 8, 8, 8, 8]
    asked.clear()
    proposals = [[], [], [0]]
    monkeypatch.setattr(drafter, "propose", lambda limit: proposals.pop(0) if proposals else [])
    in_runs(engine, 20, drafter)
    assert asked[:4] == [1, 2, 1, 2], "behind a guess, right or wrong, runs are short again"


def test_tokens_before_what_is_no_number_come_first() -> None:
    def rule(ids: list[int], logits: Array) -> Array:
        return np.full_like(logits, np.nan) if len(ids) == 12 else logits

    sound = tokens(FakeEngine(max_seq=60), 20, SampleOpts.greedy())
    engine = FakeEngine(max_seq=60, rule=rule)
    engine.forward(PROMPT)
    looked_up, found = LookedUp(engine, Guesses(sound, [5]), Counters()), sound[:1]
    with pytest.raises(NumericalError, match="position 11"):
        while True:
            found += looked_up.more(found[-1], 20, ())
    assert found == sound[:7]
    assert engine._ids == [*PROMPT, *sound[:6]]


# ---------------------------------------------------------------------------------------------------- prompt lookup


def test_the_text_goes_on_as_it_did_before() -> None:
    drafter = PromptLookup([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6])
    assert drafter.propose(6)[:2] == [7, 8]
    drafter.observe(0)
    assert drafter.propose(6) == []


def test_the_longest_match_counts() -> None:
    assert PromptLookup([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]).propose(1) == [7]
    assert PromptLookup([1, 2, 3, 7, 1, 2, 3, 8, 4, 1, 2, 3]).propose(1) == [8], "of equal ones the newest"


def test_a_loop_goes_on_beyond_the_end_of_the_text() -> None:
    drafter = PromptLookup([1, 2, 3] * 30)
    assert drafter.propose(7) == [1, 2, 3, 1, 2, 3, 1]
    assert len(drafter.propose(MOST)) >= 7


def test_guesses_that_fail_are_not_made_any_more() -> None:
    """Text in which every pair comes again, but never with what followed it."""
    rng = np.random.default_rng(0)
    drafter, proposed = PromptLookup([]), 0
    for token in rng.integers(0, 12, 3000).tolist():
        drafter.observe(token)
        proposed += len(drafter.propose(MOST))
    assert proposed < 60


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    rng = np.random.default_rng(0)
    drafter = PromptLookup(rng.integers(0, 12, 500).tolist())
    for token in [1, 2, 3, 4, 5, 6, 7, 8] * 8:
        drafter.observe(token)
    assert len(drafter.propose(MOST)) == MOST


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.75, 2), (0.9, 6), (1.0, 15)])
def test_how_many_drafts_pay(rate: float, drafts: int) -> None:
    """The last one is right, with all before it, at least every other time."""
    assert Hits(rate).worth(MOST) == drafts
    assert rate**drafts >= 0.5


# ---------------------------------------------------------------------------------------------------- sessions

GRAPHS = {
    "full": hybrid.graph(("full", "full")),
    "ring": hybrid.graph(("ring", "full")),
    "recurrent": hybrid.graph(("conv", "delta")),
    "all": hybrid.graph(),
}


@pytest.fixture(params=GRAPHS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hybrid.InterpretedEngine]:
    monkeypatch.setattr(kv, "RING", 16)
    made = hybrid.InterpretedEngine(GRAPHS[request.param])
    yield made
    made.close()


def test_every_kind_of_state_goes_back_behind_a_wrong_draft(engine: hybrid.InterpretedEngine) -> None:
    """The rows are those of one pass over the ids in float64, and no step is spent on going back."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, hybrid.VOCAB, 120).tolist()
    engine.forward(ids[:30])
    want = hybrid.reference(engine.graph, ids)
    speculation = Speculation(engine, Guesses(ids[31:], [0, 3, 1, 7, 2, 2]), 80, check_finite)
    for at in range(30, 100):
        assert np.abs(speculation.step(ids[at]) - want[at]).max() <= CEILING * np.abs(want).max()
    speculation.finish()
    assert engine.ids == ids[:100]
    assert np.abs(engine.forward(ids[100:103]) - want[102]).max() <= CEILING * np.abs(want).max()


def test_what_was_right_is_taken_into_recurrent_states(engine: hybrid.InterpretedEngine) -> None:
    """No row is computed twice; states that may go back for free have nothing to take in."""
    steps = []
    engine.before = lambda: steps.append(engine.rows)
    engine.forward(list(range(20)))
    engine.verify([1, 2, 3])
    engine.trim(21)
    engine.verify([4, 5])
    engine.trim(21)
    engine.verify([6])
    assert np.diff([0, *steps]).tolist() == [16, 4, 3, 2, 1]
    assert engine.advanced == bool(engine.current.recurrent)


@pytest.mark.parametrize("verb", ["forward", "snapshot", "verify", "scratch"])
def test_whatever_follows_a_verification_finds_its_rows(engine: hybrid.InterpretedEngine, verb: str) -> None:
    ids = np.random.default_rng(2).integers(0, hybrid.VOCAB, 40).tolist()
    want = hybrid.reference(engine.graph, ids)
    engine.forward(ids[:30])
    engine.verify([*ids[30:34], 1, 2])
    engine.trim(34)
    if verb == "snapshot":
        engine.restore(engine.snapshot())
    if verb == "scratch":
        with engine.scratch():
            engine.forward([3, 4, 5])
            engine.verify([7, 8, 9])
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
