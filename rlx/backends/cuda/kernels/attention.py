"""Attention as its kernels know it: sizes, and what a row sees.

`row_attention.py` computes few rows, `attention_prompt.py` many.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.code import I32, Code, Value
from rlx.backends.cuda.kernels.cache import Segment
from rlx.ir.dims import DimLike

QUERIES = 8  # heads that a block of few rows computes at most


@dataclass(frozen=True)
class Attention:
    """An attention.

    Attributes:
        heads, kv_heads, width: its sizes.
        scale, window, cap, mask: as in `rlx.ir.meaning.attention`.
        length: number of positions.
        rows: number of rows.
        bias_heads: heads of a bias.
        sinks: whether each head has one more score, which counts for no value.
        out: type of the results.
        cards: how many share the heads.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int | None
    cap: float | None
    mask: str
    length: DimLike
    rows: DimLike
    bias_heads: int
    sinks: bool
    out: str
    cards: int = 1

    @property
    def together(self) -> int:
        """Heads of a block; they share keys."""
        return min(self.heads // self.kv_heads, QUERIES)

    @property
    def parts(self) -> int:
        """Blocks of a row on a card, without ranges."""
        return self.kv_heads // self.cards * -(-(self.heads // self.kv_heads) // self.together)

    @property
    def partial(self) -> int:
        """Numbers of the result of a range: the weighted values, largest score and sum of weights."""
        return -(-self.width // 2) * 2 + 2


def visible(k: Code, a: Attention, segment: Segment, row: Value) -> tuple[Value, Value]:
    """The first and the last position that a row sees."""
    length = k.number(k.dim(a.length, segment.env))
    rows = segment.env.get("SEQ", k.number(k.dim(a.rows)))
    own = length - rows + (row - segment.first)
    last = own
    if a.mask in ("none", "bias"):
        last = length - 1
    elif a.mask == "visible":
        last = k.smaller(k.load(k.pointers["operand"], I32, row), length - 1)
    elif a.mask == "around":
        assert a.window is not None
        last = k.smaller(own + (a.window - 1), length - 1)
    low = k.number(0) if a.window is None else k.larger(own - (a.window - 1), 0)
    return low, last
