"""Scales and lows of quantized weights, from what the file has of them (see `rlx.backends.blocks`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlx.backends.blocks import Blocks
from rlx.backends.cuda.code import F32, Code, Value

_MAGIC = 0x4B000000  # the bits of 2^23: with a byte as its lowest one, 2^23 plus the byte
_FLIP = -0x7F7F7F80  # the sign bits of four bytes

#: A number of row g, and of row g + 8.
Pair = tuple[Value, Value]


@dataclass(frozen=True)
class Numbers:
    """The scales of 32 k, one or two, and the lows, if there are any."""

    scales: list[Pair]
    lows: list[Pair]


def numbers_of(k: Code, row: Blocks, words: Sequence[Value]) -> Numbers:
    """The numbers of 32 k of two rows.

    Args:
        words: the bytes of the fields, [field, row], then the f16 numbers of the superblock, [number, row].
    """
    fields, heads = words[: len(words) - row.head], words[len(words) - row.head :]
    numbers = [_f16(k, word) for word in heads]
    if row.unit != 1:
        numbers = [(first * row.unit, second * row.unit) for first, second in numbers]
    return _SCALES[row.scales](k, fields, numbers, row.parts)


def _f16(k: Code, word: Value) -> Pair:
    first, second = k.lanes(word.bits("<2 x half>"))
    return first.to(F32), second.to(F32)


def _unsigned(k: Code, word: Value, first: int) -> Pair:
    """Two bytes as numbers."""
    low, high = (k.bytes_of(word, k.number(_MAGIC), 0x7440 + first + i).bits(F32) - float(2**23) for i in range(2))
    return low, high


def _signed(k: Code, word: Value, first: int) -> Pair:
    flipped = word ^ _FLIP
    low, high = (
        k.bytes_of(flipped, k.number(_MAGIC), 0x7440 + first + i).bits(F32) - float(2**23 + 128) for i in range(2)
    )
    return low, high


def _times(first: Pair, second: Pair) -> Pair:
    return first[0] * second[0], first[1] * second[1]


def _d_m(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    low = _f16(k, fields[1])
    return Numbers([_f16(k, fields[0])], [(-low[0], -low[1])])


def _d_s(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    return Numbers([_times(heads[0], _signed(k, fields[0], 2 * part)) for part in range(parts)], [])


def _d_s_m(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    scale, low = (_times(head, _unsigned(k, fields[0], 2 * i)) for i, head in enumerate(heads))
    return Numbers([scale], [low])


def _d_sm(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    scales, lows = (
        [_times(head, _unsigned(k, fields[0] >> shift & 0x0F0F0F0F, 2 * part)) for part in range(2)]
        for head, shift in zip(heads, (0, 4), strict=True)
    )
    return Numbers(scales, lows)


def _e8m0(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    """2^(e - 128); those of e = 0 and 1 are subnormal."""
    found = []
    for i in range(2):
        e = fields[0] >> 8 * i & 255
        found.append(k.select(e >= 2, (e - 1) << 23, k.number(1 << 21) << e).bits(F32))
    return Numbers([(found[0], found[1])], [])


def _e4m3(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    """Half of an e4m3 number without its sign: its bits at those of an f32, whose exponent has another bias."""
    found = []
    for i in range(4):
        byte = fields[0] >> 8 * i & 255
        number = ((byte & 127) << 20).bits(F32) * 2.0**119
        found.append(k.select(byte.equals(127), k.f32(0.0), number))
    return Numbers([(found[0], found[1]), (found[2], found[3])], [])


def _f32(k: Code, fields: Sequence[Value], heads: Sequence[Pair], parts: int) -> Numbers:
    return Numbers([(fields[0].bits(F32), fields[1].bits(F32))], [])


_SCALES: dict[str, Callable[[Code, Sequence[Value], Sequence[Pair], int], Numbers]] = {
    "d": lambda k, fields, heads, parts: Numbers([_f16(k, fields[0])], []),
    "d_m": _d_m,
    "d_s": _d_s,
    "d_s_m": _d_s_m,
    "d_sm": _d_sm,
    "one": lambda k, fields, heads, parts: Numbers([heads[0]], []),
    "f32": _f32,
    "e8m0": _e8m0,
    "e4m3": _e4m3,
}
