"""Rounds of MTP drafts in native code, as LLVM IR text beside the worker loop.

One round: the model verifies the newest token and the drafts after it in one step, and chooses a token after each row.
Rows are accepted up to the first one whose chosen token differs from the next draft. If some rows are rejected, the
recurrent states are recomputed for the accepted rows. The accepted rows and the chosen tokens then run through the MTP
head, which makes the next drafts.
"""

from __future__ import annotations

import struct

from rlx.backends.cpu.context import DRAFTS_PLAN, MODEL, PLAN, PROGRAMS, RESULTS, RUN
from rlx.backends.cpu.llvm_text import load, place
from rlx.backends.drafts import MEMORY, MOST, PAYS


def _double(value: float) -> str:
    """A double as LLVM writes it, exactly."""
    return f"double 0x{struct.pack('>d', value).hex().upper()}"


_NUMBERS = {
    "counter_bytes", "again_counter_bytes", "hidden_bytes", "seen", "shift", "head_shift", "most", "rows", "stop_count",
    "count", "nanoseconds",
}  # fmt: skip

_FIELDS = "".join(load(name, DRAFTS_PLAN, "i64" if name in _NUMBERS else "ptr") for name in (*PROGRAMS, *RUN))
_MODEL = "".join(load(name, MODEL, "i64" if name in _NUMBERS else "ptr", "%turn") for name in MODEL)
_NEXT = "".join(load(name, MODEL, "ptr", "%other", "next.") for name in ("tokens", "positions", "seq", "past"))
_RESULTS = "".join(place(name, DRAFTS_PLAN) for name in RESULTS)

DRAFTS = f"""@pays = internal constant [{MOST + 1} x double] [{", ".join(map(_double, (*PAYS, float("inf"))))}]

; Update an acceptance rate by some hits and possibly one miss.
define internal double @rated(double %rate, i64 %hits, i1 %miss) nounwind {{
entry:
  br label %more
more:
  %i = phi i64 [ 0, %entry ], [ %i.next, %hit ]
  %now = phi double [ %rate, %entry ], [ %up, %hit ]
  %any = icmp ult i64 %i, %hits
  br i1 %any, label %hit, label %end
hit:
  %rest = fsub double 1.0, %now
  %step = fdiv double %rest, {MEMORY}.0
  %up = fadd double %now, %step
  %i.next = add i64 %i, 1
  br label %more
end:
  %fall = fsub double 0.0, %now
  %part = fdiv double %fall, {MEMORY}.0
  %down = fadd double %now, %part
  %new = select i1 %miss, double %down, double %now
  ret double %new
}}

; Number of drafts in a row that pay, at least one.
define internal i64 @worth(double %rate, i64 %most) nounwind {{
entry:
  br label %more
more:
  %count = phi i64 [ 1, %entry ], [ %count.next, %again ]
  %at = getelementptr inbounds [{MOST + 1} x double], ptr @pays, i64 0, i64 %count
  %least = load double, ptr %at, align 8
  %pays = fcmp oge double %rate, %least
  %room = icmp ult i64 %count, %most
  %go = and i1 %pays, %room
  br i1 %go, label %again, label %end
again:
  %count.next = add i64 %count, 1
  br label %more
end:
  ret i64 %count
}}

; Store %count consecutive numbers from %first on.
define internal void @count_up(ptr %positions, i64 %first, i64 %count) nounwind {{
entry:
  br label %more
more:
  %i = phi i64 [ 0, %entry ], [ %i.next, %more ]
  %at = getelementptr inbounds i32, ptr %positions, i64 %i
  %value = add i64 %first, %i
  %narrow = trunc i64 %value to i32
  store i32 %narrow, ptr %at, align 4
  %i.next = add i64 %i, 1
  %again = icmp ult i64 %i.next, %count
  br i1 %again, label %more, label %end
end:
  ret void
}}

define internal void @add_to(ptr %sum, i64 %more) nounwind {{
  %old = load i64, ptr %sum, align 8
  %new = add i64 %old, %more
  store i64 %new, ptr %sum, align 8
  ret void
}}

; Run rounds until there are enough tokens, a token ends the run, there are no more drafts, or the time is up. Returns
; the number of tokens. The inputs of the first round are set.
define i64 @rlx_drafts(ptr %pool, ptr %plan) nounwind {{
entry:
{_FIELDS}{_RESULTS}
  %one.count = getelementptr inbounds i8, ptr %one, i64 {8 * PLAN.index("count")}
  %some.count = getelementptr inbounds i8, ptr %some, i64 {8 * PLAN.index("count")}
  %one.found = getelementptr inbounds i8, ptr %one, i64 {8 * PLAN.index("found")}
  %some.found = getelementptr inbounds i8, ptr %some, i64 {8 * PLAN.index("found")}
  %begun = call i64 @now()
  br label %verify
verify:                                           ; %done: tokens so far; %behind: rows that the head has processed
  %turn = phi ptr [ %now, %entry ], [ %other, %again ]
  %other = phi ptr [ %next, %entry ], [ %turn, %again ]
  %done = phi i64 [ 0, %entry ], [ %done.next, %again ]
  %behind = phi i64 [ %seen, %entry ], [ %behind.next, %again ]
{_MODEL}{_NEXT}  %in = load i64, ptr %seq, align 8
  %start = load i64, ptr %past, align 8
  call void @llvm.memset.p0.i64(ptr %counters, i8 0, i64 %counter_bytes, i1 false)
  call void @rlx_share(ptr %pool, ptr %function, ptr %context)
  call void @advance(ptr %context)
  %fresh = getelementptr inbounds i32, ptr %found, i64 %done
  br label %row
row:
  %i = phi i64 [ 0, %verify ], [ %right.rows, %compare ]
  %id.at = getelementptr inbounds i32, ptr %chosen, i64 %i
  %id = load i32, ptr %id.at, align 4
  %fresh.at = getelementptr inbounds i32, ptr %fresh, i64 %i
  store i32 %id, ptr %fresh.at, align 4
  %right.rows = add i64 %i, 1
  %last = call i1 @ends(i32 %id, i64 %rows, ptr %stops, i64 %stop_count)
  %bottom = icmp uge i64 %right.rows, %in
  %stay = or i1 %last, %bottom
  br i1 %stay, label %accept, label %compare
compare:
  %draft.at = getelementptr inbounds i32, ptr %tokens, i64 %right.rows
  %draft = load i32, ptr %draft.at, align 4
  %same = icmp eq i32 %draft, %id
  br i1 %same, label %row, label %accept
accept:
  %drafted.now = sub i64 %in, 1
  call void @add_to(ptr %rounds.at, i64 1)
  call void @add_to(ptr %drafted.at, i64 %drafted.now)
  call void @add_to(ptr %accepted.at, i64 %i)
  store i64 %right.rows, ptr %right.at, align 8
  %miss = icmp ult i64 %right.rows, %in
  %rate.old = load double, ptr %rate.at, align 8
  %rate = call double @rated(double %rate.old, i64 %i, i1 %miss)
  store double %rate, ptr %rate.at, align 8
  %recurrent = icmp ne ptr %again_function, null
  %redo = and i1 %miss, %recurrent
  br i1 %redo, label %less, label %check
less:                                             ; the new states include rejected rows: recompute them
  store i64 %right.rows, ptr %again_seq, align 8
  call void @llvm.memset.p0.i64(ptr %again_counters, i8 0, i64 %again_counter_bytes, i1 false)
  call void @rlx_share(ptr %pool, ptr %again_function, ptr %again_context)
  call void @advance(ptr %again_context)
  br label %check
check:
  %done.next = add i64 %done, %right.rows
  %left = sub i64 %count, %done.next
  %few = icmp sle i64 %left, 1                    ; a round with drafts may return two tokens or more
  %late = call i1 @late(i64 %begun, i64 %nanoseconds)
  %full = or i1 %few, %late
  %over = or i1 %last, %full
  br i1 %over, label %out, label %guess
guess:                                            ; run the accepted rows and their chosen tokens through the head
  %worth = call i64 @worth(double %rate, i64 %most)
  %room = sub i64 %left, 1
  %near = icmp ult i64 %room, %worth
  %wanted = select i1 %near, i64 %room, i64 %worth
  %alone = icmp eq i64 %right.rows, 1
  %head = select i1 %alone, ptr %one, ptr %some
  %head.count = select i1 %alone, ptr %one.count, ptr %some.count
  %head.tokens = select i1 %alone, ptr %one_tokens, ptr %some_tokens
  %head.hidden = select i1 %alone, ptr %one_hidden, ptr %some_hidden
  %token.bytes = mul i64 %right.rows, 4
  %row.bytes = mul i64 %right.rows, %hidden_bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %head.tokens, ptr %chosen, i64 %token.bytes, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %head.hidden, ptr %hidden, i64 %row.bytes, i1 false)
  %head.first = add i64 %behind, %head_shift
  call void @count_up(ptr %some_positions, i64 %head.first, i64 %right.rows)
  store i64 %right.rows, ptr %some_seq, align 8
  store i64 %behind, ptr %some_past, align 8
  %behind.next = add i64 %behind, %right.rows
  %newest = sub i64 %behind.next, 1
  %head.newest = add i64 %newest, %head_shift
  call void @count_up(ptr %one_position, i64 %head.newest, i64 1)
  store i64 %newest, ptr %one_past, align 8
  store i64 %wanted, ptr %head.count, align 8
  %head.found = select i1 %alone, ptr %one.found, ptr %some.found
  %drafts = getelementptr inbounds i32, ptr %next.tokens, i64 1
  store ptr %drafts, ptr %head.found, align 8
  %made = call i64 @rlx_repeat(ptr %pool, ptr %head)
  %made.before = sub i64 %made, 1
  %made.at = getelementptr inbounds i32, ptr %drafts, i64 %made.before
  %made.id = load i32, ptr %made.at, align 4
  %none = icmp slt i32 %made.id, 0
  %kept = select i1 %none, i64 %made.before, i64 %made
  %nothing = icmp eq i64 %kept, 0
  br i1 %nothing, label %out, label %again
again:
  store i32 %id, ptr %next.tokens, align 4
  %in.next = add i64 %kept, 1
  %start.next = add i64 %start, %right.rows
  %first.next = add i64 %start.next, %shift
  call void @count_up(ptr %next.positions, i64 %first.next, i64 %in.next)
  store i64 %in.next, ptr %next.seq, align 8
  store i64 %start.next, ptr %next.past, align 8
  br label %verify
out:
  ret i64 %done.next
}}
"""
