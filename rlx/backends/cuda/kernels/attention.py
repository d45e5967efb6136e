"""Attention as its kernels know it: sizes, and what a row sees.

`row_attention.py` computes few rows, `attention_prompt.py` many.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cuda.code import I32, Code, Value
from rlx.backends.cuda.kernels.cache import Segment
from rlx.ir.dims import DimLike
from rlx.ir.dtypes import DType

QUERIES = 8  # heads that a block of few rows computes at most
#: Of keys and values in a type of cache: kind of their parts, how many, and how many of queries and weights. Those of
#: other types have 8 bits of their own.
_PARTS = {"f16": ("f16", 1, 2), "bf16": ("bf16", 1, 3), "f32": ("bf16", 3, 3)}


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


@dataclass(frozen=True)
class SharedRows:
    """Rows of keys and values in shared memory, for products on tensor cores.

    Attributes:
        width: of a row, in elements.
        kind: of the operands of products: "f16" or "bf16".
        parts: that add up to a key or a value.
        own: that add up to a query or a weight.
    """

    width: int
    kind: str
    parts: int
    own: int

    @property
    def stride(self) -> int:
        """Bytes from row to row, so that eight rows lie in different banks."""
        return 2 * self.width + 16


def operands_of(keys: DType, values: DType) -> tuple[str, int, int]:
    """The kind of operands, the parts of keys and values, and those of queries and weights, by the types of a cache."""
    return _PARTS.get(keys.name, ("bf16", 2, 2)) if keys == values else ("bf16", 3, 3)


def known(k: Code, a: Attention, segment: Segment) -> Value:
    """How many positions earlier calls have written."""
    if a.mask != "causal":
        return k.number(0)
    return k.number(k.dim(a.length, segment.env)) - segment.env.get("SEQ", k.number(k.dim(a.rows)))


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
