"""How the worker loop reads a clock and puts threads to sleep, for each form of the platform, as LLVM IR text.

CPU backend, under `loop.py`. A signal is { i32 value, i32 sleepers }. A thread that has spun long enough sleeps until
the value differs from %old; whoever changes the value wakes it. `sleepers` counts the threads that sleep, so that
nobody makes a system call where none does.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cpu.llvm_text import fill
from rlx.errors import TargetError


@dataclass(frozen=True)
class Waits:
    """The parts of the loop's text that depend on the operating system.

    Attributes:
        declarations: of the functions that the others call.
        now: the body of a function that returns nanoseconds of a clock.
        sleep: of `@await`: from the label `sleep` on, to `out` when %signal no longer holds %old.
        wake: the end of `@ring`: wakes all sleepers of %signal, and goes to `out`.
    """

    declarations: str
    now: str
    sleep: str
    wake: str


_TIMESPEC = """  %seconds = load i64, ptr %time, align 8
  %rest.at = getelementptr inbounds i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at, align 8
  %whole = mul i64 %seconds, 1000000000
  %ns = add i64 %whole, %rest
  ret i64 %ns"""

_CLOCK_GETTIME = (
    """  %time = alloca { i64, i64 }, align 8
  %rc = call i32 @clock_gettime(i32 $clock, ptr %time)
"""
    + _TIMESPEC
)

# C11. The only clock of C that counts nanoseconds may be set back; a wait then spins shorter or longer once.
_TIMESPEC_GET = (
    """  %time = alloca { i64, i64 }, align 8
  %rc = call i32 @timespec_get(ptr %time, i32 1)
"""
    + _TIMESPEC
)

_PERFORMANCE_COUNTER = """  %count.at = alloca i64, align 8
  %rate.at = alloca i64, align 8
  %rc = call i32 @QueryPerformanceCounter(ptr %count.at)
  %rc.rate = call i32 @QueryPerformanceFrequency(ptr %rate.at)
  %count = load i64, ptr %count.at, align 8
  %rate = load i64, ptr %rate.at, align 8
  %seconds = udiv i64 %count, %rate
  %left = urem i64 %count, %rate
  %left.large = mul i64 %left, 1000000000
  %rest = udiv i64 %left.large, %rate
  %whole = mul i64 %seconds, 1000000000
  %ns = add i64 %whole, %rest
  ret i64 %ns"""

# A thread that goes to sleep counts itself and then reads the value once more; `@ring` changes the value and then reads
# the count. All of this is seq_cst, so one of the two sees the other. That the system compares the value itself is not
# enough: it does not read it in this order, so on Arm it may read it before others see the count.
_SLEEP = """sleep:
  %sleepers.at = getelementptr inbounds i8, ptr %signal, i64 4
  %asleep.before = atomicrmw add ptr %sleepers.at, i32 1 seq_cst, align 4
  %value = load atomic i32, ptr %signal seq_cst, align 8
  %same = icmp eq i32 %value, %old
  br i1 %same, label %sleep.in, label %sleep.off
sleep.in:                                         ; the system compares the value with %old once more
  $wait
sleep.off:
  %asleep.after = atomicrmw sub ptr %sleepers.at, i32 1 seq_cst, align 4
  br label %sleep.look
sleep.look:
  %value.late = load atomic i32, ptr %signal acquire, align 8
  %still = icmp eq i32 %value.late, %old
  br i1 %still, label %sleep, label %out"""

# The waking thread subtracts the threads that it wakes, so it makes no further system calls while they wait for a CPU.
_FUTEX_WAIT = """%expected = zext i32 %old to i64                ; FUTEX_WAIT_PRIVATE
  %rc = call i64 (i64, ...) @syscall(i64 $call, ptr %signal, i64 128, i64 %expected, ptr null)
  %woken = icmp eq i64 %rc, 0
  br i1 %woken, label %sleep.look, label %sleep.off"""

_WAKE_FUTEX = """  %sleepers.at = getelementptr inbounds i8, ptr %signal, i64 4
  %asleep = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %wake, label %out
wake:                                             ; FUTEX_WAKE_PRIVATE: all sleepers
  %woken = call i64 (i64, ...) @syscall(i64 $call, ptr %signal, i64 129, i64 2147483647)
  %woken.narrow = trunc i64 %woken to i32
  %asleep.after = atomicrmw sub ptr %sleepers.at, i32 %woken.narrow seq_cst, align 4
  br label %out"""

# Where a wake does not say how many it woke, each sleeper subtracts itself.
_WAKE_ADDRESS = """  %sleepers.at = getelementptr inbounds i8, ptr %signal, i64 4
  %asleep = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %any = icmp ne i32 %asleep, 0
  br i1 %any, label %wake, label %out
wake:
  $wake
  br label %out"""

_ULOCK_WAIT = """%expected = zext i32 %old to i64
  %rc = call i32 @__ulock_wait(i32 1, ptr %signal, i64 %expected, i32 0) ; UL_COMPARE_AND_WAIT, no time limit
  br label %sleep.off"""
_ULOCK_WAKE = "%rc = call i32 @__ulock_wake(i32 257, ptr %signal, i64 0) ; UL_COMPARE_AND_WAIT | ULF_WAKE_ALL"

_ADDRESS_WAIT = """%rc = call i32 @WaitOnAddress(ptr %signal, ptr %expected.at, i64 4, i32 -1) ; no time limit
  br label %sleep.off"""
_ADDRESS_WAKE = "call void @WakeByAddressAll(ptr %signal)"

_SLEEP_NAPS = """sleep:                                            ; naps that grow to 2 ms
  %nap = phi i64 [ 1000, %entry ], [ %nap.next, %sleep ]
  %time = getelementptr inbounds i8, ptr %expected.at, i64 8
  store i64 0, ptr %time, align 8
  %time.rest = getelementptr inbounds i8, ptr %time, i64 8
  store i64 %nap, ptr %time.rest, align 8
  %napped = call i32 @thrd_sleep(ptr %time, ptr null)
  %nap.twice = shl i64 %nap, 1
  %nap.long = icmp ugt i64 %nap.twice, 2000000
  %nap.next = select i1 %nap.long, i64 2000000, i64 %nap.twice
  %value = load atomic i32, ptr %signal acquire, align 8
  %still = icmp eq i32 %value, %old
  br i1 %still, label %sleep, label %out"""

_CLOCK = "declare i32 @clock_gettime(i32, ptr)"
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98}  # SYS_futex
_MONOTONIC = {"linux": 1, "darwin": 6}  # CLOCK_MONOTONIC

#: How idle threads may wait: by a system call of Linux, of macOS, by a function of Windows, or in short naps.
WAITS = ("futex", "ulock", "address", "naps")


def waits(how: str, arch: str) -> Waits:
    """The text of a way to wait, one of `WAITS`, on an architecture.

    Raises:
        TargetError: there is no such way.
    """
    if how == "futex" and arch not in _FUTEX:
        how = "naps"
    if how == "futex":
        wait, wake = (fill(text, call=_FUTEX[arch]) for text in (_FUTEX_WAIT, _WAKE_FUTEX))
        now = fill(_CLOCK_GETTIME, clock=_MONOTONIC["linux"])
        return Waits(f"{_CLOCK}\ndeclare i64 @syscall(i64, ...)", now, fill(_SLEEP, wait=wait), wake)
    if how == "ulock":
        declarations = "declare i32 @__ulock_wait(i32, ptr, i64, i32)\ndeclare i32 @__ulock_wake(i32, ptr, i64)"
        now = fill(_CLOCK_GETTIME, clock=_MONOTONIC["darwin"])
        return Waits(f"{_CLOCK}\n{declarations}", now, *_by_address(_ULOCK_WAIT, _ULOCK_WAKE))
    if how == "address":
        clock = "@QueryPerformanceCounter(ptr)", "@QueryPerformanceFrequency(ptr)"
        names = *clock, "@WaitOnAddress(ptr, ptr, i64, i32)"
        declarations = "\n".join([*(f"declare i32 {name}" for name in names), "declare void @WakeByAddressAll(ptr)"])
        return Waits(declarations, _PERFORMANCE_COUNTER, *_by_address(_ADDRESS_WAIT, _ADDRESS_WAKE))
    if how == "naps":
        declarations = "declare i32 @timespec_get(ptr, i32)\ndeclare i32 @thrd_sleep(ptr, ptr)"
        return Waits(declarations, _TIMESPEC_GET, _SLEEP_NAPS, "  br label %out")
    raise TargetError(f"no worker loop waits by {how!r}", hint=f"There are: {', '.join(WAITS)}")


def _by_address(wait: str, wake: str) -> tuple[str, str]:
    return fill(_SLEEP, wait=wait), fill(_WAKE_ADDRESS, wake=wake)
