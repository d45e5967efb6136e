"""The interface of an engine for the loop, and an engine without a cache.

Runners stage, under the engine loop. `rlx.engine.engine.Engine` implements the interface, too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlx.backends.device import Backend
from rlx.backends.memory import Values
from rlx.engine.request import Logits
from rlx.errors import ArgumentError
from rlx.sampling.choice import Choose, choose_rows

if TYPE_CHECKING:
    from rlx.engine.model_runner import Segment
    from rlx.engine.token_run import Run, RunRow

MOST_ROWS = 1 << 30


class StepEngine(Protocol):
    """The part of an engine that the loop uses.

    Attributes:
        most_rows: maximum number of rows in a segment.
    """

    most_rows: int

    @property
    def shared_rows(self) -> int:
        """Largest row count of a prompt that may share a step with other prompts."""
        ...

    @property
    def choose(self) -> Choose:
        """Chooses tokens from rows of logits."""
        ...

    def open_sequence(self, prompt: Ids[int] = (), embeddings: Any = None, *, salt: str = "", adapter: int = 0) -> Any:
        """A sequence that will hold `prompt`. It begins with the longest prefix that the cache knows for this salt.

        Args:
            adapter: the number of the adapter that its rows get, 0 for none.
        """
        ...

    def compute(self, segments: Ids[Segment], /) -> Ids[Values | None]:
        """Computes the segments; their logits are valid until the next step.

        Raises:
            PoolFullError: the cache has no room, and nothing was computed.
        """
        ...

    def run(self, rows: Ids[RunRow], *, loads: bool = True) -> Run | None:
        """Steps that take each other's tokens; None if it cannot: steps then compute them one by one.

        Args:
            loads: whether a program that finds the likeliest tokens may be loaded or compiled for this.

        Raises:
            PoolFullError: the cache has no room, and nothing was computed.
        """
        ...

    def greedy(self, sequence: Any, token: int, count: int, stops: Ids[int] = ()) -> list[int]:
        """Appends `token` and the likeliest tokens after it, at most until one of `stops`, and for 50 ms.

        Returns:
            1 to `count` tokens; the last one is not appended. `[]` if it cannot: a step then computes the next one.

        Raises:
            NumericalError: a logit is NaN or infinite; the token that would follow is not appended.
        """
        ...


class ComputedAnew:
    """A sequence that is nothing but its ids, and the prompt embeddings of some."""

    recurrent = marks = False

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
    """An engine without a cache: computes the whole context for each token.

    For runners that have nothing but `predict_logits`, and as the reference.

    Args:
        logits: the logits after some ids, float32[vocab]; of those and prompt embeddings where there are some.
    """

    most_rows, choose = MOST_ROWS, staticmethod(choose_rows)
    shared_rows = Backend.shared_rows

    def __init__(self, logits: Callable[..., Logits]) -> None:
        self._logits = logits

    def open_sequence(
        self, prompt: Ids[int] = (), embeddings: Any = None, *, shared: bool = True, salt: str = "", adapter: int = 0
    ) -> ComputedAnew:
        """An empty sequence."""
        return ComputedAnew(embeddings)

    def compute(self, segments: Ids[Segment]) -> list[Values | None]:
        """Appends the segments; the logits after those that ask for them, float32[vocab]."""
        found: list[Values | None] = []
        for segment in segments:
            context: Any = segment.sequence
            context.ids.extend(segment.tokens)
            embeddings = [] if context.embeddings is None else [context.embeddings]
            found.append(None if segment.logits == "none" else np.asarray(self._logits([*context.ids], *embeddings)))
        return found

    def run(self, rows: Ids[RunRow], *, loads: bool = True) -> None:
        """It cannot."""

    def greedy(self, sequence: Any, token: int, count: int, stops: Ids[int] = ()) -> list[int]:
        """It cannot: `[]`."""
        return []

    def check_fits(self, positions: int) -> None:
        """There is no pool that they would not fit."""

    def prompt_embeddings(self, count: int, embeds: Any, bias: Any = None) -> Any:
        """`ArgumentError`: it computes from ids."""
        raise ArgumentError("this runner takes no prompt embeddings", where="embeds", hint="give ids alone")
