"""The functions that a card starts, each of some kernels."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.code import GLOBAL, THREADS, Kernel
from rlx.backends.cuda.features import Features


def entry(name: str, kernels: Sequence[Kernel], features: Features) -> str:
    """A module with one function for the card, whose blocks run some kernels, one after the other.

    Its parameters are of 8 bytes each: of each kernel the number of blocks up to and with its own, then its pointers;
    at last the address of the extents.

    Args:
        features: what the card has.
    """
    parameters, calls = list[str](), list[str]()
    for i, each in enumerate(kernels):
        own = [f"%k{i}.{j}" for j in range(each.pointers)]
        parameters += [f"i64 %end{i}", *(f"{GLOBAL} align 16 {name}" for name in own)]
        last = i == len(kernels) - 1
        before = f"%last{i - 1}" if i else "0"
        calls += [f"  %last{i} = trunc i64 %end{i} to i32", f"  %own{i} = sub i32 %block, {before}"]
        if not last:
            calls += [f"  %mine{i} = icmp ult i32 %block, %last{i}", f"  br i1 %mine{i}, label %run{i}, label %next{i}"]
            calls += [f"run{i}:"]
        calls += [f"  call void @{each.name}(i32 %own{i}{''.join(f', {GLOBAL} {p}' for p in own)}, {GLOBAL} %extents)"]
        calls += ["  ret void"] + ([] if last else [f"next{i}:"])
    parameters.append(f"{GLOBAL} align 4 %extents")
    called = ["declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()"]
    if features.overlaps:
        called += [f"declare void @llvm.nvvm.griddepcontrol.{what}()" for what in ("wait", "launch.dependents")]
    declared = sorted({*called, *(line for each in kernels for line in each.declared)})
    resident = min(filter(None, (each.resident for each in kernels)), default=0)  # all have the memory of the largest
    bounds = f'"nvvm.maxntid"="{THREADS}"' + f' "nvvm.minctasm"="{resident}"' * (resident > 0)
    distinct = {each.name: each.text for kernel in kernels for each in (*kernel.own, kernel)}
    return "\n".join([
        'target triple = "nvptx64-nvidia-cuda"',
        "@shared = external addrspace(3) global [0 x i8], align 16",
        *declared,
        *distinct.values(),
        f'define ptx_kernel void @{name}({", ".join(parameters)}) {bounds} {{',
        "  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()",
        *calls,
        "}",
        "!0 = !{}",
        "",
    ])  # fmt: skip
