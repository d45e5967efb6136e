"""Functions that do not belong to a program, as LLVM IR text: beside the worker loop (`launch/loop.py`), and the steps
of single kernels.
"""

from __future__ import annotations

from rlx.backends.cpu.context import CONTEXT, PLAN, STEP
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.llvm_text import Text, load, place

_STREAMS = "abcd"


def _each(text: str) -> str:
    """Lines for each stream, whose letter takes the place of `#`."""
    return "".join(text.replace("#", stream) for stream in _STREAMS)


_SUMS = _each("  %s# = phi <8 x i64> [ zeroinitializer, %read ], [ %s#.next, %loop ]\n")
_FETCHES = _each("""  %p# = getelementptr i8, ptr %#, i64 %ahead
  call void @llvm.prefetch.p0(ptr %p#, i32 0, i32 3, i32 1)
""")
_READS = _each("""  %l# = getelementptr i8, ptr %#, i64 %off
  %v# = load <8 x i64>, ptr %l#, align 64
  %s#.next = add <8 x i64> %s#, %v#
""")

# Reads memory at full speed, for `read_bandwidth`; ctx = { base, lines per stream, sums }. The memory has a share for
# each worker, which begins with its own, so that a share that fits its cache stays there, and then takes those that
# nobody has taken. It reads a share in four streams in parallel with 64-byte loads, prefetching 512 bytes ahead. Of
# each share there is whether it is taken, and the sum, so that LLVM keeps the loads.
READ = f"""; The step of the bandwidth measurement.
define void @rlx_read(ptr %ctx, i64 %worker, i64 %n) nounwind {{
entry:
  %base = load ptr, ptr %ctx, align 8
  %lines.at = getelementptr inbounds i8, ptr %ctx, i64 8
  %lines = load i64, ptr %lines.at, align 8
  %sums.at = getelementptr inbounds i8, ptr %ctx, i64 16
  %sums = load ptr, ptr %sums.at, align 8
  %stream = mul i64 %lines, 64
  %size = mul i64 %stream, {len(_STREAMS)}
  br label %look
look:
  %seen = phi i64 [ 0, %entry ], [ %seen.next, %next ]
  %whose = add i64 %worker, %seen
  %share = urem i64 %whose, %n
  %slot = mul i64 %share, 128
  %taken.at = getelementptr inbounds i8, ptr %sums, i64 %slot
  %taken = atomicrmw xchg ptr %taken.at, i64 1 monotonic
  %free = icmp eq i64 %taken, 0
  br i1 %free, label %read, label %next
read:
  %skip = mul i64 %share, %size
  %a = getelementptr i8, ptr %base, i64 %skip
  %b = getelementptr i8, ptr %a, i64 %stream
  %c = getelementptr i8, ptr %b, i64 %stream
  %d = getelementptr i8, ptr %c, i64 %stream
  br label %loop
loop:
  %i = phi i64 [ 0, %read ], [ %i.next, %loop ]
{_SUMS}  %off = mul i64 %i, 64
  %ahead = add i64 %off, 512
{_FETCHES}{_READS}  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %lines
  br i1 %more, label %loop, label %end
end:
  %ab = add <8 x i64> %sa.next, %sb.next
  %cd = add <8 x i64> %sc.next, %sd.next
  %all = add <8 x i64> %ab, %cd
  %sum = call i64 @llvm.vector.reduce.add.v8i64(<8 x i64> %all)
  %sum.at = getelementptr inbounds i8, ptr %taken.at, i64 8
  store i64 %sum, ptr %sum.at, align 8
  br label %next
next:
  %seen.next = add i64 %seen, 1
  %others = icmp ult i64 %seen.next, %n
  br i1 %others, label %look, label %out
out:
  ret void
}}
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
  call void @rlx_share(ptr %pool, ptr %function.now, ptr %context.now)
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


def range_step(kernel: Kernel) -> tuple[str, str]:
    """The step that runs the units of a kernel: (its name, its LLVM assembly).

    ctx: the kernel's buffers, its extents, the number of units, the grain (units per range), and a counter that must be
    zero before the step.
    """
    t, types = Text(), ["ptr"] * len(kernel.buffers) + ["i64"] * len(kernel.extents)
    values = [t.load(kind, "%ctx", i) for i, kind in enumerate([*types, "i64", "i64"])]
    *passed, units, grain = values
    counter = t.value(f"getelementptr i64, ptr %ctx, i64 {len(values)}")
    arguments = ", ".join(f"{kind} {value}" for kind, value in zip(types, passed, strict=True))
    name, body = f"range_{kernel.symbol}", "\n".join(t.lines)
    return (
        name,
        f"""declare void @{kernel.symbol}({", ".join([*types, "i64", "i64"])})
declare i64 @llvm.umin.i64(i64, i64)

define void @{name}(ptr %ctx, i64 %worker, i64 %workers) {{
{body}
  br label %fetch
fetch:
  %start = atomicrmw add ptr {counter}, i64 {grain} monotonic
  %more = icmp ult i64 %start, {units}
  br i1 %more, label %work, label %done
work:
  %next = add i64 %start, {grain}
  %end = call i64 @llvm.umin.i64(i64 %next, i64 {units})
  call void @{kernel.symbol}({arguments}, i64 %start, i64 %end)
  br label %fetch
done:
  ret void
}}
""",
    )


def row_step(kernel: Kernel, scratch: int) -> tuple[str, str]:
    """The step that calls a kernel once for each row of a table of arguments: (its name, its LLVM assembly).

    ctx: the table, the number of its rows, a counter that must be zero before the step, and for each of the kernel's
    first `scratch` buffers where it begins for worker 0, and its bytes for each worker. A row holds the other buffers
    and the extents.
    """
    types = ["ptr"] * len(kernel.buffers) + ["i64"] * len(kernel.extents)
    begin, row, own = Text(), Text("w"), list[str]()
    for i in range(scratch):
        base, size = begin.load("ptr", "%ctx", 3 + 2 * i), begin.load("i64", "%ctx", 4 + 2 * i)
        own.append(begin.value(f"getelementptr i8, ptr {base}, i64 {begin.value(f'mul i64 {size}, %worker')}"))
    held = [row.load(kind, "%row", i) for i, kind in enumerate(types[scratch:])]
    arguments = ", ".join(f"{kind} {value}" for kind, value in zip(types, [*own, *held], strict=True))
    name, first, each = f"rows_{kernel.symbol}", "\n".join(begin.lines), "\n".join(row.lines)
    return (
        name,
        f"""declare void @{kernel.symbol}({", ".join([*types, "i64", "i64"])})

define void @{name}(ptr %ctx, i64 %worker, i64 %workers) {{
  %table = load ptr, ptr %ctx
  %count.at = getelementptr i64, ptr %ctx, i64 1
  %count = load i64, ptr %count.at
  %counter = getelementptr i64, ptr %ctx, i64 2
{first}
  br label %fetch
fetch:
  %i = atomicrmw add ptr %counter, i64 1 monotonic
  %more = icmp ult i64 %i, %count
  br i1 %more, label %work, label %done
work:
  %words = mul i64 %i, {len(held)}
  %row = getelementptr i64, ptr %table, i64 %words
{each}
  call void @{kernel.symbol}({arguments}, i64 0, i64 1)
  br label %fetch
done:
  ret void
}}
""",
    )
