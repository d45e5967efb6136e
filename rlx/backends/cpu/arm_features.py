"""What an aarch64 processor can do, asked of the operating system and named as LLVM names it.

LLVM's own detection reads `/proc/cpuinfo`, which containers and emulators may hide or take from another machine. Linux
tells every process in its auxiliary vector, macOS by `sysctl`, Windows by a function.
"""

from __future__ import annotations

import ctypes
import sys

# Bits of AT_HWCAP and AT_HWCAP2 (Linux: arch/arm64/include/uapi/asm/hwcap.h).
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {"neon": 1 << 1, "lse": 1 << 8, "dotprod": 1 << 20, "sve": 1 << 22}
_HWCAP2 = {"sve2": 1 << 1, "i8mm": 1 << 13, "bf16": 1 << 14}

#: Keys of `sysctl` (Apple: "Determining Instruction Set Characteristics"). Every Apple processor has NEON.
_SYSCTL = {
    "lse": "hw.optional.arm.FEAT_LSE",
    "dotprod": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
}

# Arguments of IsProcessorFeaturePresent (winnt.h). Every Windows machine has NEON.
_WINDOWS = {"lse": 34, "dotprod": 43}


def features() -> frozenset[str]:
    """The features of this machine that code may use, by LLVM name; only `neon` where the system does not tell."""
    ask = {"linux": _linux, "darwin": _macos, "win32": _windows}.get(sys.platform)
    return frozenset({"neon"}) | (ask() if ask else frozenset())


def _linux() -> frozenset[str]:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return named(getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2))


def named(hwcap: int, hwcap2: int) -> frozenset[str]:
    """The features in the two words of Linux."""
    tables = ((_HWCAP, hwcap), (_HWCAP2, hwcap2))
    return frozenset(name for table, word in tables for name, bit in table.items() if word & bit)


def _macos() -> frozenset[str]:
    sysctl = ctypes.CDLL(None).sysctlbyname

    def is_set(key: str) -> bool:
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        failed = sysctl(key.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
        return not failed and value.value == 1  # older systems lack the keys of newer features

    return frozenset(name for name, key in _SYSCTL.items() if is_set(key))


def _windows() -> frozenset[str]:
    present = ctypes.CDLL("kernel32").IsProcessorFeaturePresent
    return frozenset(name for name, number in _WINDOWS.items() if present(number))
