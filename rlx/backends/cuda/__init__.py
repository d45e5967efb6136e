"""The device "cuda": NVIDIA cards, through LLVM and the driver alone."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.backends.cuda import backend, build, choice_code, compile_only, passes, sass

__all__ = ["backend", "build", "choice_code", "compile_only", "passes", "sass"]

# What a start from the compile cache does not need, imported when it is first used.
__getattr__ = modules_of(__name__, __all__)
