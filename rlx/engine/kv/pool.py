"""The cache pool: the memory of all states of an engine, shared by its sequences and bounded in bytes.

Runtime, between an engine and its `StateMemory`. Full caches are pages with counted references. Rings and recurrent
states are slots; checkpoints are copies of slots in ordinary memory. The prefix index (`prefix.py`) remembers what
sequences have computed, of those that still run and those that ended. A new sequence takes over the longest prefix
that is known: it shares whole pages, and copies the one that it will write to.

Pages in use, slots in use and checkpoints together take at most `kv_bytes`; what only the index holds takes less while
the system is short of memory. If a step needs more, the least recently used ends of the index go first. If that is not
enough, `reserve` raises `PoolFullError` before anything is computed.

By default `kv_bytes` is half of the memory that this process may still use once the weights are loaded, divided among
the models of a server, at least what one sequence of the whole context needs, and at most what 64 of them need. Memory
that is there is the least of: what the system calls available, what the cgroup (v1 or v2, each of its levels) leaves,
and what the limit of the address space leaves. Where a buffer takes its memory at once, such as on a card, everything
is planned before anything is loaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from rlx.backends.memory import Memory
from rlx.closing import on_error
from rlx.compiler.state_memory import Sizes, StateMemory
from rlx.engine.kv.prefix import Checkpoint, PageAllocator, PrefixIndex, page_count
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import Plan, Sequence, SequenceMemory
from rlx.env import size
from rlx.errors import ArgumentError, PoolFullError, ResourceError
from rlx.ir.graph import Graph
from rlx.passes.capabilities import Layouts
from rlx.passes.options import MAX_PAST

if TYPE_CHECKING:
    from rlx.engine.kv.disk_kv_cache import DiskKVCache

MOST_SEQUENCES = 64
SHARE = 2  # the pool takes one part in so many of the memory that is left
RESERVE = 128 << 20
WORK = 512 << 20  # of a device whose memory is planned: what programs work on, and code
LOOK = 1.0  # seconds between two looks at how much memory the system has
STEP = 8 << 20  # bytes that the pool takes before it looks again: a look reads files
_UNKNOWN = 8 << 30  # of systems that do not say how much memory there is


def pool_bytes(
    memory: Memory, chosen: int | None, sizes: Sizes, max_seq: int, weight_bytes: int, pools: int = 1
) -> int:
    """The size of the pool in bytes.

    Args:
        memory: of the device.
        chosen: what the user says, or None.
        sizes: of the model's states.
        max_seq: maximum number of positions of a sequence.
        weight_bytes: memory that the weights take, which are not loaded yet.
        pools: how many share the memory that the weights leave.
    """
    if chosen is not None:
        return chosen
    one, work = sizes.sequence_bytes(max_seq), 0 if memory.lazy else pools * WORK
    left = max(0, available_memory(memory) - weight_bytes - work) / (SHARE * pools * sizes.share)
    return max(one, min(int(left), MOST_SEQUENCES * one))


def lacking(memory: Memory, pool: int, sizes: Sizes, fixed_bytes: int) -> int:
    """Bytes that a model with such a pool lacks before anything of it is loaded, if buffers take theirs at once.

    Args:
        fixed_bytes: what weights and images take.
    """
    needed = fixed_bytes + int(pool * sizes.share) + WORK
    return 0 if memory.lazy else max(0, needed - available_memory(memory))


def check_plan(
    memory: Memory,
    pool: int,
    sizes: Sizes,
    max_seq: int,
    weight_bytes: int,
    image_bytes: int,
    experts: Callable[[int], str],
) -> None:
    """Checks that a model fits, before anything of it is loaded, if buffers take their memory at once.

    Args:
        pool: size of the pool in bytes.
        image_bytes: what images take, their tower included.
        experts: bytes that are short -> how many layers' experts the host can take for them, as a hint; or "".

    Raises:
        ResourceError: it does not; says what is short, and what helps.
    """
    if not (short := lacking(memory, pool, sizes, weight_bytes + image_bytes)):
        return
    free, caches = available_memory(memory), int(pool * sizes.share)
    images = f"images {size(image_bytes)}, " if image_bytes else ""
    parts = f"weights {size(weight_bytes)}, {images}caches {size(caches)}, work {size(WORK)}"
    room, tokens = int((free - weight_bytes - image_bytes - WORK) / sizes.share), 0
    for step in (1 << i for i in reversed(range(max_seq.bit_length()))):
        if tokens + step <= max_seq and sizes.sequence_bytes(tokens + step) <= room:
            tokens += step
    hint = experts(short)
    if tokens >= sizes.page:
        smaller = f'Give max_seq={min(max_seq, tokens)} or less, kv_bytes={room >> 20}MiB or less, or kv_dtype="q8_0".'
        hint = f"{smaller} {hint}".strip()
    elif not hint:
        hint = 'Use a smaller file (rlx quantize), end other programs that use the device, or choose device="cpu".'
    what = f"the model lacks {size(short)} of the device's memory: {size(free)} are free, and it takes {parts}"
    raise ResourceError(what, where="memory", hint=hint)


def available_memory(memory: Memory) -> int:
    """Bytes of a memory that this process may still use; 8 GiB if nobody knows."""
    found = memory.available()
    return int(found) if math.isfinite(found) else _UNKNOWN


class Reserve:
    """Memory that the pool leaves to others, whatever its size: 128 MiB, or an eighth of what there is at the start.

    Attributes:
        taken: bytes that the pool has taken since the last look.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._bytes, self._look_at = min(RESERVE, available_memory(memory) // 8), 0.0
        self.taken = 0

    def short(self, needed: int) -> int:
        """How many bytes the system lacks for `needed` more beside the reserve; looks once a second, 0 meanwhile."""
        now = time.monotonic()
        if now < self._look_at or not self._memory.lazy:  # the pool has all of its memory already
            return 0
        self.taken, self._look_at = 0, now + LOOK
        return max(0, needed + self._bytes - available_memory(self._memory))


SLOTS = 128  # maximum number of slots; a slot that is not used takes no memory
CHECKPOINT_SHARE = 4  # checkpoints may take this part of the pool, one in so many
WARM_BYTES = 64 << 20  # free pages that stay resident, so that they can be reused without page faults


class CachePool:
    """The states of an engine's sequences.

    Args:
        graph: the model.
        memory: of the device.
        max_seq: maximum number of positions of a sequence.
        rows: maximum number of rows in a call.
        kv_bytes: bound of the memory in bytes.
        fitted: checks prompt embeddings, and fits them to the model.

    Attributes:
        memory: pages and slots.
        pages: counts the owners of pages.
        index: the prefix index.
        kv_bytes: the bound.
        asked, hit: tokens of prompts that sequences were opened with, and how many of them were known.
        kept: what is kept on disk; None for nothing.
        opened: the sequences that are not closed, by `id`.

    Raises:
        ArgumentError: `kv_bytes` is not enough for a single page and slot.
        ResourceError: the system refuses the memory.
    """

    def __init__(
        self,
        graph: Graph,
        memory: Memory,
        layouts: Layouts,
        *,
        max_seq: int,
        rows: int,
        kv_bytes: int,
        fitted: Callable[[PromptEmbeddings], PromptEmbeddings] = lambda embeddings: embeddings,
    ) -> None:
        self.sizes = sizes = Sizes.of(graph, layouts, max_seq, rows)
        self.kv_bytes, self.max_seq, self.rows = kv_bytes, max_seq, rows
        smallest = sizes.bytes_of(1, 1)
        if kv_bytes < smallest:
            what = f"{size(kv_bytes)} is too little: one page of {sizes.page} positions takes {size(smallest)}"
            raise ArgumentError(what, where="kv_bytes", hint="Give more, or leave it out.")
        count = min(kv_bytes // sizes.page_bytes if sizes.page_bytes else MAX_PAST, MAX_PAST // sizes.page)
        slots = min(kv_bytes // sizes.slot_bytes, SLOTS) if sizes.slot_bytes else 0
        try:
            self.memory = StateMemory(graph, memory, layouts, sizes.extents(count, slots), paged=True)
        except ResourceError as error:
            what = f"the system refuses {size(sizes.bytes_of(count, slots))}"
            each = f"a page of {sizes.page} positions takes {size(sizes.page_bytes)}, a slot {size(sizes.slot_bytes)}"
            hint = "Give the pool less (kv_bytes), or raise the memory limit of this process."
            found = f"{what} for the pool of caches ({each})"
            raise ResourceError(found, where="kv_bytes", hint=hint) from error
        self.pages = PageAllocator(count, page_count(max_seq, sizes.page), self._cool)
        self.index = PrefixIndex(self.pages, sizes.page)
        self.asked = self.hit = 0
        pages = (kv_bytes - sizes.slot_bytes) // sizes.page_bytes if sizes.page_bytes else MAX_PAST
        self._longest = pages * sizes.page  # positions of a sequence that has all of it
        self.kept: DiskKVCache | None = None
        self._reserve, self._lazy, self._fitted = Reserve(memory), memory.lazy, fitted
        self._slots = slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self.opened = WeakValueDictionary[int, Sequence]()

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(
        self,
        prompt: Ids[int] = (),
        embeddings: PromptEmbeddings | None = None,
        *,
        shared: bool = True,
        salt: str = "",
        adapter: int = 0,
        counts: bool = True,
    ) -> Sequence:
        """A new sequence, which holds the longest known prefix of the prompt, but at least one token less than it.

        The caller appends the rest with `Engine.step`, in chunks that end where `Sequence.call_end` says.

        Args:
            prompt: the token ids that the caller is going to append. It has to append those after the prefix.
            embeddings: rows in place of the embeddings of some tokens: one span for each image of the prompt. The ids
                there may be any, such as those of the family's placeholder. Grids and two-way attention have no effect
                in models that do not have them.
            shared: whether it takes part in the prefix index. Otherwise it begins empty, and leaves nothing.
            salt: only sequences with the same salt share prefixes.
            adapter: the number of the adapter that its rows get, 0 for none.
            counts: whether the known prefix is one that somebody uses, for statistics and for what is kept on disk.

        Raises:
            PoolFullError: there is no room for a slot.
            PromptError: a span does not fit the model, or an image whose rows see each other needs more rows than a
                call holds.
        """
        begins = shared and len(prompt) > 0
        if begins and self.opened:
            self.publish(prompt)
        if embeddings is not None:
            embeddings = self._fitted(embeddings)
        sequence = Sequence(self, embeddings=embeddings, shared=shared, salt=salt, adapter=adapter)
        self.opened[id(sequence)] = sequence
        if not begins:
            return sequence
        with on_error(sequence.discard):
            sequence.begin_with(prompt)
        if counts:
            self.asked += len(prompt)
            self.hit += sequence.done
            if self.kept is not None and sequence.done:
                self.kept.used_again(sequence.keys(sequence.done))
        return sequence

    @property
    def _sequences(self) -> list[Sequence]:
        """The sequences that somebody refers to and nobody has closed; any thread may ask."""
        return [sequence for ref in self.opened.valuerefs() if (sequence := ref()) is not None]

    def publish(self, prompt: Ids[int] | None = None) -> None:
        """Adds what the open sequences have computed so far to the prefix index.

        Args:
            prompt: of those that this may begin with; None for all.
        """
        for sequence in self._sequences:
            sequence.publish(prompt)

    def remember(self) -> None:
        """As `publish`, with the states at their ends: before the pool is closed."""
        for sequence in self._sequences:
            sequence.remember()

    def recover(self) -> None:
        """Restores all counters from their owners: after an interrupt, and for sequences that were dropped unclosed."""
        self.index.recount()
        held = [sequence.memory.pages.tolist() for sequence in self._sequences]
        self.pages.recount(held, [node.pages for node in self.index.nodes()])
        used = {slot for sequence in self._sequences for slot in sequence.memory.slots}
        free = [slot for slot in range(self._slots - 1, -1, -1) if slot not in used]
        for slot in set(free).difference(self._free_slots):
            self.memory.release_slot(slot)
        self._free_slots = free

    # -- room -----------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of pages and slots in use, and of checkpoints."""
        return self.kv_bytes - self._left()

    def _left(self, pages: int = 0, slots: int = 0) -> int:
        """Bytes that so many pages and slots more would leave of the pool; less than 0 if there is no room for them."""
        sizes, used = self.sizes, self._slots - len(self._free_slots)
        if self.pages.used + pages > self.pages.count or used + slots > self._slots:
            return -1
        taken = (self.pages.used + pages) * sizes.page_bytes + (used + slots) * sizes.slot_bytes
        return self.kv_bytes - taken - self.index.checkpoint_bytes

    def reserve(self, plans: Ids[tuple[SequenceMemory, Plan]]) -> None:
        """Gives every sequence the pages and slots for its next rows, as `SequenceMemory.plan` says: all of them, or
        none.

        Raises:
            PoolFullError: there is no room.
        """
        pages, slots = sum(plan[0] for _, plan in plans), sum(plan[1] for _, plan in plans)
        if (pages or slots) and not self.has_room(pages, slots):
            raise self._no_room(pages, slots)
        for memory, plan in plans:
            memory.grow(*plan)

    def _no_room(self, pages: int, slots: int) -> PoolFullError:
        """The error where there is no room for so many pages and slots."""
        needed, available = self.sizes.bytes_of(pages, slots), max(0, self._left())
        what = f"the pool of {size(self.kv_bytes)} has no room for {size(needed)} more ({size(available)} are free)"
        hint = "Wait for other requests to end, shorten the prompt, or open the model with a larger kv_bytes."
        return PoolFullError(what, where="kv_bytes", hint=hint, needed=needed, available=available, total=self.kv_bytes)

    def has_room(self, pages: int, slots: int = 0) -> bool:
        """Whether so many pages and slots can be taken; drops ends of the index if necessary."""
        needed = pages * self.sizes.page_bytes + slots * self.sizes.slot_bytes
        self._reserve.taken += needed
        if self._reserve.taken >= STEP and (short := self._reserve.short(needed)):
            goal = self.used_bytes - short
            self.index.evict(lambda: self.used_bytes <= goal)  # others need it more
            self._cool(0)

        if (room := self._left(pages, slots)) < 0:
            if not self.index.evict(lambda: self._left(pages, slots) >= 0):
                self.recover()  # sequences that nobody closed
            if (room := self._left(pages, slots)) < 0:
                return False
        if self.pages.warm:
            self._cool(room)
        return True

    def check_fits(self, positions: int) -> None:
        """`PoolFullError` if so many positions of one sequence do not fit, even if there were no others."""
        if positions > self._longest:
            needed = self.sizes.sequence_bytes(positions)
            what = f"{positions} tokens take {size(needed)}, and the pool holds {size(self.kv_bytes)}"
            hint = "Shorten the prompt, or open the model with a larger kv_bytes."
            raise PoolFullError(
                what, where="kv_bytes", hint=hint, needed=needed, available=self.kv_bytes, total=self.kv_bytes
            )

    # -- pages and slots, for sequences ---------------------------------------------------------------------------

    def _cool(self, room: int | None = None) -> None:
        """Gives free pages back to the system if those that are resident take more than `room`, or are many.

        Args:
            room: bytes; by default those that are left of the pool.
        """
        room = self._left() if room is None else room
        if self._lazy and len(self.pages.warm) * self.sizes.page_bytes > min(WARM_BYTES, room):
            self.memory.release_pages(list(self.pages.warm))
            self.pages.warm.clear()

    def take_slot(self) -> int:
        """A slot, whose states are zeros; there must be one."""
        return self._free_slots.pop()

    def drop_slot(self, slot: int) -> None:
        """Gives a slot back."""
        self.memory.release_slot(slot)
        self._free_slots.append(slot)

    def wipe(self, sequence: Sequence) -> None:
        """Sets the pages that only this sequence and its entries in the index hold to zeros, and drops the entries."""
        pages = sequence.memory.pages.tolist()
        self.index.forget(sequence.keys(sequence.done), set(pages))
        own = [page for page in pages if self.pages.owners[page] == 1]
        self.memory.release_pages(own)

    def add_checkpoint(self, sequence: Sequence) -> None:
        """Copies a sequence's slot into the index, at its present length; not if there is no room for it."""
        keys = sequence.keys(sequence.done)
        newest = self.index.checkpoint(keys)
        if newest is not None and newest.length == sequence.done:
            return
        saved = self.memory.save_slot(sequence.memory.slot, sequence.done)
        limit = self.kv_bytes // CHECKPOINT_SHARE
        if saved.nbytes > limit:
            return
        self.index.drop_checkpoints(limit - saved.nbytes)
        self.index.evict(lambda: self.used_bytes + saved.nbytes <= self.kv_bytes)
        if self.used_bytes + saved.nbytes <= self.kv_bytes:
            self.index.add(keys, Checkpoint(sequence.done, saved, saved.nbytes))

    # -- the whole ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Bytes and counters."""
        return {
            "kv_bytes": self.kv_bytes,
            "kv_used_bytes": self.used_bytes,
            "checkpoint_bytes": self.index.checkpoint_bytes,
            "paused_bytes": sum(saved.nbytes for each in self._sequences if (saved := each.saved) is not None),
            "prefix_tokens_asked": self.asked,
            "prefix_tokens_hit": self.hit,
            "prefix_evictions": self.index.evictions,
            **(self.kept.stats() if self.kept is not None else {}),
        }

    def close(self) -> None:
        """Releases the memory."""
        self.memory.close()
