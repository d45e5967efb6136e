"""Prompts whose states are kept on disk: which ones, and how their states come from the pool to the disk and back.

Runtime, between `pool.py` and `prefix_store.py`.

What is written, while the process runs:

- a beginning of at least 64 tokens that a second prompt began with: a system prompt, tools, a document, a conversation
  that goes on. It will come again.
- what a sequence of at least 1,024 tokens has computed when it ends. It was expensive.

When the engine is closed everything else that the prefix index knows follows, the most recently used first, for at most
5 seconds and half of the limit: it is lost otherwise.

Reading is a sequence whose rows come from files in place of programs: it takes pages from the pool, and leaves them in
the prefix index, where the prompt finds them. A prompt is read if that is quicker than computing it by measured rates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlx.compiler.state_memory import SlotCopy
from rlx.engine.kv.prefix import Keys, page_count
from rlx.engine.kv.prefix_store import BLOCK, Digests, Found, PrefixStore, Run
from rlx.engine.kv.prompt_embeddings import PromptEmbeddings
from rlx.engine.kv.sequence import SPACING, keys_of
from rlx.errors import PoolFullError

if TYPE_CHECKING:
    from rlx.engine.kv.pool import CachePool
    from rlx.engine.kv.sequence import Sequence as PoolSequence

T = TypeVar("T")
Array = np.ndarray[Any, Any]

LEAST = 64  # a beginning of fewer tokens is neither written nor read
LONG = 1024  # a sequence of so many tokens is written although nobody has asked for it again
PIECE_BYTES = 8 << 20  # copied or read between two steps of other requests: some milliseconds
CLOSE_SECONDS = 5.0  # to write what is not on disk yet when the engine is closed
WAITING = 256  # beginnings that wait to be written; older ones are dropped
RECENT = 0.3  # weight of the newest measurement of the disk

#: Runs a call where nobody else touches the pool.
Call = Callable[[Callable[[], T]], T | None]


@dataclass(frozen=True)
class _Worth:
    """A beginning that is to be written.

    Attributes:
        keys: i64 [positions].
        whole: whether the states at all checkpoints on the way count, not only those at the end.
        used: when it was last used, in seconds since the epoch; None for now.
    """

    keys: Keys
    whole: bool
    used: float | None = None


class DiskKVCache:
    """Moves the states of prompts between the pool and the disk.

    Args:
        pool: the states in memory.
        store: the states on disk.

    Attributes:
        hit: tokens of prompts whose states were read.
        notify: called when there is something to be written.
        rate: prompt tokens per second as the engine has computed them lately; 0 before it is known.
    """

    def __init__(self, pool: CachePool, store: PrefixStore) -> None:
        self.pool, self.store = pool, store
        self.hit, self.rate = 0, 0.0
        self.notify: Callable[[], object] = lambda: None
        self._waiting: deque[_Worth] = deque(maxlen=WAITING)
        self._speed = 0.0  # bytes per second of reading, with the checks and the copy into the pool
        memory = pool.memory
        self._sizes = [memory.page_shape(name) for name in memory.full]  # heads and bytes of a page, per full cache

    # -- what is worth it -----------------------------------------------------------------------------------------

    def used_again(self, keys: Keys) -> None:
        """Notes that a prompt began with what another one has computed."""
        self._note(keys, LEAST, whole=False)

    def ended(self, keys: Keys) -> None:
        """Notes what a sequence has computed when it ends."""
        self._note(keys, LONG, whole=True)

    def _note(self, keys: Keys, least: int, *, whole: bool) -> None:
        if len(keys) >= least and self.store.problem is None:
            self._waiting.append(_Worth(keys, whole))
            self.notify()

    @property
    def is_waiting(self) -> bool:
        """Whether something is to be written."""
        return bool(self._waiting)

    # -- reading --------------------------------------------------------------------------------------------------

    def reading(
        self, prompt: Sequence[int], embeddings: PromptEmbeddings | None = None, salt: str = ""
    ) -> Generator[None, None, None] | None:
        """Work that brings the beginning of a prompt from disk into the prefix index, a piece between two `yield`s.

        None if there is nothing on disk that memory lacks, or if computing it is quicker. `salt` is that of the
        sequence which will hold the prompt.
        """
        if not self.store.is_ready or (embeddings is not None and embeddings.bias is not None):
            return None
        keys = keys_of(prompt, embeddings, salt)[: len(prompt) - 1]
        if len(keys) < LEAST:
            return None
        known, digests = self._known(keys), self.store.digests(keys)
        found = self.store.find(digests, len(keys))
        if found is None or found.length - known < LEAST or not self._pays(found, known, self.rate):
            return None
        opened = partial(self.pool.open, prompt, embeddings=embeddings, salt=salt, counts=False)
        return self._read(prompt, opened, digests, found, known)

    def _known(self, keys: Keys) -> int:
        """How many of the first positions a sequence with these keys would take over from memory."""
        self.pool.publish()
        if not self.store.has_states:
            return self.pool.index.known(keys)
        checkpoint = self.pool.index.checkpoint(keys)
        return checkpoint.length if checkpoint else 0

    def _pays(self, found: Found, known: int, rate: float) -> bool:
        """Whether reading is quicker than computing; so it is as long as nobody has measured both."""
        nbytes = (page_count(found.length, self.store.page) - known // self.store.page) * self.store.page_bytes
        nbytes += self.pool.sizes.slot_bytes if found.states else 0
        return not (self._speed and rate) or nbytes / self._speed <= (found.length - known) / rate

    def _read(
        self, prompt: Sequence[int], opened: Callable[[], PoolSequence], digests: Digests, found: Found, known: int
    ) -> Generator[None, None, None]:
        state = None
        if found.states:
            state = self._state_of(found)
            if state is None:  # damaged: perhaps an earlier one is not
                again = self.store.find(digests, len(digests.keys))
                if again is not None and again.length - known >= LEAST and again.addresses != found.addresses:
                    yield from self._read(prompt, opened, digests, again, known)
                return
        sequence = opened()
        try:
            start = sequence.done
            if found.length - start < LEAST:
                return
            sequence.begin(found.length - start)
            done = yield from self._fill(sequence, found, start)
            if state is not None and done == found.length:
                sequence.memory.put(state)
                sequence.end(prompt[start:done], ring_start=state.first)
            elif state is None and done > start:
                sequence.end(prompt[start:done])
            else:
                return
            self.hit += sequence.done - start
            self.store.touch(found.addresses)
        except PoolFullError:
            return
        finally:
            sequence.close()

    def _fill(self, sequence: PoolSequence, found: Found, start: int) -> Generator[None, None, int]:
        """Reads the pages from position `start` on; returns up to which position they hold states."""
        memory, page, done = self.pool.memory, self.store.page, start // self.store.page * self.store.page
        most = max(1, PIECE_BYTES // max(1, self.store.page_bytes))
        for run in found.runs:
            if run.used <= start:
                continue
            entry = self.store.open_run(run)
            if entry is None:
                return max(start, done)
            rate = self.rate or self.store.rate(entry)
            while done < run.used:
                began = time.perf_counter()
                count = min(most, page_count(run.used - done, page))
                pages = self.store.read(entry, (done - run.start) // page, count, self.store.page_bytes)
                if pages is None:
                    return max(start, done)
                at = done // page
                memory.load_pages(sequence.pages[at : at + count], self._split(pages))
                done = min(run.used, done + count * page)
                self._measure(pages.nbytes, time.perf_counter() - began)
                if done < found.length and not found.states and not self._pays(found, done, rate):
                    return done
                yield
        return found.length

    def _measure(self, nbytes: int, seconds: float) -> None:
        now = nbytes / max(seconds, 1e-9)
        self._speed = now if not self._speed else self._speed + RECENT * (now - self._speed)

    def _split(self, parts: Array) -> list[Array]:
        """Pages u8 [pages, bytes] as those of each full cache, u8 [heads, pages, bytes]."""
        found, at = [], 0
        for heads, nbytes in self._sizes:
            part = parts[:, at : at + heads * nbytes].reshape(len(parts), heads, nbytes)
            found.append(part.transpose(1, 0, 2))
            at += heads * nbytes
        return found

    def _state_of(self, found: Found) -> SlotCopy | None:
        shapes = self.pool.memory.slot_shapes(found.length)
        nbytes = sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in shapes)
        began = time.perf_counter()
        entry = self.store.open_states(found)
        parts = None if entry is None else self.store.read(entry, 0, 1, nbytes)
        if parts is None:
            return None
        self._measure(parts.nbytes, time.perf_counter() - began)
        arrays, at = [], 0
        for dtype, shape in shapes:
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            arrays.append(parts[0, at : at + size].view(dtype).reshape(shape))
            at += size
        return SlotCopy(self.pool.memory.first_read(found.length), found.length, tuple(arrays))

    # -- writing --------------------------------------------------------------------------------------------------

    def write_next(self, call: Call[Any], keep_on: Callable[[], bool]) -> None:
        """Writes what has waited longest.

        Args:
            call: runs a call where nobody else touches the pool: each copies some pages. None if it could not.
            keep_on: asked before each of them; False ends it.
        """
        try:
            worth = self._waiting.popleft()
        except IndexError:
            return
        if self.store.may_write:
            self._write(worth, call, keep_on)
        if not keep_on() and len(self._waiting) < WAITING:  # perhaps it was not finished; newer ones are worth more
            self._waiting.appendleft(worth)

    def write_all(self, call: Call[Any]) -> None:
        """Writes what waits and what else the prefix index knows, for at most `CLOSE_SECONDS`."""
        end = time.monotonic() + CLOSE_SECONDS
        most = self.store.written_bytes + self.store.store.limit // 2

        def keep_on() -> bool:
            return self.store.may_write and time.monotonic() < end and self.store.written_bytes < most

        if keep_on():
            call(self.pool.remember)
        while self._waiting and keep_on():
            self.write_next(call, keep_on)
        now = time.time()
        for at, keys in enumerate(self.pool.index.ends() if keep_on() else ()):
            if not keep_on():
                return
            if len(keys) >= LEAST:
                self._write(_Worth(keys, True, now - at), call, keep_on)

    def _write(self, worth: _Worth, call: Call[Any], keep_on: Callable[[], bool]) -> None:
        keys = worth.keys
        if not self.store.has_states:
            self._write_pages(self.store.digests(keys), len(keys), worth.used, call, keep_on)
            return
        states: list[tuple[int, Any]] = call(partial(self.pool.index.checkpoints, keys)) or []
        chosen = [
            (length, state)
            for length, state in states
            if length >= LEAST and (length == len(keys) or (worth.whole and length % SPACING))
        ]
        digests = self.store.digests(keys)
        for length, state in chosen:
            if self.store.has_states_at(digests, length):
                self._touch(digests, length)
            elif not keep_on() or not self._write_pages(digests, length, worth.used, call, keep_on):
                return
            else:
                data = b"".join(np.ascontiguousarray(array).tobytes() for array in state.arrays)
                self.store.write_states(digests, length, data, self.rate, worth.used)

    def _touch(self, digests: Digests, length: int) -> None:
        found = self.store.find(digests, length)
        if found is not None:
            self.store.touch(found.addresses)

    def _write_pages(
        self, digests: Digests, length: int, used: float | None, call: Call[Any], keep_on: Callable[[], bool]
    ) -> bool:
        """Writes the pages of the first `length` positions that are not on disk; returns whether all of them are."""
        used = time.time() if used is None else used  # of all blocks: the store then removes the last ones first
        if not self.store.page_bytes:
            return True
        runs: list[Run] = self.store.covering(digests, length)
        covered = runs[-1].used if runs else 0
        if covered >= length:
            self.store.touch([run.address for run in runs])
            return True
        for start in range(covered // BLOCK * BLOCK, length, BLOCK):
            end = min(start + BLOCK, length)
            parts = self._copied(digests.keys[:end], start, call, keep_on)
            if parts is None or not self.store.write_pages(digests, end, parts, self.rate, used):
                return False
        return True

    def _copied(self, keys: Keys, start: int, call: Call[Any], keep_on: Callable[[], bool]) -> list[bytes] | None:
        """The pages from position `start` to the end of the keys; None if the pool does not hold them any more."""
        page, parts = self.store.page, list[bytes]()
        count = max(1, PIECE_BYTES // self.store.page_bytes)
        last = page_count(len(keys), page)
        for first in range(start // page, last, count):
            end = min(last, first + count)
            saved = call(partial(self._pages, keys, first, end)) if keep_on() else None
            if saved is None:
                return None
            parts += [b"".join(array[:, i].tobytes() for array in saved) for i in range(end - first)]
        return parts

    def _pages(self, keys: Keys, first: int, last: int) -> list[Array] | None:
        """Copies of pages first .. last of the positions with these keys, as `StateMemory.save_pages`.

        None if the prefix index does not know them any more.
        """
        if self.pool.index.known(keys) < len(keys):
            return None
        return self.pool.memory.save_pages(self.pool.index.table(keys)[first:last])

    def stats(self) -> dict[str, int]:
        """Bytes and counters."""
        return {"cache_kv_tokens_hit": self.hit, **self.store.stats()}
