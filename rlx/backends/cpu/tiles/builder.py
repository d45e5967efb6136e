"""The function of a kernel under construction: its parameters, its text, and numbers in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llvmlite import ir

from rlx.backends.cpu.kernel import Kernel, symbol
from rlx.backends.cpu.llvm_text import WRITTEN
from rlx.backends.cpu.loops import NoPythonForm, is_python_only
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tiles.types import F32X16, FLOAT, I1, I32X16, I64, POINTER, Index

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
        text = f"{_as_written(str(self.module), self._loops)}\n{WRITTEN}\n"
        name = symbol(template, text)
        return Kernel(name, self.buffers, self.extents, text.replace(_PLACEHOLDER, name), source)

    def call(self, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
        """Calls an intrinsic, and declares it on first use."""
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
