"""The choice of tokens on the card: a table with a line for each row of logits goes there, the tokens come back.

CUDA backend, over `kernels/choose.py`. The card chooses with temperature, top-k, top-p, min-p, penalties, bias and
masks. The host chooses from rows that it has, with other options, and where the card found too many tokens to sort: it
copies these rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends import cuda
from rlx.backends.cuda import driver
from rlx.backends.cuda.agreed import choice as layout
from rlx.backends.cuda.agreed.steps import THREADS
from rlx.backends.cuda.driver import Card, LaunchConfig, Loaded
from rlx.backends.cuda.memory import address, pinned_bytes
from rlx.backends.device import Builder, Files
from rlx.backends.memory import Buffer, DeviceArray, Memory
from rlx.sampling.choice import UNIFORM, Choice, Chosen, choose_rows
from rlx.sampling.filters import INTERVALS
from rlx.sampling.options import SampleOpts
from rlx.store.entry import Entry

_ALIGN = 16
#: The sizes come first in what is sent.
_HEAD = 16


def compiled(builder: Builder, link: Callable[[str], bytes], cards: Sequence[Card]) -> list[list[Loaded]]:
    """The kernels on each card, from the compile cache."""

    def load(stored: Entry) -> list[list[Loaded]]:
        codes = [(stored.read(f"{n}.cubin"), n, nbytes) for n, nbytes in json.loads(stored.read("shared.json")).items()]
        return [[Loaded(card, *code) for code in codes] for card in cards]

    def build() -> Files:
        return cuda.choice_code.files(builder.target, link)

    return builder.once("the choice of tokens", build, load, kind="choice", name="choose")


@dataclass(frozen=True)
class Begun:
    """What chooses the tokens of some rows on a card, ready to launch again and again.

    Attributes:
        launches: function, configuration and arguments of each kernel, and where the arguments lie.
        key: what they depend on.
        pointers: where the tokens come, i32, each with whether all logits are finite; and where the random number of
            the first row lies, f64; that of the next one is `layout.WORDS` further on.
    """

    launches: Sequence[tuple[c_void_p, LaunchConfig, Any, Any]] = ()
    key: tuple[int, ...] = ()
    pointers: tuple[int, ...] = ()


class Chooser:
    """Chooses tokens, see `rlx.sampling.choice.Choose`; one thread at a time. Its code is loaded by the first call.

    Args:
        cards: each of which has all logits. In a run all choose, and find the same tokens; else the first one does.
        memory: of the cards.
        code: gives the kernels of each card.
        overlaps: whether a kernel may start while the one before ends.
    """

    def __init__(
        self, cards: Sequence[Card], memory: Memory, code: Callable[[], list[list[Loaded]]], *, overlaps: bool
    ) -> None:
        self._cards, self._memory, self._code, self._overlaps = cards, memory, code, overlaps
        self._kernels: list[list[Loaded]] = []
        self._size = 0, 0  # rows and parts that there is room for
        self._own: dict[str, Buffer] = {}
        self._sent: Buffer | None = None  # the copy of what is sent
        self._pinned, self._room = 0, 0

    def __call__(self, rows: Sequence[Any], choices: Sequence[Choice]) -> list[Chosen]:
        own = [i for i, row in enumerate(rows) if isinstance(row, DeviceArray) and on_card(choices[i].opts, len(row))]
        found: dict[int, Chosen] = {}
        if own:
            tokens = self._on_card([rows[i] for i in own], [choices[i] for i in own])
            found = {i: each for i, each in zip(own, tokens, strict=True) if each.token != layout.TOO_MANY}
        if left := [i for i in range(len(rows)) if i not in found]:
            found |= zip(left, choose_rows([rows[i] for i in left], [choices[i] for i in left]), strict=True)
        return [found[i] for i in range(len(rows))]

    def _on_card(self, rows: Sequence[DeviceArray], choices: Sequence[Choice]) -> list[Chosen]:
        count, card = len(rows), self._cards[0]
        for function, config, arguments, _ in self._begun(rows, choices).launches:
            card.launch(function, config, arguments)
        card.wait()
        result = self._host(8 * count).view(np.int32).reshape(count, 2).tolist()
        return [Chosen(token, is_finite == 1) for token, is_finite in result]

    def begin(self, rows: Sequence[DeviceArray], choices: Sequence[Choice]) -> list[Begun]:
        """What chooses a token of each row in each step of a run, on each card, without the host."""
        return [self._begun(rows, choices, number, alone=True) for number in range(len(self._cards))]

    def _begun(
        self, rows: Sequence[DeviceArray], choices: Sequence[Choice], number: int = 0, *, alone: bool = False
    ) -> Begun:
        """Sends what the kernels of a card read.

        Args:
            alone: the tokens stay on the card.
        """
        count, vocab = len(rows), len(rows[0])
        parts = -(-vocab // layout.PART)
        self._fit(count, parts)
        sent = self._send(rows, choices, vocab, parts, number)
        draws = [choice.opts for choice in choices if not choice.opts.is_greedy]
        needed = [True, any(opts.top_k > 0 or opts.top_p < 1 for opts in draws), bool(draws)]
        places = {name: address(buffer, number) for name, buffer in self._own.items()}
        places |= {"memory": 0, "table": sent + _HEAD}
        places |= {} if alone else {"found": self._pinned}
        given = [count * parts, *(places[name] for name in layout.POINTERS), sent]
        launches = []
        for kernel, is_needed in zip(self._kernels[number], needed, strict=True):
            if is_needed:
                card, shared = self._cards[number], kernel.shared
                config = driver.config(count * parts, THREADS, shared, card, overlaps=self._overlaps)
                launches.append((kernel.function, config, *driver.pointers(given)))
        drawn = sent + _HEAD + 8 * (layout.FIRST_NUMBER + UNIFORM)
        return Begun(launches, (len(launches), *given), (places["found"], drawn))

    def _host(self, nbytes: int, start: int = 0) -> NDArray[np.uint8]:
        """Pinned memory from a byte on: first the tokens, then what is sent to each card."""
        return pinned_bytes(self._pinned + start, nbytes)

    def _send(self, rows: Sequence[DeviceArray], choices: Sequence[Choice], vocab: int, parts: int, number: int) -> int:
        """Begins to copy the table to a card, and what it points to; its address there."""
        count, start = len(rows), -(-8 * len(rows) // _ALIGN) * _ALIGN
        end = _HEAD + -(-8 * count * layout.WORDS // _ALIGN) * _ALIGN
        arrays = [array for choice in choices for array in _arrays(choice)]
        nbytes = end + sum(array.nbytes + _ALIGN for array in arrays)
        self._reserve(start, nbytes)
        assert self._sent is not None
        base, start = address(self._sent, number), start + number * self._room
        host = self._host(nbytes, start)
        places, at = dict[int, int](), end
        for array in arrays:
            places[id(array)] = base + at
            host[at : at + array.nbytes] = array.view(np.uint8)
            at += -(-array.nbytes // _ALIGN) * _ALIGN
        host[:8].view(np.int32)[:] = vocab, parts
        table = host[_HEAD : _HEAD + 8 * count * layout.WORDS].view(np.int64).reshape(count, layout.WORDS)
        logits = [address(row.buffer, number) for row in rows]
        layout.describe(table, logits, choices, lambda array: places[id(array)])
        self._cards[number].send(base, self._pinned + start, at)
        return base

    def _fit(self, rows: int, parts: int) -> None:
        """Makes the memory that the kernels work on, and loads them."""
        if not self._kernels:
            self._kernels = self._code()
        if rows <= self._size[0] and parts <= self._size[1]:
            return
        rows, parts = max(rows, self._size[0]), max(parts, self._size[1])
        self._free_own()
        sizes = {
            "parts": 8 * rows * layout.PART_WORDS * parts, "rows": 8 * rows * layout.ROW_WORDS,
            "counters": 4 * rows * layout.COUNTERS, "sums": 16 * rows * INTERVALS,
            "listed": 16 * rows * layout.LISTED, "found": 8 * rows,
        }  # fmt: skip
        for name, nbytes in sizes.items():
            self._own[name] = self._memory.allocate(nbytes)
        self._size = rows, parts  # not before: there may be no room for all of it

    def _free_own(self) -> None:
        """Frees the memory that the kernels work on."""
        for buffer in self._own.values():
            buffer.close()
        self._own, self._size = {}, (0, 0)

    def _reserve(self, start: int, nbytes: int) -> None:
        """Makes room for what is sent, after the tokens."""
        if self._room >= start + nbytes:
            return
        self._free_sent()
        room = 2 * (start + nbytes)
        self._sent = self._memory.allocate(room)
        self._pinned = self._cards[0].pinned(room * len(self._cards))
        self._room = room  # not before, as in `_fit`

    def _free_sent(self) -> None:
        """Frees the memory for what is sent."""
        if self._sent is not None:
            self._sent.close()
        if self._pinned:
            self._cards[0].free_pinned(self._pinned)
        self._sent, self._pinned, self._room = None, 0, 0

    def close(self) -> None:
        """Frees its memory, and its code."""
        self._free_sent()
        self._free_own()
        self._kernels = []


def on_card(opts: SampleOpts, vocab: int) -> bool:
    """Whether the kernels can choose with these options from so many tokens."""
    simple = not (opts.mirostat or opts.top_n_sigma or opts.xtc_probability) and opts.typical_p == 1
    return vocab <= layout.MOST_TOKENS and (opts.is_greedy or simple)


def _arrays(choice: Choice) -> Sequence[NDArray[Any]]:
    """The arrays of a choice."""
    return [*([] if choice.mask is None else [choice.mask]), *(choice.changes or ())]
