"""The engine loop and its handles: threads, asyncio, callbacks, interrupts, the end of a process. No sleeps."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from toy_engine import ToyEngine, answer
from toy_engine import job as made_job

from rlx.engine.loop.handle import Handle, Stream
from rlx.engine.loop.job import AHEAD, Job
from rlx.engine.loop.loop import EngineLoop
from rlx.engine.request import FinishReason
from rlx.errors import BusyError, DeadlineError

pytestmark = pytest.mark.any_machine

PROMPT = [3, 1, 4, 1, 5]
HANGS = 120  # seconds after which a wait has failed, also on a busy machine


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    engine = ToyEngine()
    made = EngineLoop(engine, clock=engine.clock)
    yield made
    made.close()


def handle(
    loop: EngineLoop,
    limit: int = 20,
    prompt: Sequence[int] = PROMPT,
    on_token: Callable[[int], Any] | None = None,
    over: Callable[..., object] | None = None,
    **options: Any,
) -> Handle:
    job = made_job(prompt, limit, **{"streaming": True, **options})
    made = Handle(loop, job, lambda: None, on_token, has_texts=False)  # type: ignore[arg-type, return-value]
    made.over = over
    loop.submit(job)
    return made


def thread_of(loop: EngineLoop) -> threading.Thread:
    return loop._thread["thread"]


def until(loop: EngineLoop, condition: Callable[[], bool]) -> bool:
    """Lets the loop work until a condition holds; whether it does in the end."""
    for _ in range(10_000):
        if condition():
            return True
        loop.call(lambda: None)
    return False


def test_steps_reach_any_number_of_consumers(loop: EngineLoop) -> None:
    made, found = handle(loop), dict[int, list[int]]()
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: [step.token for step in made]}))
        for i in range(5)  # type: ignore[misc]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert [found[i] for i in range(5)] == [answer(PROMPT, 20)] * 5
    assert [step.token for step in made] == made.result() == answer(PROMPT, 20)
    assert made.result().finish_reason == FinishReason.LENGTH


def test_asyncio_tasks_and_threads(loop: EngineLoop) -> None:
    prompts = [[i, 2, 3] for i in range(6)]

    async def tokens(made: Handle) -> list[int]:
        async with made:
            return [step.token async for step in made]

    async def main() -> Any:
        handles = [handle(loop, 12, each) for each in prompts]
        waits = asyncio.gather(*map(tokens, handles[:4]), *handles[4:])
        thread = asyncio.to_thread(lambda: handle(loop, 12).result())
        return [*await waits, await thread]

    assert asyncio.run(main()) == [answer(each, 12) for each in [*prompts, PROMPT]]


def test_a_cancelled_task_aborts_its_request(loop: EngineLoop) -> None:
    made = handle(loop, 1 << 30)  # it cannot end before it is cancelled

    async def read() -> None:
        async with made:
            async for _ in made:
                pass

    async def main() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0)  # it begins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert until(loop, lambda: loop.is_idle)
    assert made.result().finish_reason == FinishReason.ABORTED


def test_the_engine_runs_ahead_by_a_bounded_number_of_tokens(loop: EngineLoop) -> None:
    made = handle(loop, 100)
    assert until(loop, lambda: made.job.backpressured)
    assert len(made.job.tokens) == AHEAD
    other = handle(loop, 30, [7])
    assert other.result() == answer([7], 30), "one that stops reading keeps nobody else"
    assert len(made.job.tokens) == AHEAD
    assert made.result() == answer(PROMPT, 100)


def test_a_callback_ends_its_request_exactly_there(loop: EngineLoop) -> None:
    for count in (1, 3, 9):
        seen, over = list[int](), list[tuple[Job, int]]()

        def on_token(token: int, seen: list[int] = seen, count: int = count) -> bool:
            seen.append(token)
            return len(seen) < count

        made = handle(loop, 100, on_token=on_token, keeps=True, over=lambda *what, over=over: over.append(what))
        assert made.result() == seen == answer(PROMPT, count)
        assert made.result().finish_reason == FinishReason.CALLBACK
        ((job, found),) = over
        assert found == count
        loop.call(lambda: None)  # what was posted before is done
        assert job.sequence.ids == PROMPT + seen[:-1] and not job.sequence.closed


def test_a_callback_that_raises(loop: EngineLoop) -> None:
    over = list[tuple[Job, int]]()

    def on_token(token: int) -> None:
        if token == answer(PROMPT, 3)[-1]:
            raise ZeroDivisionError

    made = handle(loop, 100, on_token=on_token, keeps=True, over=lambda *what: over.append(what))
    with pytest.raises(ZeroDivisionError):
        made.result()
    with pytest.raises(ZeroDivisionError):
        made.result()
    ((job, count),) = over
    loop.call(lambda: None)
    assert job.sequence.ids == PROMPT + answer(PROMPT, count - 1)
    assert handle(loop).result() == answer(PROMPT, 20)


def test_a_deadline_counts_from_the_submission(loop: EngineLoop) -> None:
    """Not from when the loop reads it: a long step of others may be in between."""
    made = handle(loop, timeout=0.5)
    loop.executor.engine.now += 1  # type: ignore[attr-defined]
    with pytest.raises(DeadlineError, match="it has 0 tokens"):
        made.result()


def test_a_handle_that_nobody_has_ends_its_request(loop: EngineLoop) -> None:
    made = handle(loop, 1000)
    next(iter(made))
    sequence = made.job.sequence
    del made
    gc.collect()
    assert until(loop, lambda: loop.is_idle and sequence.closed)
    kept = handle(loop, 3, keeps=True)
    assert kept.result() == answer(PROMPT, 3)
    assert not kept.job.sequence.closed


def test_streams_start_lazily_and_end_when_they_are_closed(loop: EngineLoop) -> None:
    streams = [Stream(partial(handle, loop, 1000, [i])) for i in range(2)]
    assert loop.is_idle
    for _ in range(5):
        assert [next(stream).token for stream in streams]
    streams[0].close()
    streams[0].close()
    assert list(streams[0]) == []
    with streams[1] as stream:
        next(stream)
    assert until(loop, lambda: loop.is_idle)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_ends_every_handle_and_the_thread() -> None:
    engine = ToyEngine()
    loop = EngineLoop(engine, clock=engine.clock, slots=2)
    handles = [handle(loop, 10**6, [i]) for i in range(4)]
    next(iter(handles[0]))
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            handles[3].result()
        except BaseException as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    driver = thread_of(loop)
    loop.close()
    loop.close()
    thread.join(HANGS)
    assert isinstance(waiting[0], BusyError)
    assert not driver.is_alive()
    for made in handles:
        with pytest.raises(BusyError, match=r"the runner was closed.*Open the model again"):
            made.result()
    for call in (lambda: handle(loop), lambda: loop.call(lambda: None)):
        with pytest.raises(BusyError, match="was closed"):
            call()
    EngineLoop(engine).close()


def test_a_loop_that_nobody_has_ends_its_thread() -> None:
    engine = ToyEngine()
    loop = EngineLoop(engine, clock=engine.clock)
    assert handle(loop).result() == answer(PROMPT, 20)
    thread, gone = thread_of(loop), weakref.ref(loop)
    assert until(loop, partial(EngineLoop.is_idle.fget, loop))
    del loop
    gc.collect()
    thread.join(HANGS)
    assert not thread.is_alive() and gone() is None


def test_a_forked_child_has_a_thread_of_its_own(loop: EngineLoop) -> None:
    made = handle(loop, 10**6)
    next(iter(made))
    child = os.fork()
    if not child:
        try:
            assert handle(loop).result() == answer(PROMPT, 20)
            with pytest.raises(BusyError, match="forked"):
                made.result()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made.abort()
    assert handle(loop).result() == answer(PROMPT, 20)


ENDS = {
    "in mid-stream": "stream = iter(made); next(stream)",
    "while another thread waits": "threading.Thread(target=wait, daemon=True).start()",
    "with an error": "raise SystemExit(3)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_while_it_computes(how: str) -> None:
    code = f"""
import sys, threading
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_engine_loop import *
from rlx.errors import BusyError
engine = ToyEngine()
loop = EngineLoop(engine, clock=engine.clock)
made = handle(loop, 10**9)
def wait():
    try:
        made.result()
    except BusyError:
        pass
{ENDS[how]}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr) == (3 if "error" in how else 0, "")


def test_stats_say_where_the_time_of_a_request_went(loop: EngineLoop) -> None:
    """The engine's clock: a step of n rows takes 0.02 + 0.002 * (n - 1) seconds."""
    first = handle(loop, 5, [*PROMPT, 9, 2])
    assert first.stats.prompt_tokens == 7 and first.stats.tokens == first.stats.decode_s == 0
    assert first.result()
    alone = loop.executor.engine.now  # type: ignore[attr-defined]
    third = handle(loop, 4, [*PROMPT, 9, 2])
    assert len(third.result()) == 4
    found = third.stats
    assert (found.prompt_tokens, found.cached_tokens, found.tokens) == (7, 6, 4)
    assert (found.queued_s, found.prompt_s) == (pytest.approx(0, abs=1e-9), pytest.approx(0.02))
    assert found.decode_s == pytest.approx(3 * 0.02)
    assert sum((found.queued_s, found.prompt_s, found.decode_s)) == pytest.approx(loop.executor.engine.now - alone)  # type: ignore[attr-defined]
    assert third.stats == found


def test_a_bug_ends_what_waits_and_the_thread_serves_what_comes_next(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loop.scheduler, "startable", lambda: {}["bug"])
        made = handle(loop)
        waits = threading.Thread(target=made.job.notifier.wait, args=(made.job.notifier.news,), daemon=True)
        waits.start()
        loop.wake()  # its own thread computes: nobody else drives
        waits.join(HANGS)
        assert not waits.is_alive()
        with pytest.raises(KeyError, match="bug"):
            made.result()
    assert handle(loop).result() == answer(PROMPT, 20)
    assert thread_of(loop).is_alive()
