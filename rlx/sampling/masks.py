"""Masks: which tokens may be drawn at all, a bit an id.

Sampling stage, under `sampler.py`. A grammar makes masks; here they are applied to logits.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating[Any]]
Words = npt.NDArray[np.int32]

_FEW = 64  # words with a bit, up to which ids are looked up one by one


class Constraint(Protocol):
    """What the tokens of one answer may be; `rlx.grammar.Constraint` implements it."""

    def mask(self) -> Words | None:
        """int32[ceil(vocab / 32)]: bit i % 32 of word i // 32 says whether id i may come next. None: any may."""
        ...

    def accept(self, token: int) -> None:
        """Goes on with a token."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next; `[]` if there is a choice."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        ...

    def copy(self) -> Self: ...


def _penalties() -> npt.NDArray[np.float32]:
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(allowed, np.float32(0), np.float32(-np.inf))


_PENALTIES = _penalties()  # float32[256, 8]: what a byte of a mask adds to its eight logits


def masked(logits: Logits, words: Words) -> Logits:
    """The logits, [vocab], with -inf where the bit of an id is 0: a new array.

    Example:
        >>> masked(np.float32([1, 2, 3]), np.int32([0b101]))
        array([  1., -inf,   3.], dtype=float32)
    """
    used = np.flatnonzero(words)
    if len(used) > _FEW:
        found: Logits = _PENALTIES.take(words.view(np.uint8), axis=0).reshape(-1)[: len(logits)]
        return np.add(found, logits, out=found) if logits.dtype == found.dtype else found + logits
    found = np.full(len(logits), -np.inf, logits.dtype)
    flags = np.unpackbits(words[used].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = np.nonzero(flags)
    ids = used[rows] * 32 + columns
    found[ids] = logits[ids]
    return found
