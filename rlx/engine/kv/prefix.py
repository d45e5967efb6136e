"""The prefix index: what is known about the beginnings of prompts, so that a shared beginning is computed once.

Runtime, under `pool.py`. The index is a radix tree over keys, one for each position: a token id, or a hash of what
stands there in place of a token (a row of an image, or a caller's embedding). A node holds a run of keys, the pages
with the keys and values of these positions, and checkpoints: copies of rings and recurrent states at a position.

A page may begin in one node and end in the next. Both then hold it. If two branches part inside a page, each branch has
a page of its own, which also holds the positions that both share. The page of the deepest node therefore holds all
positions of its path.

Nodes have no link to their parents, and a node that is split is replaced in one assignment. So the tree is whole after
an interrupt at any instruction.

A page is a number: 64 positions of the pool's full caches, whose memory lies in every full cache of the model
(`StateMemory`). Its owners are sequences and nodes of the index; each of them counts once for each page that it holds.
Truth lies with the owners: `recount` restores the counters from them, after an interrupt at any instruction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]

_LOOK = 1024  # pages looked at in one go


class PageAllocator:
    """Counted references to pages.

    Args:
        count: how many pages there are.
        apart: how many pages lie between the beginnings of two sequences, if they are free.
        released: called when pages are free that had an owner.

    Attributes:
        owners: i32 [count], how many owners hold each page; 0 is a free page.
        indexed: i32 [count], how many of them are nodes of the prefix index.
        frozen: i32 [count], how many positions of each page other owners rely on. A sequence may write behind them; to
            write before them it copies the page first, unless it is the only owner.
        used: number of pages that are not free.
        warm: free pages that may be resident.
    """

    def __init__(self, count: int, apart: int, released: Callable[[], object] = lambda: None) -> None:
        self.count, self._apart_by, self._released, self._next = count, apart, released, 0
        self.owners, self.indexed, self.frozen = (np.zeros(count, np.int32) for _ in range(3))
        self.used, self.warm = 0, set[int]()

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self.count - self.used

    def take(self, after: int | None = None) -> int:
        """A free page, which then has one owner. There must be one.

        Args:
            after: the page of the positions before. The next page is preferred, so that a sequence's pages lie in a
                row, which attention reads fastest.
        """
        following = -1 if after is None else after + 1
        page = following if 0 <= following < self.count and not self.owners[following] else self._apart()
        self.owners[page], self.frozen[page] = 1, 0
        self.used += 1
        self.warm.discard(page)
        return page

    def _apart(self) -> int:
        """The page where the next sequence begins: where one began whose pages are resident, else the next free place.

        Memory that is used for the first time costs page faults, twice the time that it takes to write the caches.
        """
        if warm := [page for page in self.warm if page % self._apart_by == 0 and not self.owners[page + 1 :][:1].any()]:
            return min(warm)
        for begin, end in (self._next, self.count), (0, self._next):
            for at in range(begin, end, _LOOK):
                free = np.flatnonzero(self.owners[at : min(at + _LOOK, end)] == 0)
                if len(free):
                    page = at + int(free[0])
                    self._next = (page + self._apart_by) % self.count
                    return page
        raise AssertionError("no page is free")

    def share(self, pages: list[int]) -> None:
        """One more owner for each of the pages, which are different."""
        self.owners[pages] += 1

    def enter(self, pages: list[int], positions: npt.ArrayLike) -> None:
        """The index holds pages, which are different, from now on, and relies on the first positions of each."""
        self.owners[pages] += 1
        self.indexed[pages] += 1
        self.frozen[pages] = np.maximum(self.frozen[pages], positions)

    def drop(self, pages: Iterable[int], *, index: bool = False) -> list[int]:
        """One owner less for each of the pages; returns those that are free now."""
        freed = []
        for page in pages:
            self.owners[page] -= 1
            self.indexed[page] -= index
            if not self.owners[page]:
                self.frozen[page] = 0
                self.used -= 1
                freed.append(page)
        if freed:
            self.warm.update(freed)
            self._released()
        return freed

    def must_copy(self, page: int, position: int) -> bool:
        """Whether a write at this position of the page, 0 to 63, would destroy what another owner relies on."""
        return bool(self.owners[page] > 1 and position < self.frozen[page])

    def is_reclaimable(self, page: int) -> bool:
        """Whether only the prefix index holds it."""
        return bool(self.owners[page] == self.indexed[page])

    def recount(self, sequences: Iterable[Iterable[int]], index: Iterable[Iterable[int]]) -> None:
        """Sets the counters to what the owners hold: the pages of each sequence, and of each node of the index."""
        owners, indexed = np.zeros_like(self.owners), np.zeros_like(self.indexed)
        for pages in sequences:
            for page in pages:
                owners[page] += 1
        for pages in index:
            for page in pages:
                owners[page] += 1
                indexed[page] += 1
        self.frozen[owners == 0] = 0
        self.warm |= set(np.flatnonzero((self.owners > 0) & (owners == 0)).tolist())
        self.warm -= set(np.flatnonzero(owners).tolist())
        self.owners[:], self.indexed[:] = owners, indexed
        self.used = int(np.count_nonzero(owners))


def page_count(positions: int, page: int) -> int:
    """How many pages so many positions take."""
    return -(-positions // page)


Keys = npt.NDArray[np.int64]


@dataclass(eq=False)
class Checkpoint:
    """The rings and recurrent states of a sequence at a position.

    Attributes:
        length: number of positions that led to them.
        state: the copy; `StateMemory.save_slot` makes it.
        nbytes: its size.
        used: when it was last used, on the clock of the index.
    """

    length: int
    state: Any
    nbytes: int
    used: int = 0


@dataclass(eq=False)
class Node:
    """A run of positions.

    Attributes:
        start: position of its first key.
        keys: i64 [positions].
        pages: the pages that hold them; the first one may begin before `start`.
        children: by their first key.
        checkpoints: by length, from start + 1 to its end.
        used: when it was last used, on the clock of the index.
    """

    start: int
    keys: Keys
    pages: list[int]
    children: dict[int, Node] = field(default_factory=dict)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    used: int = 0

    @property
    def end(self) -> int:
        """Position after its last key."""
        return self.start + len(self.keys)


@dataclass(frozen=True)
class Hit:
    """The result of a look-up.

    Attributes:
        length: how many positions can be taken over.
        pages: the pages that hold them.
        checkpoint: the states at `length`; None if the model has none, or nothing was found.
        common: how many positions are known; at least `length`.
    """

    length: int
    pages: list[int]
    checkpoint: Checkpoint | None
    common: int


class PrefixIndex:
    """A radix tree from prefixes to pages and checkpoints.

    Args:
        pages: counts the pages; the index is an owner of those that it holds.
        page: positions per page.

    Attributes:
        checkpoint_bytes: size of all checkpoints.
        evictions: how many pages and checkpoints were dropped to make room.
    """

    def __init__(self, pages: PageAllocator, page: int) -> None:
        self._pages, self._page = pages, page
        self._root = Node(0, np.zeros(0, np.int64), [])
        self._clock = 0
        self.checkpoint_bytes = self.evictions = 0

    # -- looking up -----------------------------------------------------------------------------------------------

    def find(self, keys: Keys, states: bool) -> Hit:
        """The longest known prefix of some keys that a sequence can begin with.

        Args:
            states: whether the model has rings or recurrent states: the prefix then ends at a checkpoint.
        """
        path, common = self._walk(keys, uses=True)
        if not path:
            return Hit(0, [], None, 0)
        checkpoint = self._checkpoint(path, common) if states else None
        if checkpoint is not None:
            checkpoint.used = self._clock
        length = common if not states else checkpoint.length if checkpoint else 0
        return Hit(length, self._table(path, length), checkpoint, common)

    def checkpoint(self, keys: Keys) -> Checkpoint | None:
        """The newest checkpoint on the way of these keys, or None."""
        path, common = self._walk(keys)
        return self._checkpoint(path, common)

    def known(self, keys: Keys) -> int:
        """How many of the keys are known."""
        return self._walk(keys)[1]

    def table(self, keys: Keys) -> list[int]:
        """The pages of the longest known beginning of some keys; looks only, so that it does not count as used."""
        return self._table(*self._walk(keys))

    def _table(self, path: list[Node], length: int) -> list[int]:
        """The pages of the first positions of a path."""
        found: list[int] = []
        for node in path:
            if node.start < length:
                found[node.start // self._page :] = node.pages
        return found[: page_count(length, self._page)]

    def checkpoints(self, keys: Keys) -> list[tuple[int, Any]]:
        """Length and states of all checkpoints on the way of some keys, in order; looks only."""
        path, common = self._walk(keys)
        every = (checkpoint for node in path for checkpoint in node.checkpoints.values())
        return sorted(((c.length, c.state) for c in every if c.length <= common), key=lambda each: each[0])

    def ends(self) -> list[Keys]:
        """The keys up to the end of each leaf, those that were used last first."""
        found: list[tuple[int, Keys]] = []
        waiting = [(self._root, self._root.keys)]
        while waiting:
            node, keys = waiting.pop()
            waiting += [(child, np.concatenate([keys, child.keys])) for child in node.children.values()]
            if not node.children and len(keys):
                found.append((node.used, keys))
        return [keys for _, keys in sorted(found, key=lambda each: -each[0])]

    def _walk(self, keys: Keys, *, uses: bool = False) -> tuple[list[Node], int]:
        """The nodes on the way of some keys, and how many keys they share with it; the last one may share a part.

        Args:
            uses: whether the nodes are used now.
        """
        node, at, path = self._root, 0, list[Node]()
        self._clock += uses
        while at < len(keys) and (child := node.children.get(int(keys[at]))) is not None:
            count = common_length(child.keys, keys[at:])
            path.append(child)
            at += count
            if uses:
                child.used = self._clock
            if count < len(child.keys):
                break
            node = child
        return path, at

    @staticmethod
    def _checkpoint(path: list[Node], common: int) -> Checkpoint | None:
        for node in reversed(path):
            lengths = [length for length in node.checkpoints if length <= common]
            if lengths:
                return node.checkpoints[max(lengths)]
        return None

    # -- adding ---------------------------------------------------------------------------------------------------

    def insert(self, keys: Keys, table: npt.NDArray[np.int32]) -> None:
        """Adds the keys of a sequence and the pages that hold them; what is known already stays as it is.

        Args:
            keys: i64 [positions].
            table: i32 [pages or more], the sequence's page table.
        """
        path, at = self._walk(keys)
        if at < len(keys):
            path = self._grow(path, at, keys, table)
        self._clock += 1
        for node in path:  # not what was split off
            node.used = self._clock

    def _grow(self, path: list[Node], at: int, keys: Keys, table: npt.NDArray[np.int32]) -> list[Node]:
        """Adds the keys from position `at` on, behind the last node of the path."""
        before = path[-2] if len(path) > 1 else self._root
        last = path[-1] if path else self._root
        if last is not self._root and at < last.end:
            last = self._split(before, last, at)
            path = [*path[:-1], last]
        first = at // self._page
        pages = table[first : page_count(len(keys), self._page)].tolist()
        positions = np.minimum(self._page, len(keys) - np.arange(first, first + len(pages)) * self._page)
        self._pages.enter(pages, positions)
        if last is self._root or last.children:
            node = Node(at, keys[at:].copy(), pages)
            last.children[int(keys[at])] = node
            return [*path, node]
        # A leaf that nothing else follows grows. The new page holds what the one before it held, and more.
        kept = first - last.start // self._page
        old = last.pages[kept:]
        own, held = np.concatenate([last.keys, keys[at:]]), [*last.pages[:kept], *pages]
        longer = Node(last.start, own, held, {}, last.checkpoints)
        before.children[int(longer.keys[0])] = longer
        self._pages.drop(old, index=True)
        return [*path[:-1], longer]

    def _split(self, before: Node, node: Node, at: int) -> Node:
        """Replaces a node by two that meet at position `at`; returns the first one."""
        count, first = at - node.start, node.start // self._page
        head_pages = node.pages[: page_count(at, self._page) - first]
        tail_pages = node.pages[at // self._page - first :]
        if at % self._page:
            self._pages.enter(tail_pages[:1], 0)  # the page in which they meet
        sides: tuple[dict[int, Checkpoint], ...] = {}, {}
        for length, checkpoint in node.checkpoints.items():
            sides[length > at][length] = checkpoint
        tail = Node(at, node.keys[count:], tail_pages, node.children, sides[1], node.used)
        head = Node(node.start, node.keys[:count], head_pages, {int(tail.keys[0]): tail}, sides[0], node.used)
        before.children[int(head.keys[0])] = head
        return head

    def add(self, keys: Keys, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint at the end of some keys, which were inserted."""
        path, common = self._walk(keys, uses=True)
        if common < len(keys) or not path:
            return
        checkpoint.used = self._clock
        old = path[-1].checkpoints.get(checkpoint.length)
        path[-1].checkpoints[checkpoint.length] = checkpoint
        self.checkpoint_bytes += checkpoint.nbytes - (old.nbytes if old else 0)

    # -- dropping -------------------------------------------------------------------------------------------------

    def evict(self, enough: Callable[[], bool]) -> bool:
        """Drops the ends of least recently used leaves until there is enough room; returns whether there is.

        Leaves whose pages are all in use by sequences stay: dropping them gives no room.
        """
        parents = {id(child): (child, node) for node in self.nodes() for child in node.children.values()}
        leaves = [(node.used, key) for key, (node, _) in parents.items() if not node.children]
        heapq.heapify(leaves)
        while not enough() and leaves:
            node, before = parents[heapq.heappop(leaves)[1]]
            while node.pages and self._gives(node) and not enough():
                self._shorten(node)
            if len(node.keys):
                continue
            before.children = {key: child for key, child in before.children.items() if child is not node}
            if before is not self._root and not before.children:
                heapq.heappush(leaves, (before.used, id(before)))
        return enough()

    def drop_checkpoints(self, limit: int) -> None:
        """Drops the least recently used checkpoints until all of them take at most `limit` bytes."""
        if self.checkpoint_bytes <= limit:
            return
        every = [(c.used, c.length, node) for node in self.nodes() for c in node.checkpoints.values()]
        for _, length, node in sorted(every, key=lambda each: each[:2]):
            if self.checkpoint_bytes <= limit:
                break
            self.checkpoint_bytes -= node.checkpoints.pop(length).nbytes
            self.evictions += 1

    def forget(self, keys: Keys, pages: set[int]) -> None:
        """Drops the end of the way of some keys, as far as it lies in these pages and nothing else follows."""
        path, common = self._walk(keys)
        for before, node in reversed([*zip([self._root, *path], path, strict=False)]):
            if node.end > common:
                return
            while not node.children and node.pages and node.pages[-1] in pages:
                self._shorten(node)
            if len(node.keys):
                return
            before.children = {key: child for key, child in before.children.items() if child is not node}

    def _gives(self, node: Node) -> bool:
        return bool(node.checkpoints) or any(map(self._pages.is_reclaimable, node.pages))

    def _shorten(self, leaf: Node) -> None:
        """Drops the last page of a leaf, with its keys and checkpoints."""
        end = max((leaf.start // self._page + len(leaf.pages) - 1) * self._page, leaf.start)
        for length in [length for length in leaf.checkpoints if length > end]:
            self.checkpoint_bytes -= leaf.checkpoints.pop(length).nbytes
            self.evictions += 1
        page = leaf.pages[-1]
        leaf.keys, leaf.pages = leaf.keys[: end - leaf.start], leaf.pages[:-1]
        self.evictions += 1
        self._pages.drop([page], index=True)

    def clear(self) -> None:
        """Drops everything."""
        held = [page for node in self.nodes() for page in node.pages]
        self._root.children = {}
        self.checkpoint_bytes = 0
        self._pages.drop(held, index=True)

    # -- inspection -----------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """The root and all nodes below it."""
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def recount(self) -> None:
        """Sets `checkpoint_bytes` to what the nodes hold, and drops nodes that an interrupt left without keys."""
        for node in self.nodes():
            node.children = {key: child for key, child in node.children.items() if len(child.keys)}
        self.checkpoint_bytes = sum(c.nbytes for node in self.nodes() for c in node.checkpoints.values())


def common_length(a: Keys, b: Keys) -> int:
    """Length of the common prefix."""
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
