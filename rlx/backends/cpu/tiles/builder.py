"""The function of a kernel under construction: types of values, parameters, text, whole numbers, loops, conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel, symbol
from rlx.backends.cpu.llvm_text import WRITTEN
from rlx.backends.cpu.loops import NoPythonForm, is_python_only
from rlx.backends.cpu.target import Target

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, HALF, POINTER, VOID = ir.FloatType(), ir.HalfType(), ir.PointerType(), ir.VoidType()


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


_PLACEHOLDER = "__KERNEL__"


class Builder:
    """A C function over buffers, extents and a range [begin, end) of work units.

    Args:
        target: the machine that the code is for.
        buffers: names of the pointer parameters.
        extents: names of the i64 parameters between the pointers and begin, end.

    Raises:
        NoPythonForm: within `python_forms`.
    """

    def __init__(self, target: Target, buffers: Sequence[str], extents: Sequence[str]) -> None:
        if is_python_only():
            raise NoPythonForm("it is written in vector code", where="tile kernel")
        self.target, self.isa = target, target.isa
        self.buffers, self.extents = tuple(buffers), tuple(extents)
        self.module = ir.Module(name="")
        self.module.triple, self.module.data_layout = target.triple, _data_layout(target)
        types = [POINTER] * len(self.buffers) + [I64] * (len(self.extents) + 2)
        self.function = ir.Function(self.module, ir.FunctionType(VOID, types), _PLACEHOLDER)
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
        text = f"{_as_written(str(self.module), self._loops)}\n{WRITTEN}\n"
        name = symbol(template, text)
        return Kernel(name, self.buffers, self.extents, text.replace(_PLACEHOLDER, name), source)

    def call(self, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
        """Calls an intrinsic or another kernel, and declares it on first use."""
        known = self.module.globals.get(name)
        callee = known or ir.Function(self.module, ir.FunctionType(result, [o.type for o in operands]), name)
        return self.b.call(callee, operands)

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
        if is_zero(start):
            return scaled
        known = known and isinstance(start, int)
        return scaled + start if known else self.b.add(self.i64(scaled), self.i64(start))

    def ceil_div(self, x: ir.Value, y: Index) -> ir.Value:
        """x / y in i64, rounded up; both are not negative."""
        less = self.i64(y - 1) if isinstance(y, int) else self.b.sub(y, self.i64(1))
        return self.b.udiv(self.b.add(x, less), self.i64(y))

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


def is_zero(x: Index) -> bool:
    """Whether x is known to be 0."""
    return isinstance(x, int) and x == 0


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


class Control(Builder):
    """Loops and conditions."""

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
        with self.loop(self.b.udiv(begin, size), self.ceil_div(end, length)) as piece:
            start = self.b.mul(piece.i, size)
            yield piece.i, self.b.sub(self.smax(begin, start), start), self.smin(self.b.sub(end, start), length)

    @contextmanager
    def when(self, condition: ir.Value) -> Iterator[None]:
        """`if condition:`"""
        with self.b.if_then(condition):
            yield
