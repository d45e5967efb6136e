"""The quantized types: how a file stores their blocks, and how each type is packed (see layouts.py).

A type is a row of `BLOCKS`. The packed form divides every type into sub-blocks of 32 k. The values are

    scale * (code - zero) - low

There is one scale per sub-block or per 16 k. Some types also have a low, the offset that is subtracted, for the same
number of k. For a type with levels, the code is an index into a table of at most 16 numbers, the levels. They are
stored unsigned, as the number they stand for plus `zero`. Where the machine multiplies signed bytes, codes and levels
of 8 bits are signed instead (`of`).

`Blocks.scales` names the formula of scale and low. Its inputs are the superblock's f16 numbers (d, dmin), both times
the type's unit, and the fields of the sub-block:

| name | numbers of a superblock | fields of a sub-block | scale | low |
|---|---|---|---|---|
| `d` | | f16 d | d | |
| `d_m` | | f16 d, f16 m | d | -m |
| `one` | d | | d | |
| `d_s` | d | i8 s, or two: one per 16 k | d * s | |
| `d_s_m` | d, dmin | u8 s, u8 m | d * s | dmin * m |
| `d_sm` | d, dmin | two u8, one per 16 k: s in the low nibble, m in the high one | d * s | dmin * m |
| `f32` | | f32 d | d | |
| `e8m0` | | u8 e | 2^(e - 128) | |
| `e4m3` | | two u8, one per 16 k: e4m3 numbers | half of the number, 0 for 0x7f | |

The codes of F8_E4M3 are floating-point numbers, in the 8-bit format e4m3fn of the OCP: a sign bit, four exponent bits
(bias 7) and three mantissa bits. The format has subnormals and no infinity; exponent and mantissa of all ones are NaN.
A value is such a number, as f32, times its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlx.backends import blocks_grids as grids
from rlx.backends import blocks_read as read
from rlx.backends.blocks_read import Bytes, Parts
from rlx.ir import dtypes
from rlx.ir.dtypes import DType


@dataclass(frozen=True)
class Blocks:
    """One quantized type.

    Attributes:
        superblock: k of a superblock, which is one block of the file.
        head: number of f16 numbers per superblock and row.
        field_bytes: bytes of a sub-block's fields per row.
        planes: widths in bits of the parts of a code, lowest bits first; each part is stored in separate vectors.
        zero: the code that means 0, for types without lows.
        scales: name of the formula of scales and lows, see the table above.
        read: reader of file blocks, `uint8[blocks of 16 rows, 16, superblocks, bytes]` -> their parts.
        halves: whether there is one scale per 16 k instead of one per 32 k.
        levels: the number that each code stands for, plus `zero`; None if a code stands for itself.
        unit: factor of the f16 numbers of a superblock, a power of two.
        floats: whether codes are e4m3fn numbers.
        signed: whether codes, or levels, are signed bytes: see `of`.
    """

    superblock: int
    head: int
    field_bytes: int
    planes: tuple[int, ...]
    zero: int
    scales: str
    read: Callable[[Bytes], Parts]
    halves: bool = False
    levels: tuple[int, ...] | None = None
    unit: float = 1.0
    floats: bool = False
    signed: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code, or of a level for types with levels."""
        if self.signed:
            return 8
        return max(self.levels).bit_length() if self.levels else sum(self.planes)

    @property
    def lows(self) -> bool:
        """Whether values have a low."""
        return self.scales in ("d_m", "d_s_m", "d_sm")

    @property
    def parts(self) -> int:
        """Scales per sub-block; the number of lows is the same for types that have them."""
        return 2 if self.halves else 1

    @property
    def subs(self) -> int:
        """Sub-blocks per superblock."""
        return self.superblock // 32

    @property
    def head_bytes(self) -> int:
        """Bytes of a superblock's f16 numbers for 16 rows. The sub-blocks follow them."""
        return 32 * self.head

    @property
    def codes_at(self) -> int:
        """Bytes of a sub-block's fields for 16 rows. The codes follow them."""
        return 16 * self.field_bytes

    @property
    def stride(self) -> int:
        """Bytes of a sub-block for 16 rows."""
        return self.codes_at + 64 * sum(self.planes)

    @property
    def nbytes(self) -> int:
        """Bytes of a superblock for 16 rows."""
        return self.head_bytes + self.subs * self.stride


def _coded(zero: int, *levels: int) -> tuple[int, ...]:
    return tuple(zero + level for level in levels)


def _signed(zero: int, *sizes: int) -> tuple[int, ...]:
    """Levels of codes whose highest bit is the sign."""
    return _coded(zero, *sizes, *(-size for size in sizes))


# Levels, as the formats define them (source: the `gguf` package's reference dequantization, ggml's tables).
_IQ4 = _coded(128, -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ3_S = _signed(15, 1, 3, 5, 7, 9, 11, 13, 15)
_IQ3_XXS = _signed(62, 4, 12, 20, 28, 36, 44, 52, 62)
_IQ2 = _signed(43, 8, 25, 43, 0)  # the codebooks use three magnitudes; the fourth code does not occur
_IQ1 = _coded(9, -7, 1, 9, 0, -9, -1, 7, 0)  # -1, 0 or 1, plus or minus 1/8, all in units of 1/8
_E2M1 = _signed(12, 0, 1, 2, 3, 4, 6, 8, 12)  # twice the 4-bit floating-point numbers

#: Every quantized type that is packed.
BLOCKS: dict[DType, Blocks] = {
    dtypes.Q8_0: Blocks(32, 0, 2, (8,), 128, "d", read.read_q8_0),
    dtypes.Q4_0: Blocks(32, 0, 2, (4,), 8, "d", read.reader_32(0)),
    dtypes.Q4_1: Blocks(32, 0, 4, (4,), 0, "d_m", read.reader_32(0, 2)),
    dtypes.Q5_0: Blocks(32, 0, 2, (4, 1), 16, "d", read.reader_32(0, fifth=True)),
    dtypes.Q5_1: Blocks(32, 0, 4, (4, 1), 0, "d_m", read.reader_32(0, 2, fifth=True)),
    dtypes.IQ4_NL: Blocks(32, 0, 2, (4,), 128, "d", read.reader_32(0), levels=_IQ4),
    dtypes.IQ4_XS: Blocks(256, 1, 1, (4,), 128, "d_s", read.read_iq4_xs, levels=_IQ4),
    dtypes.Q2_K: Blocks(256, 2, 2, (2,), 0, "d_sm", read.read_q2_k, halves=True),
    dtypes.Q3_K: Blocks(256, 1, 2, (2, 1), 4, "d_s", read.read_q3_k, halves=True),
    dtypes.Q4_K: Blocks(256, 2, 2, (4,), 0, "d_s_m", read.read_q4_k),
    dtypes.Q5_K: Blocks(256, 2, 2, (4, 1), 0, "d_s_m", read.read_q5_k),
    dtypes.Q6_K: Blocks(256, 1, 2, (4, 2), 32, "d_s", read.read_q6_k, halves=True),
    dtypes.TQ1_0: Blocks(256, 1, 0, (2,), 1, "one", read.read_tq1_0),
    dtypes.TQ2_0: Blocks(256, 1, 0, (2,), 1, "one", read.read_tq2_0),
    dtypes.IQ1_S: Blocks(256, 1, 1, (2, 1), 9, "d_s", grids.read_iq1_s, levels=_IQ1, unit=1 / 8),
    dtypes.IQ1_M: Blocks(256, 1, 2, (2, 1), 9, "d_s", grids.read_iq1_m, levels=_IQ1, unit=1 / 8, halves=True),
    dtypes.IQ2_XXS: Blocks(256, 1, 1, (2, 1), 43, "d_s", grids.read_iq2_xxs, levels=_IQ2, unit=1 / 8),
    dtypes.IQ2_XS: Blocks(256, 1, 2, (2, 1), 43, "d_s", grids.read_iq2_xs, levels=_IQ2, unit=1 / 8, halves=True),
    dtypes.IQ2_S: Blocks(256, 1, 2, (2, 1), 43, "d_s", grids.read_iq2_s, levels=_IQ2, unit=1 / 8, halves=True),
    dtypes.IQ3_XXS: Blocks(256, 1, 1, (4,), 62, "d_s", grids.read_iq3_xxs, levels=_IQ3_XXS, unit=1 / 4),
    dtypes.IQ3_S: Blocks(256, 1, 1, (4,), 15, "d_s", grids.read_iq3_s, levels=_IQ3_S),
    dtypes.MXFP4: Blocks(32, 0, 1, (4,), 12, "e8m0", read.read_mxfp4, levels=_E2M1),
    dtypes.NVFP4: Blocks(64, 0, 2, (4,), 12, "e4m3", read.read_nvfp4, levels=_E2M1, halves=True),
    dtypes.F8_E4M3: Blocks(32, 0, 4, (8,), 0, "f32", read.read_f8_e4m3, floats=True),
}


def of(dtype: DType, *, signed: bool) -> Blocks:
    """The row of a quantized type.

    Args:
        signed: codes or levels of 8 bits have their zero subtracted (`Isa.signed_codes`).
    """
    row = BLOCKS[dtype]
    if not signed or row.bits != 8 or row.floats:
        return row
    levels = row.levels and tuple(level - row.zero for level in row.levels)
    return replace(row, zero=0, levels=levels, signed=True)
