"""The types of LLVM that kernels use: how their constants are written, their sizes, conversions between them."""

from __future__ import annotations

import struct

FLOATS = {"half", "bfloat", "float", "double"}
BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8}


def constant(value: float, type_: str) -> str:
    """A number as LLVM writes it."""
    if type_ in ("float", "double"):
        number = struct.unpack("<f", struct.pack("<f", value))[0] if type_ == "float" else float(value)
        return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    assert type_ not in FLOATS, "16-bit constants are not used"
    return str(int(value))


def size_of(type_: str) -> int:
    """Bytes of a value, 8 for pointers."""
    if type_.startswith("<"):
        count, element = type_[1:-1].split(" x ")
        return int(count) * BYTES[element]
    return BYTES.get(type_, 8)


def conversion(old: str, new: str, signed: bool) -> str:
    """The instruction that converts a number, see `Value.to`."""
    if old in FLOATS and new in FLOATS:
        return "fpext" if BYTES[new] > BYTES[old] else "fptrunc"
    if old in FLOATS:
        return "fptosi"
    if new in FLOATS:
        return "sitofp" if signed or old in ("i32", "i64") else "uitofp"
    if old == "i1":
        return "zext"
    if BYTES[new] < BYTES[old]:
        return "trunc"
    return "sext" if signed or old == "i32" else "zext"
