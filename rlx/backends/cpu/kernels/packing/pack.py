"""Packs the file bytes of a weight into the layout "r16k4" (see layouts.py), superblock by superblock.

`repack.py` and `repack_grids.py` have the code for one superblock of each type. Rows beyond the last one become zeros.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cpu import grids
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.packing import repack as moves
from rlx.backends.cpu.kernels.packing import repack_grids as moves_grids
from rlx.backends.cpu.layouts import PACKINGS
from rlx.backends.cpu.loops import loop_kernel
from rlx.errors import CompileError
from rlx.ir import dtypes
from rlx.ir.dtypes import U8, DType
from rlx.scalars import HOLE, Helper, Ptr, u32

#: Holes: elements of a superblock, its bytes in the file (one row), its packed bytes (16 rows).
SUPERBLOCK: int = HOLE
FILE_BYTES: int = HOLE
PACKED_BYTES: int = HOLE
#: `MOVE(raw, at, out, to, row, keep)` moves one row's superblock; `keep` is all ones, or zero for a row of zeros.
MOVE: Helper = HOLE


def pack(dtype: DType, *, signed: bool = False) -> Kernel:
    """File bytes of a weight [n, k] -> its packed bytes. Buffers: raw, out. Extents: n, k. A unit is a row block.

    `k` must be a multiple of the type's superblock. The caller must check it (`layouts.packed_bytes` does).

    Args:
        signed: codes of 8 bits are signed bytes, for targets that multiply those (`Isa.signed_codes`).

    Raises:
        CompileError: the type has no packed layout.
    """
    if dtype not in REPACK:
        raise CompileError(f"no kernel packs {dtype}", hint=f"Packed types: {', '.join(map(str, REPACK))}")
    packing, move = PACKINGS[dtype], (_SIGNED if signed else REPACK).get(dtype, REPACK[dtype])
    holes = {"SUPERBLOCK": packing.superblock, "PACKED_BYTES": packing.nbytes}
    holes |= {"FILE_BYTES": dtype.row_bytes(packing.superblock)}
    kernel = loop_kernel(_pack, {**holes, "MOVE": move}, [("raw", U8), ("out", U8)], ("n", "k"))
    return replace(kernel, llvm=grids.define(kernel.llvm))


def _pack(raw: Ptr, out: Ptr, n: int, k: int, begin: int, end: int) -> None:
    count = k // SUPERBLOCK
    for block in range(begin, end):
        for s in range(count):
            to = (block * count + s) * PACKED_BYTES
            for row in range(16):
                real = block * 16 + row < n
                source = block * 16 + row if real else block * 16
                keep = u32(0xFFFFFFFF) if real else u32(0)
                MOVE(raw, (source * count + s) * FILE_BYTES, out, to, row, keep)


#: The hole `MOVE` of each type that can be packed.
REPACK: dict[DType, Helper] = {
    dtypes.F32: moves.repack_f32,
    dtypes.F16: moves.repack_f16,
    dtypes.BF16: moves.repack_f32,  # the same four bytes: two numbers
    dtypes.Q8_0: moves.repack_q8_0,
    dtypes.Q4_0: moves.repack_q4_0,
    dtypes.Q4_1: moves.repack_q4_1,
    dtypes.Q5_0: moves.repack_q5_0,
    dtypes.Q5_1: moves.repack_q5_1,
    dtypes.IQ4_NL: moves.repack_q4_0,
    dtypes.IQ4_XS: moves.repack_iq4_xs,
    dtypes.Q2_K: moves.repack_q2_k,
    dtypes.Q3_K: moves.repack_q3_k,
    dtypes.Q4_K: moves.repack_q4_k,
    dtypes.Q5_K: moves.repack_q5_k,
    dtypes.Q6_K: moves.repack_q6_k,
    dtypes.TQ1_0: moves.repack_tq1_0,
    dtypes.TQ2_0: moves.repack_tq2_0,
    dtypes.MXFP4: moves.repack_mxfp4,
    dtypes.NVFP4: moves.repack_nvfp4,
    dtypes.F8_E4M3: moves.repack_f8_e4m3,
    dtypes.IQ1_S: moves_grids.repack_iq1_s,
    dtypes.IQ1_M: moves_grids.repack_iq1_m,
    dtypes.IQ2_XXS: moves_grids.repack_iq2_xxs,
    dtypes.IQ2_XS: moves_grids.repack_iq2_xs,
    dtypes.IQ2_S: moves_grids.repack_iq2_s,
    dtypes.IQ3_XXS: moves_grids.repack_iq3_xxs,
    dtypes.IQ3_S: moves_grids.repack_iq3_s,
}

#: The same where signed codes differ.
_SIGNED: dict[DType, Helper] = {dtypes.Q8_0: moves.repack_q8_0_signed}
