"""Several cards that compute together: what each has of a whole, and the kernel in which they meet.

Every card runs the same kernels. Of a matrix it has some rows, of a cache some heads, and it computes these results
and writes them on all cards. No sum is shared, so the results have the bits of one card. Before others read them, and
before memory is used again that others may still read, all cards meet.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.agreed.steps import CARD, LINE
from rlx.backends.cuda.code import F32, I32, I64, Code, Value

#: How long a card waits for another one, in nanoseconds. What it waits for are kernels, which take far less.
PATIENCE = 20 * 10**9


def of_card(k: Code, cards: int, number: Value, count: int) -> Value:
    """The number among all of one of the `count` that each of some cards has."""
    return number if cards == 1 else number + k.dim_named(CARD) * count


@dataclass(frozen=True)
class Part:
    """What a card has of the outputs of a matrix.

    Attributes:
        count: outputs of the card.
        whole: of all cards.
    """

    count: int
    whole: int

    @property
    def split(self) -> bool:
        """Whether cards have different ones."""
        return self.count < self.whole

    def place(self, k: Code, place: Value) -> Value:
        """A place among outputs of the card as one among all."""
        return of_card(k, 2 if self.split else 1, place, self.count)

    def numbers(self, k: Code, memory: Value) -> Value:
        """Memory of a number f32 for each output, from the card's first on."""
        return k.at(memory, F32, k.dim_named(CARD) * self.count) if self.split else memory


def meet(k: Code, cards: int) -> None:
    """One block: returns when all cards have come here as often; what they wrote before is seen from then on.

    Each card has a line of memory for each other card, which notes there how often it came.
    A card that waits too long stops with an error, which ends its context.

    Pointers:
        lines: of this card, i32 [cards, LINE / 4].
        places: addresses of its own line on each card, i64 [cards].
    """
    k.wait()
    with k.when(k.thread < cards):
        own = k.dim_named(CARD)
        line = k.at(k.pointers["lines"], I32, k.thread * (LINE // 4))
        count = k.load(k.at(k.pointers["lines"], I32, own * (LINE // 4)), I32) + 1
        k.sync_warp((1 << cards) - 1)  # all have read the count, which one of them raises
        place = k.load(k.pointers["places"], I64, k.thread)
        k.assembly("void", "st.release.sys.global.u32 [$0], $1;", "l,r", place, count)
        begin = _clock(k)
        with k.repeat() as again:
            found = k.assembly(I32, "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", line)
            with k.when(_clock(k) - begin > PATIENCE):
                k.assembly("void", "trap;", "")
            again(found - count < 0)


def _clock(k: Code) -> Value:
    return k.assembly(I64, "mov.u64 $0, %globaltimer;", "=l")
