"""Loop kernels as such: holes, the language, what the LLVM module holds, names that hold across processes."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from forms import Form, call, forms

from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.kernels.cache import kv
from rlx.backends.cpu.kernels.packing import pack
from rlx.backends.cpu.kernels.rows import copy, embedding, norm, quantize, reduce, rope, softmax
from rlx.backends.cpu.layouts import PACKED_DTYPES
from rlx.backends.cpu.loops import loop_kernel, specialize
from rlx.errors import CompileError
from rlx.ir.dtypes import F16, F32, I32, I64
from rlx.scalars import HOLE, Helper, Ptr, Scalar, f32, i64

FACTOR: float = HOLE
DEEP: bool = HOLE
TABLE: tuple[int, ...] = HOLE
GIVEN = 3

IO = [("x", F32), ("out", F32)]


def scale(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for i in range(begin, end):
        out[i] = x[i] * f32(FACTOR) + f32(GIVEN)


def times(x: Scalar) -> Scalar:
    return x * f32(FACTOR)


MADE: dict[str, Callable[[], Kernel]] = {
    "rms_norm": lambda: norm.rms_norm(96, 1e-6),
    "rms_norm_plain": lambda: norm.rms_norm(96, 1e-6, weighted=False),
    "rms_norm_q8a": lambda: norm.rms_norm(96, 1e-6, out="q8a"),
    "quantize": lambda: quantize.quantize(96),
    "round": lambda: quantize.quantize(96, "bf16"),
    "rope_angles": lambda: rope.rope_angles(8),
    "rope": lambda: rope.rope(2, 96, 64, "neox"),
    "rope_tiles": lambda: rope.rope(2, 32, 32, "interleaved", norm_eps=1e-6, store="k_tiles", kv_dtype="bf16"),
    "kv_write": lambda: kv.kv_write(2, 32, F16),
    "softmax": lambda: softmax.softmax(33),
    "argmax": lambda: reduce.argmax(100),
    "top_k": lambda: reduce.top_k(100, 5),
    "sum": lambda: reduce.row_reduce(100, "sum"),
    "last_row": lambda: copy.last_row(7),
    **{f"embedding_{t}": partial(embedding.embedding, t, 256) for t in PACKED_DTYPES},
    **{f"pack_{t}": partial(pack.pack, t) for t in PACKED_DTYPES},
}


@cache
def made(which: str) -> Kernel:
    return MADE[which]()


# ---------------------------------------------------------------------------------------------------- holes


def test_specialize_gives_plain_python() -> None:
    x, out = np.array([1, 2], np.float32), np.zeros(2, np.float32)
    specialize(scale, {"FACTOR": 10.0})(x, out, 0, 2)
    np.testing.assert_array_equal(out, [13, 23])


# ---------------------------------------------------------------------------------------------------- identity


def test_names_and_texts_hold_across_processes() -> None:
    code = (
        "import sys, hashlib; from rlx.backends.cpu.kernels.cache import kv; "
        "from rlx.backends.cpu.kernels.packing import pack; "
        "from rlx.backends.cpu.kernels.rows import copy, embedding, norm, quantize, reduce, rope, softmax\n"
        "assert not {'numba', 'llvmlite'} & set(sys.modules), 'imported too early'\n"
        "k = [reduce.top_k(100, 5), norm.rms_norm(96, 1e-6, out='q8a'), rope.rope_angles(8)]\n"
        "print(*[f'{x.symbol}:{hashlib.sha256(x.llvm.encode()).hexdigest()}' for x in k])"
    )
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    here = [made(which) for which in ("top_k", "rms_norm_q8a", "rope_angles")]
    assert done.stdout.split() == [f"{k.symbol}:{hashlib.sha256(k.llvm.encode()).hexdigest()}" for k in here]


# ---------------------------------------------------------------------------------------------------- refusals


def test_errors_name_the_kernel_and_the_reason() -> None:
    def broken(x: Ptr, begin: int, end: int) -> None:
        for i in range(begin, end):
            x[i] = x[i].nonsense

    with pytest.raises(CompileError, match=r"(?s)loop kernel broken: .*nonsense"):
        loop_kernel(broken, {}, [("x", F32)])
    loop_kernel(scale, {"FACTOR": 17.0}, IO)  # and a failure leaves nothing behind


def no_lowering(x: Ptr, begin: int, end: int) -> None:
    print(begin)


def raises(x: Ptr, begin: int, end: int) -> None:
    raise ValueError("no")


def overload(x: Ptr, begin: int, end: int) -> None:
    x[begin] = min(x[begin], x[end])


@pytest.mark.parametrize(("fn", "reason"), [(no_lowering, "print"), (raises, "cannot raise"), (overload, "min")])
def test_what_kernels_may_not_use_is_refused(fn: Helper, reason: str) -> None:
    with pytest.raises(CompileError, match=rf"(?s)loop kernel {fn.__name__}: .*{reason}"):
        loop_kernel(fn, {}, [("x", F32)])


# ---------------------------------------------------------------------------------------------------- the language


def language(x: Ptr, out: Ptr, seq: int, begin: int, end: int) -> None:
    for i in range(begin, end):
        total = i64(0)
        for j in range(10, -10, -3):
            if j % 4 == 1 or (j < 0 and j // 7 != -1):
                continue
            total += j // 3 + (j % 5) * TABLE[1]
        while total > 50:
            total -= 7
            if total == 60:
                break
        if DEEP:
            total += TABLE[0]
        else:
            total = x.no_such_attribute  # never typed: the branch is dead
        out[i] = total * 1000 + i64(x[i]) + abs(-seq) + (i ^ 5) - (seq << 2 >> 1)


@forms
def test_the_language_means_what_python_means(form: Form) -> None:
    kernel = loop_kernel(language, {"TABLE": (4, 9), "DEEP": True}, [("x", I32), ("out", I64)], ("seq",))
    x, out = np.arange(-3, 4, dtype=np.int32), np.zeros(7, np.int64)
    call(form, kernel, x, out, end=7, seq=11)
    wanted = np.zeros(7, np.int64)
    specialize(language, {"TABLE": (4, 9), "DEEP": True})([int(v) for v in x], wanted, 11, 0, 7)
    np.testing.assert_array_equal(out, wanted)


# ---------------------------------------------------------------------------------------------------- LLVM


@pytest.mark.parametrize("which", MADE)
def test_a_module_is_minimal_and_self_contained(which: str) -> None:
    import llvmlite.binding as llvm

    kernel = made(which)
    module = llvm.parse_assembly(kernel.llvm)
    module.verify()
    external = [f.name for f in module.functions if not f.is_declaration and f.linkage.name == "external"]
    assert external == [kernel.symbol]
    assert all(f.name.startswith("llvm.") for f in module.functions if f.is_declaration)
    tables = [str(variable) for variable in module.global_variables]
    assert all("= private unnamed_addr constant [" in table for table in tables), "only constants, only their own"
    assert not re.search(r"numba|Py|NRT|env|excinfo", kernel.llvm)
    assert "target " not in kernel.llvm, "the linker decides the target"
    wide = re.search(r"\bf(add|sub|mul|div|rem|cmp|neg)\b.* double", kernel.llvm)
    assert not wide, "a literal without `f32(...)` would widen to double in the compiled form only"
    head = next(line for line in kernel.llvm.splitlines() if line.startswith(f"define void @{kernel.symbol}("))
    assert head.count("* noalias ") == len(kernel.buffers), "pointers do not overlap"
    assert head.count("i64 %") == len(kernel.extents) + 2
