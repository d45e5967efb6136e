"""What `versus.py` times in turns: prompts, and tokens one by one behind a filled cache. For each task it chooses the
settings of each program.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from drive import Process
from machine import Machine
from report import Measurement, Series

SETTLE = 0.05  # seconds between turns, in which the threads of the side before go to sleep
PIECE = 512  # tokens that rlx computes at a time at most, and llama.cpp unless told otherwise
WARM_TOKENS = 4
TRIAL_PROMPT = 128
CHOOSE = ("ik_llama.cpp", "OpenVINO")  # sides that name the settings to try
TUNED = ("llama.cpp", *CHOOSE)
TORCH_QUICK = ("prefill 512", "decode at 0")  # tasks that transformers takes part in when time is short


@dataclass(frozen=True)
class Task:
    """A prompt of `tokens` from an empty cache ("prefill"), or `tokens` one by one after `depth` others ("decode")."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}" if self.kind == "prefill" else f"decode at {self.depth}"

    @property
    def middle(self) -> int:
        """The length of the cache half way through decoding."""
        return self.depth + self.tokens // 2

    @property
    def trial(self) -> Task:
        """A task like it, short enough to try settings on."""
        if self.kind == "prefill":
            return replace(self, tokens=min(self.tokens, TRIAL_PROMPT))
        return replace(self, depth=min(self.depth, PIECE))

    def prepare(self, side: Process) -> None:
        """Fills the cache."""
        if self.kind == "decode":
            side("fill", depth=self.depth)

    def warm(self, side: Process) -> None:
        """Fills the cache and runs a little: compiles, and touches the pages of the weights."""
        self.prepare(side)
        self._timed(side, min(self.tokens, PIECE if self.kind == "prefill" else WARM_TOKENS))

    def run(self, side: Process) -> float:
        """Seconds: of the whole prompt, or of one token."""
        time.sleep(SETTLE)
        return self._timed(side, self.tokens)

    def _timed(self, side: Process, tokens: int) -> float:
        return float(side(self.kind, tokens=tokens)["seconds"])

    def variants(self) -> list[dict[str, Any]]:
        """llama.cpp's settings that may be best for it."""
        pieces = (PIECE, 2048) if self.kind == "prefill" and self.tokens > PIECE else (PIECE,)
        return [{"flash": flash, "ubatch": piece} for flash in (True, False) for piece in pieces]


def tune(peer: Process, task: Task, repeat: int) -> str:
    """Leaves a program with the settings that are fastest on the task; what they are."""
    own = peer.name in CHOOSE
    variants = peer("variants", prompt=task.kind == "prefill")["variants"] if own else task.variants()
    found: list[tuple[float, dict[str, Any]]] = []
    for variant in variants:
        peer("use", **variant)
        task.warm(peer)
        found.append((min(task.run(peer) for _ in range(repeat)), variant))
    best = min(found, key=lambda pair: pair[0])[1]
    peer("use", **best)
    if own:
        return ", ".join(f"{name} {value}" for name, value in best.items())
    return f"flash attention {'on' if best['flash'] else 'off'}, pieces of {best['ubatch']}"


@dataclass(frozen=True)
class Patience:
    """How often tasks are repeated, and when it is enough.

    Attributes:
        repeat: turns of every task.
        row_seconds: after so many no further turn of a task begins; there is always one.
        end: when nothing more begins, on `time.monotonic`'s clock.
        quick: llama.cpp's settings are chosen on short tasks, by one run each.
    """

    repeat: int
    row_seconds: float = float("inf")
    end: float = float("inf")
    quick: bool = False

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def enough(self, started: float) -> bool:
        """Whether a task that started then has had its time."""
        return self.over or time.monotonic() - started > self.row_seconds


def compare(
    task: Task, sides: dict[str, Process], machine: Machine, patience: Patience
) -> tuple[Measurement, list[float]]:
    """All sides in turns; and the read bandwidth after each turn."""
    if patience.quick and task.name not in TORCH_QUICK:
        sides = {name: side for name, side in sides.items() if name != "transformers"}
    series = {name: Series(task.tokens if task.kind == "prefill" else 1) for name in sides}
    tried, repeat = (task.trial, 1) if patience.quick else (task, min(3, patience.repeat))
    for name in TUNED:
        if name in sides:
            series[name].settings = tune(sides[name], tried, repeat)
    for side in sides.values():
        task.warm(side)
    started, bandwidths = time.monotonic(), list[float]()
    for _ in range(patience.repeat):
        for name, side in sides.items():
            series[name].seconds.append(task.run(side))
        bandwidths.append(machine.read_bandwidth(0.2))
        if patience.enough(started):
            break
    return Measurement(task.name, series), bandwidths
