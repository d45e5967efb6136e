"""The language of loop kernels, in which kernels of custom ops are written, too (docs/custom-ops.md).

`f32`, `i32`, `i64`: conversions. `exp`, `sqrt`, `sin`, `cos`, `maximum`: functions of f32. `round_even`: the nearest
whole number as i32. `fastmath(*SUM_FLAGS)` marks a helper whose sums may be computed in any order, as those of a kernel
are. All of them work under plain Python, too. These are the names for custom ops; rlx's own kernels use the others,
too.

A `Primitive` has two implementations, one in Python and one in LLVM. All other functions here are plain Python over
primitives, and are lowered like the kernels that call them. Arithmetic is 32-bit: write `f32(0.5)`, never `0.5`. With
`0.5`, NumPy would keep single precision but the compiled form would widen to double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy import float32 as f32
from numpy import int32 as i32
from numpy import int64 as i64

from rlx.errors import CompileError

__all__ = ["SUM_FLAGS", "cos", "exp", "f32", "fastmath", "i32", "i64", "maximum", "round_even", "sin", "sqrt"]

u8 = np.uint8
u16 = np.uint16
u32 = np.uint32
u64 = np.uint64

#: A pointer inside a kernel. It can be indexed; the kernel's parameter declares the element type.
Ptr: TypeAlias = Any
#: A number inside a kernel.
Scalar: TypeAlias = Any
#: A function that kernels call; also the type of a hole for such a function.
Helper: TypeAlias = Callable[..., Any]


class _Hole:
    def __repr__(self) -> str:
        return "HOLE"


#: The value of a name that is filled in when a kernel is compiled: `WIDTH: int = HOLE`.
HOLE: Any = _Hole()
Fn = TypeVar("Fn", bound=Callable[..., Any])

#: The flags that a reduction needs to be vectorized. Not `nnan` or `ninf`: NaN and infinity must propagate.
SUM_FLAGS = ("arcp", "contract", "nsz", "reassoc")
FLAGS = frozenset(SUM_FLAGS)


def fastmath(*flags: str) -> Callable[[Fn], Fn]:
    """Marks a helper function: its float operations get these LLVM flags. The operations of its callers do not."""

    def mark(fn: Fn) -> Fn:
        fn.fastmath = checked_flags(flags, fn)  # type: ignore[attr-defined]
        return fn

    return mark


def outlined(fn: Fn) -> Fn:
    """Marks a helper function: it is compiled once instead of into each of its callers."""
    fn.outlined = True  # type: ignore[attr-defined]
    return fn


def checked_flags(flags: Sequence[str], fn: Callable[..., Any]) -> tuple[str, ...]:
    """The flags in order, each once.

    Raises:
        CompileError: a flag is not one of `FLAGS`.
    """
    if not FLAGS.issuperset(flags):
        wrong = ", ".join(sorted(set(flags) - FLAGS))
        raise CompileError(f"fast-math flags {wrong} are not allowed", where=fn.__name__, hint=f"Use {sorted(FLAGS)}")
    return tuple(sorted(set(flags)))


@dataclass(frozen=True, eq=False)
class Primitive:
    """A scalar operation that Python has no operator for.

    Attributes:
        name: its name in kernels.
        args: types of the operands; `*u8` is a byte pointer.
        result: type of the value, or `none`.
        python: the implementation on NumPy scalars and byte arrays.
        llvm: the implementation in LLVM, `(builder, operands) -> value`.
    """

    name: str
    args: tuple[str, ...]
    result: str
    python: Callable[..., Any]
    llvm: Callable[[Any, Any], Any]

    def __call__(self, *args: Any) -> Any:
        return self.python(*args)


# ------------------------------------------------------------------------------------------------ primitives


def _llvm_type(name: str) -> Any:
    import llvmlite.ir as ir

    return ir.FloatType() if name == "f32" else ir.IntType(int(name[1:]))


def _bitcast(to: str) -> Callable[[Any, Any], Any]:
    return lambda builder, operands: builder.bitcast(operands[0], _llvm_type(to))


def _intrinsic(name: str) -> Callable[[Any, Any], Any]:
    def build(builder: Any, operands: Any) -> Any:
        import llvmlite.ir as ir

        f32_type = _llvm_type("f32")
        ftype = ir.FunctionType(f32_type, [f32_type] * len(operands))
        return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", [f32_type], ftype), operands)

    return build


def _address(builder: Any, base: Any, offset: Any, to: str) -> Any:
    at = builder.gep(base, [offset], inbounds=True)
    return builder.bitcast(at, _llvm_type(to).as_pointer())


def _load(name: str, dtype: str, scalar: Any) -> Primitive:
    """`name(bytes, offset)`: the value at a byte offset, aligned or not."""

    def python(base: Any, offset: int) -> Any:
        return base[offset : offset + np.dtype(scalar).itemsize].view(scalar)[0]

    def llvm(builder: Any, operands: Any) -> Any:
        base, offset = operands
        return builder.load(_address(builder, base, offset, dtype), align=1)

    return Primitive(name, ("*u8", "i64"), dtype, python, llvm)


def _store(name: str, dtype: str, scalar: Any) -> Primitive:
    """`name(bytes, offset, value)`: writes the value at a byte offset, aligned or not."""

    def python(base: Any, offset: int, value: Any) -> None:
        base[offset : offset + np.dtype(scalar).itemsize].view(scalar)[0] = value

    def llvm(builder: Any, operands: Any) -> None:
        base, offset, value = operands
        builder.store(value, _address(builder, base, offset, dtype), align=1)

    return Primitive(name, ("*u8", "i64", dtype), "none", python, llvm)


@cache
def stack_memory(dtype: str, count: int) -> Primitive:
    """`memory()`: a pointer to stack memory for `count` numbers, aligned to 64 bytes.

    The primitive is cached by its arguments, so that equal kernels have equal holes.
    """

    def llvm(builder: Any, operands: Any) -> Any:
        import llvmlite.ir as ir

        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(_llvm_type(dtype), count))
        memory.align = 64
        return builder.bitcast(memory, _llvm_type(dtype).as_pointer())

    scalar = {"f32": f32, "u8": u8}[dtype]
    return Primitive(f"memory_{dtype}_{count}", (), f"*{dtype}", lambda: np.zeros(count, scalar), llvm)


as_bits = Primitive("as_bits", ("f32",), "u32", lambda x: f32(x).view(u32), _bitcast("u32"))
as_f32 = Primitive("as_f32", ("u32",), "f32", lambda bits: u32(bits).view(f32), _bitcast("f32"))
sqrt = Primitive("sqrt", ("f32",), "f32", lambda x: np.sqrt(f32(x)), _intrinsic("sqrt"))
sin = Primitive("sin", ("f32",), "f32", lambda x: np.sin(f32(x)), _intrinsic("sin"))
maximum = Primitive("maximum", ("f32", "f32"), "f32", lambda a, b: np.maximum(f32(a), f32(b)), _intrinsic("maximum"))
cos = Primitive("cos", ("f32",), "f32", lambda x: np.cos(f32(x)), _intrinsic("cos"))
load_u16 = _load("load_u16", "u16", u16)
load_u32 = _load("load_u32", "u32", u32)
load_f32 = _load("load_f32", "f32", f32)
store_u16 = _store("store_u16", "u16", u16)
store_u32 = _store("store_u32", "u32", u32)
store_i32 = _store("store_i32", "i32", i32)
store_f32 = _store("store_f32", "f32", f32)

# ------------------------------------------------------------------------------------------------ half floats
# The conversions use bit arithmetic instead of LLVM's `half`. Baseline x86 has no conversion instructions, and LLVM
# would call a runtime library there. Bit arithmetic vectorizes, and does not depend on the thread's denormal mode.


def f16_to_f32(half: Any) -> Any:
    """The value of IEEE half-precision bits (u16), exactly."""
    bits = u32(half)
    magnitude = bits & u32(0x7FFF)
    rebias = u32(0x38000000) if magnitude < u32(0x7C00) else u32(0x70000000)
    normal = (magnitude << u32(13)) + rebias
    tiny = as_bits(f32(i32(magnitude)) * f32(2.0**-24))
    shifted = tiny if magnitude < u32(0x400) else normal
    return as_f32(u32(shifted) | u32((bits & u32(0x8000)) << u32(16)))


def f32_to_f16(x: Any) -> Any:
    """Half-precision bits (u16) of a value, rounded to nearest even. Overflow gives infinity, NaN stays NaN."""
    bits = as_bits(x)
    magnitude = u32(bits & u32(0x7FFFFFFF))
    odd = u32((magnitude >> u32(13)) & u32(1))
    normal = u32(u32(magnitude + u32(0xFFF) + odd) - u32(0x38000000)) >> u32(13)
    # Near 0.5 the spacing of f32 numbers is 2^-24, that of half subnormals: adding 0.5 rounds to a half subnormal.
    tiny = u32(as_bits(as_f32(magnitude) + f32(0.5)) - u32(0x3F000000))
    half = tiny if magnitude < u32(0x38800000) else normal
    half = u32(0x7C00) if magnitude >= u32(0x477FF000) else half
    half = u32(0x7E00) if magnitude > u32(0x7F800000) else half
    return u16(u32(half) | ((bits >> u32(16)) & u32(0x8000)))


def bf16_to_f32(half: Any) -> Any:
    """The value of bfloat16 bits (u16), exactly."""
    return as_f32(u32(u32(half) << u32(16)))


def f32_to_bf16(x: Any) -> Any:
    """bfloat16 bits (u16) of a value, rounded to nearest even; NaN stays NaN."""
    bits = as_bits(x)
    magnitude = u32(bits & u32(0x7FFFFFFF))
    odd = u32((magnitude >> u32(16)) & u32(1))
    rounded = u32(magnitude + u32(0x7FFF) + odd) >> u32(16)
    half = u32((magnitude >> u32(16)) | u32(0x40)) if magnitude > u32(0x7F800000) else rounded
    return u16(u32(half) | ((bits >> u32(16)) & u32(0x8000)))


def keep_f32(x: Any) -> Any:
    """The conversion for buffers of f32: returns the value unchanged."""
    return f32(x)


# ------------------------------------------------------------------------------------------------ arithmetic


def round_even(x: Any) -> Any:
    """Nearest integer of x as i32, ties to even, for |x| < 2^22.

    Adding 1.5 * 2^23 leaves the integer in the low bits of the mantissa.
    """
    return i32(as_bits(x + f32(12582912.0)) - u32(0x4B400000))


def exp(x: Any) -> Any:
    """e^x for x <= 88, error below 2 units in the last place; below -87.3 it is 0, NaN stays NaN.

    The range is reduced to |r| <= ln(2)/2, with ln(2) in two parts. The Taylor polynomial of degree 7 gives e^r (its
    remainder is 5e-9), and the exponent bits give 2^n. A call of libm would not vectorize.
    """
    low = x < f32(-87.3)
    y = f32(-87.3) if low else x
    shifted = y * f32(1.44269504) + f32(12582912.0)
    n = shifted - f32(12582912.0)
    r = (y - n * f32(0.693359375)) + n * f32(2.12194440e-4)
    p = f32(1.0 / 5040.0)
    p = p * r + f32(1.0 / 720.0)
    p = p * r + f32(1.0 / 120.0)
    p = p * r + f32(1.0 / 24.0)
    p = p * r + f32(1.0 / 6.0)
    p = p * r + f32(0.5)
    p = p * r + f32(1.0)
    p = p * r + f32(1.0)
    # The integer n is in the low bits of `shifted`. A conversion of `n` to an integer would be undefined for NaN.
    scale = as_f32(u32(u32(as_bits(shifted) - u32(0x4B400000 - 127)) << u32(23)))
    return f32(0.0) if low else p * scale


def order_key(x: Any) -> Any:
    """An i32 with the order of x: -0 equals +0, and every NaN is greater than all numbers, so that a search finds it.

    The code has no branches. With branches, LLVM's jump threading would stop a running maximum from being vectorized.
    """
    bits = i32(as_bits(x))
    magnitude = i32(bits & i32(0x7FFFFFFF))
    number = i32(magnitude - i32(0x7F800001)) >> i32(31)  # all ones, or zero for NaN
    negative = i32(i32(bits >> i32(31)) & number)
    key = i32(i32(magnitude ^ negative) - negative)
    return i32(0x7F800001) if key > i32(0x7F800001) else key
