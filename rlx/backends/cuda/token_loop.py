"""Runs of steps in which the card takes the tokens of a step to the next one: what they read and write.

The host begins steps ahead of the one whose tokens it waits for, so that the card has one to do meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import c_void_p
from dataclasses import dataclass
from math import inf

import numpy as np

from rlx.backends.cuda.agreed import loop
from rlx.backends.cuda.chooser import Begun, Chooser, on_card
from rlx.backends.cuda.driver import Card
from rlx.backends.cuda.memory import address, pinned_bytes
from rlx.backends.memory import DeviceArray, Memory, Values
from rlx.backends.program import Draws, Program, TokenRun, TokenSteps
from rlx.sampling.choice import UNIFORM

_WAITED = 2e-5  # seconds: who waits less found the step done


@dataclass(frozen=True)
class Between:
    """What comes between two steps of a run.

    Attributes:
        each: what draws tokens on each card.
        key: what this depends on.
    """

    each: Sequence[Begun]
    key: tuple[tuple[int, ...], ...] = ()


def serves(run: TokenRun, logits: Values | None) -> bool:
    """Whether the card can run the steps alone.

    Args:
        logits: of all rows, if tokens are drawn.
    """
    if run.carried or run.first or run.count > loop.STEPS or any(len(end.stops) > loop.STOPS for end in run.ends):
        return False
    if (draws := run.draws) is None:
        return True
    if not (isinstance(draws.choose, Chooser) and isinstance(logits, DeviceArray)):
        return False
    return all(on_card(choice.opts, logits.shape[-1]) for choice in draws.choices)


class TokenLoop:
    """The memory of runs, see `agreed/loop.py`.

    Args:
        cards: the host sees the tokens of the first one.
        rows: maximum number.
    """

    def __init__(self, cards: Sequence[Card], memory: Memory, rows: int) -> None:
        card, self._start = cards[0], loop.HEAD_BYTES + rows * loop.ROW_BYTES
        self._card, self._cards = card, len(cards)
        nbytes = 4 * loop.STEPS * rows
        with ExitStack() as ends:  # if there is no room for all of it
            self._memory = memory.allocate(self._start + nbytes)
            ends.callback(self._memory.close)
            self._pinned = card.pinned(nbytes)
            ends.callback(card.free_pinned, self._pinned)
            self._found = pinned_bytes(self._pinned, nbytes).view(np.int32)
            self._done = list[c_void_p]()
            for _ in range(loop.STEPS):
                self._done.append(event := card.event())
                ends.callback(card.forget_event, event)
            self._ends = ends.pop_all()

    def write(self, run: TokenRun) -> None:
        """Tells the card of a run."""
        ends, draws = run.ends, run.draws
        block = np.zeros(loop.HEAD_BYTES + len(ends) * loop.ROW_BYTES, np.uint8)
        block[: loop.HEAD_BYTES].view(np.int32)[:] = run.ids, 0
        rows = block[loop.HEAD_BYTES :].reshape(len(ends), loop.ROW_BYTES)
        head = rows.view(np.int32)
        for row, end in zip(head, ends, strict=True):
            row[[loop.LEFT, loop.STOP_COUNT]] = end.count, len(end.stops)
            row[loop.STOPS_AT : loop.STOPS_AT + len(end.stops)] = end.stops
        if draws is not None:
            rows.view(np.float64)[:, loop.NUMBERS_AT : loop.NUMBERS_AT + len(draws.numbers)] = draws.numbers.T
            for choice, number in zip(draws.choices, draws.numbers[0].tolist(), strict=True):
                if not choice.opts.is_greedy:
                    choice.numbers[UNIFORM] = number
        self._memory.part(0, block.nbytes).write(block)

    def between(self, draws: Draws | None, logits: Values | None) -> Between:
        """What draws tokens from the logits of all rows, if they are drawn."""
        if draws is None:
            return Between([Begun()] * self._cards)
        assert isinstance(draws.choose, Chooser) and isinstance(logits, DeviceArray)
        begun = draws.choose.begin([logits[row] for row in range(len(draws.choices))], draws.choices)
        return Between(begun, tuple(each.key for each in begun))

    def begun(self, step: int) -> None:
        """A step was begun, with all that comes after it."""
        self._card.record(self._done[step])

    def tokens(self, step: int, rows: int) -> list[int]:
        """The tokens of a step, once it is done."""
        self._card.wait_for(self._done[step])
        found: list[int] = self._found[step * rows : (step + 1) * rows].tolist()
        return found

    def address(self, number: int, place: str) -> int:
        """Where the block ("loop") or the tokens ("found") lie for a card."""
        if place == "found":
            return self._pinned if number == 0 else address(self._memory, number) + self._start
        return address(self._memory, number)

    def close(self) -> None:
        """Frees it."""
        self._ends.close()


class StepsAhead(TokenSteps):
    """The steps of a run that the card does alone.

    Args:
        tokens: the memory of the run, which the card was told of.
        begin: begins a step.
    """

    def __init__(self, program: Program, run: TokenRun, tokens: TokenLoop, begin: Callable[[], object]) -> None:
        super().__init__(program, run)
        self._tokens, self._begin = tokens, begin
        self._begun = list[float]()  # when each step was
        self._looked = 0.0  # when the last one was done

    def take(self, ahead: int, seconds: float = inf) -> list[list[int]]:
        while self.ahead < ahead and len(self._begun) < self._run.count:
            self._begin()
            self._tokens.begun(len(self._begun))
            self._begun.append(time.perf_counter())
            self.ahead += 1
        if not self.ahead:
            return []
        start = time.perf_counter()
        found = self._tokens.tokens(self._taken, len(self._run.ends))
        now = time.perf_counter()
        self.seconds = now - max(self._looked, self._begun[self._taken]) if now - start > _WAITED else None
        self._looked, self.ahead = now, self.ahead - 1
        self._note(found)
        return [found]
