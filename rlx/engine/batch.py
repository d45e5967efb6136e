"""A batch: what one call of `Engine.step` computes.

Runtime. Linears, norms and experts see the rows of a batch only. Ops over states see its segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Literal

from rlx.engine.kv.sequence import Sequence

Rows = Literal["none", "last", "all"]
"""The rows of a segment whose logits are returned."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of rows of one sequence: the next token, a chunk of a prompt, or a token and the drafts after it.

    Attributes:
        sequence: the sequence that the rows continue; at most one segment of a batch may have it.
        tokens: the token ids of the rows, at least one. Positions with prompt embeddings are computed from these.
        logits: the rows whose logits are returned.
        drafts: whether the rows after the first may be rejected: `Sequence.rewind` then takes them back at no cost,
            also from recurrent states.
    """

    sequence: Sequence
    tokens: Ids[int]
    logits: Rows = "last"
    drafts: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """Segments of different sequences, which one step computes.

    Example:
        >>> logits = engine.step(Batch([Segment(a, [17]), Segment(b, prompt[:40], logits="none")]))
        >>> logits[0].shape, logits[1]
        ((32000,), None)

    Attributes:
        copies: whether the returned logits are copies. If not, they may be views, valid until the next step: for
            callers that choose a token and are done with them.
    """

    segments: Ids[Segment]
    copies: bool = True


def packed(lengths: Ids[int], rows: int, texts: int) -> Iterator[list[int]]:
    """Numbers of texts that are computed together: up to `texts` texts of `rows` rows in all; a longer text is alone.

    The longest come first, and shorter ones fill what they leave.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first, last = 0, len(order) - 1
    while first <= last:
        chosen, left = [order[first]], rows - lengths[order[first]]
        first += 1
        while first <= last and len(chosen) < texts and lengths[order[first]] <= left:
            left -= lengths[order[first]]
            chosen.append(order[first])
            first += 1
        while first <= last and len(chosen) < texts and lengths[order[last]] <= left:
            left -= lengths[order[last]]
            chosen.append(order[last])
            last -= 1
        yield chosen
