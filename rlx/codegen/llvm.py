"""LLVM assembly text in, object code out. The only place that runs LLVM's passes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from rlx.codegen.target import Target
from rlx.errors import CompileError

_lock = threading.Lock()  # llvmlite's global context is not thread-safe


def link(modules: Iterable[str], target: Target) -> Any:
    """Parses the modules into one, linked; raises `CompileError` with LLVM's message."""
    import llvmlite.binding as llvm

    target.machine()  # initializes LLVM
    try:
        parsed = [llvm.parse_assembly(text) for text in modules]
        first, *rest = parsed
        for other in rest:
            first.link_in(other)
        first.triple = target.triple
        first.verify()
    except RuntimeError as error:
        raise CompileError(
            f"LLVM refuses the program: {error}", hint="This is a bug of rlx; please report it."
        ) from error
    return first


def optimize(module: Any, target: Target) -> None:
    """Runs the optimizing pipeline in place."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.slp_vectorization = False  # tile kernels are vectors already; loop kernels have loops
    builder = llvm.create_pass_builder(target.machine(), options)
    builder.getModulePassManager().run(module, builder)


def compile_module(modules: Iterable[str], target: Target) -> tuple[bytes, str]:
    """-> (object code, the optimized assembly it was emitted from)."""
    with _lock:
        module = link(modules, target)
        optimize(module, target)
        return bytes(target.machine().emit_object(module)), str(module)


def assembly(llvm_text: str, target: Target) -> str:
    """Machine assembly of an optimized module."""
    with _lock:
        return str(target.machine().emit_assembly(link([llvm_text], target)))
