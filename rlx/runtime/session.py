"""A session: the token ids so far, and the states that result from them.

Runtime, between a model's engine and the memory of `rlx.runtime.kv`. It implements rewinding. Full caches rewind for
free, because positions after the session are never read. Rings can rewind until needed positions are overwritten.
Recurrent states cannot rewind: they are restored from a checkpoint, and the ids after it are computed again. A step
that verifies drafts leaves recurrent states unchanged and writes new ones beside them, which are adopted afterwards.

A step is `begin`, the program, `end`. Its ids count only after `end`. If an interrupt prevents `end`, the next `settle`
restores states that agree with the ids. Ids and states are therefore always consistent.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.errors import SnapshotError
from rlx.runtime.kv import States
from rlx.runtime.prompt_embeddings import PromptEmbeddings
from rlx.runtime.snapshot import Snapshot

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

CHECKPOINTS = 4  # maximum number of checkpoints; the newest ones are kept
CHECKPOINT_BYTES = 512 << 20  # limit for all of them; the oldest are dropped first, and a larger one is not made
_EVERYTHING = 1 << 62  # larger than every position


@dataclass
class _Checkpoint:
    """A length that the session can rewind to. Data is copied only when a step would destroy it."""

    length: int
    recurrent: Array | None = None
    rings: Arrays | None = None

    @property
    def nbytes(self) -> int:
        recurrent = 0 if self.recurrent is None else self.recurrent.nbytes
        return recurrent + sum(a.nbytes for a in (self.rings or {}).values())


class Session:
    """The ids of a session and its states, which the session owns and which start as zeros.

    Args:
        checkpoints: whether to record checkpoints.

    Attributes:
        ids: the tokens so far; `array("i")`, four bytes each.
        done: how many ids the states contain. After a rewind it may be less than `len(ids)`: the rest must be
            recomputed.
        recurrent: the names of the recurrent states.
        embeddings: the prompt embeddings that the session started with, or None.
    """

    def __init__(self, states: States, checkpoints: bool = True) -> None:
        self.states, self.ids, self.done = states, array("i"), 0
        self.embeddings: PromptEmbeddings | None = None
        self._notes = checkpoints
        self._floor = self._kept = 0  # first position that rings hold: now, and before the current step
        self._torn = False  # whether recurrent states may be inconsistent with every length
        self._checkpoints: list[_Checkpoint] = []
        self._ahead = 0  # caches hold the ids up to there, and recurrent states can be advanced by them
        self.recurrent, self._rings = states.names("recurrent"), states.names("ring")
        self._room = states.ring_capacity or _EVERYTHING

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, rows: int, *, aside: bool = False, turns: bool = False) -> None:
        """Call before programs write `rows` positions after `done`.

        Args:
            aside: recurrent states are unchanged; new ones are written beside them.
            turns: the same, but the two buffers alternate.
        """
        if not (aside or turns):
            self.states.home()
        lost = max(self._floor, self.done + rows - self._room)
        if self._checkpoints:
            self._save(lost)
        self._kept, self._floor, self._torn, self._ahead = self._floor, lost, not aside, 0

    def end(self, ids: Sequence[int], *, aside: bool = False) -> None:
        """Call after the programs have run on `ids`, possibly fewer than announced; `aside` as in `begin`."""
        end = self.done + len(ids)
        self.ids[self.done : end] = array("i", ids)
        if aside:
            self._ahead = end
        else:
            self.done = end
        self._floor, self._torn = max(self._kept, end - self._room), False

    @property
    def ahead(self) -> tuple[int, bool]:
        """How many of the next ids a step has verified, and whether the states beside contain exactly these."""
        right = max(0, min(self._ahead, len(self.ids)) - self.done)
        return right, self.done + right == self._ahead

    def take(self, count: int) -> None:
        """Adopts the states beside, which contain the next `count` ids."""
        self._torn = True  # an interrupt between the two assignments must be detected
        self.states.turn ^= 1
        self.done += count
        self._ahead, self._torn = 0, False

    def leave(self) -> None:
        """Discards what the last step computed beside the states."""
        self._ahead = 0

    def settle(self) -> None:
        """Makes the states consistent after a step that was interrupted."""
        if self._torn:
            self.rewind(len(self.ids))

    def embeddings_at(self, position: int) -> PromptEmbeddings | None:
        """The prompt embeddings if the position is computed from them, else None."""
        return self.embeddings if self.embeddings is not None and position < len(self.embeddings) else None

    def call_end(self, start: int, most: int) -> int:
        """End of a call of at most `most` rows from `start`: a call must not mix prompt embeddings and tokens."""
        embeddings = self.embeddings_at(start)
        return start + most if embeddings is None else embeddings.end(start, most)

    def mark(self) -> None:
        """Records a checkpoint at `done`; data is copied only when a later step would overwrite it."""
        there = self._checkpoints[-1].length if self._checkpoints else 0
        if self._notes and self.done > there and (self.recurrent or self._rings):
            self._checkpoints = [*self._checkpoints, _Checkpoint(self.done)][-CHECKPOINTS:]

    @property
    def checkpoint_bytes(self) -> int:
        """Total bytes of the copies in checkpoints."""
        return sum(c.nbytes for c in self._checkpoints)

    def _save(self, lost: int) -> None:
        """Copies data that checkpoints need and the next step destroys; positions below `lost` leave the rings."""
        copied = False
        for checkpoint in self._checkpoints:
            if checkpoint.recurrent is None:
                checkpoint.recurrent = self.states.copy_recurrent()
                copied = True
            first = self.states.first_read(checkpoint.length)
            if checkpoint.rings is None and first < lost:
                copy, length = self.states.copy_positions, checkpoint.length
                checkpoint.rings = {name: copy(name, first, length) for name in self._rings}
                copied = True
        while copied and sum(c.nbytes for c in self._checkpoints) > CHECKPOINT_BYTES:
            del self._checkpoints[0]

    # -- rewinding ------------------------------------------------------------------------------------------------

    def rewind(self, length: int) -> None:
        """Drops the ids after the first `length`. Ids that the states then lack must be recomputed.

        Free if the states allow it; otherwise restores the newest checkpoint at or before `length`. Without one,
        everything must be recomputed.
        """
        del self.ids[length:]
        self.embeddings = self.embeddings.first(length) if self.embeddings is not None else None
        self._checkpoints = [c for c in self._checkpoints if c.length <= length]
        at = min(self.done, length)
        if self._can_stand_at(at):
            self.done, self._torn = at, False
        else:
            there = [c for c in self._checkpoints if c.length <= length and self._reaches(c)]
            self._return_to(max(there, key=lambda c: c.length, default=_Checkpoint(0)))

    def _reaches(self, checkpoint: _Checkpoint) -> bool:
        """Whether rings can rewind there: with the checkpoint's copy, or as they are."""
        whole = checkpoint.rings is not None or not self._rings
        return whole or self.states.first_read(checkpoint.length) >= self._floor

    def _can_stand_at(self, length: int) -> bool:
        """Whether the states can continue from there without a checkpoint."""
        if self.recurrent and (self._torn or length != self.done):
            return False
        return not self._rings or self.states.first_read(length) >= self._floor

    def _return_to(self, checkpoint: _Checkpoint) -> None:
        self._torn, self._ahead = True, 0  # an interrupt while copying must be detected
        if checkpoint.length == 0:
            self.states.zero()
            self._floor = 0
        if checkpoint.recurrent is not None:
            self.states.put_recurrent(checkpoint.recurrent)
        if checkpoint.rings is not None:
            self._floor, first = _EVERYTHING, self.states.first_read(checkpoint.length)
            for name, value in checkpoint.rings.items():
                self.states.put_positions(name, first, value)
            self._floor = first
        self.done, self._torn = checkpoint.length, False

    # -- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self, model: str) -> Snapshot:
        """A copy of the session; all ids must be in the states.

        Raises:
            SnapshotError: the session started with prompt embeddings, which ids cannot represent.
        """
        if self.embeddings is not None:
            hint = "Prefill again with the embeddings instead of restoring."
            raise SnapshotError("a session that began with embeddings has no snapshot", where="snapshot", hint=hint)
        copy, length = self.states.copy_positions, self.done
        arrays = {name: copy(name, 0, length) for name in self.states.names("full")}
        arrays |= {name: copy(name, self._floor, length) for name in self._rings}
        arrays |= {name: self.states.copy(name) for name in self.recurrent}
        return Snapshot(tuple(self.ids), arrays, self._formats(), model)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces the session by a snapshot that has passed `check`; an interrupt leaves an empty session."""
        self._checkpoints, self._torn, self._floor, self.embeddings = [], True, _EVERYTHING, None
        self._ahead = 0
        del self.ids[:]
        length, floor = snapshot.position, 0
        for name in self.states.names("full"):
            self.states.put_positions(name, 0, snapshot.arrays[name])
        for name in self._rings:
            newest = snapshot.arrays[name][:, -self._room :]
            floor = max(floor, length - newest.shape[1])
            self.states.put_positions(name, length - newest.shape[1], newest)
        for name in self.recurrent:
            self.states.put(name, snapshot.arrays[name])
        self.ids.extend(snapshot.ids)
        self.done, self._floor, self._torn = length, floor, False
        self._checkpoints = [_Checkpoint(length)]

    def check(self, snapshot: Snapshot) -> None:
        """Checks that a snapshot can be restored.

        Raises:
            SnapshotError: it is not a snapshot, the states have other formats, or the arrays do not match the formats.
        """
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"expected a Snapshot, found a {type(snapshot).__name__}", where="restore")
        own = self._formats()
        for name in sorted(own.keys() | snapshot.formats.keys()):
            found, expected = snapshot.formats.get(name, "nothing"), own.get(name, "nothing")
            if found != expected:
                hint = "Open the model with the cache type of the snapshot (kv_dtype)."
                what = f"the snapshot has {found}, the session {expected}"
                raise SnapshotError(what, where=f"state {name!r}", hint=hint)
            self._check_array(name, snapshot.arrays.get(name), snapshot.position)

    def _check_array(self, name: str, value: Array | None, length: int) -> None:
        state = self.states.table[name]
        shape = [*state.shape[:-1], state.width]
        if state.kind == "full":
            shape[1] = length
        if state.kind == "ring":
            held = value.shape[1] if value is not None and value.ndim == 3 else 0
            shape[1] = min(max(held, length - self.states.first_read(length)), length)
        fits = value is not None and list(value.shape) == shape and value.dtype == state.element
        if state.kind != "fixed" and not fits:
            found = f"{value.dtype}{list(value.shape)}" if value is not None else "nothing"
            what = f"the snapshot's array is {found}, expected {state.element}{shape}"
            raise SnapshotError(what, where=f"state {name!r}", hint="The snapshot is damaged: take the snapshot again.")

    def _formats(self) -> dict[str, str]:
        return {name: state.format for name, state in self.states.table.items()}
