"""Ctrl-C at any instruction of a caller: the runner stays usable, at once, and computes what it would have computed.

A signal comes in the caller's thread by a trace function, at each instruction in turn, so nothing depends on luck. The
engine loop's own thread never gets one.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fake_engine import FakeEngine

import rlx
from rlx.runners import Model

pytestmark = pytest.mark.any_machine

PROMPT = [3, 1, 4, 1, 5]
PLACES = ("/rlx/runners/", "/rlx/engine/", "/rlx/sampling/")


class Interrupt:
    """Presses Ctrl-C at one instruction of what runs inside, in this thread.

    Args:
        at: its number, from 1 on.
    """

    def __init__(self, at: int) -> None:
        self._at, self.count = at, 0

    def __enter__(self) -> Interrupt:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one when it begins to trace
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in PLACES) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace = self._step  # Python 3.13 wants it before f_trace_opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)  # as Ctrl-C: who computes may note it and go on to the end of a turn
        return self._step


def interrupted(call: Callable[[], Any], every: int = 1) -> Iterator[int]:
    """Interrupts `call` at each `every`-th instruction in turn; gives its number."""
    for at in range(1, 1 << 30, every):
        with Interrupt(at) as interrupt:
            try:
                call()
            except KeyboardInterrupt:
                sys.settrace(None)
                yield at
        if interrupt.count < at:
            return


CALLS: dict[str, Callable[[Model], Any]] = {
    "generate": lambda runner: runner.generate(PROMPT, 2),
    "callback": lambda runner: runner.generate(PROMPT, 2, lambda token: None),
    "stream": lambda runner: list(runner.stream(PROMPT, 2)),
    "batch": lambda runner: runner.generate_batch([PROMPT, [7, 8]], 2, lambda i, token: None),
    "decode": lambda runner: (runner.prefill_logits(PROMPT), runner.decode_logits(7)),
    "score": lambda runner: runner.score(PROMPT),
}


def wait_until_idle(runner: Model) -> None:
    """The loop's thread ends its turn after it has handed a result over; on a busy machine that may take long."""
    end = time.monotonic() + 60
    while not runner._loop.is_idle and time.monotonic() < end:
        time.sleep(0.01)
    assert runner._loop.is_idle


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_every_instruction_of_a_call(name: str) -> None:
    """Afterwards calls have the same results, nothing computes on, and one thread serves all."""
    runner = Model(FakeEngine())
    expected = Model(FakeEngine()).generate(PROMPT, 3)
    logits = Model(FakeEngine()).predict_logits([*PROMPT, 9]).tolist()
    count = 0
    for at in interrupted(lambda: CALLS[name](runner), every=97 if name == "batch" else 23):
        assert runner.generate(PROMPT, 3) == expected, at
        assert runner.past_seq == len(PROMPT) + 2
        runner.prefill_logits(PROMPT)
        assert runner.decode_logits(9).tolist() == logits
        count += 1
    assert count > 50
    gc.collect()
    assert runner.generate(PROMPT, 3) == expected
    wait_until_idle(runner)
    assert sum(thread is runner._loop._thread["thread"] for thread in threading.enumerate()) == 1


REAL: dict[str, Callable[[Any], Any]] = {
    "generate": lambda runner: runner.generate(PROMPT, 3, stop_at_eog=False),
    "lookup": lambda runner: list(runner.stream(PROMPT * 2, 3, stop_at_eog=False, speculative="prompt-lookup")),
    "predict": lambda runner: runner.predict_logits(PROMPT).tolist(),
    "batch": lambda runner: runner.generate_batch([PROMPT, [7, 8]], 2, stop_at_eog=False),
    "score": lambda runner: runner.score(PROMPT).tolist(),
}


def test_interrupts_of_a_real_engine(goldens: Path) -> None:
    """What is computed afterwards is what was computed before."""
    options: dict[str, Any] = {"max_seq": 64, "threads": 1, "profile": {"buckets": {"seq": [1, 32]}}}
    with rlx.auto_runner(goldens / "llama" / "model-f16.gguf", **options) as runner:

        def results() -> list[Any]:
            return [REAL["generate"](runner), REAL["batch"](runner), REAL["score"](runner)]

        runner.prefill_logits([5, 6])
        expected = results()
        for call in REAL.values():
            for _ in interrupted(lambda call=call: call(runner), every=211):  # type: ignore[misc]
                assert results() == expected
