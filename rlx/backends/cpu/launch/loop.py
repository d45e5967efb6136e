"""The worker loop, and how workers of a program wait for each other, as LLVM IR text.

CPU backend: compiled for the same target as every program and kept in the same store. No C compiler is needed, and a
warm start runs no LLVM pass. `rlx.backends.cpu.launch.native` loads it and gives it threads.

A wait spins for some microseconds, then sleeps in the kernel. With pure spinning, one worker without a CPU stalls all
others. Yielding is no better: on a busy machine each `sched_yield` gives a neighbour a whole time slice. Two competing
processes on two CPUs fell from 170 to 2 steps per second with either, and to 60 to 90 with sleeping. Steps that take
their work from counters use `rlx_phase`, which waits for work, not for workers; a late worker then costs almost
nothing.
"""

from __future__ import annotations

from rlx.backends.cpu.context import CLOSED, INSIDE, OFFSETS
from rlx.backends.cpu.isa import for_triple
from rlx.backends.cpu.launch.loop_drafts import DRAFTS
from rlx.backends.cpu.launch.loop_functions import CLOCKS, READ, REPEAT
from rlx.backends.cpu.launch.waits import waits
from rlx.backends.cpu.levels import architecture
from rlx.backends.cpu.llvm_text import fill

_TEMPLATE = """; The worker loop of rlx.
target triple = "$triple"

$declarations
declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)
declare i64 @llvm.vector.reduce.add.v8i64(<8 x i64>)

; Nanoseconds of a clock.
define internal i64 @now() nounwind {
$now
}

; Change a signal and wake its sleepers. seq_cst here and in @await: either the waiter sees the new value before it
; sleeps, or this function sees the sleeper.
define internal void @ring(ptr %signal) nounwind noinline {
entry:
  %old = atomicrmw add ptr %signal, i32 1 seq_cst, align 8
$wake
out:
  ret void
}

; Spin for up to %spin ns until the signal's value differs from %old.
define internal i1 @look(ptr %signal, i32 %old, i64 %spin) nounwind noinline {
entry:
  br label %quick
quick:                                            ; some checks before the first read of the clock
  %i = phi i32 [ 0, %entry ], [ %i.next, %quick.pause ]
  %value.quick = load atomic i32, ptr %signal acquire, align 8
  %came.quick = icmp ne i32 %value.quick, %old
  br i1 %came.quick, label %yes, label %quick.pause
quick.pause:
  $pause
  %i.next = add i32 %i, 1
  %quick.more = icmp ult i32 %i.next, 32
  br i1 %quick.more, label %quick, label %slow
slow:
  %start = call i64 @now()
  br label %again
again:
  %value = load atomic i32, ptr %signal acquire, align 8
  %came = icmp ne i32 %value, %old
  br i1 %came, label %yes, label %rest
rest:
  $pause
  %time = call i64 @now()
  %passed = sub i64 %time, %start
  %more = icmp ult i64 %passed, %spin
  br i1 %more, label %again, label %no
yes:
  ret i1 true
no:
  ret i1 false
}

; Wait until the signal's value differs from %old: spin for %spin ns, then sleep.
define internal void @await(ptr %signal, i32 %old, i64 %spin) nounwind noinline {
entry:
  %expected.at = alloca [24 x i8], align 8        ; the old value, and a time
  store i32 %old, ptr %expected.at, align 8
  %came = call i1 @look(ptr %signal, i32 %old, i64 %spin)
  br i1 %came, label %out, label %sleep
$sleep
out:
  ret void
}

; End of a phase: it ends when all its work is done, by whichever worker, so a worker without a CPU delays nobody.
; %worker has done %mine of %total units; %done, zero before the step, is their sum. Returns true when all are done.
; Returns false, never for worker 0, after a long wait: return from the step; on the next call earlier phases are done.
define i1 @rlx_phase(ptr %pool, ptr %done, i64 %mine, i64 %total, i64 %worker) nounwind {
entry:
  %n = load i64, ptr %pool, align 8
  %alone = icmp eq i64 %n, 1
  br i1 %alone, label %yes, label %report
report:
  %tick.at = getelementptr inbounds i8, ptr %pool, i64 $tick
  %spin.at = getelementptr inbounds i8, ptr %pool, i64 8
  %spin = load i64, ptr %spin.at, align 8
  %idle = icmp eq i64 %mine, 0
  br i1 %idle, label %check, label %add
add:
  %before = atomicrmw add ptr %done, i64 %mine acq_rel, align 8
  %sum = add i64 %before, %mine
  %complete = icmp eq i64 %sum, %total
  br i1 %complete, label %last, label %check
last:
  call void @ring(ptr %tick.at)
  br label %yes
check:
  %tick = load atomic i32, ptr %tick.at acquire, align 8
  %sum.now = load atomic i64, ptr %done acquire, align 8
  %over = icmp uge i64 %sum.now, %total
  br i1 %over, label %yes, label %wait
wait:
  %main = icmp eq i64 %worker, 0
  br i1 %main, label %wait.main, label %wait.other
wait.main:
  call void @await(ptr %tick.at, i32 %tick, i64 %spin)
  br label %check
wait.other:
  %came = call i1 @look(ptr %tick.at, i32 %tick, i64 %spin)
  br i1 %came, label %check, label %no
yes:
  ret i1 true
no:
  ret i1 false
}

; Main loop of a worker: wait for a step, enter if the gate is open, leave. Enter the same step again only after a tick,
; when there may be more work. A null function ends the loop.
define void @rlx_worker(ptr %pool, i64 %index) nounwind {
entry:
  %n = load i64, ptr %pool, align 8
$places
  br label %idle
idle:                                             ; %last: the step that was left at tick %left
  %last = phi i64 [ 0, %entry ], [ %last, %wait ], [ %last, %enter ], [ %number, %work ], [ %number, %report ]
  %left = phi i32 [ 0, %entry ], [ %left, %wait ], [ %left, %enter ], [ %left.now, %work ], [ %left.now, %report ]
  %tick = load atomic i32, ptr %tick.at acquire, align 8
  %gate = load atomic i64, ptr %gate.at acquire, align 8
  %closed.bit = and i64 %gate, $closed
  %closed = icmp ne i64 %closed.bit, 0
  br i1 %closed, label %wait, label %wanted
wanted:
  %number = lshr i64 %gate, 32
  %new = icmp ne i64 %number, %last
  %moved = icmp ne i32 %tick, %left
  %want = or i1 %new, %moved
  br i1 %want, label %enter, label %wait
wait:
  call void @await(ptr %tick.at, i32 %tick, i64 %spin)
  br label %idle
enter:
  %one.more = add i64 %gate, 1
  %pair = cmpxchg ptr %gate.at, i64 %gate, i64 %one.more acq_rel acquire, align 8
  %entered = extractvalue { i64, i1 } %pair, 1
  br i1 %entered, label %inside, label %idle
inside:
  %function = load ptr, ptr %function.at, align 8
  %stop = icmp eq ptr %function, null
  br i1 %stop, label %end, label %work
work:
  %context = load ptr, ptr %context.at, align 8
  call void %function(ptr %context, i64 %index, i64 %n)
  %left.now = load atomic i32, ptr %tick.at acquire, align 8
  ; A caller that has closed the gate waits for the last worker inside.
  %gate.before = atomicrmw sub ptr %gate.at, i64 1 acq_rel, align 8
  %lower = and i64 %gate.before, 4294967295
  %empty = icmp eq i64 %lower, $closed_one
  br i1 %empty, label %report, label %idle
report:
  call void @ring(ptr %finished.at)
  br label %idle
end:
  ret void
}

; Run a step here; free workers join. It is done when worker 0 returns and all that joined have left. A null function
; ends the workers.
define void @rlx_share(ptr %pool, ptr %function, ptr %context) nounwind noinline {
entry:
  %n = load i64, ptr %pool, align 8
  %alone = icmp eq i64 %n, 1
  br i1 %alone, label %own, label %publish
own:
  call void %function(ptr %context, i64 0, i64 1)
  ret void
publish:
$places
  %finished = load atomic i32, ptr %finished.at acquire, align 8
  store ptr %function, ptr %function.at, align 8
  store ptr %context, ptr %context.at, align 8
  %gate.old = load atomic i64, ptr %gate.at monotonic, align 8
  %number.old = lshr i64 %gate.old, 32
  %number = add i64 %number.old, 1
  %gate = shl i64 %number, 32
  store atomic i64 %gate, ptr %gate.at release, align 8
  call void @ring(ptr %tick.at)
  %stop = icmp eq ptr %function, null
  br i1 %stop, label %out, label %work
work:
  call void %function(ptr %context, i64 0, i64 %n)
  %gate.then = atomicrmw or ptr %gate.at, i64 $closed acq_rel, align 8
  %inside = and i64 %gate.then, $inside
  %empty = icmp eq i64 %inside, 0
  br i1 %empty, label %out, label %await.last
await.last:
  call void @await(ptr %finished.at, i32 %finished, i64 %spin)
  ret void
out:
  ret void
}

$read
$clocks
$repeat
$drafts"""

# What a worker and the caller of a step need of the pool's memory.
_PLACES = """  %spin.at = getelementptr inbounds i8, ptr %pool, i64 16
  %spin = load i64, ptr %spin.at, align 8
  %tick.at = getelementptr inbounds i8, ptr %pool, i64 $tick
  %gate.at = getelementptr inbounds i8, ptr %pool, i64 $gate
  %function.at = getelementptr inbounds i8, ptr %gate.at, i64 8
  %context.at = getelementptr inbounds i8, ptr %gate.at, i64 16
  %finished.at = getelementptr inbounds i8, ptr %pool, i64 $finished"""


def runtime_llvm(triple: str, how: str) -> str:
    """LLVM assembly of the functions in `SYMBOLS` for a target triple.

    Args:
        how: the way to wait, one of `rlx.backends.cpu.launch.waits.WAITS`.

    Raises:
        TargetError: there is no such way.
    """
    arch = architecture(triple).name
    pause, parts = for_triple(triple).pause, waits(how, arch)
    hint = f"declare void {pause.replace('i32 1', 'i32 immarg')}" if pause else ""
    return fill(
        _TEMPLATE,
        triple=triple,
        places=fill(_PLACES, **OFFSETS),
        declarations=f"{parts.declarations}\n{hint}",
        now=parts.now,
        pause=f"call void {pause}" if pause else "",
        sleep=parts.sleep,
        wake=parts.wake,
        read=READ,
        clocks=CLOCKS,
        repeat=REPEAT,
        drafts=DRAFTS,
        closed=CLOSED,
        closed_one=CLOSED + 1,
        inside=INSIDE,
        **OFFSETS,
    )
