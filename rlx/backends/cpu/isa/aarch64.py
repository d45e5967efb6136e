"""aarch64: what every 64-bit ARM processor has. The rest is portable code, which LLVM compiles to NEON instructions."""

from __future__ import annotations

from rlx.backends.cpu.isa.portable import Portable


class Aarch64(Portable):
    """The instructions of an aarch64 target."""

    pause = "@llvm.aarch64.hint(i32 1)"
    converts_half = True
