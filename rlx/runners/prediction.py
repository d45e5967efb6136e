"""Drafts by the model's own head that predicts a further token (multi-token prediction).

Runners stage, beside `engine.py`. The head is one more layer with a cache of its own. At position p it takes what the
model's head multiplied there and the token that came after, and says what may follow that token. While a generation
speculates, the engine tells a `Predictor` what it computed, row by row; before the next drafts are made, the rows that
were chosen go through the layer. Drafts after the first take the layer's own results for those of the model.

What the layer does not know does no harm but fewer accepted drafts: where a session was restored, or went on unheard,
its cache begins anew at the first position it hears of. Rotation makes attention depend on distances only, so positions
may be counted from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rlx.runners.programs import Programs, Wanted
from rlx.runners.speculative import Hits
from rlx.runtime.kv import States

Floats = npt.NDArray[np.float32]

DRAFTS = 3  # in a row at most: each is a step of the layer, and less likely to come than the one before
HEAD_ROWS = 1 << 15  # ids that are drafted, the first ones: those of tokens that merges made early, the frequent ones


class Predictor:
    """The layer, its cache, and how much of the session it has seen.

    Args:
        programs: those of `models.build_predictor`'s graph, bound to `states`.
        ranges: rows of each program.
        states: the layer's cache, with room for every position.
    """

    def __init__(self, programs: Programs, ranges: Sequence[tuple[int, int]], states: States) -> None:
        self._programs, self._ranges, self.states = programs, ranges, states
        self._base = self._next = 0  # positions [base, next) have been through the layer
        self._start = 0  # of the rows that have not
        self._ids: list[int] = []
        self._hidden: Floats | None = None

    def hear(self, start: int, ids: Sequence[int], hidden: Floats) -> None:
        """The model has computed `ids` at the positions from `start` on; hidden [len(ids), width], copied."""
        self.catch_up(start, ids[0])
        if not self._base <= start <= self._next + 1:
            self._base = self._next = start
        self._next = max(self._next, start)
        self._start = max(self._next, start)
        known = self._start - start
        self._ids, self._hidden = list(ids[known:]), hidden[known:].copy()

    def forget(self, length: int) -> None:
        """The session was cut to its first `length` tokens."""
        del self._ids[max(0, length - self._start) :]
        # What the layer has made of the last position goes with the token behind it: it stays until it is made anew.
        self._next = max(min(self._next, length - 1), self._base)
        if length <= self._base:
            self._base = self._next = length

    def catch_up(self, length: int, token: int) -> tuple[int, Floats] | None:
        """Puts the rows before position `length` through the layer, where `token` comes next.

        Returns:
            The likeliest token behind `token`, and the layer's own hidden row; None if nothing was heard of the row
            before.
        """
        count = length - self._start
        if self._hidden is None or not 0 < count <= len(self._ids):
            return None
        found, after = None, [*self._ids[1:count], token]
        most = self._ranges[-1][1]
        for at in range(0, count, most):
            rows = slice(at, min(at + most, count))
            found = self.step(self._start + at, after[rows], self._hidden[rows])
        self._next = length
        self._ids, self._hidden, self._start = self._ids[count:], self._hidden[count:], length
        return found

    def step(self, position: int, ids: Sequence[int], hidden: Floats) -> tuple[int, Floats]:
        """Some rows of the layer, from a position of the session on: what follows the last, and its hidden row."""
        rows, past = len(ids), position - self._base
        program = self._programs[Wanted(next(r for r in self._ranges if r[0] <= rows <= r[1]))]
        program.inputs["tokens"][:rows] = ids
        program.inputs["positions"][:rows] = range(past, past + rows)
        program.inputs["hidden"][:rows] = hidden
        env = {"SEQ": rows, "PAST_SEQ": past, **self.states.extents}
        program.run(**env)
        return int(program.output("draft", **env)[0]), program.output("next_hidden", **env).copy()

    def close(self) -> None:
        self._programs.close()
        self.states.close()


class HeadDrafter:
    """A `Drafter` that asks the model's own head.

    Args:
        past: how many tokens the session holds, all of them chosen; asked when drafts are wanted.
        most: drafts in a row at most.
    """

    def __init__(self, predictor: Predictor, past: Callable[[], int], most: int = DRAFTS) -> None:
        self._predictor, self._past, self._most = predictor, past, most
        self._hits, self._open = Hits(0.9), list[int]()
        self._token: int | None = None

    def observe(self, token: int) -> None:
        if self._open:
            hit = self._open.pop(0) == token
            self._hits.count(hit)
            if not hit:
                self._open.clear()
        self._token = token

    def propose(self, limit: int) -> list[int]:
        assert self._token is not None
        position, drafts = self._past(), list[int]()
        found = self._predictor.catch_up(position, self._token)
        if found is not None:
            drafts.append(found[0])
            count = min(limit, max(1, self._hits.worth(self._most)))
            while len(drafts) < count:
                found = self._predictor.step(position + len(drafts) - 1, drafts[-1:], found[1])
                drafts.append(found[0])
        self._open = list(drafts)
        return drafts


def head_rows(vocab_size: int) -> int:
    """How many ids are drafted: most of a draft's time goes into the head, and rare tokens are rarely right."""
    return min(vocab_size, HEAD_ROWS)
