"""Functions that kernels of custom ops may call, see docs/custom-ops.md.

`f32`, `i32`, `i64`: conversions. `exp`, `sqrt`, `sin`, `cos`, `maximum`: functions of f32. `round_even`: the nearest
whole number as i32. `fastmath(*SUM_FLAGS)` marks a helper whose sums may be computed in any order, as those of a kernel
are. All of them work under plain Python, too.
"""

from rlx.backends.cpu.loops import SUM_FLAGS, fastmath
from rlx.backends.cpu.scalars import cos, exp, f32, i32, i64, maximum, round_even, sin, sqrt

__all__ = ["SUM_FLAGS", "cos", "exp", "f32", "fastmath", "i32", "i64", "maximum", "round_even", "sin", "sqrt"]
