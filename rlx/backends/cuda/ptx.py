"""LLVM assembly to PTX, in child processes: LLVM ends the process on what it cannot select.

Run as a program, this module reads one JSON object, {"level", "ptx", "modules"}, from its input, and writes a line of
JSON for each module: [its number, its PTX].
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlx.errors import CompileError
from rlx.platform import cpu_count

_HINT = "This is a bug of rlx; please report it."

#: The intrinsics that kernels may call: LLVM's code generator for PTX takes all of them at every level that has them.
ALLOWED = frozenset((
    "llvm.ceil.f32", "llvm.fabs.f32", "llvm.fabs.f64", "llvm.fma.f32", "llvm.fma.f64", "llvm.maxnum.f32",
    "llvm.minnum.f32",
    "llvm.nvvm.cp.async.cg.shared.global.16", "llvm.nvvm.cp.async.cg.shared.global.16.s",
    "llvm.nvvm.cp.async.ca.shared.global.8", "llvm.nvvm.cp.async.commit.group", "llvm.nvvm.cp.async.wait.group",
    "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16.p3", "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.trans.b16.p3",
    "llvm.nvvm.mma.m16n8k16.row.col.f32.f32", "llvm.nvvm.mma.m16n8k8.row.col.f32.f32",
    "llvm.rint.f64", "llvm.sqrt.f32", "llvm.nvvm.barrier.cta.sync.aligned.all", "llvm.nvvm.bar.warp.sync",
    "llvm.nvvm.ex2.approx.f", "llvm.nvvm.griddepcontrol.launch.dependents",
    "llvm.nvvm.griddepcontrol.wait", "llvm.nvvm.lg2.approx.f", "llvm.nvvm.mma.m16n8k16.row.col.bf16",
    "llvm.nvvm.mma.m16n8k16.row.col.s8", "llvm.nvvm.mma.m16n8k32.row.col.s8", "llvm.nvvm.rcp.approx.ftz.f",
    "llvm.nvvm.prmt", "llvm.nvvm.rsqrt.approx.f",
    "llvm.nvvm.read.ptx.sreg.ctaid.x", "llvm.nvvm.read.ptx.sreg.tid.x", "llvm.nvvm.shfl.sync.bfly.i32",
    "llvm.nvvm.shfl.sync.idx.i32", "llvm.nvvm.vote.ballot.sync",
))  # fmt: skip


def compiled(modules: Sequence[str], level: str, version: int) -> list[str]:
    """The PTX of some modules of LLVM assembly.

    Args:
        level: such as "sm_90".
        version: of PTX, ten times.

    Raises:
        CompileError: LLVM refuses one.
    """
    for text in modules:
        check_calls(text)
    shares = [list(range(len(modules)))[i :: cpu_count()] for i in range(min(cpu_count(), len(modules)))]
    found: dict[int, str] = {}
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        for some in pool.map(lambda share: _child({i: modules[i] for i in share}, level, version), shares):
            found |= some
    ptx = [found[i] for i in range(len(modules))]
    for text in ptx:
        check_order(text)
    return ptx


def check_calls(text: str) -> None:
    """Raises `CompileError` if a module calls what is not `ALLOWED`."""
    if unknown := set(re.findall(r"@(llvm\.[\w.]+)\(", text)) - ALLOWED:
        raise CompileError(f"kernels call {', '.join(sorted(unknown))}", where="device cuda", hint=_HINT)


def check_order(ptx: str) -> None:
    """Raises `CompileError` if an atomic operation has no memory order: LLVM 22 drops that of `atomicrmw`."""
    if found := re.findall(r"^\s*(?:atom|red)\.(?!.*(?:release|acq_rel|relaxed)).*$", ptx, re.MULTILINE):
        raise CompileError(f"an atomic operation without an order: {found[0].strip()}", where="device cuda", hint=_HINT)


def _child(modules: dict[int, str], level: str, version: int) -> dict[int, str]:
    request = json.dumps({"level": level, "ptx": version, "modules": list(modules.items())})
    command = [sys.executable, "-m", __name__]
    run = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    found = {int(number): text for number, text in map(json.loads, run.stdout.splitlines())}
    missing = [number for number in modules if number not in found]
    if missing:
        name = re.search(r"define ptx_kernel void @(\w+)", modules[missing[0]])
        what = f"LLVM refuses the kernel {name[1] if name else ''}: {run.stderr.strip()[-2000:] or run.returncode}"
        raise CompileError(what, where="device cuda", hint=_HINT)
    return found


def main() -> None:
    """The child process."""
    import llvmlite.binding as llvm  # only the child emits code

    request: dict[str, Any] = json.load(sys.stdin)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu=request["level"], features=f"+ptx{request['ptx']}", opt=3)
    for number, text in request["modules"]:
        module = llvm.parse_assembly(f'target datalayout = "{machine.target_data}"\n{text}')
        module.verify()
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        print(json.dumps([number, machine.emit_assembly(module)]), flush=True)


if __name__ == "__main__":
    main()
