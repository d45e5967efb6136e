"""The instruction sets: `of` gives that of a target, by the features that were measured on the machine.

CPU backend, under the emitter of tile kernels. Another instruction set is one more file and a row of `SETS`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rlx.backends.cpu.isa.aarch64 import Aarch64
from rlx.backends.cpu.isa.portable import Isa
from rlx.backends.cpu.isa.x86 import X86

if TYPE_CHECKING:
    from rlx.backends.cpu.target import Target

#: First word of an LLVM triple -> the instruction set; the portable one for all others.
SETS: dict[str, type[Isa]] = {"x86_64": X86, "amd64": X86, "aarch64": Aarch64, "arm64": Aarch64}


@lru_cache
def of(target: Target) -> Isa:
    """The instruction set of a target."""
    return for_triple(target.triple)(target)


def for_triple(triple: str) -> type[Isa]:
    """The instruction set of machines with this triple."""
    return SETS.get(triple.split("-")[0], Isa)
