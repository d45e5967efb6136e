"""The choice of tokens by native code: a table of arguments, one line for each row of logits.

CPU backend, over `kernels/rows/choose.py`. One row runs in the calling thread, several are shared by the workers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from rlx.backends.cpu import steps
from rlx.backends.cpu.launch.native import WorkerPool
from rlx.backends.device import Builder
from rlx.sampling.choice import NUMBERS, Choice, Chosen, surprise
from rlx.sampling.filters import INTERVALS, Logits

#: Bytes of a token in each of the kernel's scratch buffers (the last one has a fixed size), the words of a row of the
#: table, and the numbers found.
_SCRATCH, _WORDS, _FOUND = (8, 8, 8, 4, 4, 0), 10, 4


class Chooser:
    """Chooses tokens, see `rlx.sampling.choice.Choose`; one thread at a time. Its code is loaded by the first call.

    Args:
        workers: those that share rows.
        builder: compiles the code.
    """

    def __init__(self, workers: WorkerPool, builder: Builder) -> None:
        self._workers, self._builder = workers, builder
        self._context = np.zeros(3 + 2 * len(_SCRATCH), np.int64)
        self._rows = self._vocab = 0

    def _fit(self, rows: int, vocab: int) -> None:
        """Makes the tables and the memory of the workers, which becomes resident where it is used."""
        if not self._rows:
            self._code = steps.choosing(self._builder)
            (self._address,) = self._code.addresses.values()
            self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self._address)
        self._rows, self._vocab = rows, vocab
        self._table = np.zeros((rows, _WORDS), np.int64)
        self._numbers, self._found = np.zeros((rows, len(NUMBERS))), np.zeros((rows, _FOUND))
        sizes = [-(-vocab * size // 64) * 64 or 8 * INTERVALS for size in _SCRATCH]
        self._scratch = [np.empty(size * self._workers.n, np.uint8) for size in sizes]  # any worker may take a row
        self._context[0] = self._table.ctypes.data
        self._context[3::2] = [each.ctypes.data for each in self._scratch]
        self._context[4::2] = sizes
        self._table[:, 5] = self._numbers.ctypes.data + self._numbers.strides[0] * np.arange(rows)
        self._table[:, 6] = self._found.ctypes.data + self._found.strides[0] * np.arange(rows)
        self._table[:, 7] = vocab

    def __call__(self, rows: Sequence[Logits] | Logits, choices: Sequence[Choice]) -> list[Chosen]:
        count, vocab = len(rows), len(rows[0])
        if count > self._rows or vocab != self._vocab:
            self._fit(max(count, self._rows), vocab)
        self._numbers[:count] = [choice.numbers for choice in choices]
        if isinstance(rows, np.ndarray):  # quick: to ask each row takes as long as the choice
            self._table[:count, 0] = rows.ctypes.data + rows.strides[0] * np.arange(count)
        else:
            self._table[:count, 0] = [row.ctypes.data for row in rows]
        self._table[:count, 8:] = 0
        for line, choice in zip(self._table, choices, strict=False):
            if (mask := choice.mask) is not None:
                line[1], line[8] = mask.ctypes.data, len(mask)
            if (changes := choice.changes) is not None:
                line[2:5], line[9] = [each.ctypes.data for each in changes], len(changes.ids)
        self._context[1:3], self._found[:count] = (count, 0), 0
        if count == 1:
            self._alone(self._context.ctypes.data, 0, 1)
        else:
            self._workers.share(self._address, self._context.ctypes.data)
        found = self._found[:count].tolist()
        return [
            Chosen(int(token), is_finite == 1, surprise(below, everything) if everything else 0.0)
            for token, is_finite, below, everything in found
        ]
