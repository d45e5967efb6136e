"""Kernels of another machine, run by an emulator: what `native.py` does where `RLX_TEST_EMULATOR` is set.

`tools/emulate.py` sets it, RLX_TEST_FEATURES to what the emulated processor has and RLX_TEST_LEVEL to a level of it. It
names the requirements, too. Python and LLVM run here, several times as fast as in the emulator. A kernel is linked into
a program of its own without a C library. It maps a file with the arguments and the buffers, calls the kernel and ends;
the buffers are then read back.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.levels import AARCH64, feature_string
from rlx.backends.cpu.target import Target

EMULATOR = os.environ.get("RLX_TEST_EMULATOR", "")  # command of qemu-user
FEATURES = frozenset(os.environ.get("RLX_TEST_FEATURES", "").split(","))
TRIPLE = "aarch64-unknown-linux-gnu"
_LINE = 64
_lock = threading.Lock()
_ELF_AARCH64 = b"\xb7\0"  # the field e_machine

#: The program. The file begins with one word per argument: the place of a buffer in the file, or a number.
_PROGRAM = """
typedef unsigned long word;
static word call(word n, word a, word b, word c, word d, word e, word f) {
  register word x8 asm("x8") = n, x0 asm("x0") = a, x1 asm("x1") = b, x2 asm("x2") = c, x3 asm("x3") = d;
  register word x4 asm("x4") = e, x5 asm("x5") = f;
  asm volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}
void *memset(void *to, int value, word n) { for (volatile char *p = to; n--;) *p++ = value; return to; }
void *memcpy(void *to, const void *from, word n) {
  const char *q = from;
  for (volatile char *p = to; n--;) *p++ = *q++;
  return to;
}
void sincosf(float x, float *sine, float *cosine) {  /* in double: Cody and Waite's reduction, then Taylor's series */
  double turns = x * 0.63661977236758138, n = (double)(long)(turns + (turns < 0 ? -0.5 : 0.5));
  double r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11, term = 1, s = 0, c = 0;
  for (int i = 0; i < 20; i++) {
    double part = i & 2 ? -term : term;
    if (i & 1) s += part; else c += part;
    term *= r / (i + 1);
  }
  long quarter = (long)n & 3;
  *sine = quarter & 1 ? c : s; *cosine = quarter & 1 ? s : c;
  if (quarter & 2) *sine = -*sine;
  if (quarter == 1 || quarter == 2) *cosine = -*cosine;
}
void KERNEL(TYPES);
void start(void) {
  word size = SIZE_OF_FILE();
  char *base = (char *)call(222, 0, size, 3, 1, 0, 0);  /* mmap the input, shared */
  word *table = (word *)base;
  KERNEL(ARGUMENTS);
  call(94, 0, 0, 0, 0, 0, 0);
}
void _start(void) { start(); }
"""


class ForeignError(AssertionError):
    """The program did not end as it should."""


def run(kernel: Kernel, arrays: Sequence[Any], numbers: Sequence[int], code: bytes) -> None:
    """Calls a kernel on arrays, of which several may be views of one memory, and writes the results into them.

    Calls of several threads run one after the other, because each copies the memory that they share.

    Args:
        numbers: its extents, begin and end.
        code: its object file.
    """
    with _lock:
        _run(kernel, arrays, numbers, code)


def _run(kernel: Kernel, arrays: Sequence[Any], numbers: Sequence[int], code: bytes) -> None:
    words = len(arrays) + len(numbers)
    places, end = dict[int, int](), -(-8 * words // _LINE) * _LINE
    for array in arrays:
        start = array.ctypes.data
        if start not in places:
            places[start] = end + start % _LINE  # the alignment of the original
            end = -(-(places[start] + array.nbytes) // _LINE) * _LINE + _LINE
    memory = np.zeros(end, np.uint8)
    memory[: 8 * words].view(np.int64)[:] = [*(places[a.ctypes.data] for a in arrays), *numbers]
    for array in arrays:
        at = places[array.ctypes.data]
        memory[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
    with tempfile.TemporaryFile() as file:
        file.write(memory.tobytes())
        file.flush()
        file.seek(0)
        ended = subprocess.run([*EMULATOR.split(), program(kernel, code)], stdin=file, capture_output=True, timeout=300)
        if ended.returncode:
            raise ForeignError(
                f"{kernel.symbol}: exit {ended.returncode}: {ended.stderr.decode(errors='replace')[:500]}"
            )
        file.seek(0)
        found = np.frombuffer(file.read(), np.uint8)
    for array in arrays:
        if array.flags.writeable:
            at = places[array.ctypes.data]
            array.reshape(-1).view(np.uint8)[:] = found[at : at + array.nbytes]


@cache
def program(kernel: Kernel, code: bytes) -> str:
    """The path of the linked program."""
    buffers, numbers = len(kernel.buffers), len(kernel.extents) + 2
    given = [f"base + table[{i}]" for i in range(buffers)]
    given += [f"(long)table[{i}]" for i in range(buffers, buffers + numbers)]
    text = _PROGRAM.replace("KERNEL", kernel.symbol).replace(
        "TYPES", ", ".join(["char *"] * buffers + ["long"] * numbers)
    )
    text = text.replace("ARGUMENTS", ", ".join(given)).replace("SIZE_OF_FILE()", "call(62, 0, 0, 2, 0, 0, 0)")  # lseek
    folder = _folder()
    (folder / f"{kernel.symbol}.c").write_text(text)
    (folder / f"{kernel.symbol}.o").write_bytes(code)
    made = folder / kernel.symbol
    flags = "-O1 -w -fno-builtin -ffreestanding -nostdlib -static -fuse-ld=lld".split()
    sources = [str(folder / f"{kernel.symbol}.{end}") for end in ("c", "o")]
    subprocess.run(["clang", f"--target={TRIPLE}", *flags, *sources, "-o", str(made)], check=True, timeout=300)
    return str(made)


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rlx-foreign-"))


def targets() -> list[Target]:
    """The level to test, as a list. The types of weights are spread over the levels of a list; so one has them all."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    _skip_whole_programs()
    level = next(each for each in AARCH64.supported(FEATURES) if each.name == os.environ["RLX_TEST_LEVEL"])
    return [Target(level.name, TRIPLE, level.cpu, feature_string(level, level.defaults(FEATURES)))]


def _skip_whole_programs() -> None:
    """Skips tests that load objects of the other machine into this process: they test more than a kernel."""
    load = NativeCode.__init__

    def checked(self: NativeCode, objects: Iterable[bytes], *more: Any) -> None:
        found = list(objects)
        if any(code[18:20] == _ELF_AARCH64 for code in found):
            pytest.skip("runs a whole program")
        load(self, found, *more)

    NativeCode.__init__ = checked  # type: ignore[method-assign]
