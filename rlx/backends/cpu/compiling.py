"""The half of the CPU backend that generates code, behind one import.

A start from the compile cache needs none of it: `steps.py` and `backend.py` import this module when code is missing.
"""

from __future__ import annotations

from rlx.backends.cpu.build import build_program
from rlx.backends.cpu.kernels.linear.linear import linear
from rlx.backends.cpu.kernels.linear.peak import peak
from rlx.backends.cpu.kernels.packing.pack import pack
from rlx.backends.cpu.kernels.rows.choose import choose
from rlx.backends.cpu.launch.loop import runtime_llvm
from rlx.backends.cpu.llvm import Module, Modules, assembly
from rlx.backends.cpu.loops import kernel_of
from rlx.backends.cpu.ranges import range_step, row_step

__all__ = [
    "Module",
    "Modules",
    "assembly",
    "build_program",
    "choose",
    "kernel_of",
    "linear",
    "pack",
    "peak",
    "range_step",
    "row_step",
    "runtime_llvm",
]
