"""A session: the token ids so far, and the states that stand for them.

Runtime, between a model's engine and the memory of `rlx.runtime.kv`. It answers how states go back: full caches by
forgetting, since positions behind the session are not read; rings as long as what is needed has not been overwritten;
recurrent states never, so they return to a checkpoint and the ids behind it are computed again. A step whose ids may
turn out wrong leaves recurrent states as they are and writes new ones beside them, which are taken afterwards.

A step is `begin`, the program, `end`. Until `end` the ids do not count; if it never comes, because of an interrupt, the
next `settle` brings the states back to the ids that do. So ids and states cannot disagree.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.errors import SnapshotError
from rlx.runtime.given import Given
from rlx.runtime.kv import States
from rlx.runtime.snapshot import Snapshot

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]

CHECKPOINTS = 4  # places a session can go back to at once, the newest ones
CHECKPOINT_BYTES = 512 << 20  # of all of them; the oldest go first, and one that is larger is not kept
_EVERYTHING = 1 << 62  # a position behind all others


@dataclass
class _Checkpoint:
    """A length that the session can go back to. A copy is made when a step would destroy what it needs, not before."""

    length: int
    recurrent: Array | None = None
    rings: Arrays | None = None

    @property
    def nbytes(self) -> int:
        recurrent = 0 if self.recurrent is None else self.recurrent.nbytes
        return recurrent + sum(a.nbytes for a in (self.rings or {}).values())


class Session:
    """The ids of a session and the states behind them, which belong to it from the start: they are zeros.

    Args:
        checkpoints: whether it notes lengths to go back to.

    Attributes:
        ids: the tokens so far; `array("i")`, four bytes each.
        done: how many of them the states contain. Fewer than `ids` after going back: the rest must be computed again.
        recurrent: the names of the recurrent states.
        given: what the first positions were computed from in place of token embeddings and the causal mask, if so.
    """

    def __init__(self, states: States, checkpoints: bool = True) -> None:
        self.states, self.ids, self.done = states, array("i"), 0
        self.given: Given | None = None
        self._notes = checkpoints
        self._floor = self._kept = 0  # rings hold the positions from here on; from where before the step
        self._torn = False  # recurrent states may be those of any length
        self._checkpoints: list[_Checkpoint] = []
        self._ahead = 0  # ids up to there are in caches, and what takes them into recurrent states is known
        self.recurrent, self._rings = states.names("recurrent"), states.names("ring")
        self._room = states.ring_capacity or _EVERYTHING

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, rows: int, *, aside: bool = False, turns: bool = False) -> None:
        """To be called before programs write `rows` positions behind `done`.

        Args:
            aside: recurrent states stay, new ones are written beside them.
            turns: so they are, but both sides take turns.
        """
        if not (aside or turns):
            self.states.home()
        lost = max(self._floor, self.done + rows - self._room)
        if self._checkpoints:
            self._save(lost)
        self._kept, self._floor, self._torn, self._ahead = self._floor, lost, not aside, 0

    def end(self, ids: Sequence[int], *, aside: bool = False) -> None:
        """The programs have run on `ids`, which may be fewer than were announced; as `begin`."""
        end = self.done + len(ids)
        self.ids[self.done : end] = array("i", ids)
        if aside:
            self._ahead = end
        else:
            self.done = end
        self._floor, self._torn = max(self._kept, end - self._room), False

    @property
    def ahead(self) -> tuple[int, bool]:
        """How many of the next ids a step computed aside, and whether the states beside are those after them."""
        right = max(0, min(self._ahead, len(self.ids)) - self.done)
        return right, self.done + right == self._ahead

    def take(self, count: int) -> None:
        """The states beside are those after the next `count` ids: they become the session's."""
        self._torn = True  # an interrupt must not come between the two
        self.states.turn ^= 1
        self.done += count
        self._ahead, self._torn = 0, False

    def leave(self) -> None:
        """What the last step computed aside will not be there any more."""
        self._ahead = 0

    def settle(self) -> None:
        """Puts the states in order after a step that did not reach its end."""
        if self._torn:
            self.rewind(len(self.ids))

    def given_at(self, position: int) -> Given | None:
        """What the position is computed from, if it is something else than its id."""
        return self.given if self.given is not None and position < len(self.given) else None

    def call_end(self, start: int, most: int) -> int:
        """Where a call of at most `most` rows that begins at `start` ends, so that what was given is not mixed."""
        given = self.given_at(start)
        return start + most if given is None else given.end(start, most)

    def mark(self) -> None:
        """Makes `done` a length to go back to; free until states are overwritten that it needs."""
        there = self._checkpoints[-1].length if self._checkpoints else 0
        if self._notes and self.done > there and (self.recurrent or self._rings):
            self._checkpoints = [*self._checkpoints, _Checkpoint(self.done)][-CHECKPOINTS:]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the copies that checkpoints hold."""
        return sum(c.nbytes for c in self._checkpoints)

    def _save(self, lost: int) -> None:
        """Copies what checkpoints need and the next step destroys; `lost`: positions below leave the rings."""
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

    # -- going back -----------------------------------------------------------------------------------------------

    def rewind(self, length: int) -> None:
        """Forgets the ids behind the first `length`; what the states then lack of the rest is left to be done again.

        Free where the states allow it, else a copy from the newest checkpoint that is not behind `length`. Without one
        everything must be done again.
        """
        del self.ids[length:]
        self.given = self.given.first(length) if self.given is not None else None
        self._checkpoints = [c for c in self._checkpoints if c.length <= length]
        at = min(self.done, length)
        if self._can_stand_at(at):
            self.done, self._torn = at, False
        else:
            there = [c for c in self._checkpoints if c.length <= length and self._reaches(c)]
            self._return_to(max(there, key=lambda c: c.length, default=_Checkpoint(0)))

    def _reaches(self, checkpoint: _Checkpoint) -> bool:
        """Whether rings can go back there: with what the checkpoint has of them, or as they are."""
        whole = checkpoint.rings is not None or not self._rings
        return whole or self.states.first_read(checkpoint.length) >= self._floor

    def _can_stand_at(self, length: int) -> bool:
        """Whether the states can go on from there as they are."""
        if self.recurrent and (self._torn or length != self.done):
            return False
        return not self._rings or self.states.first_read(length) >= self._floor

    def _return_to(self, checkpoint: _Checkpoint) -> None:
        self._torn, self._ahead = True, 0  # an interrupt in between must not leave a mixture that seems whole
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
        """A copy of the session, whose ids must all be done.

        Raises:
            SnapshotError: the session began with embeddings, for which ids do not stand.
        """
        if self.given is not None:
            hint = "Give the embeddings again where it shall go on."
            raise SnapshotError("a session that began with embeddings has no snapshot", where="snapshot", hint=hint)
        copy, length = self.states.copy_positions, self.done
        arrays = {name: copy(name, 0, length) for name in self.states.names("full")}
        arrays |= {name: copy(name, self._floor, length) for name in self._rings}
        arrays |= {name: self.states.copy(name) for name in self.recurrent}
        return Snapshot(tuple(self.ids), arrays, self._formats(), model)

    def restore(self, snapshot: Snapshot) -> None:
        """Becomes the session that was copied, which `check` must have passed; an interrupt leaves an empty one."""
        self._checkpoints, self._torn, self._floor, self.given = [], True, _EVERYTHING, None
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
        """Whether a snapshot can be restored.

        Raises:
            SnapshotError: it is something else, the states have other formats, or the arrays are not what the formats
                say.
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
            raise SnapshotError(what, where=f"state {name!r}", hint="The snapshot is damaged: take it anew.")

    def _formats(self) -> dict[str, str]:
        return {name: state.format for name, state in self.states.table.items()}
