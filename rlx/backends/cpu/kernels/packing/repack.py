"""Moves one row's superblock from the file layout to the packed layout: one function per type, called by `pack.py`.

`move(raw, at, out, to, row, keep)` reads file bytes at offset `at` and writes packed bytes at offset `to`. `row` is the
row in its block of 16. `keep` is a mask: all ones, or zero to write a row of zeros. Four consecutive codes of a row are
one 32-bit word in the file and in the packed vector, so a bit field is split or joined in all four bytes at once. The
types with codebooks are in `repack_grids.py`.
"""

from __future__ import annotations

from rlx.scalars import Ptr, Scalar, load_u16, load_u32, store_u16, store_u32, u8, u16, u32, u64


def word(raw: Ptr, at: int, keep: Scalar) -> Scalar:
    """Four bytes of the file, masked by `keep`."""
    return u32(load_u32(raw, at) & keep)


def repack_half(raw: Ptr, at: int, out: Ptr, to: int, keep: Scalar) -> None:
    store_u16(out, to, u16(load_u16(raw, at) & keep))


def spread(codes: Scalar, out: Ptr, to: int, step: int) -> None:
    """Stores the four bytes of a word, `step` bytes apart."""
    for j in range(4):
        out[to + j * step] = u8(codes >> u32(8 * j))


def join_nibbles(low: Scalar, high: Scalar) -> Scalar:
    return u32((low & u32(0x0F0F0F0F)) | ((high & u32(0x0F0F0F0F)) << u32(4)))


def four_bits(bits: Scalar) -> Scalar:
    """The low four bits of a word, one in each byte. The product adds copies shifted by 7: bit j moves to bit 8 j."""
    return u32(u32((bits & u32(15)) * u32(0x00204081)) & u32(0x01010101))


def repack_f32(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    store_u32(out, to + row * 4, word(raw, at, keep))


def repack_f16(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)


def repack_bytes(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar, flips: Scalar) -> None:
    """32 elements of a byte each, whose bits are flipped where those of `flips` are set."""
    for g in range(8):
        store_u32(out, to + g * 64 + row * 4, u32(word(raw, at + g * 4, keep) ^ flips))


def repack_q8_0(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    repack_bytes(raw, at + 2, out, to + 32, row, keep, u32(0x80808080))


def repack_q8_0_signed(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    repack_bytes(raw, at + 2, out, to + 32, row, keep, u32(0))


def repack_nibbles(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    """32 elements in 16 bytes. No bits change: byte i of the file already holds elements i and i + 16."""
    for j in range(4):
        store_u32(out, to + j * 64 + row * 4, word(raw, at + j * 4, keep))


def repack_fifth_bits(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    """Moves bit i of a word, which belongs to element i = 4 g + j, to bit g of byte j."""
    bits = word(raw, at, keep)
    plane = u32(0)
    for g in range(8):
        plane = u32(plane | (four_bits(u32(bits >> u32(4 * g))) << u32(g)))
    store_u32(out, to + row * 4, plane)


def repack_q4_0(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    repack_nibbles(raw, at + 2, out, to + 32, row, keep)


def repack_q4_1(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    repack_half(raw, at + 2, out, to + 32 + row * 2, keep)
    repack_nibbles(raw, at + 4, out, to + 64, row, keep)


def repack_q5_0(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    repack_nibbles(raw, at + 6, out, to + 32, row, keep)
    repack_fifth_bits(raw, at + 2, out, to + 288, row, keep)


def repack_q5_1(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    repack_half(raw, at + 2, out, to + 32 + row * 2, keep)
    repack_nibbles(raw, at + 8, out, to + 64, row, keep)
    repack_fifth_bits(raw, at + 4, out, to + 320, row, keep)


def repack_iq4_xs(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at, out, to + row * 2, keep)
    high = u32(load_u16(raw, at + 2) & keep)
    low = word(raw, at + 4, keep)
    for sub in range(8):
        first = to + 32 + sub * 272
        scale = ((low >> u32(4 * sub)) & u32(15)) | (((high >> u32(2 * sub)) & u32(3)) << u32(4))
        out[first + row] = u8(scale - u32(32))
        repack_nibbles(raw, at + 8 + sub * 16, out, first + 16, row, keep)


def repack_k_head(raw: Ptr, at: int, out: Ptr, to: int, row: int, step: int, keep: Scalar) -> None:
    """Moves d, dmin and the eight 6-bit scales and mins of Q4_K and Q5_K. Sub-blocks are `step` bytes apart."""
    repack_half(raw, at, out, to + row * 2, keep)
    repack_half(raw, at + 2, out, to + 32 + row * 2, keep)
    a = word(raw, at + 4, keep)
    b = word(raw, at + 8, keep)
    c = word(raw, at + 12, keep)
    first = to + 64 + row
    spread(u32(a & u32(0x3F3F3F3F)), out, first, step)
    spread(u32(b & u32(0x3F3F3F3F)), out, first + 16, step)
    top_a = (a >> u32(2)) & u32(0x30303030)
    top_b = (b >> u32(2)) & u32(0x30303030)
    spread(u32((c & u32(0x0F0F0F0F)) | top_a), out, first + 4 * step, step)
    spread(u32(((c >> u32(4)) & u32(0x0F0F0F0F)) | top_b), out, first + 4 * step + 16, step)


def repack_nibble_pairs(raw: Ptr, at: int, out: Ptr, to: int, row: int, step: int, apart: int, keep: Scalar) -> None:
    """The low four bits of each element. 32 bytes hold one sub-block in low nibbles, and in high ones another.

    The other one comes `apart` sub-blocks later. Packed sub-blocks are `step` bytes apart.
    """
    for pair in range(4):
        for j in range(4):
            a = word(raw, at + pair * 32 + j * 4, keep)
            b = word(raw, at + pair * 32 + 16 + j * 4, keep)
            first = to + (pair + pair // apart * apart) * step + j * 64 + row * 4
            store_u32(out, first, join_nibbles(a, b))
            store_u32(out, first + apart * step, join_nibbles(u32(a >> u32(4)), u32(b >> u32(4))))


def repack_q4_k(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_k_head(raw, at, out, to, row, 288, keep)
    repack_nibble_pairs(raw, at + 16, out, to + 96, row, 288, 1, keep)


def repack_crumbs(raw: Ptr, at: int, out: Ptr, to: int, row: int, step: int, keep: Scalar) -> None:
    """Two bits of each element. 32 bytes hold those of four sub-blocks, the next 32 bytes those of the other four.

    Packed sub-blocks are `step` bytes apart.
    """
    for half in range(2):
        for j in range(2):
            first = at + half * 32 + j * 4
            a, b = word(raw, first, keep), word(raw, first + 8, keep)
            c, d = word(raw, first + 16, keep), word(raw, first + 24, keep)
            for quarter in range(4):
                shift = u32(2 * quarter)
                low = ((a >> shift) & u32(0x03030303)) | (((b >> shift) & u32(0x03030303)) << u32(2))
                high = ((c >> shift) & u32(0x03030303)) | (((d >> shift) & u32(0x03030303)) << u32(2))
                place = to + (half * 4 + quarter) * step + j * 64 + row * 4
                store_u32(out, place, u32(low | (high << u32(4))))


def repack_bits(raw: Ptr, at: int, out: Ptr, to: int, row: int, sub: int, keep: Scalar) -> None:
    """One bit of each element of a sub-block. Bit s of 32 bytes belongs to sub-block s."""
    bits = u32(0)
    for g in range(8):
        bits = u32(bits | (((word(raw, at + g * 4, keep) >> u32(sub)) & u32(0x01010101)) << u32(g)))
    store_u32(out, to + row * 4, bits)


def repack_q5_k(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_k_head(raw, at, out, to, row, 352, keep)
    repack_nibble_pairs(raw, at + 48, out, to + 96, row, 352, 1, keep)
    for sub in range(8):
        repack_bits(raw, at + 16, out, to + 64 + sub * 352 + 288, row, sub, keep)


def repack_q2_k(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at + 80, out, to + row * 2, keep)
    repack_half(raw, at + 82, out, to + 32 + row * 2, keep)
    for sub in range(8):
        first = to + 64 + sub * 160
        out[first + row] = u8(raw[at + sub * 2] & keep)
        out[first + 16 + row] = u8(raw[at + sub * 2 + 1] & keep)
    repack_crumbs(raw, at + 16, out, to + 96, row, 160, keep)


def repack_q3_k(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at + 108, out, to + row * 2, keep)
    high = word(raw, at + 104, keep)
    for sub in range(8):
        first = to + 32 + sub * 224
        for half in range(2):
            # Scale i: its low four bits are a nibble of byte i % 8, its high two bits are in byte i % 4 of a word.
            i = sub * 2 + half
            low = u32(raw[at + 96 + (i & 7)] & keep) >> u32((i >> 3) * 4)
            top = (high >> u32((i & 3) * 8 + (i >> 2) * 2)) & u32(3)
            out[first + half * 16 + row] = u8(((low & u32(15)) | (top << u32(4))) - u32(32))
        repack_bits(raw, at, out, first + 160, row, sub, keep)
    repack_crumbs(raw, at + 32, out, to + 64, row, 224, keep)


def repack_q6_k(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at + 208, out, to + row * 2, keep)
    for sub in range(8):
        first = to + 32 + sub * 416 + row
        out[first] = u8(raw[at + 192 + sub * 2] & keep)
        out[first + 16] = u8(raw[at + 193 + sub * 2] & keep)
    repack_nibble_pairs(raw, at, out, to + 64, row, 416, 2, keep)
    repack_crumbs(raw, at + 128, out, to + 320, row, 416, keep)


# --- ternary digits ---------------------------------------------------------------------------------------------------


def digits(bytes_: Scalar, turns: int) -> Scalar:
    """Ternary digit number `turns` of each of four bytes.

    A byte is a fixed-point fraction of 256. Multiplying it by 3 gives the next digit as the integer part.
    """
    power = u32(u64(0x511B090301) >> u64(8 * turns)) & u32(255)  # 3^turns
    even = u32(u32(u32((bytes_ & u32(0x00FF00FF)) * power) & u32(0x00FF00FF)) * u32(3)) >> u32(8)
    odd = u32(u32(u32(((bytes_ >> u32(8)) & u32(0x00FF00FF)) * power) & u32(0x00FF00FF)) * u32(3)) >> u32(8)
    return u32((even & u32(0x00030003)) | ((odd & u32(0x00030003)) << u32(8)))


def four_digits(raw: Ptr, at: int, group: int, keep: Scalar) -> Scalar:
    """Elements 4 * group to 4 * group + 3 of a block.

    A block has 32 bytes of five digits each, then 16 bytes of five digits, then 4 bytes of four digits.
    """
    if group < 40:
        return digits(word(raw, at + (group & 7) * 4, keep), group >> 3)
    if group < 60:
        return digits(word(raw, at + 32 + (group & 3) * 4, keep), (group - 40) >> 2)
    return digits(word(raw, at + 48, keep), group - 60)


def repack_tq1_0(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at + 52, out, to + row * 2, keep)
    for sub in range(8):
        for j in range(2):
            plane = u32(0)
            for i in range(4):
                plane = u32(plane | (four_digits(raw, at, sub * 8 + 2 * i + j, keep) << u32(2 * i)))
            store_u32(out, to + 32 + sub * 128 + j * 64 + row * 4, plane)


def repack_tq2_0(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    repack_half(raw, at + 64, out, to + row * 2, keep)
    repack_crumbs(raw, at, out, to + 32, row, 128, keep)


# --- numbers of 4 and 8 bits ------------------------------------------------------------------------------------------


def repack_mxfp4(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    out[to + row] = u8(raw[at] & keep)
    repack_nibbles(raw, at + 1, out, to + 16, row, keep)


def repack_nvfp4(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    """16 elements per 8 bytes, low nibbles first. A packed byte joins one of the first 16 and one of the second 16."""
    for sub in range(2):
        first = to + sub * 288
        codes = at + 4 + sub * 16
        out[first + row] = u8(raw[at + sub * 2] & keep)
        out[first + 16 + row] = u8(raw[at + sub * 2 + 1] & keep)
        for j in range(2):
            a = word(raw, codes + j * 4, keep)
            b = word(raw, codes + 8 + j * 4, keep)
            place = first + 32 + j * 64 + row * 4
            store_u32(out, place, join_nibbles(a, b))
            store_u32(out, place + 128, join_nibbles(u32(a >> u32(4)), u32(b >> u32(4))))


def repack_f8_e4m3(raw: Ptr, at: int, out: Ptr, to: int, row: int, keep: Scalar) -> None:
    store_u32(out, to + row * 4, word(raw, at, keep))
    repack_bytes(raw, at + 4, out, to + 64, row, keep, u32(0))
