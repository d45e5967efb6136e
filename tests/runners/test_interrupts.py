"""Ctrl-C at any instruction: the runner stays usable in its thread, at once, and computes what it would have computed.

An interrupt is raised by a trace function at each instruction in turn, so nothing depends on luck.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fake_engine import FakeEngine

import rlx
from rlx.runners.cached import CachedRunner
from rlx.runners.generation.exclusive import Exclusive

PROMPT = [3, 1, 4, 1, 5]
# Sequences bring themselves in order by `settle`, the pool by `recover`. Threads are left out: no code can hold a lock
# over every instruction, and real interrupts come between calls only, where a `with` statement over a lock is safe.
PLACES = ("/rlx/runners/", "/rlx/sampling/", "/rlx/runtime/sequence", "/rlx/runtime/p", "contextlib.py")


class Interrupt:
    """Raises a KeyboardInterrupt at one instruction or line of what runs inside.

    Args:
        at: its number, from 1 on.
        places: parts of the paths of files whose instructions count.
        lines: count lines in place of instructions.
    """

    def __init__(self, at: int, places: tuple[str, ...], lines: bool = False) -> None:
        self._at, self._places, self._lines, self.count = at, places, lines, 0

    def __enter__(self) -> Interrupt:
        sys._getframe().f_trace_opcodes = not self._lines  # Python 3.12 looks for one when it begins to trace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in self._places):
            return None
        frame.f_trace = self._step  # Python 3.13 wants it before f_trace_opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = not self._lines, self._lines
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "opcode"):
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step


def interrupted(
    call: Callable[[], Any], places: tuple[str, ...], lines: bool = False, every: int = 1
) -> Iterator[KeyboardInterrupt]:
    """What `call` raises when it is interrupted at each instruction in turn, or at each `every`-th."""
    for at in range(1, 1 << 30, every):
        with Interrupt(at, places, lines) as interrupt:
            try:
                call()
            except KeyboardInterrupt as error:
                sys.settrace(None)
                yield error  # with its traceback, which keeps the frames
        if interrupt.count < at:
            return


def a_stream_left(runner: CachedRunner) -> None:
    next(stream := runner.stream(PROMPT, 3))
    runner.reset()
    stream.close()


CALLS: dict[str, Callable[[CachedRunner], Any]] = {
    "generate": lambda runner: runner.generate(PROMPT, 2),
    "callback": lambda runner: runner.generate(PROMPT, 2, lambda token: None),
    "stream": lambda runner: list(runner.stream(PROMPT, 2)),
    "a stream left": a_stream_left,
    "decode": lambda runner: (runner.prefill_logits(PROMPT), runner.decode_logits(7)),
    "with": lambda runner: runner.__enter__().past_seq,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_every_instruction_of_a_runner(name: str) -> None:
    runner = CachedRunner(FakeEngine())
    expected = CachedRunner(FakeEngine()).generate(PROMPT, 3)
    places, count = ("/rlx/runners/", "contextlib.py"), 0
    for _ in interrupted(lambda: CALLS[name](runner), places):
        assert runner.generate(PROMPT, 3) == expected
        count += 1
    assert count > 100


def test_an_interrupt_at_every_instruction_of_taking_and_giving_back() -> None:
    exclusive, count = Exclusive("thing"), 0

    def use(name: str) -> None:
        with exclusive(name):
            pass

    for _ in interrupted(lambda: use("first"), ("/rlx/runners/generation/exclusive.py",)):
        use("second")
        count += 1
    assert count > 50


REAL: dict[str, Callable[[Any], Any]] = {
    "generate": lambda runner: runner.generate(PROMPT, 3, stop_at_eog=False),
    "lookup": lambda runner: list(runner.stream(PROMPT * 2, 3, stop_at_eog=False, speculative="prompt-lookup")),
    "predict": lambda runner: runner.predict_logits(PROMPT),
    "batch": lambda runner: runner.generate_batch([PROMPT, [7, 8]], 2, stop_at_eog=False),
    "score": lambda runner: runner.score(PROMPT),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts in generators that close
def test_interrupts_of_a_real_engine(goldens: Path) -> None:
    """Sessions, scratch sessions and batches: what is computed afterwards is what was computed before."""
    options: dict[str, Any] = {"max_seq": 64, "threads": 1, "profile": {"buckets": {"seq": [1, 32]}}}
    with rlx.auto_runner(goldens / "llama" / "model-f16.gguf", **options) as runner:

        def results() -> list[Any]:
            return [CALLS["generate"](runner), REAL["batch"](runner), REAL["score"](runner).tolist()]

        runner.prefill_logits([5, 6])
        expected = results()
        for call in REAL.values():
            for _ in interrupted(lambda call=call: call(runner), PLACES, lines=True, every=61):  # type: ignore[misc]
                assert results() == expected
