"""Runs: steps that take the tokens of the step before, of one sequence and of several, with the host only watching."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx import Request, SampleOpts
from rlx.engine.engine import Engine
from rlx.engine.loop.executor import Executor
from rlx.engine.request import FinishReason
from rlx.engine.token_run import STEPS, RunRow
from rlx.runners.base import planned, submitted_together

PROMPTS = [[5, 9, 2, 7], [9, 2], [7, 1, 30, 30, 2, 11, 4], [5, 9, 2, 8], [3]]
COUNT = 45
#: One of each kind of cache: full, windows, recurrent states.
FAMILIES = ("llama", "gemma3", "qwen35")
SAMPLES = {
    "greedy": SampleOpts.greedy(),
    "temperature": SampleOpts(temperature=1.1, seed=5),
    "top-k and top-p": SampleOpts(temperature=1.3, top_k=20, top_p=0.9, seed=6),
}


@pytest.fixture(scope="module")
def opened(goldens: Path) -> Iterator[Any]:
    """Opens a family once."""
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            options: dict[str, Any] = {"precision": "exact", "max_seq": 160, "compile_ahead": False}
            made[family] = rlx.auto_runner(goldens / family / "hf", **options)
        return made[family]

    yield get
    for runner in made.values():
        runner.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many segments each step had that the loop computed: prompts, and tokens that no run found."""
    found, compute = list[int](), Executor._compute

    def counted(self: Executor, segments: dict[Any, Any]) -> Any:
        found.append(len(segments))
        return compute(self, segments)

    monkeypatch.setattr(Executor, "_compute", counted)
    return found


def alone(runner: Any, sample: SampleOpts, count: int = COUNT) -> list[list[int]]:
    """The tokens of each prompt, step by step."""
    found = []
    for i, ids in enumerate(PROMPTS):
        own = sample if sample.is_greedy else replace(sample, seed=(sample.seed or 0) + i)
        found.append([step.token for step in runner.stream(ids, count, sample=own, stop_at_eog=False)])
    return found


@pytest.mark.parametrize("watched", [False, True], ids=["unwatched", "watched"])
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_tokens_of_steps(
    opened: Any, family: str, sample: str, watched: bool, steps: list[int]
) -> None:
    """After the prompts the loop computes no step, but for models whose states cannot go back to where somebody stops,
    or to a step that the device leaves to the host.
    """
    runner, opts, seen = opened(family), SAMPLES[sample], list[tuple[int, int]]()
    expected = alone(runner, opts)
    steps.clear()
    looks = (lambda i, token: seen.append((i, token))) if watched else None
    found = runner.generate_batch(PROMPTS, COUNT, looks, sample=opts, stop_at_eog=False)
    assert found == expected
    if watched:
        assert [[token for at, token in seen if at == i] for i in range(len(PROMPTS))] == expected
    if family == "qwen35" and (watched or opts.top_k):
        assert len(steps) >= COUNT
    elif watched:  # who is behind is waited for, and then takes a step
        assert sum(steps) < COUNT * len(PROMPTS) / 2
    else:
        assert len(steps) < 8, "prompts may take several where their states are copied"


def request(i: int, count: int = COUNT, **options: Any) -> Request:
    """One for prompt i, which gets the tokens of `alone` with the options "temperature"."""
    sample = replace(SAMPLES["temperature"], seed=5 + i)
    return Request(PROMPTS[i], count, **{"sample": sample, "stop_at_eog": False, **options})


def together(runner: Any, *requests: Request) -> list[list[int]]:
    """The tokens of requests that begin together, and that nobody looks at before they end."""
    handles = [planned(runner, each, has_texts=False) for each in requests]
    return [list(each) for each in submitted_together(runner, handles).results()]


async def answered(runner: Any, *requests: Request) -> list[list[int]]:
    """The tokens of some requests, each read by a task of its own."""

    async def read(handle: Any) -> list[int]:
        return [step.token async for step in handle]

    return await asyncio.gather(*[read(runner.submit(each)) for each in requests])


def test_each_row_ends_for_itself(opened: Any, steps: list[int]) -> None:
    """At stop ids of its own, at its own number of tokens, and not before it has as many as it needs."""
    runner = opened("llama")
    expected, steps[:] = alone(runner, SAMPLES["temperature"]), []
    stops = [expected[0][20], expected[2][4], expected[2][30]]
    asked = [request(0, stop_ids=stops[:1]), request(1, 3), request(2, min_tokens=10, stop_ids=stops[2:])]
    asked += [request(3), request(4, 1)]
    found = together(runner, *asked)
    assert found[0] == expected[0][: expected[0].index(stops[0]) + 1]
    assert [found[1], found[3], found[4]] == [expected[1][:3], expected[3], expected[4][:1]]
    assert len(found[2]) >= 10 and stops[2] not in found[2][:9]
    assert len(steps) < 20, "but for the first tokens of the one that must not end yet"


def test_who_comes_meanwhile_waits_for_few_steps(opened: Any, steps: list[int]) -> None:
    """And each gets the tokens that it has alone."""
    runner = opened("llama")
    expected = alone(runner, SAMPLES["temperature"])

    async def main() -> list[list[int]]:
        first = asyncio.create_task(answered(runner, request(0, 90), request(1)))
        found = []
        for i in (2, 3, 4):
            await asyncio.sleep(0.003)
            found += await answered(runner, request(i, 9))
        return [*await first, *found]

    found = asyncio.run(main())
    assert found[0][:COUNT] == expected[0] and len(found[0]) == 90
    assert found[1:] == [expected[1], *(tokens[:9] for tokens in expected[2:])]


def test_one_who_looks_back_makes_all_take_steps(opened: Any, steps: list[int]) -> None:
    """As long as it is there: its next token depends on those before."""
    runner = opened("llama")
    back = SampleOpts(temperature=1.0, repetition_penalty=1.4, seed=2)
    expected = alone(runner, SAMPLES["temperature"])
    penalized = [step.token for step in runner.stream(PROMPTS[1], 12, sample=back, stop_at_eog=False)]
    steps.clear()
    found = together(runner, request(0), request(1, 12, sample=back), request(2))
    assert found == [expected[0], penalized, expected[2]]
    assert len(steps) == 12, "the prompts, and the tokens of the one who looks back but the first"


def test_a_callback_ends_its_row_only(opened: Any, steps: list[int]) -> None:
    runner = opened("llama")
    expected, seen = alone(runner, SAMPLES["greedy"]), [0] * len(PROMPTS)

    def look(i: int, token: int) -> bool:
        seen[i] += 1
        return seen[i] < 7 * (i + 1)

    found = runner.generate_batch(PROMPTS, COUNT, look, stop_at_eog=False)
    assert found == [tokens[: 7 * (i + 1)] for i, tokens in enumerate(expected)]
    assert {each.finish_reason for each in found} == {FinishReason.CALLBACK}


def test_an_abort_in_mid_run(opened: Any, steps: list[int]) -> None:
    """What the others get does not change, and what the cache knows afterwards is right."""
    runner = opened("llama")
    expected = alone(runner, SAMPLES["temperature"])

    async def main() -> list[list[int]]:
        gone = [runner.submit(request(i, 120)) for i in (1, 2)]
        stay = asyncio.create_task(answered(runner, request(0), request(3)))
        for at, handle in enumerate(gone):
            for step in range(5 + at):
                await handle.step_async(step)
            handle.abort()
        return await stay

    assert asyncio.run(main()) == [expected[0], expected[3]]
    again = [*PROMPTS[1], *expected[1][:4]]
    follows = [step.token for step in runner.stream(again, 5, sample=SAMPLES["greedy"], stop_at_eog=False)]
    runner.reset()
    assert follows == list(runner.generate(again, 5, stop_at_eog=False))


def test_a_session_goes_on_after_runs(opened: Any) -> None:
    """The states of a sequence that stays are those of its tokens, also where the device had gone further."""
    runner = opened("qwen35")
    found = runner.generate(PROMPTS[2], COUNT, stop_at_eog=False)
    assert runner.past_seq == len(PROMPTS[2]) + COUNT - 1
    more = runner.decode_logits(found[-1])
    runner.reset()
    assert (runner.prefill_logits([*PROMPTS[2], *found]).argmax(), len(found)) == (more.argmax(), COUNT)


def test_rows_that_the_device_leaves_to_the_host(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row ends without a token: a step of its own finds it, with the random number of that step."""
    runner = opened("gemma3")
    expected, number = alone(runner, SAMPLES["top-k and top-p"]), 0
    engine: Engine = runner._engine
    choose, run = engine.choose, engine.run

    def sometimes(rows: Any, choices: Any) -> Any:
        nonlocal number
        number += 1
        found = choose(rows, choices)
        return [each._replace(token=-1) if (number + i) % 5 == 0 else each for i, each in enumerate(found)]

    def with_failures(rows: list[RunRow], **options: Any) -> Any:
        monkeypatch.setattr(engine, "choose", sometimes)
        try:
            return run(rows, **options)
        finally:
            monkeypatch.setattr(engine, "choose", choose)

    monkeypatch.setattr(engine, "run", with_failures)
    found = runner.generate_batch(PROMPTS, COUNT, sample=SAMPLES["top-k and top-p"], stop_at_eog=False)
    assert found == expected and number > COUNT // STEPS


def test_a_run_takes_no_room_that_is_not_there(goldens: Path) -> None:
    """Where the cache is full a step is computed for those that have room, and the others are paused."""
    options: dict[str, Any] = {"precision": "exact", "max_seq": 160, "compile_ahead": False}
    with rlx.auto_runner(goldens / "llama" / "hf", **options) as runner:
        page = runner._engine.pool.sizes.page_bytes
        expected = runner.generate_batch(PROMPTS, 80, stop_at_eog=False)
    with rlx.auto_runner(goldens / "llama" / "hf", **options, kv_bytes=5 * page) as runner:
        assert runner.generate_batch(PROMPTS, 80, stop_at_eog=False) == expected
        assert runner.stats()["requests"]["paused"] > 0
