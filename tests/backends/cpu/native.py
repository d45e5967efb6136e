"""Compiles one kernel and calls it on NumPy arrays: how kernel tests run machine code without the linker."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from typing import Any

import compiled_modules
import foreign
import numpy as np
import pytest
from numpy.typing import NDArray

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.llvm import Compiled, needs_few_passes, optimize
from rlx.backends.cpu.target import Target

Array = NDArray[Any]

_names = itertools.count()


@cache
def load(kernel: Kernel, target: Target) -> Any:
    """A ctypes function: one `c_void_p` a buffer, one `c_int64` an extent, begin and end. Calls release the GIL."""
    import llvmlite.binding as llvm

    if target.triple == foreign.TRIPLE:
        pytest.skip("calls code of this machine")
    builder = llvm.JITLibraryBuilder().add_object_img(emit_object(kernel, target)).add_current_process()
    jit = llvm.create_lljit_compiler(target.machine(), use_jit_link=True)
    tracker = builder.export_symbol(kernel.symbol).link(jit, f"kernel{next(_names)}")
    types = [ctypes.c_void_p] * len(kernel.buffers) + [ctypes.c_int64] * (len(kernel.extents) + 2)
    function = ctypes.CFUNCTYPE(None, *types)(tracker[kernel.symbol])
    function.owners = (jit, tracker)  # type: ignore[attr-defined]  # the code lives as long as these
    return function


def run(kernel: Kernel, target: Target, *arrays: Array, begin: int = 0, end: int, **extents: int) -> None:
    """Calls the kernel on arrays (in the order of `kernel.buffers`) for the units [begin, end)."""
    assert len(arrays) == len(kernel.buffers), (kernel.buffers, len(arrays))
    assert all(a.flags.c_contiguous for a in arrays)
    sizes = [extents.pop(name) for name in kernel.extents]
    assert not extents, f"unknown extents {sorted(extents)}"
    if target.triple == foreign.TRIPLE:
        foreign.run(kernel, arrays, [*sizes, begin, end], emit_object(kernel, target))
        return
    load(kernel, target)(*(a.ctypes.data for a in arrays), *sizes, begin, end)


def optimized(kernel: Kernel, target: Target) -> Any:
    """The kernel's LLVM module after the pass pipeline that the linker uses."""
    import llvmlite.binding as llvm

    machine = target.machine()
    module = llvm.parse_assembly(kernel.llvm)
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    module.verify()
    optimize(module, machine, few=needs_few_passes(kernel.llvm, target))
    return module


@cache
def emit_object(kernel: Kernel, target: Target) -> bytes:
    """The kernel as an object file."""

    def compiled() -> Compiled:
        return Compiled(bytes(target.machine().emit_object(optimized(kernel, target))), "")

    return compiled_modules.remembered("kernel", kernel.llvm, target, compiled).code


def assembly(kernel: Kernel, target: Target) -> str:
    """The kernel as assembler text, to look for instructions."""
    return str(target.machine().emit_assembly(optimized(kernel, target)))


def aligned(array: Array) -> Array:
    """A copy whose first byte lies on a 64-byte line, as the runtime's buffers do."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
