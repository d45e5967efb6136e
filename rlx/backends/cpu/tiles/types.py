"""The types of the values of tile kernels."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from llvmlite import ir

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, HALF, POINTER = ir.FloatType(), ir.HalfType(), ir.PointerType()


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """The type of a vector with this number of lanes."""
    return ir.VectorType(element, lanes)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's `bfloat`, which llvmlite lacks. Used for operands of dot products, never for constants."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
F32X16, I32X16, I8X64, BF16X32 = vector(FLOAT), vector(I32), vector(I8, 64), vector(BFLOAT, 32)


@cache
def constant(type_: ir.VectorType, numbers: tuple[int, ...] | int = 0) -> ir.Value:
    """A vector of integers, which may all be equal. Equal constants are one object, whose text llvmlite writes once."""
    return ir.Constant(type_, [numbers] * type_.count if isinstance(numbers, int) else list(numbers))


#: A run-time value, or a number known at compile time.
Index: TypeAlias = ir.Value | int


def mangle(type_: ir.Type) -> str:
    """The type suffix of an overloaded intrinsic, such as `v16f32`."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{mangle(type_.element)}"
    return {FLOAT: "f32", HALF: "f16"}.get(type_) or f"i{type_.width}"
