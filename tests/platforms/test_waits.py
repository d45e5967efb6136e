"""Every way in which idle workers wait, run: the calls of macOS and Windows are imitated with Linux' futex."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.loop import runtime_llvm
from rlx.backends.cpu.launch.native import RuntimeLibrary, WorkerPool
from rlx.backends.cpu.llvm import compile_module
from rlx.backends.cpu.target import Target

pytestmark = pytest.mark.skipif("sys.platform != 'linux' or __import__('platform').machine() != 'x86_64'")

#: `__ulock_wait` and `WaitOnAddress` with their arguments checked, over futex (202: FUTEX_WAIT 128, FUTEX_WAKE 129).
IMITATIONS = """
declare i64 @syscall(i64, ...)
define i32 @__ulock_wait(i32 %operation, ptr %address, i64 %value, i32 %timeout) {
  %right = icmp eq i32 %operation, 1
  br i1 %right, label %wait, label %wrong
wait:
  %rc = call i64 (i64, ...) @syscall(i64 202, ptr %address, i64 128, i64 %value, ptr null)
  ret i32 0
wrong:
  ret i32 -1
}
define i32 @__ulock_wake(i32 %operation, ptr %address, i64 %value) {
  %right = icmp eq i32 %operation, 257
  %count = select i1 %right, i64 2147483647, i64 1
  %rc = call i64 (i64, ...) @syscall(i64 202, ptr %address, i64 129, i64 %count)
  ret i32 0
}
define i32 @WaitOnAddress(ptr %address, ptr %compare, i64 %size, i32 %timeout) {
  %value.narrow = load i32, ptr %compare
  %value = zext i32 %value.narrow to i64
  %rc = call i64 (i64, ...) @syscall(i64 202, ptr %address, i64 128, i64 %value, ptr null)
  ret i32 1
}
define void @WakeByAddressAll(ptr %address) {
  %rc = call i64 (i64, ...) @syscall(i64 202, ptr %address, i64 129, i64 2147483647)
  ret void
}
declare i32 @clock_gettime(i32, ptr)
define i32 @QueryPerformanceCounter(ptr %to) {
  %time = alloca { i64, i64 }
  %rc = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %whole = mul i64 %seconds, 10000000
  %ticks = udiv i64 %rest, 100
  %count = add i64 %whole, %ticks
  store i64 %count, ptr %to
  ret i32 1
}
define i32 @QueryPerformanceFrequency(ptr %to) {
  store i64 10000000, ptr %to
  ret i32 1
}
"""
NAMES = [
    "__ulock_wait", "__ulock_wake", "WaitOnAddress", "WakeByAddressAll", "QueryPerformanceCounter",
    "QueryPerformanceFrequency",
]  # fmt: skip
# Each worker adds 1 to its word. Worker 0 comes last: it waits for the others, one after the other.
STEP = """
declare i32 @usleep(i32)
define void @count(ptr %words, i64 %worker, i64 %n) {
entry:
  %at = getelementptr i64, ptr %words, i64 %worker
  %before = load i64, ptr %at
  %after = add i64 %before, 1
  %main = icmp eq i64 %worker, 0
  br i1 %main, label %next, label %out
next:
  %i = phi i64 [ 1, %entry ], [ %i.next, %came ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %wait, label %out
wait:
  %slept = call i32 @usleep(i32 10)
  %other.at = getelementptr i64, ptr %words, i64 %i
  %other = load atomic i64, ptr %other.at acquire, align 8
  %is.here = icmp uge i64 %other, %after
  br i1 %is.here, label %came, label %wait
came:
  %i.next = add i64 %i, 1
  br label %next
out:
  store atomic i64 %after, ptr %at release, align 8
  ret void
}
"""


@pytest.fixture(scope="module")
def code() -> dict[str, NativeCode]:
    target = Target.host("generic")
    texts = {"imitations": (IMITATIONS, NAMES), "step": (STEP, ["count"])}
    return {name: NativeCode([compile_module(text, target).code], names) for name, (text, names) in texts.items()}


def library(how: str, imports: dict[str, int]) -> RuntimeLibrary:
    target = Target.host("generic")
    return RuntimeLibrary(compile_module(runtime_llvm(target.triple, how), target).code, imports)


@pytest.mark.parametrize("how", ["futex", "ulock", "address", "naps"])
def test_every_worker_does_every_step(how: str, code: dict[str, NativeCode]) -> None:
    """Steps in a row, which find workers spinning, and after pauses, which find them asleep."""
    words = np.zeros(64, np.int64)
    with WorkerPool(3, library(how, code["imitations"].addresses)) as pool:
        for pause in [0.0] * 200 + [0.02] * 10:
            time.sleep(pause)
            pool.share(code["step"].addresses["count"], words.ctypes.data)
    assert words[:4].tolist() == [210, 210, 210, 0]


@pytest.mark.parametrize("how", ["ulock", "address", "naps"])
def test_a_pool_of_sleepers_ends(how: str, code: dict[str, NativeCode]) -> None:
    before = threading.active_count()
    pool = WorkerPool(2, library(how, code["imitations"].addresses))
    time.sleep(0.05)
    pool.close()
    assert threading.active_count() == before


def test_functions_of_the_system_may_be_given_by_address(code: dict[str, NativeCode]) -> None:
    """As on Windows, where LLVM does not find all of them."""
    called: list[str] = []
    kinds = {
        "QueryPerformanceCounter": ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p),
        "WakeByAddressAll": ctypes.CFUNCTYPE(None, ctypes.c_void_p),
    }

    def recorder(name: str) -> Callable[..., int]:
        real = kinds[name](code["imitations"].addresses[name])

        def call(*arguments: int) -> int:
            called.append(name)
            return real(*arguments) or 0

        return call

    fakes = {name: kind(recorder(name)) for name, kind in kinds.items()}
    addresses = {name: ctypes.cast(fake, ctypes.c_void_p).value or 0 for name, fake in fakes.items()}
    words = np.zeros(64, np.int64)
    with WorkerPool(2, library("address", code["imitations"].addresses | addresses)) as pool:
        time.sleep(0.05)
        pool.share(code["step"].addresses["count"], words.ctypes.data)
    assert words[:2].tolist() == [1, 1] and set(called) == set(kinds)
