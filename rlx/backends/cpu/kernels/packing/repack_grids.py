"""Packs the types with codebooks: entries and signs become one code per element (see `grids.py`, `blocks_grids.py`).

Codes of 3 bits have a plane of 2 bits, from the codebook, and a plane of signs. A sub-block has four entries of 8
elements. Entry p covers groups 2 p and 2 p + 1, whose 2-bit fields are at bits 2 p of the plane's two vectors.
"""

from __future__ import annotations

from rlx.backends.cpu.grids import grid_iq1_s, grid_iq2_s, grid_iq2_xs, grid_iq2_xxs, grid_iq3_s, grid_iq3_xxs
from rlx.backends.cpu.kernels.packing.repack import four_bits, join_nibbles, repack_half, word
from rlx.scalars import Ptr, Scalar, i64, load_u16, store_u16, store_u32, u8, u16, u32, u64


def odd(scale: Scalar) -> Scalar:
    return u8(scale * u32(2) + u32(1))


def eighth(signs: Scalar) -> Scalar:
    """Adds the eighth sign bit to seven: their parity, so that the number of negative signs is even."""
    seven = u32(signs & u32(127))
    parity = u32(seven ^ (seven >> u32(4)))
    parity = u32(parity ^ (parity >> u32(2)))
    return u32(seven | (((parity ^ (parity >> u32(1))) & u32(1)) << u32(7)))


def eight_bits(signs: Scalar, p: int) -> Scalar:
    """The signs of entry p in the plane of signs, where bit g of a byte belongs to group g."""
    return u32((four_bits(signs) | (four_bits(u32(signs >> u32(4))) << u32(1))) << u32(2 * p))


def store_codes(out: Ptr, to: int, row: int, low: Scalar, top: Scalar) -> None:
    """Stores the two planes of a sub-block."""
    store_u32(out, to + row * 4, u32(low))
    store_u32(out, to + 64 + row * 4, u32(low >> u64(32)))
    store_u32(out, to + 128 + row * 4, top)


# --- two bits ---------------------------------------------------------------------------------------------------------


def repack_iq2_xxs(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    for sub in range(8):
        entries = word(raw, at + 2 + sub * 8, keep)
        signs = word(raw, at + 6 + sub * 8, keep)
        first = to + 32 + sub * 208
        out[first + row] = odd(signs >> u32(28))
        low = u64(0)
        top = u32(0)
        for p in range(4):
            low |= grid_iq2_xxs(i64((entries >> u32(8 * p)) & u32(255))) << u64(2 * p)
            top |= eight_bits(eighth(u32(signs >> u32(7 * p))), p)
        store_codes(out, first + 16, row, low, top)


def repack_two_scales(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    """Moves a byte of two scales, for 16 elements each."""
    scales = u32(raw[at] & keep)
    out[to + row] = odd(scales & u32(15))
    out[to + 16 + row] = odd(scales >> u32(4))


def repack_iq2_xs(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    for sub in range(8):
        first = to + 32 + sub * 224
        repack_two_scales(raw, at + 66 + sub, out, first, row, keep)
        low = u64(0)
        top = u32(0)
        for p in range(4):
            both = u32(load_u16(raw, at + 2 + sub * 8 + p * 2) & keep)
            low |= grid_iq2_xs(i64(both & u32(511))) << u64(2 * p)
            top |= eight_bits(eighth(both >> u32(9)), p)
        store_codes(out, first + 32, row, low, top)


def repack_iq2_s(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    for sub in range(8):
        first = to + 32 + sub * 224
        repack_two_scales(raw, at + 74 + sub, out, first, row, keep)
        entries = word(raw, at + 2 + sub * 4, keep)
        signs = word(raw, at + 34 + sub * 4, keep)
        high = u32(raw[at + 66 + sub] & keep)
        low = u64(0)
        top = u32(0)
        for p in range(4):
            entry = ((entries >> u32(8 * p)) & u32(255)) | (((high >> u32(2 * p)) & u32(3)) << u32(8))
            low |= grid_iq2_s(i64(entry)) << u64(2 * p)
            top |= eight_bits(u32(signs >> u32(8 * p)), p)
        store_codes(out, first + 32, row, low, top)


# --- three bits: an entry is one group --------------------------------------------------------------------------------


def with_signs(codes: Scalar, signs: Scalar) -> Scalar:
    return u32(codes | (four_bits(signs) << u32(3)))


def group_xxs(raw: Ptr, at: int, sub: int, g: int, keep: Scalar) -> Scalar:
    """Group g of a sub-block of IQ3_XXS."""
    signs = eighth(u32(word(raw, at + 66 + sub * 4, keep) >> u32(7 * (g >> 1))))
    entry = i64(raw[at + 2 + sub * 8 + g] & keep)
    return with_signs(grid_iq3_xxs(entry), u32(signs >> u32(4 * (g & 1))))


def repack_iq3_xxs(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    for sub in range(8):
        first = to + 32 + sub * 272
        out[first + row] = odd(word(raw, at + 66 + sub * 4, keep) >> u32(28))
        for j in range(4):
            codes = join_nibbles(group_xxs(raw, at, sub, j, keep), group_xxs(raw, at, sub, j + 4, keep))
            store_u32(out, first + 16 + j * 64 + row * 4, codes)


def group_s(raw: Ptr, at: int, sub: int, g: int, keep: Scalar) -> Scalar:
    """Group g of a sub-block of IQ3_S."""
    high = (u32(raw[at + 66 + sub] & keep) >> u32(g)) & u32(1)
    entry = u32(raw[at + 2 + sub * 8 + g] & keep) | (high << u32(8))
    signs = u32(raw[at + 74 + sub * 4 + (g >> 1)] & keep)
    return with_signs(grid_iq3_s(i64(entry)), u32(signs >> u32(4 * (g & 1))))


def repack_iq3_s(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    for sub in range(8):
        first = to + 32 + sub * 272
        out[first + row] = odd((u32(raw[at + 106 + (sub >> 1)] & keep) >> u32(4 * (sub & 1))) & u32(15))
        for j in range(4):
            codes = join_nibbles(group_s(raw, at, sub, j, keep), group_s(raw, at, sub, j + 4, keep))
            store_u32(out, first + 16 + j * 64 + row * 4, codes)


# --- one bit: the plane of signs holds the signs of the shifts --------------------------------------------------------


def eight_equal(bit: Scalar, p: int) -> Scalar:
    """Like `eight_bits`, with one bit for all elements of entry p."""
    return u32(((bit & u32(1)) * u32(0x03030303)) << u32(2 * p))


def repack_iq1_s(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    for sub in range(8):
        first = to + 32 + sub * 208
        entries = word(raw, at + 2 + sub * 4, keep)
        high = u32(load_u16(raw, at + 34 + sub * 2) & keep)
        out[first + row] = odd((high >> u32(12)) & u32(7))
        low = u64(0)
        top = u32(0)
        for p in range(4):
            entry = ((entries >> u32(8 * p)) & u32(255)) | (((high >> u32(3 * p)) & u32(7)) << u32(8))
            low |= grid_iq1_s(i64(entry)) << u64(2 * p)
            top |= eight_equal(high >> u32(15), p)
        store_codes(out, first + 16, row, low, top)


def repack_iq1_m(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    number = u32(0)
    for i in range(4):
        number |= u32(u32(load_u16(raw, at + 48 + i * 2) & keep) >> u32(12)) << u32(4 * i)
    store_u16(out, to + row * 2, u16(number))
    for sub in range(8):
        first = to + 32 + sub * 224
        scales = u32(load_u16(raw, at + 48 + (sub >> 1) * 2) & keep) >> u32(6 * (sub & 1))
        out[first + row] = odd(scales & u32(7))
        out[first + 16 + row] = odd((scales >> u32(3)) & u32(7))
        entries = word(raw, at + sub * 4, keep)
        high = u32(load_u16(raw, at + 32 + sub * 2) & keep)
        low = u64(0)
        top = u32(0)
        for p in range(4):
            four = u32(high >> u32(4 * p))
            entry = ((entries >> u32(8 * p)) & u32(255)) | ((four & u32(7)) << u32(8))
            low |= grid_iq1_s(i64(entry)) << u64(2 * p)
            top |= eight_equal(u32(four >> u32(3)), p)
        store_codes(out, first + 32, row, low, top)
