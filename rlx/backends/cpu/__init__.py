"""The CPU backend: kernels as LLVM assembly, programs that native workers run."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.backends.cpu import autotune, compiling, formats, isa, machine, numba_frontend, uncompiled

__all__ = ["autotune", "compiling", "formats", "isa", "machine", "numba_frontend", "uncompiled"]

# What a start from the compile cache does not need, imported when it is first used.
__getattr__ = modules_of(__name__, __all__)
