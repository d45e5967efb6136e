"""A sequence: token ids, and where the states that result from them lie in the pool.

Runtime, over `pool.py`. Full caches rewind for free, because positions after the end are never read. Rings can rewind
until needed positions are overwritten. Recurrent states cannot rewind: they are restored from a checkpoint, and the ids
after it are computed again. A step that verifies drafts leaves recurrent states unchanged and writes new ones into a
second slot; taking them over swaps the two.

A step is `begin`, the program, `end`. Its ids count only after `end`. If an interrupt prevents `end`, the next `settle`
restores states that agree with the ids. Ids and states are therefore always consistent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.compiler.state_memory import SlotCopy
from rlx.engine.kv.prefix import Keys, Pages, page_count
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.errors import BusyError

if TYPE_CHECKING:
    from rlx.engine.kv.pool import CachePool

NO_SLOT = -1
SPACING = 512  # positions at multiples of it are checkpoints, too
_EVERYTHING = 1 << 62  # larger than every position


@dataclass(frozen=True)
class Saved:
    """A paused sequence in ordinary memory: copies of its pages and of its slot."""

    pages: list[np.ndarray[Any, Any]]
    slot: SlotCopy | None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.pages) + (self.slot.nbytes if self.slot else 0)


Plan = tuple[int, int, int | None, int | None]
"""Arguments of `SequenceMemory.grow`."""


class SequenceMemory:
    """The pages and slots that a sequence holds.

    Attributes:
        pages: i32 [pages], the page table: page p / 64 holds position p.
        slot: the slot of its rings and recurrent states, or -1.
        spare: the slot that drafts write recurrent states to, or -1.
        own_from: writes from this position on destroy nothing that others rely on.
        has_slot: whether the model has rings or recurrent states.
        recurrent: whether it has recurrent states.
    """

    def __init__(self, pool: CachePool) -> None:
        self._pool, self._size = pool, pool.sizes.page
        self.pages: Pages = np.zeros(0, np.int32)
        self.slot = self.spare = NO_SLOT
        self.own_from = 0
        self.has_slot, self.recurrent = pool.memory.has_slots, bool(pool.memory.recurrent)

    @property
    def slots(self) -> list[int]:
        """The slots that it holds."""
        return [slot for slot in (self.slot, self.spare) if slot != NO_SLOT]

    def plan(self, start: int, rows: int, drafts: bool) -> Plan | None:
        """What `grow` takes, so that `rows` positions from `start` on can be written; None if they can.

        Args:
            drafts: whether rows may be rejected.
        """
        has_slots = not self.has_slot or (self.slot >= 0 and (self.spare >= 0 or not (drafts and self.recurrent)))
        if has_slots and start >= self.own_from and start + rows <= len(self.pages) * self._size:
            return None
        (at, inside), pages = divmod(start, self._size), self.pages
        copies = rows > 0 and at < len(pages) and self._pool.pages.must_copy(int(pages[at]), inside)
        fresh = max(0, page_count(start + rows, self._size) - len(pages))
        slots = (self.has_slot and self.slot == NO_SLOT) + (drafts and self.recurrent and self.spare == NO_SLOT)
        return fresh + copies, slots, start if rows else None, at if copies else None

    def grow(self, count: int, slots: int, start: int | None, copied: int | None) -> None:
        """Takes pages and slots as `plan` says; for `CachePool.reserve`.

        Args:
            count: number of pages, a copy included.
            slots: number of slots.
            start: the position that is written first; None for none.
            copied: number of the page in the table that is replaced by a copy; None for none.
        """
        if copied is not None:
            self._own(copied)
            count -= 1
        if count:
            table = self.pages.tolist()
            for _ in range(count):
                table.append(self._pool.pages.take(table[-1] if table else None))
            self.pages = np.array(table, np.int32)
        self.own_from = self.own_from if start is None else start
        for _ in range(slots):
            if self.slot == NO_SLOT:
                self.slot = self._pool.take_slot()
            else:
                self.spare = self._pool.take_slot()

    def share(self, pages: list[int], length: int) -> int:
        """Takes over the pages of a known prefix, as an empty table. The last one is copied, unless it is whole.

        Returns:
            The number of positions that it holds then: fewer than `length` if there was no room for the copy.
        """
        pool = self._pool
        pool.pages.share(pages)  # before anything can evict them
        self.pages, self.own_from = np.array(pages, np.int32), length + 1
        if not length % self._size:
            return length
        if not pool.has_room(1):
            length -= length % self._size
            self.cut(length)
            return length
        self._own(len(pages) - 1)
        return length

    def cut(self, length: int) -> None:
        """Drops the pages behind a length."""
        count = page_count(length, self._size)
        if count < len(self.pages):
            dropped = self.pages[count:].tolist()
            self.pages = self.pages[:count]
            self._pool.pages.drop(dropped)

    @property
    def can_alternate(self) -> bool:
        """Whether slot and spare slot may change places: rings stay where they are."""
        return not self._pool.memory.rings

    def take_spare(self) -> None:
        """Makes the recurrent states of the spare slot those of the sequence."""
        if self.can_alternate:
            self.slot, self.spare = self.spare, self.slot
        else:
            self._pool.memory.copy_recurrent(self.spare, self.slot)

    def put(self, saved: SlotCopy | None) -> None:
        """Restores rings and recurrent states from a copy, or recurrent states that are empty."""
        memory = self._pool.memory
        if self.slot == NO_SLOT:
            return
        if saved is None:
            memory.zero_recurrent(self.slot)
        else:
            memory.load_slot(self.slot, saved)

    def save(self, length: int) -> Saved:
        """Copies of what a sequence of `length` positions needs."""
        memory = self._pool.memory
        slot = memory.save_slot(self.slot, length) if self.slot != NO_SLOT else None
        return Saved(memory.save_pages(self.pages[: page_count(length, self._size)]), slot)

    def load(self, saved: Saved, length: int) -> None:
        """Takes pages and a slot for what `save` has copied, and restores it.

        Raises:
            PoolFullError: there is no room; nothing has changed.
        """
        pool = self._pool
        if (plan := self.plan(0, length, False)) is not None:
            pool.reserve([(self, plan)])
        pool.memory.load_pages(self.pages, saved.pages)
        if saved.slot is not None:
            self.put(saved.slot)

    def free(self) -> None:
        """Gives everything back."""
        pages, slots = self.pages.tolist(), (self.slot, self.spare)
        self.pages, self.slot, self.spare = self.pages[:0], NO_SLOT, NO_SLOT
        self._pool.pages.drop(pages)
        for slot in slots:
            if slot != NO_SLOT:
                self._pool.drop_slot(slot)

    def _own(self, at: int) -> None:
        """Replaces the page at a place of the table by a copy."""
        pool, old = self._pool, int(self.pages[at])
        page = pool.pages.take(int(self.pages[at - 1]) if at else None)
        pool.memory.copy_page(old, page)
        table = self.pages.copy()
        table[at] = page
        self.pages = table
        pool.pages.drop([old])


class Sequence:
    """A sequence of a pool; `CachePool.open` makes one.

    Args:
        embeddings: the embedded spans of the prompt: images, or a caller's own rows.
        shared: whether it takes part in the prefix index.
        salt: only sequences with the same salt share prefixes.
        adapter: the number of the adapter.

    Attributes:
        ids: the tokens so far; `array("i")`, four bytes each.
        done: how many ids the states contain. After a rewind it may be less than `len(ids)`: the rest must be
            recomputed.
        memory: its pages and slots.
        ring_start: first position that its rings hold.
        embeddings: its embedded spans, or None. They may lie behind the ids so far.
        adapter: the number of the adapter that its rows get, 0 for none.
        marks: whether `mark` has an effect.
        dirty: whether recurrent states may be inconsistent with every length, after an interrupt.
        saved: the copies while it is paused, or None.
        closed: whether it has ended.
    """

    embeddings: PromptEmbeddings | None = None

    def __init__(
        self,
        pool: CachePool,
        *,
        embeddings: PromptEmbeddings | None = None,
        shared: bool = True,
        salt: str = "",
        adapter: int = 0,
    ) -> None:
        self.pool, self.ids, self.done, self.closed = pool, array("i"), 0, False
        self.memory, self.adapter = SequenceMemory(pool), adapter
        self.saved: Saved | None = None
        self._rings, self._room = pool.memory.rings, pool.memory.ring_capacity or _EVERYTHING
        self._shared, self._salt, self._checkpoints = shared, salt, set[int]()
        self.marks = shared and self.memory.has_slot
        if embeddings is not None:
            self.use(embeddings)
        self._published = 0  # how many positions the prefix index knows of this sequence
        self.ring_start = self._kept = 0  # first position that rings hold: now, and before the current step
        self.dirty = False
        self._ahead = 0  # caches hold the ids up to there, and recurrent states can be advanced by them

    def __len__(self) -> int:
        return len(self.ids)

    def use(self, embeddings: PromptEmbeddings | None) -> None:
        """Sets the embedded spans, before anything of them is computed; ends of images become checkpoints."""
        self.embeddings = embeddings
        self._checkpoints.update(embeddings.image_ends if embeddings else ())

    @property
    def pages(self) -> Pages:
        """Its page table, i32 [pages]: page p / 64 holds position p."""
        return self.memory.pages

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent states."""
        return self.memory.recurrent

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, rows: int, *, speculative: bool = False, alternating: bool = False) -> None:
        """Call before programs write `rows` positions after `done`.

        Args:
            speculative: recurrent states are unchanged; new ones are written to the spare slot.
            alternating: several programs run, which alternate between slot and spare slot. If their number is odd,
                `memory.take_spare` follows.

        Raises:
            PoolFullError: there is no room; nothing has changed. Not after `CachePool.reserve`.
            BusyError: it was closed, or is paused.
        """
        if self.closed or self.saved is not None:
            self.check_open()
        if (plan := self.memory.plan(self.done, rows, speculative or alternating)) is not None:
            self.pool.reserve([(self.memory, plan)])
        if self.memory.has_slot and not self.dirty and (self.done in self._checkpoints or self.done % SPACING == 0):
            self.remember()
        lost = max(self.ring_start, self.done + rows - self._room)
        self._kept, self.ring_start, self.dirty, self._ahead = self.ring_start, lost, not speculative, 0

    def end(self, ids: Ids[int], *, speculative: bool = False, ring_start: int = 0) -> None:
        """Call after the programs have run on `ids`, possibly fewer than announced.

        Args:
            speculative: as in `begin`.
            ring_start: first position that rings hold, if not all positions before were written to them.
        """
        end = self.done + len(ids)
        self.ids[self.done : end] = array("i", ids)
        if speculative:
            self._ahead = end
        else:
            self.done = end
        self.ring_start, self.dirty = max(self._kept, end - self._room, ring_start), False

    @property
    def ahead(self) -> tuple[int, bool]:
        """How many of the next ids a step has verified, and whether the spare slot contains exactly these."""
        right = max(0, min(self._ahead, len(self.ids)) - self.done)
        return right, self.done + right == self._ahead

    def take(self, count: int) -> None:
        """Takes over the states in the spare slot, which contain the next `count` ids."""
        self.dirty = True  # an interrupt between the assignments must be detected
        self.memory.take_spare()
        self.done += count
        self._ahead, self.dirty = 0, False

    def leave(self) -> None:
        """Discards what the last step computed in the spare slot."""
        self._ahead = 0

    def settle(self) -> None:
        """Makes the states consistent after a step that was interrupted; `BusyError` as `begin`."""
        if self.closed or self.saved is not None:
            self.check_open()
        if self.dirty:
            self.rewind(len(self.ids))

    def mark(self, length: int | None = None) -> None:
        """Has the states copied into the prefix index when they are at `length`, by default the present one.

        They are copied before the next step changes them. Without effect if the model has only full caches.
        """
        if self.marks:
            self._checkpoints.add(self.done if length is None else length)

    def call_end(self, start: int, most: int) -> int:
        """End of a call of at most `most` rows from `start`; more only for an image whose rows see each other.

        It ends where a checkpoint is due, and never inside such an image.
        """
        end, embeddings = start + most, self.embeddings
        if self.marks and not (embeddings is not None and embeddings.is_biased(start)):
            end = min([end, (start // SPACING + 1) * SPACING, *(mark for mark in self._checkpoints if mark > start)])
        return end if embeddings is None else embeddings.call_end(start, end)

    # -- the prefix index -----------------------------------------------------------------------------------------

    def begin_with(self, prompt: Ids[int]) -> None:
        """Takes over the longest known prefix of a prompt, but at least one token less than it.

        Raises:
            PoolFullError: there is no room for a slot.
        """
        pool = self.pool
        keys = keys_of(prompt, self.embeddings, self._salt)[: len(prompt) - 1]
        hit = pool.index.find(keys, self.memory.has_slot)
        length = self.memory.share(hit.pages, hit.length) if hit.length else 0
        if self.memory.has_slot:
            self.mark(hit.common)  # another prompt parts from this one there; a third one may, too
            length = hit.length if length == hit.length else 0  # states exist at the checkpoint only
            if (plan := self.memory.plan(0, 0, False)) is not None:
                pool.reserve([(self.memory, plan)])
            if hit.checkpoint is not None and length:
                self.memory.put(hit.checkpoint.state)
                self.ring_start = hit.checkpoint.state.first
            self.memory.cut(length)
        self.ids.extend(prompt[:length])
        self.done = self._published = length

    def publish(self, prompt: Ids[int] | None = None) -> None:
        """Adds what is computed to the prefix index.

        Args:
            prompt: only if this may begin with it; None for any. Mostly the next id shows that it does not.
        """
        at = self._published
        if not self._shared or self.dirty or self.saved or self.done <= at:
            return
        if self.embeddings is None:  # ids of images say nothing
            if prompt is not None and (len(prompt) <= at or prompt[at] != self.ids[at]):
                return
        elif self.embeddings.bias is not None:
            return  # rows see later ones, so a prefix of it is no prefix
        self.memory.own_from = max(self.memory.own_from, self.done)  # others rely on what is before it
        self.pool.index.insert(keys_of(self.ids[: self.done], self.embeddings, self._salt), self.memory.pages)
        self._published = self.done

    def remember(self) -> None:
        """As `publish`, with a checkpoint of the present states if they could not go back."""
        if self.saved is not None or self.dirty:
            return
        self._checkpoints.discard(self.done)
        self.publish()
        if self._shared and self.memory.slot != NO_SLOT and 0 < self.done <= self._published:
            self.pool.add_checkpoint(self)

    def keys(self, length: int) -> Keys:
        """The keys of the first positions in the prefix index, i64 [length]."""
        return keys_of(self.ids[:length], self.embeddings, self._salt)

    # -- rewinding ------------------------------------------------------------------------------------------------

    def rewind(self, length: int) -> None:
        """Drops the ids after the first `length`, and the embedded spans there. Ids that the states then lack must be
        recomputed.

        Free if the states allow it; otherwise restores the newest checkpoint at or before `length`. Without one,
        everything must be recomputed.
        """
        self.check_open()
        at = min(self.done, length)
        if self.embeddings is not None and length < len(self.ids):
            if (independent := self.embeddings.independent(length)) < at:
                at, self._ahead = independent, 0
            self.embeddings = self.embeddings.cut(length)
        del self.ids[length:]
        self._checkpoints = {mark for mark in self._checkpoints if mark <= length}
        self._published = min(self._published, at)
        if self._can_stand_at(at):
            self.done, self.dirty = at, False
            self.memory.cut(max(at, min(length, self._ahead)))  # those after `done` hold rows that a step has verified
        else:
            checkpoint = self.pool.index.checkpoint(self.keys(length)) if self._shared else None
            self._return_to(checkpoint.state if checkpoint else None)
            self.memory.cut(self.done)

    def _can_stand_at(self, length: int) -> bool:
        """Whether the states can continue from there without a checkpoint."""
        if self.recurrent and (self.dirty or length != self.done):
            return False
        return not self._rings or self.pool.memory.first_read(length) >= self.ring_start

    def _return_to(self, saved: SlotCopy | None) -> None:
        """Restores a checkpoint, or empty states."""
        self.dirty, self._ahead, self.ring_start = True, 0, _EVERYTHING  # an interrupt while copying must be detected
        self.memory.put(saved)
        length, self.ring_start = (saved.length, saved.first) if saved else (0, 0)
        self.done, self.dirty = length, False

    # -- the end --------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Moves its states to ordinary memory, and gives its pages and slots back; `resume` undoes it."""
        if self.saved is not None or self.closed:
            return
        self.settle()
        self.leave()
        self.saved = self.memory.save(self.done)
        self.memory.free()

    def resume(self) -> None:
        """Moves the states of a paused sequence back.

        Raises:
            PoolFullError: there is no room; it stays paused.
        """
        if (saved := self.saved) is not None:
            self.memory.load(saved, self.done)
            self.ring_start = max(self.ring_start, saved.slot.first if saved.slot else 0)
            self.saved = None

    def close(self) -> None:
        """Ends it and gives its memory back. What it has computed stays in the prefix index. May be called again."""
        if self.closed:
            return
        self.remember()
        if self._shared and self.pool.kept is not None and self._published:
            self.pool.kept.ended(self.keys(self._published))
        self.closed, self.saved = True, None
        self.memory.free()
        self.pool.opened.pop(id(self), None)

    def discard(self) -> None:
        """As `close`, but leaves nothing: after logits that are NaN, for example."""
        if not self.closed:
            self.closed, self.saved = True, None
            self.pool.wipe(self)
            self.memory.free()
            self.pool.opened.pop(id(self), None)

    def check_open(self) -> None:
        """`BusyError` if it was closed, or is paused."""
        if self.closed or self.saved is not None:
            what = "the sequence was closed" if self.closed else "the sequence is paused"
            hint = "Open a new one." if self.closed else "Call resume() first."
            raise BusyError(what, where="sequence", hint=hint)


def keys_of(ids: Ids[int], embeddings: PromptEmbeddings | None, salt: str = "") -> Keys:
    """The keys of some ids in the prefix index, i64 [ids]: the id, or in an embedded span a hash of what stands there.

    Hashes are below 0, so that they differ from every token id.

    Args:
        salt: hashed into the first key, so that only prompts with the same salt have a prefix in common.
    """
    keys = np.array(ids, np.int64)
    if embeddings is not None:
        embeddings.identify(keys)
    if salt and len(keys):
        digest = blake2b(keys[:1].tobytes(), digest_size=8, key=blake2b(salt.encode("utf-8", "surrogatepass")).digest())
        keys[0] = -1 - (int.from_bytes(digest.digest(), "little") >> 1)
    return keys
