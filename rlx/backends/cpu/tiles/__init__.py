"""The emitter of tile kernels: loops, vector arithmetic and memory access over `llvmlite.ir`.

Tile kernels control the use of registers, so they are written as vector code: 16 f32 or i32 lanes, or 64 int8 lanes, on
every machine. LLVM splits these vectors for narrower targets. Instructions of one machine stand behind `Emitter.isa`
(`rlx.backends.cpu.isa`), so that the code of a kernel shows its loops and tiles.

The emitter's operations are in one file for each kind:

    builder.py    the function, its parameters and its text; whole numbers
    control.py    loops, tiles of a range, conditions
    vectors.py    arithmetic of vectors; pieces of vectors
    memory.py     addresses, loads and stores, masks, prefetches
    floats.py     loads and stores of f16 and bf16
"""

from __future__ import annotations

from llvmlite import ir

from rlx.backends.cpu.tiles.control import Control, Loop
from rlx.backends.cpu.tiles.floats import Floats
from rlx.backends.cpu.tiles.types import (
    BF16X32,
    BFLOAT,
    F32X16,
    FLOAT,
    HALF,
    I1,
    I8,
    I8X64,
    I16,
    I32,
    I32X16,
    I64,
    LANES,
    POINTER,
    Index,
    constant,
    mangle,
    vector,
)

__all__ = [
    "BF16X32",
    "BFLOAT",
    "F32X16",
    "FLOAT",
    "HALF",
    "I1",
    "I8",
    "I8X64",
    "I16",
    "I32",
    "I32X16",
    "I64",
    "LANES",
    "POINTER",
    "Emitter",
    "Index",
    "Loop",
    "constant",
    "mangle",
    "vector",
]  # fmt: skip


class Emitter(Control, Floats):
    """Generates one kernel: a C function over buffers, extents and a range [begin, end) of work units.

    Args:
        target: the machine that the code is for.
        buffers: names of the pointer parameters.
        extents: names of the i64 parameters between the pointers and begin, end.
    """

    def scale_by_power(self, x: ir.Value, n: ir.Value) -> ir.Value:
        """x * 2^n, for lanes n that are whole numbers within +-252. Rounds once, also to infinity or subnormals."""
        return self.isa.scale_by_power(self, x, n)
