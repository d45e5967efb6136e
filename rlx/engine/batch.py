"""A batch: what one call of `Engine.step` computes.

Runtime. Linears, norms and experts see the rows of a batch only. Ops over states see its segments.
"""

from __future__ import annotations

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
