"""The page allocator and the prefix index, against plain Python models of what they promise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.engine.kv.prefix import Checkpoint, PageAllocator, PrefixIndex, page_count

pytestmark = pytest.mark.any_machine

PAGE = 4
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=22)


def test_pages_lie_in_a_row_and_sequences_apart() -> None:
    """A sequence that grows gets the next page, as long as nobody else has it."""
    pages = PageAllocator(64, 30)
    first = [pages.take()]
    second = [pages.take()]
    for _ in range(20):
        first.append(pages.take(first[-1]))
        second.append(pages.take(second[-1]))
    assert np.diff(first).tolist() == np.diff(second).tolist() == [1] * 20
    assert not set(first) & set(second)
    while pages.free:
        first.append(pages.take(first[-1]))
    assert sorted(first + second) == list(range(64)), "in the end every page is taken"


def test_a_sequence_begins_where_memory_is_resident() -> None:
    pages = PageAllocator(64, 16)
    first, second = ([pages.take()] for _ in range(2))
    for _ in range(3):
        first.append(pages.take(first[-1]))
        second.append(pages.take(second[-1]))
    pages.drop(second)
    third = [pages.take()]
    third.append(pages.take(third[-1]))
    assert third == second[:2]
    pages.drop(first[:1])  # what follows is still in use
    assert pages.take() == 32


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
@settings(deadline=None)
def test_owners_are_counted(steps: list[tuple[int, int]]) -> None:
    pages, model = PageAllocator(12, 5), Counter[int]()
    frozen: dict[int, int] = {}
    for verb, number in steps:
        held = sorted(model)
        if verb == 0 and pages.free:
            page = pages.take(held[number % len(held)] if held and number % 2 else None)
            assert page not in model
            model[page], frozen[page] = 1, 0
        elif verb == 1 and held:
            page = held[number % len(held)]
            pages.share([page])
            model[page] += 1
        elif verb == 2 and held:
            page = held[number % len(held)]
            model[page] -= 1
            assert pages.drop([page]) == ([] if model[page] else [page])
            model = +model
        elif verb == 3 and held:
            page = held[number % len(held)]
            pages.enter([page], number % 4)
            model[page] += 1
            frozen[page] = max(frozen[page], number % 4)
        assert pages.used == len(model)
        for page in model:
            for position in range(4):
                assert pages.must_copy(page, position) == (model[page] > 1 and position < frozen[page])
    before = pages.owners.copy()
    pages.owners[:] = 77  # after an interrupt
    pages.recount([[page] * count for page, count in model.items()], [])
    assert np.array_equal(pages.owners, before) and pages.used == len(model)


class Writer:
    """A stand-in for sequences: it writes each token to its place, copies what the index relies on, and checks reads.

    Attributes:
        content: what every place of every page holds: the whole prefix that the position belongs to.
        known: every prefix that was inserted, as a tuple of keys.
    """

    def __init__(self, count: int) -> None:
        self.freed: list[int] = []  # how many pages are free after each release
        self.pages = PageAllocator(count, 3, lambda: self.freed.append(self.pages.free))
        self.index = PrefixIndex(self.pages, PAGE)
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.known: set[tuple[int, ...]] = set()

    def run(self, keys: list[int], states: bool, checkpoints: list[int]) -> int:
        """A sequence from its begin to its end; returns the number of positions that it took over."""
        hit = self.index.find(np.array(keys[:-1], np.int64), states)
        self.check(keys, hit.pages, hit.length)
        self.pages.share(hit.pages)
        table, length = list(hit.pages), hit.length
        if length % PAGE:  # the last page is written to
            if not self.room(1):
                self.pages.drop(table)
                return 0
            page = self.pages.take()
            for place in range(PAGE):
                self.content[page, place] = self.content.get((table[-1], place), ())
            self.pages.drop([table.pop()])
            table.append(page)
        missing = page_count(len(keys), PAGE) - len(table)
        if self.room(missing):
            for _ in range(missing):
                table.append(self.pages.take(table[-1] if table else None))
            for position in range(length, len(keys)):
                page = table[position // PAGE]
                assert not self.pages.must_copy(page, position % PAGE)
                self.content[page, position % PAGE] = tuple(keys[: position + 1])
            for end in [*checkpoints, len(keys)]:
                part = np.array(keys[:end], np.int64)
                if length < end <= len(keys):
                    self.index.insert(part, np.array(table, np.int32))
                    self.known |= {tuple(keys[: i + 1]) for i in range(end)}
                    if end in checkpoints:
                        self.index.add(part, Checkpoint(end, tuple(keys[:end]), 10))
        self.pages.drop(table)
        return length

    def room(self, count: int) -> bool:
        return self.index.evict(lambda: self.pages.free >= count)

    def check(self, keys: list[int], table: list[int], length: int) -> None:
        """The pages of a hit hold the prefixes that they are taken for."""
        assert len(table) == page_count(length, PAGE)
        for position in range(length):
            assert self.content[table[position // PAGE], position % PAGE] == tuple(keys[: position + 1])

    def consistent(self) -> None:
        """Every counter says what the nodes hold, and nothing else holds a page."""
        held = Counter(page for node in self.index.nodes() for page in node.pages)
        assert dict(held) == {i: n for i, n in enumerate(self.pages.owners.tolist()) if n}
        assert np.array_equal(self.pages.owners, self.pages.indexed)
        kept = sum(c.nbytes for node in self.index.nodes() for c in node.checkpoints.values())
        assert kept == self.index.checkpoint_bytes
        for node in self.index.nodes():
            assert len(node.pages) == (page_count(node.end, PAGE) - node.start // PAGE if len(node.keys) else 0)
            assert all(child.start == node.end and child.keys[0] == key for key, child in node.children.items())


@given(st.lists(TOKENS, max_size=12))
@settings(deadline=None)
def test_the_longest_known_prefix_is_found(prompts: list[list[int]]) -> None:
    """With room for everything: exactly what a set of all prefixes says, and the right content."""
    writer = Writer(400)
    for keys in prompts:
        best = max((n for n in range(len(keys)) if not n or tuple(keys[:n]) in writer.known), default=0)
        assert writer.run(keys, False, []) == best
        writer.consistent()
    assert writer.index.evictions == 0
    writer.index.clear()
    assert writer.pages.used == 0


@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(1, 22), max_size=3)), max_size=12))
@settings(deadline=None)
def test_states_are_taken_over_at_the_newest_checkpoint(prompts: list[tuple[list[int], list[int]]]) -> None:
    writer, kept = Writer(400), dict[tuple[int, ...], int]()
    for keys, marks in prompts:
        best = max((len(p) for p in kept if p == tuple(keys[: len(p)]) and len(p) < len(keys)), default=0)
        assert writer.run(keys, True, sorted(marks)) == best
        hit = writer.index.find(np.array(keys, np.int64), True)
        assert hit.checkpoint is None or hit.checkpoint.state == tuple(keys[: hit.length])
        for end in marks:
            if best < end <= len(keys):
                kept[tuple(keys[:end])] = 1
        writer.consistent()
    writer.index.drop_checkpoints(25)
    assert writer.index.checkpoint_bytes <= 20
    writer.consistent()


@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(1, 22), max_size=2)), max_size=25), st.booleans())
@settings(deadline=None)
def test_little_room(prompts: list[tuple[list[int], list[int]]], states: bool) -> None:
    """Nothing is lost or counted wrong where the least recently used ends go; hits are right, if shorter."""
    writer = Writer(8)
    for keys, marks in prompts:
        writer.run(keys, states, sorted(marks) if states else [])
        writer.consistent()


def test_the_least_recently_used_end_goes_first() -> None:
    writer = Writer(8)
    a, b, c = [1] * 12, [2] * 12, [3] * 12
    writer.run(a, False, [])
    writer.run(b, False, [])
    writer.run([*a, 1], False, [])  # uses a; 7 pages
    writer.run(c, False, [])  # needs three: both ends of b that are free to go
    known = {name: writer.index.known(np.array(keys, np.int64)) for name, keys in (("a", a), ("b", b), ("c", c))}
    assert known == {"a": 12, "b": 4, "c": 12}
    assert writer.index.evictions == 2 and len(writer.freed) == 2


def test_a_sequence_that_is_forgotten_leaves_what_others_share() -> None:
    writer = Writer(40)
    writer.run([1, 2, 3, 4, 5, 6], False, [])
    writer.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], False, [])
    keys = np.arange(1, 14)
    hit = writer.index.find(keys, False)
    writer.index.forget(keys, set(hit.pages[2:]))
    assert writer.index.known(keys) == 8
    writer.consistent()
