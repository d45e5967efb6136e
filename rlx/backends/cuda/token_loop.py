"""Loops of steps of one row, in which the card takes each token to the next step: what they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.backends.cuda.agreed import loop
from rlx.backends.cuda.chooser import Chooser, on_card
from rlx.backends.cuda.driver import LaunchConfig
from rlx.backends.cuda.memory import address
from rlx.backends.memory import DeviceArray, Memory, Values
from rlx.backends.program import Draws, TokenRun
from rlx.sampling.choice import UNIFORM

#: A launch: function, configuration and arguments, and where the arguments lie.
Ready = tuple[c_void_p, LaunchConfig, Any, Any]


@dataclass(frozen=True)
class Between:
    """What comes between two steps of a loop.

    Attributes:
        key: what it depends on.
        launches: that draw a token.
        pointers: where it and its random number lie then.
    """

    key: tuple[int, ...] = ()
    launches: Sequence[Ready] = ()
    pointers: tuple[int, ...] = ()


def serves(run: TokenRun, row: Values | None) -> bool:
    """Whether the card can run the steps alone.

    Args:
        row: of the logits, if tokens are drawn.
    """
    if run.carried or run.first or len(run.stops) > loop.STOPS:
        return False
    if (draws := run.draws) is None:
        return True
    return isinstance(draws.choose, Chooser) and isinstance(row, DeviceArray) and on_card(draws.choice.opts, len(row))


class TokenLoop:
    """The memory of loops, see `agreed/loop.py`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory.allocate(loop.NBYTES)

    def begin(self, run: TokenRun, steps: int, first: int) -> None:
        """Tells the card of some steps.

        Args:
            first: number of the first step in the run.
        """
        block = np.zeros(loop.NBYTES, np.uint8)
        head, end = block.view(np.int32), loop.STOPS_AT + len(run.stops)
        head[[loop.COUNT, loop.STOP_COUNT, loop.TABLE]] = 0, len(run.stops), run.rows
        head[loop.STOPS_AT : end] = run.stops
        if run.draws:
            numbers = run.draws.numbers[first : first + steps]
            block.view(np.float64)[loop.NUMBERS_AT : loop.NUMBERS_AT + steps] = numbers
            run.draws.choice.numbers[UNIFORM] = numbers[0]
        self._memory.write(block)

    def tokens(self) -> list[int]:
        """The tokens of the steps, once they are done; fewer if the last one ends the run."""
        found = self._memory.read(np.int32)
        return [int(token) for token in found[loop.FOUND_AT : loop.FOUND_AT + int(found[loop.COUNT])]]

    def between(self, draws: Draws | None, row: Values | None) -> Between:
        """What draws a token from a row, if it is drawn."""
        if draws is None:
            return Between()
        assert isinstance(draws.choose, Chooser) and isinstance(row, DeviceArray)
        begun = draws.choose.begin(row, draws.choice)
        return Between(begun.key, begun.launches, (begun.token, begun.number))

    def address(self, number: int) -> int:
        """Where it lies on a card."""
        return address(self._memory, number)

    def close(self) -> None:
        """Frees it."""
        self._memory.close()
