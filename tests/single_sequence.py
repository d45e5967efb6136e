"""An engine with calls on one sequence of its own, for tests of programs and states."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from functools import cached_property

import numpy as np

from rlx.engine.engine import Engine
from rlx.engine.kv.pool import CachePool
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import Sequence
from rlx.engine.kv.sequence_snapshot import check_snapshot, restore, take_snapshot
from rlx.engine.kv.snapshot import Snapshot
from rlx.engine.model_runner import ModelRunner
from rlx.engine.request import Logits
from rlx.errors import ArgumentError

FEW = 16  # dropping fewer tokens than this is a rejected draft, not another prompt


class SingleSequence:
    """Calls on one sequence, the current one.

    Attributes:
        model_runner: computes.
        max_seq: how many tokens the sequence may hold.
    """

    model_runner: ModelRunner
    pool: CachePool
    max_seq: int
    _identity: str  # of the model
    _path: object  # of the model's file, for messages

    @cached_property
    def _sequence(self) -> Sequence:
        return self.pool.open()

    @property
    def current(self) -> Sequence:
        """The sequence that the calls work on."""
        return self._sequence

    @property
    def past(self) -> int:
        """Number of tokens in the sequence."""
        return len(self._sequence)

    @property
    def ids(self) -> list[int]:
        """The token ids of the sequence; a copy."""
        return self._sequence.ids.tolist()

    # -- running --------------------------------------------------------------------------------------------------

    def forward(self, ids: Ids[int], all_rows: bool = False) -> Logits:
        """Appends ids to the sequence.

        After an error or an interrupt the sequence holds the ids of the chunks that were finished.

        Returns:
            float32 [vocab], the logits after the last id, or with `all_rows` [len(ids), vocab].

        Raises:
            PromptError: no ids, or more than the cache has room for.
            PoolFullError: the pool has no room for them.
        """
        rows = list(self._pieces(ids, all_rows))
        return np.concatenate(rows) if all_rows else rows[-1][0]

    def _pieces(self, ids: Ids[int], all_rows: bool) -> Iterator[Logits]:
        self.model_runner.reserve(self._sequence, ids)
        yield from self.model_runner.pieces(self._sequence, ids, all_rows)
        if len(ids) > 1:
            self._sequence.mark()

    def verify(self, ids: Ids[int]) -> Logits:
        """As `forward` with `all_rows`, for drafts: all ids but the first may be rejected.

        Recurrent states are unchanged until the next call. `trim` is free before it. The next call then updates the
        states by the ids that remain.

        Raises:
            PromptError, PoolFullError: as `forward`.
        """
        self.model_runner.reserve(self._sequence, ids)
        return self.model_runner.run(self._sequence, ids, True, speculative=len(ids) > 1 and self._sequence.recurrent)

    def forward_embeddings(self, ids: Ids[int], embeddings: PromptEmbeddings) -> Logits:
        """Starts anew with `ids`, computed from prompt embeddings; otherwise as `forward`.

        Layers with their own embedding tables look `ids` up there. After an error the sequence is empty.
        """
        self.reset()
        self._sequence.use(embeddings)
        try:
            return self.forward(ids)
        except BaseException:
            self.reset()
            raise

    # -- going back -----------------------------------------------------------------------------------------------

    def trim(self, length: int) -> None:
        """Drops everything after the first `length` tokens; exact up to rounding for every kind of state.

        This is free for full caches, and for rings up to the number of tokens that they hold beyond the window.
        Otherwise, and with recurrent states, it restores the newest checkpoint at or before `length`, and the next
        `forward` recomputes the ids after it, or all ids if there is no checkpoint. What is dropped stays in the prefix
        index, unless it is only a few tokens.

        Raises:
            ArgumentError: the sequence holds fewer tokens, or `length` is negative.
        """
        if not 0 <= length <= self.past:
            raise ArgumentError(f"cannot trim to {length}: the cache holds {self.past} tokens")
        if self.past - length > FEW:
            self._sequence.publish()
        self._sequence.rewind(length)

    def reset(self) -> None:
        """Empties the sequence."""
        self.trim(0)

    def snapshot(self) -> Snapshot:
        """A copy of the sequence: its ids, the used part of every cache, and the recurrent states."""
        if self.past:
            self.model_runner.refresh(self._sequence)
        return take_snapshot(self._sequence, self._identity)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the sequence by a snapshot, also by one of another engine of the same model.

        The context length may differ; the cache types must be the same.

        Raises:
            SnapshotError: it is of another model or other state formats; the sequence is unchanged.
            PromptError: it holds more tokens than the context.
            PoolFullError: the pool has no room for it; the sequence is unchanged.
        """
        check_snapshot(self.pool, snapshot, self._identity, self._path, self.model_runner.limits)
        restore(self._sequence, snapshot)


class SingleEngine(SingleSequence, Engine):
    """An engine with a sequence of its own."""
