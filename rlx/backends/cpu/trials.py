"""Trials of the kernels of custom ops: each is compared with its meaning before a program is stored.

The kernel runs twice on small random operands: first as plain Python on buffers that check every index, so that one
that leaves its buffers is named and not run; then as native code. It must compute what the meaning says, the same in
one range of units and unit by unit, write all of its result and nothing else.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlx.backends.cpu.kernel import Call
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.verify import difference
from rlx.errors import CustomOpError
from rlx.ir import dims
from rlx.ir.custom import CustomOp
from rlx.ir.custom_trials import operands_of, sample_sizes
from rlx.ir.meaning import Array
from rlx.ir.op_table import OPS

_ACCESSES = 200_000  # of buffers, that the Python form makes at most: it is slow
_GUARD = 64  # elements around the result that must stay as they are
_FILL = 0xA5


class _Enough(Exception):
    """The Python form has made its accesses."""


@dataclass
class _Count:
    left: int = _ACCESSES

    def one(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Enough


@dataclass
class _Checked:
    """A buffer of the Python form."""

    name: str
    where: str
    values: Array
    count: _Count = field(repr=False)
    writes: bool = False

    def __getitem__(self, at: Any) -> Any:
        self._check(at, "reads")
        return self.values[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if not self.writes:
            what = f"a side effect: it writes {self.name}[{at}], an operand"
            raise CustomOpError(what, where=self.where, hint="A kernel writes `out` only.")
        self._check(at, "writes")
        self.values[at] = value

    def _check(self, at: Any, what: str) -> None:
        self.count.one()
        if not 0 <= at < len(self.values):
            hint = "A buffer is flat: element i of row r of x[..., n] is x[r * n + i]."
            text = f"it {what} {self.name}[{at}], and {self.name} has {len(self.values)} elements"
            raise CustomOpError(text, where=self.where, hint=hint)


def check_kernel(call: Call, code: bytes, limits: dims.Bounds) -> None:
    """Compares the kernel of a custom op with its meaning.

    Args:
        code: object code of the kernel.
        limits: bounds of the symbols.

    Raises:
        CustomOpError: they disagree, or the kernel leaves its buffers.
    """
    node, op = call.node, OPS[call.node.op].custom
    assert op is not None
    sizes = sample_sizes(node, limits)
    native = NativeCode([code], [call.kernel.symbol])
    for positive in (False, True):
        operands = operands_of(node, sizes, positive=positive)
        flat = [np.ascontiguousarray(x, np.int32 if x.dtype.kind in "iu" else np.float32).reshape(-1) for x in operands]
        expected = op.evaluate(operands, dict(node.attrs), sizes)
        if not positive:
            _run_python(call, op, flat, expected, sizes)
        found = _run_native(call, op, flat, expected, sizes, native.addresses[call.kernel.symbol])
        wrong = difference(node, found.reshape(expected.shape), expected, partial(list, operands))
        if wrong is not None:
            what = f"it computes {wrong.found:.8g} at {list(wrong.place)}, the meaning {wrong.expected:.8g}"
            hint = f"{wrong.wrong} of {wrong.size} random values differ by more than the tolerance, {op.tolerance}."
            raise CustomOpError(what, where=f"custom op {op.name}, kernel", hint=hint)


def _run_python(call: Call, op: CustomOp, operands: list[Array], expected: Array, sizes: dict[str, int]) -> None:
    """Runs the kernel as Python; stops after a number of accesses."""
    assert call.kernel.python is not None
    where, count = f"custom op {op.name}, kernel", _Count()
    out = np.zeros(expected.size, np.int32 if expected.dtype.kind in "iub" else np.float32)
    buffers = [_Checked(name, where, x, count) for name, x in zip(op.operands, operands, strict=True)]
    extents = [dims.value(d, sizes) for d in call.extents]
    try:
        with np.errstate(all="ignore"):
            result = _Checked("out", where, out, count, writes=True)
            call.kernel.python(*buffers, result, *extents, 0, call.units.at(sizes))
    except (_Enough, ArithmeticError):
        return  # native code has no such errors; its result is compared
    except CustomOpError:
        raise
    except Exception as error:  # whatever a user's function raises
        raise CustomOpError(f"it raised {type(error).__name__}: {error}", where=where) from error


def _run_native(
    call: Call, op: CustomOp, operands: list[Array], expected: Array, sizes: dict[str, int], address: int
) -> Array:
    """The result of the native kernel, in one range of units; checks another division and what else is written."""
    where, units = f"custom op {op.name}, kernel", call.units.at(sizes)
    kernel, extents = call.kernel, [dims.value(d, sizes) for d in call.extents]
    types = [ctypes.c_void_p] * len(kernel.buffers) + [ctypes.c_int64] * (len(extents) + 2)
    function = ctypes.CFUNCTYPE(None, *types)(address)
    kept = [x.copy() for x in operands]
    dtype = np.dtype(np.int32 if expected.dtype.kind in "iub" else np.float32)
    results = []
    for ranges in ([(0, units)], [(unit, unit + 1) for unit in reversed(range(units))]):
        memory = np.full((expected.size + 2 * _GUARD) * dtype.itemsize, _FILL, np.uint8)
        out = memory[_GUARD * dtype.itemsize : -_GUARD * dtype.itemsize]
        for begin, end in ranges:
            function(*(x.ctypes.data for x in operands), out.ctypes.data, *extents, begin, end)
        around = np.concatenate([memory[: _GUARD * dtype.itemsize], memory[-_GUARD * dtype.itemsize :]])
        if (around != _FILL).any() or any(a.tobytes() != b.tobytes() for a, b in zip(operands, kept, strict=True)):
            raise CustomOpError("a side effect: it writes beside its result", where=where)
        results.append(out.view(dtype))
    unwritten = (results[0].view(np.uint32) == _FILL * 0x01010101).nonzero()[0]
    if len(unwritten):
        what = (
            f"it leaves {len(unwritten)} of {expected.size} elements of the result unwritten, first out[{unwritten[0]}]"
        )
        raise CustomOpError(what, where=where, hint="A unit writes all of its part of the result.")
    if results[0].tobytes() != results[1].tobytes():
        hint = "A unit must compute its own part of the result, and read nothing that another unit writes."
        raise CustomOpError("its result depends on how units are divided among workers", where=where, hint=hint)
    return results[0]
