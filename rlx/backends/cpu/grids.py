"""Codebooks of the IQ types. The file stores the index of an entry, and an entry is 4 or 8 small codes.

The tables come from the `gguf` package, which is imported only to pack such weights: by the NumPy layout, or when a
packing kernel is compiled. The kernel calls one function per codebook. `define` adds that function and its table to the
kernel's module, as private constant data. So the object code is self-contained and a warm start does not need `gguf`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from numpy.typing import NDArray

from rlx.backends.codebooks import codes
from rlx.scalars import Primitive

_DECLARED = re.compile(r'^declare (i\d+) @"?grid_(\w+?)"?\(.*$', re.MULTILINE)


@cache
def _words(name: str) -> NDArray[Any]:
    """One word per entry: u32 of 4 codes or u64 of 8, the first code in the lowest byte."""
    entries = codes(name)
    return entries.view(f"<u{entries.shape[1]}")[:, 0]


def _primitive(name: str, count: int) -> Primitive:
    """`grid_<name>(i)`: the codes of entry i, one byte per code."""
    symbol, bits = f"grid_{name}", 8 * count

    def llvm(builder: Any, operands: Any) -> Any:
        import llvmlite.ir as ir

        type_ = ir.FunctionType(ir.IntType(bits), [ir.IntType(64)])
        known = builder.module.globals.get(symbol)
        return builder.call(known or ir.Function(builder.module, type_, symbol), operands)

    return Primitive(symbol, ("i64",), f"u{bits}", lambda i: _words(name)[i], llvm)


grid_iq1_s = _primitive("iq1_s", 8)
grid_iq2_xxs = _primitive("iq2_xxs", 8)
grid_iq2_xs = _primitive("iq2_xs", 8)
grid_iq2_s = _primitive("iq2_s", 8)
grid_iq3_xxs = _primitive("iq3_xxs", 4)
grid_iq3_s = _primitive("iq3_s", 4)


def define(llvm: str) -> str:
    """Replaces the codebook declarations in LLVM assembly by their definitions."""
    return _DECLARED.sub(lambda found: _definition(found[1], found[2]), llvm)


def _definition(type_: str, name: str) -> str:
    words = _words(name)
    array = f"[{len(words)} x {type_}]"
    values = ", ".join(f"{type_} {word}" for word in words.tolist())
    return (
        f"@grid_{name}.table = private unnamed_addr constant {array} [{values}], align 64\n"
        f"define internal {type_} @grid_{name}(i64 %i) alwaysinline {{\n"
        f"  %at = getelementptr inbounds {array}, ptr @grid_{name}.table, i64 0, i64 %i\n"
        f"  %entry = load {type_}, ptr %at\n"
        f"  ret {type_} %entry\n}}"
    )
