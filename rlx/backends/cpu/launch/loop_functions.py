"""Functions that do not belong to a program, as LLVM IR text beside the worker loop (`launch/loop.py`)."""

from __future__ import annotations

from rlx.backends.cpu.context import CONTEXT, PLAN, STEP
from rlx.backends.cpu.llvm_text import load, place

# Reads memory at full speed, for `read_bandwidth`; ctx = { base, lines per stream, sums }. Each worker reads four
# streams in parallel with 64-byte loads, prefetching 512 bytes ahead. It stores the sum so that LLVM keeps the loads.
READ = """; The step of the bandwidth measurement.
define void @rlx_read(ptr %ctx, i64 %worker, i64 %n) nounwind {
entry:
  %base = load ptr, ptr %ctx, align 8
  %lines.at = getelementptr inbounds i8, ptr %ctx, i64 8
  %lines = load i64, ptr %lines.at, align 8
  %sums.at = getelementptr inbounds i8, ptr %ctx, i64 16
  %sums = load ptr, ptr %sums.at, align 8
  %stream = mul i64 %lines, 64
  %share = mul i64 %stream, 4
  %skip = mul i64 %worker, %share
  %a = getelementptr i8, ptr %base, i64 %skip
  %b = getelementptr i8, ptr %a, i64 %stream
  %c = getelementptr i8, ptr %b, i64 %stream
  %d = getelementptr i8, ptr %c, i64 %stream
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %sa = phi <8 x i64> [ zeroinitializer, %entry ], [ %sa.next, %loop ]
  %sb = phi <8 x i64> [ zeroinitializer, %entry ], [ %sb.next, %loop ]
  %sc = phi <8 x i64> [ zeroinitializer, %entry ], [ %sc.next, %loop ]
  %sd = phi <8 x i64> [ zeroinitializer, %entry ], [ %sd.next, %loop ]
  %off = mul i64 %i, 64
  %ahead = add i64 %off, 512
  %pa = getelementptr i8, ptr %a, i64 %ahead
  %pb = getelementptr i8, ptr %b, i64 %ahead
  %pc = getelementptr i8, ptr %c, i64 %ahead
  %pd = getelementptr i8, ptr %d, i64 %ahead
  call void @llvm.prefetch.p0(ptr %pa, i32 0, i32 3, i32 1)
  call void @llvm.prefetch.p0(ptr %pb, i32 0, i32 3, i32 1)
  call void @llvm.prefetch.p0(ptr %pc, i32 0, i32 3, i32 1)
  call void @llvm.prefetch.p0(ptr %pd, i32 0, i32 3, i32 1)
  %la = getelementptr i8, ptr %a, i64 %off
  %lb = getelementptr i8, ptr %b, i64 %off
  %lc = getelementptr i8, ptr %c, i64 %off
  %ld = getelementptr i8, ptr %d, i64 %off
  %va = load <8 x i64>, ptr %la, align 64
  %vb = load <8 x i64>, ptr %lb, align 64
  %vc = load <8 x i64>, ptr %lc, align 64
  %vd = load <8 x i64>, ptr %ld, align 64
  %sa.next = add <8 x i64> %sa, %va
  %sb.next = add <8 x i64> %sb, %vb
  %sc.next = add <8 x i64> %sc, %vc
  %sd.next = add <8 x i64> %sd, %vd
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %lines
  br i1 %more, label %loop, label %end
end:
  %ab = add <8 x i64> %sa.next, %sb.next
  %cd = add <8 x i64> %sc.next, %sd.next
  %all = add <8 x i64> %ab, %cd
  %sum = call i64 @llvm.vector.reduce.add.v8i64(<8 x i64> %all)
  %slot = mul i64 %worker, 128
  %sum.at = getelementptr inbounds i8, ptr %sums, i64 %slot
  store i64 %sum, ptr %sum.at, align 8
  ret void
}
"""

_LOG = "".join(load(name, CONTEXT, "i64", "%context") for name in ("times", "marks", "log_bytes", "log_left"))

# A step writes its clocks where its context says. While they are logged, steps in a row write to one row each.
CLOCKS = f"""; The cycle counter that steps record.
declare i64 @llvm.readcyclecounter()
define i64 @rlx_cycles() nounwind {{
  %cycles = call i64 @llvm.readcyclecounter()
  ret i64 %cycles
}}

; After a step: the next one logs its clocks in the next row, if there is one.
define internal void @advance(ptr %context) nounwind {{
entry:
{place("log_left", CONTEXT, "%context", "row.")}  %left.now = load i64, ptr %row.log_left.at, align 8
  %none = icmp eq i64 %left.now, 0
  br i1 %none, label %out, label %log
log:
{_LOG}  %times.next = add i64 %times, %log_bytes
  %marks.next = add i64 %marks, %log_bytes
  %left.next = sub i64 %log_left, 1
  store i64 %times.next, ptr %times.at, align 8
  store i64 %marks.next, ptr %marks.at, align 8
  store i64 %left.next, ptr %log_left.at, align 8
  br label %out
out:
  ret void
}}
"""

_NUMBERS = (
    "counter_bytes", "first_counter_bytes", "carried_bytes", "rows", "stop_count", "count", "nanoseconds"
)  # fmt: skip


_STEP_NOW = "".join(
    f"  %{name}.now = phi {'i64' if name in _NUMBERS else 'ptr'} [ %first_{name}, %entry ], [ %{name}, %feed ]\n"
    for name in STEP
)

# One step per token, each fed the token that the step before chose. Ends when there are enough tokens, one is a stop id
# or out of range, or the time is up.
REPEAT = f"""; Whether a token ends the run: it is a stop id, or out of range for a table of %rows rows.
define internal i1 @ends(i32 %id, i64 %rows, ptr %stops, i64 %stop_count) nounwind {{
entry:
  %id.wide = sext i32 %id to i64
  %wrong = icmp uge i64 %id.wide, %rows
  br i1 %wrong, label %yes, label %look
look:
  %s = phi i64 [ 0, %entry ], [ %s.next, %compare ]
  %seen = icmp uge i64 %s, %stop_count
  br i1 %seen, label %no, label %compare
compare:
  %stop.at = getelementptr inbounds i32, ptr %stops, i64 %s
  %stop = load i32, ptr %stop.at, align 4
  %s.next = add i64 %s, 1
  %same = icmp eq i32 %stop, %id
  br i1 %same, label %yes, label %look
yes:
  ret i1 true
no:
  ret i1 false
}}

; Whether %nanoseconds have passed since %begun.
define internal i1 @late(i64 %begun, i64 %nanoseconds) nounwind {{
  %clock = call i64 @now()
  %spent = sub i64 %clock, %begun
  %late = icmp uge i64 %spent, %nanoseconds
  ret i1 %late
}}

; Repeat a step that chooses a token. Returns the number of tokens.
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)

define i64 @rlx_repeat(ptr %pool, ptr %plan) nounwind {{
entry:
{"".join(load(name, PLAN, "i64" if name in _NUMBERS else "ptr") for name in PLAN)}
  %begun = call i64 @now()
  br label %step
step:
  %i = phi i64 [ 0, %entry ], [ %done, %feed ]
{_STEP_NOW}  call void @llvm.memset.p0.i64(ptr %counters.now, i8 0, i64 %counter_bytes.now, i1 false)
  call void @start(ptr %pool, ptr %function.now, ptr %context.now, i64 0)
  call void @advance(ptr %context.now)
  %id = load i32, ptr %chosen.now, align 4
  %found.at.i = getelementptr inbounds i32, ptr %found, i64 %i
  store i32 %id, ptr %found.at.i, align 4
  %done = add i64 %i, 1
  %last = call i1 @ends(i32 %id, i64 %rows, ptr %stops, i64 %stop_count)
  %enough = icmp uge i64 %done, %count
  %late = call i1 @late(i64 %begun, i64 %nanoseconds)
  %full = or i1 %enough, %late
  %over = or i1 %last, %full
  br i1 %over, label %out, label %feed
feed:
  store i32 %id, ptr %token, align 4
  call void @llvm.memcpy.p0.p0.i64(ptr %operand, ptr %result.now, i64 %carried_bytes, i1 false)
  %past.old = load i64, ptr %past, align 8
  %past.new = add i64 %past.old, 1
  store i64 %past.new, ptr %past, align 8
  %position.old = load i32, ptr %position, align 4
  %position.new = add i32 %position.old, 1
  store i32 %position.new, ptr %position, align 4
  br label %step
out:
  ret i64 %done
}}
"""
