"""Code beside programs: single kernels as steps that all workers share, and the worker loop, each compiled once.

CPU backend. Everything here goes through the compile cache of the `Builder`.

A step function of a single kernel, `void step(ptr ctx, i64 worker, i64 workers)`, needs no program; ctx holds 64-bit
words. Packing and benchmarks use `range_step` of `launch/loop_functions.py`, the choice of tokens `row_step`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlx import platform
from rlx.backends import cpu
from rlx.backends.cpu.kernel import Kernel
from rlx.backends.cpu.launch.code import NativeCode
from rlx.backends.cpu.launch.native import RuntimeLibrary
from rlx.backends.cpu.layouts import BLOCK_ROWS, LAYOUTS
from rlx.backends.cpu.target import Target
from rlx.backends.device import Builder, Files
from rlx.ir.dtypes import DType

if TYPE_CHECKING:
    from rlx.backends.cpu.llvm import Compiled
    from rlx.store.entry import Entry

#: Compiled modules that a process keeps for a target, for the programs that it compiles next.
MODULES = 256


class _Recent(OrderedDict[str, "Compiled"]):
    """The last modules that were compiled, by the digests of their texts."""

    def __setitem__(self, digest: str, compiled: Compiled) -> None:
        super().__setitem__(digest, compiled)
        if len(self) > MODULES:
            self.popitem(last=False)


@lru_cache(maxsize=4)
def recent(target: Target) -> _Recent:
    """Those for a target, of all compilers of this process: models of one shape have most of their kernels in common,
    and so have the programs of one model.
    """
    return _Recent()


def compiling() -> Any:
    """The module that generates code; imported when the first code is missing."""
    return cpu.compiling


def files_of(modules: Mapping[str, Compiled]) -> dict[str, bytes | str]:
    """The files of compiled modules: object code, and the assembly that it was emitted from."""
    code = {f"{name}.o": module.code for name, module in modules.items()}
    return {**code, **{f"{name}.ll": module.text for name, module in modules.items()}}


def objects(stored: Entry) -> list[bytes]:
    """The object code of a compiled program, module by module."""
    return [stored.read(name) for name in stored.names if name.endswith(".o")]


def step_of(
    builder: Builder,
    make: Callable[[Any], Kernel],
    *,
    what: str,
    scratch: int | None = None,
    **fields: Any,
) -> NativeCode:
    """A kernel as a step of its own, see `rlx.backends.cpu.steps`; its one symbol is the step.

    Args:
        make: makes the kernel with what `compiling` returns, if it must be compiled.
        what: it is, for whoever waits for it.
        scratch: number of scratch buffers of a kernel that takes rows of a table, see `row_step`.
        fields: of the compile key.
    """

    def build() -> Files:
        generate = compiling()
        kernel = make(generate)
        name, text = generate.range_step(kernel) if scratch is None else generate.row_step(kernel, scratch)
        files = _compiled(builder.target, kernel=kernel.llvm, program=text)
        return files | {"symbol.txt": name, "kernel.txt": kernel.source}

    def load(stored: Entry) -> NativeCode:
        return NativeCode(objects(stored), [stored.read("symbol.txt").decode()])

    return builder.once(what, build, load, **fields)


def packing(builder: Builder, dtype: DType) -> NativeCode:
    """The step that packs a matrix of this type."""
    return step_of(
        builder,
        lambda generate: generate.pack(dtype, signed=builder.target.isa.signed_codes),
        what=f"the packing of {dtype.name} weights",
        kind="pack",
        name=dtype.name,
        options={"layout": LAYOUTS.matrices},
    )


def choosing(builder: Builder) -> NativeCode:
    """The step that chooses the tokens of some rows of logits."""
    what = "the choice of tokens"
    return step_of(builder, lambda generate: generate.choose(), what=what, scratch=6, kind="choice", name="choose")


def peak(builder: Builder, kind: str) -> NativeCode:
    """The step that measures an arithmetic peak, see `rlx.backends.cpu.kernels.linear.peak`."""
    what = "a measurement"
    return step_of(builder, lambda generate: generate.peak(kind, builder.target), what=what, kind="peak", name=kind)


def linear(builder: Builder, dtype: DType, k: int, act: str, *, single: bool) -> NativeCode:
    """The step of a linear of n results, a multiple of 16, that `rlx tune` times."""
    return step_of(
        builder,
        lambda generate: generate.linear(dtype, BLOCK_ROWS, k, act, builder.target, single=single),
        what="a measurement",
        kind="linear",
        name=dtype.name,
        options={"k": k, "act": act, "single": single, "tuning": builder.target.tuning},
    )


def worker_loop(builder: Builder) -> RuntimeLibrary:
    """The native worker loop."""
    waits = platform.current().waits

    def build() -> Files:
        return _compiled(builder.target, program=compiling().runtime_llvm(builder.target.triple, waits))

    def load(stored: Entry) -> RuntimeLibrary:
        return RuntimeLibrary(stored.read("program.o"))

    return builder.once("the worker loop", build, load, kind="runtime", name="workers", options={"waits": waits})


def _compiled(target: Target, **texts: str) -> dict[str, bytes | str]:
    """The files of modules by their names."""
    with compiling().Modules(target, recent(target)) as modules:
        for name, text in texts.items():
            modules.add(name, text)
        return files_of(modules.results())
