"""An engine without a cache: every token is computed from the whole context.

Runners stage, under the engine loop. For runners that have nothing but `predict_logits`, and as the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.engine.batch import Batch
from rlx.engine.loop.job import Logits

MOST_ROWS = 1 << 30


class Context:
    """A sequence that is nothing but its ids, and the prompt embeddings of some."""

    recurrent = False

    def __init__(self, embeddings: Any = None) -> None:
        self.ids: list[int] = []
        self.embeddings = embeddings

    def __len__(self) -> int:
        return len(self.ids)

    def call_end(self, start: int, most: int) -> int:
        """End of a call of at most `most` rows from `start`."""
        return start + most

    def mark(self, length: int) -> None:
        """There is nothing to copy."""

    def rewind(self, length: int) -> None:
        """Drops the ids after the first `length`."""
        del self.ids[length:]

    def pause(self) -> None:
        """There is nothing to save."""

    resume = close = discard = pause


class RecomputeEngine:
    """Recomputes the context of each token.

    Args:
        logits: the logits after some ids, float32[vocab]; of those and prompt embeddings where there are some.
    """

    most_rows = MOST_ROWS

    def __init__(self, logits: Callable[..., Logits]) -> None:
        self._logits = logits

    def open_sequence(
        self, prompt: Sequence[int] = (), embeddings: Any = None, *, shared: bool = True, salt: str = ""
    ) -> Context:
        """An empty sequence."""
        return Context(embeddings)

    def step(self, batch: Batch) -> list[Logits | None]:
        """Appends the segments; the logits after those that ask for them, float32[vocab]."""
        found: list[Logits | None] = []
        for segment in batch.segments:
            context: Any = segment.sequence
            context.ids.extend(segment.tokens)
            given = [list(context.ids), *([] if context.embeddings is None else [context.embeddings])]
            found.append(None if segment.logits == "none" else np.asarray(self._logits(*given)))
        return found

    def greedy(self, sequence: Any, token: int, count: int, stops: Sequence[int] = (), loads: bool = True) -> list[int]:
        """It cannot: `[]`, so that steps are computed one by one."""
        return []
