"""Snapshots of sequences: taken, checked and restored.

Runtime, over `sequence.py`; `snapshot.py` describes the copies and their file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.compiler.state_memory import StateMemory
from rlx.engine.kv.prefix import page_count
from rlx.engine.kv.sequence import NO_SLOT, Sequence
from rlx.engine.kv.snapshot import Snapshot
from rlx.errors import PromptError, SnapshotError

if TYPE_CHECKING:
    from rlx.engine.kv.pool import CachePool
    from rlx.engine.model_runner import Limits

Array = np.ndarray[Any, Any]

_DAMAGED = "The file is damaged: take the snapshot again."
_OTHER_MODEL = (
    "Open the file that it was taken from. If it is this one, another version of rlx computes it in another way: take "
    "the snapshot again."
)


def take_snapshot(sequence: Sequence, model: str) -> Snapshot:
    """A copy of a sequence; all ids must be in the states.

    Args:
        model: identity of the model.
    """
    memory, length, slot = sequence.pool.memory, sequence.done, max(0, sequence.memory.slot)
    pages, ring_start = sequence.pages[: page_count(length, memory.page)], sequence.ring_start
    rings = memory.ring_pages(ring_start // memory.page * memory.page, length)
    arrays = {name: memory.read(name, pages, 0, 0, length) for name in memory.full}
    arrays |= {name: memory.read(name, rings, slot, ring_start, length) for name in memory.rings}
    if sequence.memory.slot == NO_SLOT:  # nothing was computed yet
        arrays |= {name: np.zeros_like(memory.copy_state(name, 0)) for name in memory.recurrent}
    else:
        arrays |= {name: memory.copy_state(name, slot) for name in memory.recurrent}
    spans = sequence.embeddings and sequence.embeddings.cut(len(sequence))
    return Snapshot(tuple(sequence.ids), arrays, formats(memory), model, spans)


def restore(sequence: Sequence, snapshot: Snapshot) -> None:
    """Replaces a sequence by a snapshot that has passed `check_snapshot`; an interrupt leaves an empty sequence.

    Raises:
        PoolFullError: there is no room; the sequence is empty then.
    """
    memory, length, ring_start = sequence.pool.memory, snapshot.position, 0
    sequence.publish()
    sequence.rewind(0)
    sequence.use(snapshot.embeddings)
    if not length:
        return
    sequence.begin(length)
    for name in memory.full:
        memory.write(name, sequence.pages, 0, 0, snapshot.arrays[name])
    slot = sequence.memory.slot
    for name in memory.rings:
        newest = snapshot.arrays[name][:, -(memory.ring_capacity or 0) :]
        start = length - newest.shape[1]
        ring_start = max(ring_start, start)
        memory.write(name, memory.ring_pages(start // memory.page * memory.page, length), slot, start, newest)
    for name in memory.recurrent:
        memory.slot_of(name, slot).write(snapshot.arrays[name])
    sequence.end(snapshot.ids, ring_start=ring_start)
    sequence.mark()


def check_snapshot(pool: CachePool, snapshot: Snapshot, model: str, path: object, limits: Limits) -> None:
    """Checks that a snapshot can be restored.

    Args:
        model: identity of the model.
        path: of the model's file, for messages.

    Raises:
        SnapshotError: it is not a snapshot, it is of another model, the states have other formats, or its ids, rows or
            arrays do not fit.
        PromptError: it holds more tokens than the context.
    """
    if not isinstance(snapshot, Snapshot):
        raise SnapshotError(f"expected a Snapshot, found a {type(snapshot).__name__}", where="restore")
    _check_states(pool.memory, snapshot)
    if snapshot.position > limits.max_seq:
        what = f"a snapshot of {snapshot.position} tokens does not fit the context of {limits.max_seq}"
        raise PromptError(what, hint="Open the model with a larger max_seq.")
    if snapshot.model != model:
        what = f"the snapshot is of another model ({snapshot.model[:12]}, this is {model[:12]})"
        raise SnapshotError(what, where=path, hint=_OTHER_MODEL)
    spans = snapshot.embeddings
    if spans is not None and any(span.rows.shape[1] not in limits.widths for span in spans.spans):
        what = f"the snapshot's embedded rows are not {limits.widths[0]} wide"
        raise SnapshotError(what, where="restore", hint=_DAMAGED)
    ids = snapshot.ids if spans is None else spans.looked_up(snapshot.ids, 0)
    wrong = next((i for i in ids if not 0 <= i < limits.ids), None)
    if wrong is not None:  # a rewind would look its embedding up
        what = f"the snapshot has the token id {wrong}, expected ids from 0 to {limits.ids - 1}"
        raise SnapshotError(what, where="restore", hint=_DAMAGED)


def _check_states(memory: StateMemory, snapshot: Snapshot) -> None:
    own = formats(memory)
    for name in sorted(own.keys() | snapshot.formats.keys()):
        found, expected = snapshot.formats.get(name, "nothing"), own.get(name, "nothing")
        if found != expected:
            hint = "Open the model with the cache type of the snapshot (kv_dtype)."
            what = f"the snapshot has {found}, the session {expected}"
            raise SnapshotError(what, where=f"state {name!r}", hint=hint)
        _check_array(memory, name, snapshot.arrays.get(name), snapshot.position)


def _check_array(memory: StateMemory, name: str, value: Array | None, length: int) -> None:
    state = memory.table[name]
    shape = [*state.shape[:-1], state.width]
    if state.kind == "full":
        shape[1] = length
    if state.kind == "ring":
        held = value.shape[1] if value is not None and value.ndim == 3 else 0
        shape[1] = min(max(held, length - memory.first_read(length)), length)
    fits = value is not None and list(value.shape) == shape and value.dtype == state.element
    if state.kind != "fixed" and not fits:
        found = f"{value.dtype}{list(value.shape)}" if value is not None else "nothing"
        what = f"the snapshot's array is {found}, expected {state.element}{shape}"
        raise SnapshotError(what, where=f"state {name!r}", hint="The snapshot is damaged: take the snapshot again.")


def formats(memory: StateMemory) -> dict[str, str]:
    """Kind, type and shape of every state."""
    return {name: state.format for name, state in memory.table.items()}
