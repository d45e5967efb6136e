"""Rounds of drafts: how many drafts pay, and what native rounds of drafting and verifying take and return.

Between a backend that runs rounds (`Backend.rounds`) and the engine, which counts on the same numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from rlx.backends.program import Program

WORTH = 0.5  # a draft is worth its row if the probability that it is reached and accepted is at least this
MEMORY = 8  # number of tokens over which the acceptance rate is averaged
MOST = 15  # maximum number of drafts in a step
PAYS = tuple(WORTH ** (1 / count) for count in range(1, MOST + 1))  # from these rates on 1, 2, ... drafts in a row pay


def max_useful_drafts(rate: float, limit: int) -> int:
    """How many drafts in a row pay, if each is accepted with this probability: at most `limit`."""
    return min(limit, bisect_right(PAYS, rate))


@dataclass(frozen=True)
class Heads:
    """The programs of an MTP head, ready to run.

    Attributes:
        one, some: for one row, and for several; inputs `tokens`, `positions` and the carried one, output `token`.
        carried: (output, input): the head's output that replaces the model's hidden state in its next step, and the
            input that takes either; the model's output has the same name as the input.
        rows: number of rows of the head's embedding table.
    """

    one: Program
    some: Program
    carried: tuple[str, str]
    rows: int


@dataclass(frozen=True)
class Rounds:
    """The result of some rounds.

    Attributes:
        tokens: the tokens that the model chose.
        right: how many of them come from the last round; its rows, up to there, are in the results of the program that
            ran last.
        rounds, drafted, accepted: calls of the model, drafts, and accepted drafts.
        rate: the recent acceptance rate of drafts.
    """

    tokens: list[int]
    right: int
    rounds: int
    drafted: int
    accepted: int
    rate: float
