"""The emitter of tile kernels: loops, vector arithmetic and memory access over `llvmlite.ir`.

Tile kernels control the use of registers, so they are written as vector code: 16 f32 or i32 lanes, or 64 int8 lanes, on
every machine. LLVM splits these vectors for narrower targets. Instructions of one machine stand behind `Emitter.isa`
(`rlx.backends.cpu.isa`), so that the code of a kernel shows its loops and tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel, symbol
from rlx.backends.cpu.target import Target
from rlx.ir.dtypes import BF16, F16, F32, DType

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


F32X16, I32X16, I8X64, BF16X32 = vector(FLOAT), vector(I32), vector(I8, 64), vector(_BFloat(), 32)

#: A run-time value, or a number known at compile time.
Index: TypeAlias = ir.Value | int

_LANE_ZERO = ir.Constant(I32X16, [0] * LANES)  # a shuffle that repeats the first lane
_PLACEHOLDER = "__KERNEL__"

# The rounds of a 16 x 16 transpose, as (bit, lanes, shift). A round replaces each pair of vectors whose indices differ
# only in `bit`: the first result takes `lanes` of the concatenated pair, the second the lanes plus `shift`. Groups of
# four lanes are interleaved in the way that the shuffle instructions of every level do it.
_UNPACK = [first + lane for first in (0, 4, 8, 12) for lane in (0, 16, 1, 17)]
_FOURS = [first + lane for first in (0, 16, 8, 24) for lane in range(4)]
_EIGHTS = [first + lane for first in (0, 16) for lane in range(8)]
_ROUNDS = ((2, _UNPACK, 2), (1, _UNPACK, 2), (4, _FOURS, 4), (8, _EIGHTS, 8))


@dataclass
class Loop:
    """A counted loop under construction.

    Attributes:
        i: the counter.
        values: the loop-carried values. Assign the values of the next iteration before the loop ends.
        results: the carried values after the last iteration.
    """

    i: ir.Value
    values: list[ir.Value]
    results: list[ir.Value] = field(default_factory=list)


class Emitter:
    """Generates one kernel: a C function over buffers, extents and a range [begin, end) of work units.

    Args:
        target: the machine that the code is for.
        buffers: names of the pointer parameters.
        extents: names of the i64 parameters between the pointers and begin, end.
    """

    def __init__(self, target: Target, buffers: Sequence[str], extents: Sequence[str]) -> None:
        self.target, self.isa = target, target.isa
        self.buffers, self.extents = tuple(buffers), tuple(extents)
        self.module = ir.Module(name="")
        self.module.triple, self.module.data_layout = target.triple, _data_layout(target)
        types = [POINTER] * len(self.buffers) + [I64] * (len(self.extents) + 2)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), _PLACEHOLDER)
        names = (*self.buffers, *self.extents, "begin", "end")
        for argument, name in zip(self.function.args, names, strict=True):
            argument.name = name
        self.args: dict[str, ir.Value] = dict(zip(names, self.function.args, strict=True))
        self._loops: list[ir.MDValue] = []
        self._entry = self.function.append_basic_block("entry")
        self.b: ir.IRBuilder = ir.IRBuilder(self.function.append_basic_block("body"))

    def finish(self, template: str, source: str) -> Kernel:
        """Ends the function and names it by `template` and a digest of its text."""
        self.b.ret_void()
        ir.IRBuilder(self._entry).branch(self.function.blocks[1])
        text = _as_written(str(self.module), self._loops)
        name = symbol(template, text)
        return Kernel(name, self.buffers, self.extents, text.replace(_PLACEHOLDER, name), source)

    # --- numbers, addresses, memory -----------------------------------------------------------------------------------

    def i64(self, x: Index) -> ir.Value:
        return ir.Constant(I64, x) if isinstance(x, int) else x

    def f32(self, x: float) -> ir.Value:
        """A number in all 16 lanes."""
        return _splat(F32X16, FLOAT.format_constant(x))

    def i32(self, x: int) -> ir.Value:
        """An integer in all 16 lanes."""
        return _splat(I32X16, str(x))

    def mul_add(self, i: Index, stride: Index, start: Index = 0) -> Index:
        """start + i * stride in i64; a Python int if all three are known at compile time."""
        known = isinstance(i, int) and isinstance(stride, int)
        scaled: Index = i * stride if known else self.b.mul(self.i64(i), self.i64(stride))
        if _is_zero(start):
            return scaled
        known = known and isinstance(start, int)
        return scaled + start if known else self.b.add(self.i64(scaled), self.i64(start))

    def at(self, pointer: ir.Value, *terms: Index | tuple[Index, Index]) -> ir.Value:
        """The address `pointer` plus the sum of the terms in bytes. A pair stands for index times stride."""
        for term in terms:
            offset = self.mul_add(*term) if isinstance(term, tuple) else term
            pointer = self.b.gep(pointer, [self.i64(offset)], source_etype=I8) if not _is_zero(offset) else pointer
        return pointer

    def load(self, type_: ir.Type, pointer: ir.Value, align: int = 1) -> ir.Value:
        return self.b.load(pointer, typ=type_, align=align)

    def store(self, value: ir.Value, pointer: ir.Value, align: int = 1) -> None:
        self.b.store(value, pointer, align=align)

    def stack(self, nbytes: int) -> ir.Value:
        """Stack memory of the kernel's call, aligned to 64 bytes."""
        slot = ir.IRBuilder(self._entry).alloca(ir.ArrayType(I8, nbytes))
        slot.align, slot.type = 64, POINTER  # llvmlite still types it as a pointer to the array
        return slot

    def prefetch(self, pointer: ir.Value, nbytes: int, level: int = 1) -> None:
        """Prefetches the cache lines of `nbytes` bytes for reading, into the cache of a level and the outer levels.

        Level 1 is for data that is needed soon. More than a few lines would evict other data from that cache.
        """
        for line in range(0, nbytes, 64):
            hints = [ir.Constant(I32, hint) for hint in (0, 4 - level, 1)]  # read, how near, data
            self.call("llvm.prefetch", ir.VoidType(), [self.at(pointer, line), *hints])

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A scalar in all 16 lanes."""
        type_ = vector(scalar.type)
        anything = ir.Constant(type_, ir.Undefined)
        single = self.b.insert_element(anything, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, anything, _LANE_ZERO)

    def splat_f32(self, pointer: ir.Value) -> ir.Value:
        """The f32 at `pointer` in all lanes."""
        return self.splat(self.load(FLOAT, pointer, 4))

    def splat_i32(self, pointer: ir.Value) -> ir.Value:
        """The i32 (or four bytes) at `pointer` in all lanes."""
        return self.splat(self.load(I32, pointer))

    def tail_mask(self, count: ir.Value) -> ir.Value:
        """A mask of the first `count` (i64) of 16 lanes: all lanes if `count` exceeds 16, none if it is negative."""
        limit = self.splat(self.b.trunc(self.clamp(count, 0, LANES), I32))
        return self.b.icmp_signed("<", ir.Constant(I32X16, list(range(LANES))), limit)

    def clamp(self, x: ir.Value, low: int, high: int) -> ir.Value:
        """x (i64) within [low, high]."""
        return self.smax(self.smin(x, high), low)

    def smin(self, x: Index, y: Index) -> ir.Value:
        """The smaller of two i64."""
        x, y = self.i64(x), self.i64(y)
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def smax(self, x: Index, y: Index) -> ir.Value:
        """The larger of two i64."""
        x, y = self.i64(x), self.i64(y)
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def load_as_f32(self, dtype: DType, pointer: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Loads 16 numbers of type f32, f16 or bf16 as f32. Lanes outside the mask are 0, and are not read."""
        element = {F32: FLOAT, F16: I16, BF16: I16}[dtype]
        raw = self.masked_load(element, pointer, mask) if mask is not None else self.load(vector(element), pointer)
        if dtype is F32:
            return raw
        return self.half_to_f32(raw) if dtype is F16 else self.bf16_to_f32(raw)

    def store_from_f32(self, dtype: DType, value: ir.Value, pointer: ir.Value, mask: ir.Value | None = None) -> None:
        """Stores 16 f32 as f32, f16 or bf16, rounded to nearest even; NaN stays NaN."""
        convert = {F32: lambda v: v, F16: self.f32_to_half, BF16: self.f32_to_bf16}[dtype]
        if mask is None:
            self.store(convert(value), pointer)
        else:
            self.masked_store(convert(value), pointer, mask)

    def masked_load(self, element: ir.Type, pointer: ir.Value, mask: ir.Value) -> ir.Value:
        type_ = vector(element)
        operands = [pointer, ir.Constant(I32, 1), mask, ir.Constant(type_, None)]
        return self.call(f"llvm.masked.load.{mangle(type_)}.p0", type_, operands)

    def masked_store(self, value: ir.Value, pointer: ir.Value, mask: ir.Value) -> None:
        operands = [value, pointer, ir.Constant(I32, 1), mask]
        self.call(f"llvm.masked.store.{mangle(value.type)}.p0", ir.VoidType(), operands)

    # --- 16-bit floats ------------------------------------------------------------------------------------------------

    def bf16_to_f32(self, bits: ir.Value) -> ir.Value:
        """<16 x i16> bf16 bits -> f32. The bits are the upper half of the f32."""
        return self.b.bitcast(self.b.shl(self.b.zext(bits, I32X16), self.i32(16)), F32X16)

    def half_to_f32(self, bits: ir.Value) -> ir.Value:
        """<16 x i16> f16 bits -> f32."""
        if self.isa.converts_half:
            return self.b.fpext(self.b.bitcast(bits, vector(HALF)), F32X16)
        # Without the instruction: shift the fields into place; a multiplication then rebiases normals and subnormals.
        wide = self.b.zext(bits, I32X16)
        magnitude = self.b.shl(self.b.and_(wide, self.i32(0x7FFF)), self.i32(13))
        scaled = self.b.bitcast(self.b.fmul(self.b.bitcast(magnitude, F32X16), self.f32(2.0**112)), I32X16)
        special = self.b.icmp_unsigned(">=", magnitude, self.i32(0x0F800000))
        scaled = self.b.select(special, self.b.or_(magnitude, self.i32(0x7F800000)), scaled)
        sign = self.b.shl(self.b.and_(wide, self.i32(0x8000)), self.i32(16))
        return self.b.bitcast(self.b.or_(scaled, sign), F32X16)

    def f32_to_half(self, value: ir.Value) -> ir.Value:
        """f32 -> <16 x i16> f16 bits, round to nearest even."""
        if self.isa.converts_half:
            return self.b.bitcast(self.b.fptrunc(value, vector(HALF)), vector(I16))
        b, i = self.b, self.i32
        bits = b.bitcast(value, I32X16)
        size = b.and_(bits, i(0x7FFFFFFF))
        # Adding 0.5 moves the bits of a subnormal half to the low end of the mantissa, and rounds them.
        small = b.sub(b.bitcast(b.fadd(b.bitcast(size, F32X16), self.f32(0.5)), I32X16), i(0x3F000000))
        odd = b.and_(b.lshr(size, i(13)), i(1))
        normal = b.lshr(b.add(b.add(size, odd), i(0xFFF - (112 << 23))), i(13))
        special = b.select(b.icmp_unsigned(">", size, i(0x7F800000)), i(0x7E00), i(0x7C00))
        finite = b.select(b.icmp_unsigned("<", size, i(0x38800000)), small, normal)
        half = b.select(b.icmp_unsigned(">=", size, i(0x47800000)), special, finite)
        return b.trunc(b.or_(half, b.lshr(b.and_(bits, i(-0x80000000)), i(16))), vector(I16))

    def f32_to_bf16(self, value: ir.Value) -> ir.Value:
        """f32 -> <16 x i16> bf16 bits, rounded to nearest even; NaN becomes a quiet NaN."""
        bits = self.b.bitcast(value, I32X16)
        odd = self.b.and_(self.b.lshr(bits, self.i32(16)), self.i32(1))
        rounded = self.b.add(self.b.add(bits, odd), self.i32(0x7FFF))
        quiet = self.b.or_(bits, self.i32(0x400000))
        chosen = self.b.select(self.b.fcmp_unordered("uno", value, value), quiet, rounded)
        return self.b.trunc(self.b.lshr(chosen, self.i32(16)), vector(I16))

    # --- control ------------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Index, stop: Index, step: int = 1, carry: Sequence[ir.Value] = ()) -> Iterator[Loop]:
        """`for i in range(start, stop, step)`, with the carried values `carry`.

        After the loop, `results` holds the carried values and `i` the first value that was not run.
        """
        before = self.b.block
        head, body, done = (self.function.append_basic_block(name) for name in ("head", "loop", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        phis = [self.b.phi(value.type) for value in carry]
        self.b.cbranch(self.b.icmp_signed("<", i, self.i64(stop)), body, done)
        self.b.position_at_end(body)
        loop = Loop(i, list(phis), list(phis))
        yield loop
        following = self.b.add(i, self.i64(step), flags=["nsw"])
        for phi, first, later in zip([i, *phis], [self.i64(start), *carry], [following, *loop.values], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, self.b.block)
        self._loops.append(self.module.add_metadata([ir.Constant(I32, len(self._loops))]))
        self.b.branch(head).set_metadata("llvm.loop", self._loops[-1])
        self.b.position_at_end(done)

    def tiled(self, start: Index, stop: Index, sizes: Sequence[int], body: Callable[[int, ir.Value], None]) -> None:
        """Covers range(start, stop) with tiles of the given sizes, largest first. `body(size, first)` emits a tile.

        A remainder smaller than the last size is not covered.
        """
        for size in sizes:
            with self.loop(start, self.b.sub(self.i64(stop), self.i64(size - 1)), size) as loop:
                body(size, loop.i)
            start = loop.i

    @contextmanager
    def cut(self, length: Index) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
        """A loop over the units [begin, end), split at multiples of `length`.

        Yields (number of the piece, its first unit, its end), where units are counted from the start of the piece.
        """
        size, begin, end = self.i64(length), self.args["begin"], self.args["end"]
        less = self.i64(length - 1) if isinstance(length, int) else self.b.sub(length, self.i64(1))
        with self.loop(self.b.udiv(begin, size), self.b.udiv(self.b.add(end, less), size)) as piece:
            start = self.b.mul(piece.i, size)
            yield piece.i, self.b.sub(self.smax(begin, start), start), self.smin(self.b.sub(end, start), length)

    @contextmanager
    def when(self, condition: ir.Value) -> Iterator[None]:
        """`if condition:`"""
        with self.b.if_then(condition):
            yield

    def call(self, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
        """Calls an intrinsic, and declares it on first use."""
        known = self.module.globals.get(name)
        callee = known or ir.Function(self.module, ir.FunctionType(result, [o.type for o in operands]), name)
        return self.b.call(callee, operands)

    # --- f32 arithmetic -----------------------------------------------------------------------------------------------

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z: one instruction with one rounding if the target has FMA, else two."""
        return self.call(f"llvm.fmuladd.{mangle(x.type)}", x.type, [x, y, z])

    def max(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Lanewise maximum; y where either is NaN. One instruction."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def min(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Lanewise minimum; y where either is NaN. One instruction."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def scale_by_power(self, x: ir.Value, n: ir.Value) -> ir.Value:
        """x * 2^n, for lanes n that are whole numbers within +-252. Rounds once, also to infinity or subnormals."""
        return self.isa.scale_by_power(self, x, n)

    def to_f32(self, x: ir.Value) -> ir.Value:
        """Signed integers of any width -> f32."""
        return self.b.sitofp(x if x.type.element == I32 else self.b.sext(x, I32X16), F32X16)

    def reduce_max(self, x: ir.Value) -> ir.Value:
        """The largest lane, in all lanes. NaN lanes may be ignored."""
        return self._fold(x, self.max)

    def reduce_add(self, x: ir.Value) -> ir.Value:
        """The sum of the lanes, in all lanes. Adds pairs at distance 8, 4, 2 and 1."""
        return self._fold(x, self.b.fadd)

    def _fold(self, x: ir.Value, combine: Any) -> ir.Value:
        for distance in (8, 4, 2, 1):
            x = combine(x, self.pick(x, [lane ^ distance for lane in range(LANES)]))
        return x

    # --- pieces of vectors --------------------------------------------------------------------------------------------

    def pick(self, x: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """The given lanes of x, as a vector."""
        order = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return self.b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), order)

    def pieces(self, x: ir.Value, lanes: int) -> list[ir.Value]:
        """Splits a vector into vectors of `lanes` lanes."""
        count = x.type.count
        return [x] if count == lanes else [self.pick(x, range(at, at + lanes)) for at in range(0, count, lanes)]

    def concat(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """Concatenates two vectors."""
        order = ir.Constant(vector(I32, 2 * low.type.count), list(range(2 * low.type.count)))
        return self.b.shuffle_vector(low, high, order)

    def transpose(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """Transposes 16 vectors of 16 lanes: result i holds lane i of each vector."""
        done = list(rows)
        for bit, lanes, shift in _ROUNDS:
            orders = [ir.Constant(I32X16, [lane + more for lane in lanes]) for more in (0, shift)]
            for i in (i for i in range(LANES) if not i & bit):
                pair = done[i], done[i | bit]
                done[i], done[i | bit] = (self.b.shuffle_vector(*pair, order) for order in orders)
        return done


def _as_written(text: str, loops: Sequence[ir.MDValue]) -> str:
    """The text of the module with metadata that disables unrolling of its loops.

    Kernels are unrolled by hand, and LLVM's unrolling would take long. Loop metadata must refer to itself, which
    llvmlite cannot write.
    """
    if not loops:
        return text
    for number, loop in enumerate(loops):
        name = loop.get_reference()
        text = text.replace(f"{name} = !{{ i32 {number} }}", f"{name} = distinct !{{ {name}, !{len(loops)} }}")
    return f'{text}\n!{len(loops)} = !{{ !"llvm.loop.unroll.disable" }}\n'


@cache
def _splat(type_: ir.VectorType, number: str) -> ir.Value:
    """A vector constant with equal lanes, in LLVM's short `splat` form, which llvmlite does not write."""
    constant = ir.FormattedConstant(I1, f"splat ({type_.element} {number})")
    constant.type = type_
    return constant


@cache
def _data_layout(target: Target) -> str:
    return str(target.machine().target_data)


def _is_zero(x: Index) -> bool:
    return isinstance(x, int) and x == 0


def mangle(type_: ir.Type) -> str:
    """The type suffix of an overloaded intrinsic, such as `v16f32`."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{mangle(type_.element)}"
    return {FLOAT: "f32", HALF: "f16"}.get(type_) or f"i{type_.width}"
