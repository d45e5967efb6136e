"""Compiles LLVM assembly to object code. This is the only module that runs LLVM's passes.

A program has many modules: one per kernel, one per region, and one with the step. Modules are compiled separately, so
that they can be compiled in parallel and so that programs can share compiled kernels. They are linked when they are
loaded (`rlx.backends.cpu.launch.native`).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

from rlx.backends.cpu.levels import AARCH64, architecture
from rlx.backends.cpu.llvm_text import WRITTEN
from rlx.backends.cpu.target import Target
from rlx.closing import Closing
from rlx.errors import CompileError
from rlx.platform import cpu_count
from rlx.tracing import span

_HINT = "This is a bug of rlx; please report it."

# The contexts of open modules. A context must outlive its module, or LLVM accesses freed memory; the garbage collector
# does not guarantee that order.
_contexts: dict[int, Any] = {}


@dataclass(frozen=True)
class Compiled:
    """A compiled module: its object code, and the optimized LLVM assembly that the code was emitted from."""

    code: bytes
    text: str


class Module(Closing):
    """An LLVM module to compile. The caller must close it, or use it in a `with` statement.

    Args:
        text: LLVM assembly.

    Raises:
        CompileError: LLVM rejects the text.
    """

    def __init__(self, text: str, target: Target) -> None:
        self._machine, self._module, self._code = target.machine(), None, b""  # the first initializes LLVM
        self._few, self._text = needs_few_passes(text, target), ""
        # Each module has its own context: only one thread at a time may work on modules that share one.
        self._context = _contexts[id(self)] = llvm.create_context()
        try:
            self._module = llvm.parse_assembly(text, self._context)
            self._module.triple = target.triple
            self._module.verify()
        except RuntimeError as error:
            self.close()
            raise CompileError(f"LLVM refuses the program: {error}", hint=_HINT) from error

    def compile(self) -> None:
        """Optimizes the module and emits its code. Takes most of the time of a compile.

        It holds neither the GIL nor llvmlite's lock, so threads can compile modules in parallel.

        The optimized module is written as text and parsed again before code is emitted. Emission depends on the order
        of the use lists, which the text does not contain, and it changes the module. This way `assembly` of the text
        shows exactly the code that was emitted.
        """
        optimize(self._module, self._machine, few=self._few)
        self._text = str(self._module)
        with llvm.parse_assembly(self._text, self._context) as module:
            self._code = _emit(module, self._machine)

    def result(self) -> Compiled:
        """The result of `compile`."""
        return Compiled(self._code, self._text)

    def emit(self) -> bytes:
        """Object code of an already optimized module. For the text of a `Compiled` this is its code."""
        return _emit(self._module, self._machine)

    def assembly(self) -> str:
        """Machine assembly of an already optimized module. For the text of a `Compiled` this matches its code."""
        return str(self._machine.emit_assembly(self._module))

    def close(self) -> None:
        """Frees the module. Further calls do nothing."""
        if self._module is not None:
            self._module.close()
        _contexts.pop(id(self), None)


#: For modules that are `WRITTEN`. Loops are rotated, so that code generation moves what does not change out of them.
_FEW_PASSES = ("sroa", "simplify_cfg", "loop_rotate", "instruction_combine", "new_gvn", "simplify_cfg")


def needs_few_passes(text: str, target: Target) -> bool:
    """Whether LLVM may run few passes on a module: it is written as its code should be.

    Not on Arm, where registers are short in some tiles: after all passes less is spilled.
    """
    return WRITTEN in text and architecture(target.triple) is not AARCH64


def optimize(module: Any, machine: Any, *, few: bool = False) -> None:
    """Optimizes the module in place.

    Args:
        few: runs a sixth of the pipeline, in time, which leaves code that is vector code already as fast. No pass of
            either changes a result: what rounds is decided by the text (flags, `llvm.fmuladd`).
    """
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.slp_vectorization = False  # tile kernels are vector code already; loop kernels use the loop vectorizer
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager() if few else builder.getModulePassManager()
    for name in _FEW_PASSES if few else ():
        getattr(passes, f"add_{name}_pass")()
    # `passes` is held: an interrupt during the call would be lost in its `__del__`.
    _unlocked("LLVMPY_RunNewModulePassManager")(passes, module, builder)


def _emit(module: Any, machine: Any) -> bytes:
    """Object code of an optimized module."""
    with ffi.OutputString() as message:
        memory = _unlocked("LLVMPY_TargetMachineEmitToMemory")(machine, module, 1, message)
        if not memory:
            raise CompileError(f"LLVM emits no object code: {message}", hint=_HINT)
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(memory), ffi.lib.LLVMPY_GetBufferSize(memory))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(memory)


@cache
def _unlocked(name: str) -> Callable[..., Any]:
    """A function of llvmlite's library, called without llvmlite's global lock."""
    locked = getattr(ffi.lib, name)
    function = ctypes.CDLL(ffi.lib._name)[name]
    function.argtypes, function.restype = locked.argtypes, locked.restype
    return function


def compile_module(text: str, target: Target) -> Compiled:
    """Compiles one module; `CompileError` if LLVM rejects it."""
    with Module(text, target) as module:
        module.compile()
        return module.result()


def _compile(name: str, module: Module) -> None:
    """Compiles a module of a program, in a thread."""
    with span(name, "LLVM"):
        module.compile()


def assembly(text: str, target: Target) -> str:
    """Machine assembly of an optimized module."""
    with Module(text, target) as module:
        return module.assembly()


class Modules:
    """Compiles modules in parallel, on all cores that this process may use, while the caller generates more of them.

    Leaving the `with` statement cancels the modules whose compilation has not started.

    Args:
        known: compiled modules by a digest of their text. They are not compiled again; new results are added.
    """

    def __init__(self, target: Target, known: MutableMapping[str, Compiled]) -> None:
        self._target, self._known = target, known
        self._pool = ThreadPoolExecutor(cpu_count(), "rlx-llvm")
        self._digests: dict[str, str] = {}
        self._found: dict[str, Compiled] = {}  # kept here too, because others may remove entries of `known`
        self._begun: dict[str, tuple[Module, Future[None]]] = {}

    def add(self, name: str, text: str) -> None:
        """Starts to compile a module; `CompileError` if LLVM rejects this module or an earlier one."""
        self._collect([digest for digest, (_, future) in self._begun.items() if future.done()])
        self._digests[name] = digest = hashlib.sha256(text.encode()).hexdigest()
        if found := self._known.get(digest):
            self._found[digest] = found
        elif digest not in self._begun.keys() | self._found.keys():
            module = Module(text, self._target)
            self._begun[digest] = module, self._pool.submit(_compile, name, module)

    def results(self, waiting: Callable[[], object] = lambda: None) -> dict[str, Compiled]:
        """Waits for all modules that were added, and returns them by name.

        Args:
            waiting: called before the wait for each module. An exception that it raises ends the wait.
        """
        for digest in list(self._begun):
            waiting()
            self._collect([digest])
        return {name: self._found[digest] for name, digest in self._digests.items()}

    def _collect(self, digests: list[str]) -> None:
        """Stores the results of modules, and frees the modules, which are several times as large as the results."""
        for digest in digests:
            module, future = self._begun[digest]
            future.result()
            self._found[digest] = self._known[digest] = module.result()
            module.close()
            del self._begun[digest]

    def __enter__(self) -> Modules:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for module, _ in self._begun.values():
            module.close()
