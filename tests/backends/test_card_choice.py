"""The choice of tokens on a card: its kernels, run on paper (`simt.py`), choose the tokens of the meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import simt
from paper_driver import PaperDriver

from rlx.backends.cuda import driver
from rlx.backends.cuda.agreed.choice import (
    AMOUNTS,
    CHANGES,
    COUNTERS,
    COUNTS,
    EXTENTS,
    FIRST_NUMBER,
    GREEDY,
    IDS,
    LISTED,
    LOGITS,
    MASK,
    MASKED,
    PART,
    PART_WORDS,
    POINTERS,
    ROW_WORDS,
    TOO_MANY,
    WORDS,
    describe,
)
from rlx.backends.cuda.chooser import Chooser
from rlx.backends.cuda.code import THREADS, Code, kernel_of
from rlx.backends.cuda.kernels import choose as kernels
from rlx.backends.cuda.memory import CardMemory
from rlx.backends.memory import DeviceArray
from rlx.errors import ResourceError
from rlx.sampling.choice import UNIFORM, Changes, Choice, choose
from rlx.sampling.filters import INTERVALS
from rlx.sampling.options import SampleOpts

VOCAB = 2 * PART + 77


class Card:
    """A card on paper with the three kernels, and memory for rows of `VOCAB` logits."""

    def __init__(self, rows: int) -> None:
        self.parts = -(-VOCAB // PART)
        self.memory = simt.Memory(1 << 22)
        sizes = {
            "parts": rows * PART_WORDS * self.parts, "rows": rows * ROW_WORDS, "counters": rows * COUNTERS,
            "sums": rows * 2 * INTERVALS, "listed": rows * 2 * LISTED, "found": rows,
        }  # fmt: skip
        self.places = {name: self.memory.put(np.zeros(size, np.int64)) for name, size in sizes.items()}
        self.programs = []
        for emit in kernels.kernels().values():
            code = Code("kernel", dict.fromkeys(POINTERS), EXTENTS)
            emit(code)
            kernel = kernel_of(code)
            self.programs.append((simt.Program(kernel.text), kernel.shared))

    def choose(self, rows: list[np.ndarray[Any, Any]], choices: list[Choice]) -> list[tuple[int, bool]]:
        table = np.zeros((len(rows), WORDS), np.int64)
        describe(table, [self.memory.put(row) for row in rows], choices, self.memory.put)
        places = {"memory": 0, "table": self.memory.put(table), **self.places}
        for program, shared in self.programs:
            program(self.memory, len(rows) * self.parts, places, [VOCAB, self.parts], shared)
        for name in ("counters", "sums"):
            assert not self.memory.get(places[name], (len(rows), 4), np.int32).any(), "0 between calls"
        found = self.memory.get(places["found"], (len(rows), 2), np.int32)
        return [(token, bool(is_finite)) for token, is_finite in found.tolist()]


def logits(seed: int = 0, spread: float = 3.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


def drawn(uniform: float, *rest: Any, **options: Any) -> Choice:
    found = Choice(SampleOpts(seed=1, **options), *rest)
    found.numbers[UNIFORM] = uniform
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "likeliest": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.9, "temperature": 0.7},
    "both": {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "min-p": {"min_p": 0.05, "temperature": 2.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_of_the_meaning(name: str) -> None:
    """Several rows at once, drawn at several places."""
    rows = [logits(1), np.round(logits(2)), logits(3, 0.4)]
    choices = [drawn(uniform, **OPTIONS[name]) for uniform in (0.03, 0.5, 0.99999)]
    expected = [choose(row, choice)[:2] for row, choice in zip(rows, choices, strict=True)]
    assert Card(3).choose(rows, choices) == expected


def changes_of(vocab: int) -> Changes:
    """Ids that come several times, some outside of the vocabulary; additions, penalties, and a ban."""
    rng = np.random.default_rng(4)
    ids = np.append(rng.integers(-3, vocab + 3, 90), [7, 7, PART, 7, vocab - 1]).astype(np.int32)
    amounts = rng.standard_normal(len(ids)) * 9
    amounts[-1] = -np.inf
    return Changes(ids, rng.integers(0, 3, len(ids)).astype(np.float64), amounts)


@pytest.mark.parametrize("name", ["likeliest", "temperature", "both"])
def test_masks_and_changes(name: str) -> None:
    mask = np.random.default_rng(5).integers(-(2**31), 2**31, -(-VOCAB // 32)).astype(np.int32)
    short = mask[: VOCAB // 64]  # what it does not reach is excluded
    more: dict[str, Any] = {**OPTIONS[name], "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    kinds = [(mask, None), (None, changes_of(VOCAB)), (short, changes_of(VOCAB))]
    rows, choices = [logits(i) for i in range(3)], [drawn(0.4, *kind, **more) for kind in kinds]
    wide = [drawn(0.4, each[0] if each[0] is not short else padded(short), each[1], **more) for each in kinds]
    expected = [choose(row, choice)[:2] for row, choice in zip(rows, wide, strict=True)]
    assert Card(3).choose(rows, choices) == expected


def padded(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.pad(mask, (0, -(-VOCAB // 32) - len(mask)))


def test_rows_that_are_broken_or_excluded() -> None:
    """No token, and whether all logits are finite; logits of -inf exclude their tokens."""
    rows = [logits() for _ in range(6)]
    rows[0][5], rows[1][PART], rows[3][:] = np.nan, np.inf, -np.inf
    rows[2][:PART] = -np.inf
    nothing = np.zeros(-(-VOCAB // 32), np.int32)
    infinite = Changes(np.array([3], np.int32), np.zeros(1), np.array([np.inf]))
    given: list[tuple[Any, ...]] = [(), (), (), (), (nothing,), (None, infinite)]
    for options in ({"temperature": 0.0}, {"top_p": 0.7}):
        choices = [drawn(0.6, *each, **options) for each in given]
        expected = [choose(row, choice)[:2] for row, choice in zip(rows, choices, strict=True)]
        assert Card(6).choose(rows, choices) == expected


def test_a_row_alone_and_what_the_host_has_to_sort() -> None:
    flat = np.full(VOCAB, 2.5, np.float32)
    rows = [flat, logits(8)]
    card, choices = Card(2), [drawn(0.7, top_k=VOCAB - 5), drawn(0.7, top_p=0.6)]
    both = card.choose(rows, choices)
    assert both[0] == (TOO_MANY, True)
    assert card.choose(rows[1:], choices[1:]) == both[1:] == [choose(rows[1], choices[1])[:2]]
    assert card.choose(rows[:1], [drawn(0.7)]) == [choose(flat, drawn(0.7))[:2]]


def test_what_the_card_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels find everything where the table says; only those run that are needed, and the host does the rest."""
    paper, seen = PaperDriver(), list[tuple[str, int]]()
    monkeypatch.setattr(driver, "_library", lambda: paper)
    monkeypatch.setattr(driver, "_quick", lambda: paper)

    def look(arguments: list[int], threads: int) -> None:
        places = dict(zip(POINTERS, arguments[1:], strict=False))
        vocab, parts = paper.see(arguments[-1])[:8].view(np.int32).tolist()
        assert arguments[0] == threads // THREADS and threads % (parts * THREADS) == 0 and places["memory"] == 0
        rows = threads // (parts * THREADS)
        found = paper.see(places["found"])[: 8 * rows].view(np.int32).reshape(rows, 2)
        table = paper.see(places["table"])[: 8 * WORDS * rows].view(np.int64).reshape(rows, WORDS)
        for line, result in zip(table, found, strict=True):
            row = array_at(line[LOGITS], vocab, np.float32)
            choice = Choice(SampleOpts(seed=1, **options))
            assert bool(line[GREEDY]) is choice.opts.is_greedy
            choice.numbers[:] = line[FIRST_NUMBER:].view(np.float64)
            choice.mask = array_at(line[MASK], line[MASKED], np.int32) if line[MASKED] else None
            if count := line[CHANGES]:
                kinds = ((IDS, np.int32), (COUNTS, np.float64), (AMOUNTS, np.float64))
                choice.changes = Changes(*(array_at(line[which], count, kind) for which, kind in kinds))
            result[:] = choose(row, choice)[:2]
            if row[0] == 77:
                result[0] = TOO_MANY

    def array_at(address: int, count: int, kind: Any) -> np.ndarray[Any, Any]:
        return paper.see(int(address))[: int(count) * np.dtype(kind).itemsize].view(kind).copy()

    for name in kernels.kernels():

        def run(arguments: list[int], threads: int, name: str = name) -> None:
            seen.append((name, threads))
            if name == "look":
                look(arguments, threads)

        paper.kernels[name.encode()] = run
    card = driver.Card()
    memory = CardMemory(lambda: [card])
    loaded = [driver.Loaded(card, name.encode(), name) for name in kernels.kernels()]
    chooser = Chooser([card], memory, lambda: [loaded], overlaps=False)
    numbers = np.stack([logits(i) for i in range(4)])
    numbers[3, 0] = 77
    array = DeviceArray(memory.adopt(numbers.reshape(-1).view(np.uint8)), "f4", numbers.shape)
    mask = np.full(-(-VOCAB // 32), 0x55555555, np.int32)
    changed = Changes(np.array([9, 9], np.int32), np.zeros(2), np.array([50.0, 1.0]))
    for count, options in ((2, {"temperature": 0.0}), (4, {"min_p": 0.1}), (4, {"top_k": 5}), (1, {"mirostat": 2})):
        choices = [drawn(0.3, mask if i % 2 else None, changed if i == 2 else None, **options) for i in range(count)]
        given: list[Any] = [array[i] for i in range(count)]
        given[1:2] = [numbers[1]] * (count > 1)  # a row that the host has
        found = chooser(given, choices)
        assert found == [choose(numbers[i], choice) for i, choice in enumerate(choices)]
    one = -(-VOCAB // PART) * THREADS
    assert seen == [("look", one), ("look", 3 * one), ("draw", 3 * one), *((n, 3 * one) for n in kernels.kernels())]
    chooser.close()
    loaded.clear()
    array.buffer.close()
    assert paper.used == 0


@pytest.mark.parametrize(("function", "needed"), [("cuMemAlloc_v2", 7), ("cuMemAllocHost_v2", 1)])
def test_a_choice_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch, function: str, needed: int) -> None:
    """Wherever the memory ends, the next choices find all that they need, and nothing is left in the end."""
    paper = PaperDriver()
    paper.kernels[b"code"] = lambda arguments, threads: None
    monkeypatch.setattr(driver, "_library", lambda: paper)
    monkeypatch.setattr(driver, "_quick", lambda: paper)
    card = driver.Card()
    memory = CardMemory(lambda: [card])
    loaded = [driver.Loaded(card, b"code", name) for name in kernels.kernels()]
    numbers = np.stack([logits(i) for i in range(16)])
    array = DeviceArray(memory.adopt(numbers.reshape(-1).view(np.uint8)), "f4", numbers.shape)
    before, usual = paper.used, getattr(PaperDriver, f"_{function}")
    choices, rows = [Choice(SampleOpts(temperature=0.0, seed=1))] * 16, [array[i] for i in range(16)]
    for there in range(needed):
        chooser, room = Chooser([card], memory, lambda: [[*loaded]], overlaps=False), iter([True] * there)
        chooser(rows[:1], choices[:1])
        allocate = partial(_allocated, usual, room)
        monkeypatch.setattr(PaperDriver, f"_{function}", lambda *given, allocate=allocate: allocate(*given))
        with pytest.raises(ResourceError, match="not enough memory"):
            chooser(rows, choices)
        monkeypatch.setattr(PaperDriver, f"_{function}", usual)
        assert len(chooser(rows[:1], choices[:1])) == 1 and len(chooser(rows, choices)) == 16
        chooser.close()
        assert paper.used == before
    loaded.clear()


def _allocated(usual: Callable[..., int | None], room: Iterator[bool], *given: Any) -> int:
    """As usual while there is room, then the code of a driver that has none."""
    return (usual(*given) or 0) if next(room, False) else 2
