"""Readers of the types with codebooks: file blocks into codes and fields, in NumPy.

See `codebooks.py` and `blocks.py`.

A code is the codebook's code with one more bit on top: the sign of the element, or for IQ1_S and IQ1_M the sign of the
shift that is added to it. Scales are returned as odd numbers: s in the file stands for (s + 1/2) times a power of two,
which equals 2 s + 1 times half that power.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.backends import codebooks
from rlx.backends.blocks_read import Bytes, Parts, by_halves, halves, pairs

_u8, _u16 = np.uint8, np.uint16
_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_THREES = np.array([0, 3, 6, 9], np.uint16)
_CRUMBS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)


def read_iq2_xxs(raw: Bytes) -> Parts:
    """Eight groups of 8 bytes: four entries of one byte, then a word of four 7-bit sign fields and a 4-bit scale."""
    words = _words(raw[..., 2:], np.uint32, (8, 2))
    entries = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    codes = _codes("iq2_xxs", entries, 2, _bits(_eighth(_sevens(words[..., 1]))))
    return Parts(halves(raw, 0), [_odd(words[..., 1] >> 28)], codes)


def read_iq2_xs(raw: Bytes) -> Parts:
    """32 words of a 9-bit entry and a 7-bit sign field, then 8 bytes of two scales each."""
    words = _words(raw[..., 2:66], np.uint16, (32,))
    codes = _codes("iq2_xs", words & _u16(511), 2, _bits(_eighth((words >> _u16(9)).astype(np.uint8))))
    return Parts(halves(raw, 0), by_halves(_odd(pairs(raw[..., 66:], 1))), codes)


def read_iq2_s(raw: Bytes) -> Parts:
    """The low bytes of the entries, the signs, the two high bits of each entry, the scales."""
    codes = _codes("iq2_s", _entries(raw[..., 2:34], _spread(raw[..., 66:74], _CRUMBS, 3)), 2, _bits(raw[..., 34:66]))
    return Parts(halves(raw, 0), by_halves(_odd(pairs(raw[..., 74:], 1))), codes)


def read_iq3_xxs(raw: Bytes) -> Parts:
    words = _words(raw[..., 66:], np.uint32, (8,))
    codes = _codes("iq3_xxs", raw[..., 2:66], 3, _bits(_eighth(_sevens(words))))
    return Parts(halves(raw, 0), [_odd(words >> 28)], codes)


def read_iq3_s(raw: Bytes) -> Parts:
    """The low bytes of the entries, their ninth bits, the signs, the scales."""
    codes = _codes("iq3_s", _entries(raw[..., 2:66], _spread(raw[..., 66:74], _BITS, 1)), 3, _bits(raw[..., 74:106]))
    return Parts(halves(raw, 0), [_odd(pairs(raw[..., 106:], 1))], codes)


def read_iq1_s(raw: Bytes) -> Parts:
    """The low bytes of the entries, then a word per 32 elements: the entries' high bits, a scale, the shift's sign."""
    words = _words(raw[..., 34:], np.uint16, (8,))
    codes = _codes("iq1_s", _entries(raw[..., 2:34], _spread(words, _THREES, 7)), 2, _every(words >> _u16(15), 32))
    return Parts(halves(raw, 0), [_odd((words >> _u16(12)) & _u16(7))], codes)


def read_iq1_m(raw: Bytes) -> Parts:
    """Like IQ1_S, with a nibble per 8 elements for the high bits of an entry and the sign of its shift.

    Each of the last four words holds four scales and 4 bits of the f16 number.
    """
    high, words = pairs(raw[..., 32:48], 1), _words(raw[..., 48:], np.uint16, (4,))
    codes = _codes("iq1_s", _entries(raw[..., :32], high & _u8(7)), 2, _every(high >> _u8(3), 8))
    d = np.bitwise_or.reduce((words >> _u16(12)) << np.arange(0, 16, 4, dtype=np.uint16), axis=-1)
    return Parts([d], by_halves(_odd(_spread(words, _THREES, 7))), codes)


def _words(raw: Bytes, kind: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    words: NDArray[Any] = np.ascontiguousarray(raw).view(kind)
    return words.reshape(*raw.shape[:-1], *shape)


def _codes(grid: str, entries: NDArray[Any], width: int, tops: Bytes) -> Bytes:
    """Entries [..., count] and the highest bit of each element's code [..., 256] -> codes [..., 256]."""
    low: Bytes = codebooks.codes(grid)[entries]
    return low.reshape(tops.shape) | (tops << _u8(width))


def _entries(low: Bytes, high: NDArray[Any]) -> NDArray[np.uint16]:
    return low.astype(np.uint16) | (high.astype(np.uint16) << _u16(8))


def _spread(words: NDArray[Any], shifts: NDArray[Any], mask: int) -> NDArray[Any]:
    """The bit fields of words [..., n], concatenated."""
    fields: NDArray[Any] = (words[..., None] >> shifts) & words.dtype.type(mask)
    return fields.reshape(*words.shape[:-1], -1)


def _sevens(words: NDArray[np.uint32]) -> Bytes:
    return _spread(words, _SEVENS, 127).astype(np.uint8)


def _eighth(signs: Bytes) -> Bytes:
    """Adds the eighth sign bit to seven: their parity, so that the number of negative signs is even."""
    parity = signs ^ (signs >> _u8(4))
    parity = parity ^ (parity >> _u8(2))
    eighth: Bytes = ((parity ^ (parity >> _u8(1))) & _u8(1)) << _u8(7)
    return signs | eighth


def _bits(signs: Bytes) -> Bytes:
    return np.unpackbits(signs, axis=-1, bitorder="little")


def _every(bits: NDArray[Any], count: int) -> Bytes:
    return np.repeat(bits.astype(np.uint8), count, axis=-1)


def _odd(scales: NDArray[Any]) -> Bytes:
    return scales.astype(np.uint8) * _u8(2) + _u8(1)
