"""A step function for a single kernel, whose units all workers share. Packing and benchmarks use it without a program.

`void range_<symbol>(ptr ctx, i64 worker, i64 workers)`. ctx holds 64-bit words: the kernel's buffers, its extents, the
number of units, the grain (units per range), and a counter that must be zero before the step.
"""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel


def range_step(kernel: Kernel) -> tuple[str, str]:
    """Returns (name of the step function, its LLVM assembly)."""
    buffers, extents = len(kernel.buffers), len(kernel.extents)
    words = buffers + extents + 3
    kinds = ["ptr"] * buffers + ["i64"] * (words - buffers - 1)
    loads = []
    for i, kind in enumerate([*kinds, "ptr"]):
        loads.append(f"  %at{i} = getelementptr i64, ptr %ctx, i64 {i}")
        if i < words - 1:
            loads.append(f"  %w{i} = load {kind}, ptr %at{i}")
    name = f"range_{kernel.symbol}"
    types = ", ".join(["ptr"] * buffers + ["i64"] * (extents + 2))
    passed = ", ".join(f"{kinds[i]} %w{i}" for i in range(buffers + extents))
    units, grain, counter = (f"%w{words - 3}", f"%w{words - 2}", f"%at{words - 1}")
    body = "\n".join(loads)
    return (
        name,
        f"""declare void @{kernel.symbol}({types})
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
  call void @{kernel.symbol}({passed}, i64 %start, i64 %end)
  br label %fetch
done:
  ret void
}}
""",
    )
