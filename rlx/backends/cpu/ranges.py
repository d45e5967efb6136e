"""Step functions for a single kernel, whose units all workers share, without a program.

`void step(ptr ctx, i64 worker, i64 workers)`; ctx holds 64-bit words. Packing and benchmarks use `range_step`, the
choice of tokens `row_step`.
"""

from __future__ import annotations

from rlx.backends.cpu.kernel import Kernel


def range_step(kernel: Kernel) -> tuple[str, str]:
    """The step that runs the units of a kernel: (its name, its LLVM assembly).

    ctx: the kernel's buffers, its extents, the number of units, the grain (units per range), and a counter that must be
    zero before the step.
    """
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


def row_step(kernel: Kernel, scratch: int) -> tuple[str, str]:
    """The step that calls a kernel once for each row of a table of arguments: (its name, its LLVM assembly).

    ctx: the table, the number of its rows, a counter that must be zero before the step, and for each of the kernel's
    first `scratch` buffers where it begins for worker 0, and its bytes for each worker. A row holds the other buffers
    and the extents.
    """
    buffers = len(kernel.buffers)
    kinds = ["ptr"] * (buffers - scratch) + ["i64"] * len(kernel.extents)
    name, lines = f"rows_{kernel.symbol}", list[str]()
    for i in range(scratch):
        lines += [
            f"  %base{i}.at = getelementptr i64, ptr %ctx, i64 {3 + 2 * i}",
            f"  %base{i} = load ptr, ptr %base{i}.at",
            f"  %size{i}.at = getelementptr i64, ptr %ctx, i64 {4 + 2 * i}",
            f"  %size{i} = load i64, ptr %size{i}.at",
            f"  %skip{i} = mul i64 %size{i}, %worker",
            f"  %own{i} = getelementptr i8, ptr %base{i}, i64 %skip{i}",
        ]
    begin, loads = "\n".join(lines), list[str]()
    for i, kind in enumerate(kinds):
        loads += [f"  %at{i} = getelementptr i64, ptr %row, i64 {i}", f"  %w{i} = load {kind}, ptr %at{i}"]
    passed = [*(f"ptr %own{i}" for i in range(scratch)), *(f"{kind} %w{i}" for i, kind in enumerate(kinds))]
    types = ", ".join(["ptr"] * buffers + ["i64"] * (len(kernel.extents) + 2))
    body = "\n".join(loads)
    return (
        name,
        f"""declare void @{kernel.symbol}({types})

define void @{name}(ptr %ctx, i64 %worker, i64 %workers) {{
  %table = load ptr, ptr %ctx
  %count.at = getelementptr i64, ptr %ctx, i64 1
  %count = load i64, ptr %count.at
  %counter = getelementptr i64, ptr %ctx, i64 2
{begin}
  br label %fetch
fetch:
  %i = atomicrmw add ptr %counter, i64 1 monotonic
  %more = icmp ult i64 %i, %count
  br i1 %more, label %work, label %done
work:
  %words = mul i64 %i, {len(kinds)}
  %row = getelementptr i64, ptr %table, i64 %words
{body}
  call void @{kernel.symbol}({", ".join(passed)}, i64 0, i64 1)
  br label %fetch
done:
  ret void
}}
""",
    )
