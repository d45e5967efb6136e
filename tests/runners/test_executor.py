"""What the engine loop decides, without threads and time: an engine of hashes, and a clock that steps advance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from toy_engine import ToyEngine, ToySequence, answer, executor, give, job

from rlx.engine.loop.executor import Executor
from rlx.engine.loop.job import AHEAD, Job, Notifier, Task
from rlx.engine.loop.scheduler import PATIENCE
from rlx.engine.speculation.drafts import Counters, Drafts
from rlx.errors import DeadlineError, NumericalError, PoolFullError

pytestmark = pytest.mark.any_machine


@pytest.fixture(params=[False, True], ids=["steps", "runs"], autouse=True)
def has_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps take each other's tokens, or the loop computes each."""
    monkeypatch.setattr(ToyEngine, "has_runs", request.param)
    return bool(request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * i) % 41 for i in range(1, length + 1)]


def run(made: Executor, most: int = 10_000) -> None:
    """Turns until there is nothing to compute."""
    while made.turn():
        most -= 1
        assert most, "it goes round in circles"


def right(*jobs: Job) -> bool:
    return all(each.ended and not each.error and each.tokens == answer(each.prompt, each.limit) for each in jobs)


def test_every_job_gets_its_tokens() -> None:
    engine = ToyEngine()
    made, jobs = executor(engine), [job(prompt(n, n), limit=n + 1) for n in (1, 5, 70, 700, 3)]
    for each in jobs:
        give(made, each)
    run(made)
    assert right(*jobs)
    assert all(sequence.closed for sequence in engine.sequences)
    assert made.room.ended == 5
    assert made.counters.tokens == sum(each.limit for each in jobs)
    assert made.counters.prompt_tokens + made.counters.reused_tokens == sum(len(each.prompt) for each in jobs)


def test_a_request_is_counted_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise who finds the loop idle reads a number that lacks the last one."""
    made, jobs, seen = executor(ToyEngine()), [job(prompt(n, n), limit=n) for n in (3, 5, 8)], list[int]()
    close = ToySequence.close

    def look(sequence: ToySequence) -> None:
        seen.append(made.room.ended + len(made.scheduler.jobs()))
        close(sequence)

    monkeypatch.setattr(ToySequence, "close", look)
    for each in jobs:
        give(made, each)
    run(made)
    assert seen == [3, 3, 3]


def test_a_step_wakes_the_tasks_of_an_event_loop_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call into another thread's event loop is a system call: one a token takes longer than a small model."""
    made, jobs = executor(ToyEngine()), [job(prompt(40, seed), 30, streaming=True) for seed in range(1, 9)]
    calls = []

    async def read(each: Job) -> int:
        woken = 0
        while not each.ended:
            seen = each.notifier.news
            each.consumed = len(each.tokens)
            if not each.ended:
                await each.notifier.wait_async(seen)
                woken += 1
        return woken

    async def main() -> list[int]:
        here, turns = asyncio.get_running_loop(), 0
        readers = [asyncio.create_task(read(each)) for each in jobs]
        await asyncio.sleep(0)
        call = here.call_soon_threadsafe
        monkeypatch.setattr(here, "call_soon_threadsafe", lambda *given: (calls.append(given), call(*given))[1])
        for each in jobs:
            give(made, each)
        while made.turn():
            turns += 1
            assert len(calls) <= turns
            for _ in range(3):  # the event loop is woken, it wakes the tasks, and these look
                await asyncio.sleep(0)
        return await asyncio.gather(*readers)

    woken = asyncio.run(main())
    assert all(count > 5 for count in woken) and right(*jobs)


def test_short_prompts_share_a_step_and_long_ones_do_not() -> None:
    engine = ToyEngine()
    made = executor(engine)
    for each in [job(prompt(40, seed), 1) for seed in range(1, 4)] + [job(prompt(300, 9), 1)]:
        give(made, each)
    run(made)
    assert engine.steps == [[40, 40, 40], [300]]


def test_the_engine_says_which_prompts_share_a_step() -> None:
    """Where one prompt does not fill the device, several share a step, as far as the largest step goes."""
    engine = ToyEngine(most_rows=2048, shared_rows=2048)
    made = executor(engine)
    jobs = [job(prompt(300, seed), 1) for seed in range(1, 9)]
    give(made, jobs[0])
    made.turn()  # rows are measured
    for each in jobs[1:]:
        give(made, each)
    give(made, job(prompt(5000, 9), 1))
    run(made)
    assert engine.steps == [[300], [300] * 6, [300], [2048], [2048], [904]] and right(*jobs)


def test_prompts_that_share_a_step_keep_to_the_stall_target() -> None:
    """0.3 s less a decode step of 0.02 s are 280 rows of 0.001 s: so two prompts of 100 share a step, not four."""
    engine = ToyEngine(first=0.02, more=0.001, most_rows=2048, shared_rows=2048)
    made = executor(engine, stall=0.3)
    give(made, job(prompt(4, 1), 400))
    for _ in range(3):
        made.turn()
    give(made, job(prompt(1500, 2), 1))
    while made.scheduler.waiting or made.scheduler.prefilling:
        made.turn()
    engine.steps.clear()
    made.counters.longest_gap = 0.0
    for seed in range(3, 7):
        give(made, job(prompt(100, seed), 1))
    run(made)
    assert [rows for rows in engine.steps if max(rows) > 1] == [[1, 100, 100], [1, 100, 100]]
    assert made.counters.longest_gap <= 0.3


def test_rows_that_decode_join_a_step_of_prompts() -> None:
    """The weights are read once for both."""
    engine = ToyEngine(first=0.02, more=0.002)
    made = decoding(engine, 0.4)
    made.turn()
    engine.steps.clear()
    short, long, task = job(prompt(40, 5), 30), job(prompt(90, 6), 1), Task(lambda: iter([None, None]))
    give(made, short)
    made.turn()
    give(made, long)
    made.turn()
    assert engine.steps == [[1, 1, 1, 40], [1, 1, 1, 1, 90]]
    give(made, task, job(prompt(50, 7), 1))
    for _ in range(2):
        made.turn()
    assert engine.steps[2:] == [[1, 1, 1, 1], [1, 1, 1, 1, 50]], "tasks and prompts take turns"
    run(made)
    assert right(short, long)


def test_rows_that_decode_leave_room_for_a_prompt_or_do_not_join_it() -> None:
    """A step has at most 64 rows: 40 of them and a chunk of 24, or 50 alone, because 14 would be too few."""
    for decoding_rows, first in ((40, [1] * 40 + [24]), (50, [1] * 50)):
        engine = ToyEngine(first=0.001, more=0.0001, most_rows=64)
        made = executor(engine, slots=100)
        for seed in range(decoding_rows):
            give(made, job(prompt(4, seed), 90))
        while len(made.scheduler.running) < decoding_rows:
            made.turn()
        engine.steps.clear()
        give(made, long := job(prompt(100, 7), 1))
        made.turn()
        assert engine.steps[0] == first
        run(made)
        assert right(long)


def test_as_many_short_prompts_share_a_step_as_gain_from_it() -> None:
    """Where a row takes about as long in a step of 60 rows as in one of 240, a prompt need not wait for all others."""
    engine = ToyEngine(first=0.02, more=0.002)
    made = executor(engine)
    give(made, job(prompt(40, 1), 60))
    made.turn()
    give(made, job(prompt(200, 2), 1))  # its rows are measured: somebody decodes
    run(made)
    engine.steps.clear()
    for seed in range(3, 11):
        give(made, job(prompt(30, seed), 1))
    run(made)
    assert engine.steps == [[30, 30]] * 4


def decoding(engine: ToyEngine, stall: float) -> Executor:
    """Three requests decode, and the cost of rows was measured."""
    made = executor(engine, stall=stall)
    for seed in (1, 2, 3):
        give(made, job(prompt(4, seed), 2000))
    for _ in range(4):
        made.turn()
    give(made, job(prompt(2000, 4), 1))
    while made.scheduler.waiting or made.scheduler.prefilling:
        made.turn()
    made.counters.longest_gap = 0.0
    engine.steps.clear()
    return made


def rows_of_prompts(engine: ToyEngine) -> list[int]:
    """The rows of each step of one long prompt."""
    return [rows[-1] for rows in engine.steps if rows[-1] > 3]


@pytest.mark.parametrize("shared", [64, 2048])
@pytest.mark.parametrize(("stall", "times"), [(0.05, 2.0), (0.1, 1.0), (0.4, 1.0)])
def test_no_gap_is_longer_than_the_stall_target(stall: float, times: float, shared: int) -> None:
    """Three decode while prompts of 2,000 tokens come in: each turn is one step of all, and a chunk that fills up the
    time. Where the first step takes half of it, the other one has half of it and at least 16 rows.
    """
    engine = ToyEngine(first=0.02, more=0.002, shared_rows=shared)
    made = decoding(engine, stall)
    long = [job(prompt(2000, seed), 5) for seed in (5, 6)]
    for each in long:
        give(made, each)
    run(made)
    assert right(*long)
    assert made.counters.longest_gap <= 1.05 * times * stall
    assert max([max(rows) for rows in engine.steps][3:-1]) >= 0.5 * stall / 0.002, "and not much shorter than that"


def test_a_prompt_is_cut_into_equal_chunks_while_somebody_decodes() -> None:
    """At most 190 rows fit the stall target: 300 take two steps in any case, so none needs more than half of them."""
    engine = ToyEngine(first=0.02, more=0.002)
    made = decoding(engine, 0.4)
    give(made, job(prompt(300, 5), 1))
    run(made)
    first, second = rows_of_prompts(engine)
    assert first == second == 150


def test_one_slow_step_is_enough_to_shorten_the_next_ones() -> None:
    """Another program takes half of the CPUs in the middle of a prompt, and gives them back."""
    engine, gaps = ToyEngine(first=0.02, more=0.002), list[float]()
    made, long = decoding(engine, 0.4), job(prompt(4000, 5), 1)
    give(made, long)
    for turn in range(12):
        engine.slowness = 2.0 if 4 <= turn < 8 else 1.0
        start = engine.now
        made.turn()
        gaps.append(engine.now - start)
    assert not long.tokens
    assert gaps[4] > 0.6 and max(gaps[:4] + gaps[5:]) <= 1.05 * 0.4
    rows = rows_of_prompts(engine)
    assert rows[8] < rows[9] < rows[11] <= rows[3]


def test_a_slow_chunk_that_nobody_waits_for_shortens_the_steps_after_it() -> None:
    engine = ToyEngine(first=0.02, more=0.002)
    made = decoding(engine, 0.4)
    for each in made.scheduler.running:
        each.stopped_at = len(each.tokens)
    give(made, *made.scheduler.running)
    engine.slowness = 2.0
    give(made, job(prompt(600, 5), 9))
    while not made.scheduler.running:
        made.turn()
    give(made, job(prompt(2000, 6), 1))
    run(made)
    assert made.counters.longest_gap <= 1.05 * 0.4


def test_first_come_first_served_with_priorities() -> None:
    engine = ToyEngine()
    made, order = executor(engine, slots=1), list[int]()
    jobs = [job(prompt(5, seed), 2, priority=priority) for seed, priority in enumerate((0, 0, 3, 1, 3))]
    for each in jobs:
        give(made, each)
    while made.turn():
        order += [i for i, each in enumerate(jobs) if each.ended and i not in order]
    assert [*order, *(i for i in range(5) if i not in order)] == [2, 4, 3, 0, 1]


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    engine = ToyEngine()
    made = executor(engine)
    long, short = job(prompt(2000), 3), job(prompt(100, 1), 3)
    give(made, long)
    made.turn()
    give(made, short)
    while not short.tokens:
        made.turn()
    assert not long.tokens and len(long.sequence) <= 512 + 100, "one chunk, then the short prompt"
    run(made)
    assert right(long, short)


def test_short_prompts_do_not_starve_a_long_one() -> None:
    """Short prompts come in faster than they can be computed: the long one waits a time bounded by its own."""
    engine = ToyEngine(first=0.02, more=0.002)
    made, long = executor(engine, slots=64), job(prompt(2000), 3)
    give(made, long)
    for seed in range(1, 10_000):
        if long.tokens:
            break
        give(made, job(prompt(150, seed), 1))
        made.turn()
    alone = 2000 * 0.002
    assert long.tokens and engine.now < (1 + PATIENCE) * alone * 1.5


def test_no_more_than_the_slots_compute_at_once() -> None:
    engine = ToyEngine()
    made, jobs = executor(engine, slots=3), [job(prompt(5, seed), 6) for seed in range(8)]
    for each in jobs:
        give(made, each)
    while made.turn():
        assert len(made.scheduler.running) + len(made.scheduler.prefilling) <= 3
    assert right(*jobs)
    assert max(len(rows) for rows in engine.steps) == 3


@pytest.mark.parametrize("room", [10_000, 100])
def test_one_reader_of_more_streams_than_slots_gets_all(room: int) -> None:
    """Nobody takes tokens of those that hold the slots before the last one has begun; also in a cache that is full."""
    engine = ToyEngine(room=room)
    made, jobs = executor(engine, slots=3), [job(prompt(5, seed), 40, streaming=True) for seed in range(8)]
    give(made, *jobs)
    while made.turn():
        pass
    assert jobs[-1].tokens
    for _ in range(40):
        for each in jobs:
            each.consumed = len(each.tokens)
        give(made, *[each for each in jobs if not each.ended])
        run(made)
    assert right(*jobs)


@pytest.mark.parametrize("priority", [0, 1])
def test_a_consumer_of_many_answers_leaves_slots_to_others(priority: int) -> None:
    """Who asks for one answer waits for the next free slot; unless the many have a higher priority."""
    made, together = executor(ToyEngine(), slots=3), Notifier()
    many = [job(prompt(5, seed), 4 + seed, notifier=together, priority=priority) for seed in range(9)]
    give(made, *many)
    made.turn()
    single = job(prompt(5, 10), 3)
    give(made, single)
    while single.record.started is None:
        made.turn()
    assert all(each.record.started is None for each in many[5:]) is (priority == 0)
    run(made)
    assert right(single, *many)


def test_a_consumer_of_many_answers_goes_on_beside_others() -> None:
    """However many others come, it keeps a slot."""
    made, together = executor(ToyEngine(), slots=3), Notifier()
    many = [job(prompt(5, seed), 4, notifier=together) for seed in range(9)]
    give(made, *many)
    for seed in range(10, 1000):
        if all(each.ended for each in many):
            break
        give(made, job(prompt(5, seed), 4))
        made.turn()
    assert right(*many)


def test_a_common_prefix_is_computed_once() -> None:
    engine, common = ToyEngine(), prompt(1000)
    made, jobs = executor(engine, slots=32), [job([*common, 40 - i, i], 3) for i in range(32)]
    for each in jobs:
        give(made, each)
    run(made)
    assert right(*jobs)
    assert made.counters.prompt_tokens == 1002 + 31 * 2


# -- ends -------------------------------------------------------------------------------------------------------------


def test_stop_ids_and_the_least_number_of_tokens() -> None:
    wanted = answer(prompt(6), 30)
    for least in (0, 3, 20):
        for native in (False, True):
            made = executor(ToyEngine())
            each = job(prompt(6), 30, stop_ids={wanted[7]}, min_tokens=least, is_greedy=native)
            give(made, each)
            run(made)
            assert len(each.tokens) >= max(least, 1)
            if least <= wanted.index(wanted[7]):
                assert each.tokens == wanted[: wanted.index(wanted[7]) + 1]
            assert wanted[7] not in each.tokens[:least]


def test_one_that_fails_fails_alone() -> None:
    engine = ToyEngine()
    engine.broken = {8}
    made, good, bad = executor(engine), job(prompt(5, 2), 20), job([8, 8, 8], 20)
    for each in (good, bad):
        give(made, each)
    run(made)
    assert right(good)
    assert isinstance(bad.error, NumericalError) and bad.ended
    assert all(sequence.closed for sequence in engine.sequences)


def test_a_deadline() -> None:
    engine = ToyEngine()
    made, good, late = executor(engine), job(prompt(5, 1), 50), job(prompt(5, 2), 50, timeout=0.3)
    unborn = job(prompt(700, 4), 50, timeout=0.01)
    for each in (good, late, unborn):
        give(made, each)
    assert made.scheduler.seconds_left(engine.now) == pytest.approx(0.01)
    run(made)
    assert right(good)
    for each in (late, unborn):
        assert isinstance(each.error, DeadlineError)
    assert 0 < len(late.tokens) < 50 and late.tokens == answer(late.prompt, 50)[: len(late.tokens)]


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_an_abort_at_any_time(when: int) -> None:
    """In the queue, in mid-prompt, while it decodes: the others go on."""
    engine = ToyEngine()
    made, good, gone = executor(engine, slots=2), job(prompt(5, 1), 30), job(prompt(60, 2), 30)
    for each in (good, gone):
        give(made, each)
    for _ in range(when):
        made.turn()
    gone.stopped_at = len(gone.tokens)
    give(made, gone)
    assert gone.ended and gone.error is None
    run(made)
    assert right(good)
    assert all(sequence.closed for sequence in engine.sequences)


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("ended", [False, True])
def test_who_stops_finds_the_sequence_at_the_last_token_but_one(count: int, ended: bool) -> None:
    made, each = executor(ToyEngine()), job(prompt(5), 8 if ended else 100, keeps=True, streaming=not ended)
    give(made, each)
    run(made)
    assert (each.ended, len(each.tokens)) == (ended, 8)
    each.stopped_at = count
    give(made, each)
    assert each.sequence.ids == each.prompt + answer(each.prompt, 8)[: count - 1]
    assert not each.sequence.closed


# -- room -------------------------------------------------------------------------------------------------------------


def test_who_finds_no_room_is_paused_and_goes_on() -> None:
    engine = ToyEngine(room=100)
    made, jobs = executor(engine), [job(prompt(20, seed), 40) for seed in range(1, 6)]
    for each in jobs:
        give(made, each)
    run(made)
    assert right(*jobs)
    assert made.room.pauses > 0


def test_who_came_first_is_done_first_although_all_were_paused() -> None:
    made, jobs, ended = executor(ToyEngine(room=100)), [job(prompt(20, seed), 40) for seed in range(1, 5)], list[int]()
    for each in jobs:
        give(made, each)
    while made.turn():
        ended += [at for at, each in enumerate(jobs) if each.ended and at not in ended]
    assert made.room.pauses >= 3
    assert ended + [at for at in range(4) if at not in ended] == [0, 1, 2, 3]


def test_who_waits_for_a_consumer_is_paused_first() -> None:
    engine = ToyEngine(room=60)
    made, slow, fast = executor(engine), job(prompt(20, 1), 100, streaming=True), job(prompt(20, 2), 35)
    give(made, slow)
    run(made)
    give(made, fast)
    run(made)
    assert right(fast) and not slow.ended
    slow.streaming = False
    slow.limit = 30
    slow.backpressured = False
    run(made)
    assert right(slow)


def test_the_newest_of_those_that_wait_for_consumers_makes_room_for_one_that_was_paused() -> None:
    made = executor(ToyEngine(room=(20 + AHEAD) + 45))
    first, second = (job(prompt(20, seed), 100, streaming=True) for seed in (1, 2))
    third = job(prompt(20, 3), 20)
    for each in (first, second, third):
        give(made, each)
    run(made)
    assert right(third) and made.room.pauses >= 2, "the third itself was paused before"
    assert (first.paused, second.paused) == (False, True)


def test_one_that_is_larger_than_the_pool_fails_with_the_sizes() -> None:
    made, large, good = executor(ToyEngine(room=50)), job(prompt(20, 1), 60), job(prompt(5, 2), 20)
    for each in (large, good):
        give(made, each)
    run(made)
    assert right(good)
    assert isinstance(large.error, PoolFullError) and large.error.total == 50
    assert large.tokens == answer(large.prompt, 60)[: len(large.tokens)]


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_tasks_and_prompts_take_turns_with_decode_steps() -> None:
    engine, seen = ToyEngine(), list[int]()
    made, busy, long = executor(engine), job(prompt(5), 30), job(prompt(400, 2), 2)

    def work() -> Any:
        for _ in range(5):
            seen.append(len(busy.tokens))
            yield
        return 4

    task, plain, wrong = Task(work), Task(lambda: 7), Task(lambda: 1 // 0)
    give(made, busy)
    made.turn()
    for each in (long, task, plain, wrong):
        give(made, each)
    run(made)
    assert right(busy, long)
    assert (task.result, plain.result) == (4, 7)
    assert isinstance(wrong.error, ZeroDivisionError)
    assert len(set(seen)) == 5, "a token between each two pieces"


# -- drafts -----------------------------------------------------------------------------------------------------------


class Knows:
    """Drafts that are right as often as told; it knows the answer."""

    def __init__(self, ids: list[int], rate: float, wrong: Callable[[int], bool] = lambda at: False) -> None:
        self.ids, self.rate, self.wrong, self.text = ids, rate, wrong, list(ids)

    def observe(self, token: int) -> None:
        self.text.append(token)

    def acceptance_probs(self, limit: int) -> list[float]:
        return [self.rate ** (i + 1) for i in range(min(limit, 4))]

    def propose(self, count: int) -> list[int]:
        return [49 if self.wrong(len(self.text) + i) else t for i, t in enumerate(answer(self.text, count))]


@pytest.mark.parametrize("wrong", [lambda at: False, lambda at: at % 3 == 0, lambda at: True])
@pytest.mark.parametrize("limit", [1, 2, 9, 30])
def test_drafts_change_no_token(wrong: Callable[[int], bool], limit: int) -> None:
    engine, counters = ToyEngine(), Counters()
    made, ids = executor(engine), prompt(12)
    each = job(ids, limit, drafts_of=lambda sequence: Drafts(Knows(ids, 0.9, wrong), counters), keeps=True)
    give(made, each)
    run(made)
    assert right(each)
    assert each.sequence.ids == ids + each.tokens[:-1]
    assert counters.accepted <= counters.drafted
    if limit == 30 and not wrong(0):
        assert len(engine.steps) < 15
