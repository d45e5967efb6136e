"""LLVM assembly text in, object code out. The only place that runs LLVM's passes.

A program is many modules: one for each kernel, and one with the step that calls them. They are compiled apart, so that
they can be side by side, and so that a kernel that several programs call is compiled once. They meet when they are
loaded (`rlx.runtime.native`).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlx.codegen.target import Target, cpu_count
from rlx.errors import CompileError

_HINT = "This is a bug of rlx; please report it."

# The contexts of modules that are not closed. LLVM's code would run into freed memory if a context went first, and the
# garbage collector knows no order.
_contexts: dict[int, Any] = {}


@dataclass(frozen=True)
class Compiled:
    """A module as object code, and the optimized assembly that it was emitted from."""

    code: bytes
    text: str


class Module:
    """A module on its way to object code. Whoever makes one closes it.

    Args:
        text: LLVM assembly.

    Raises:
        CompileError: LLVM refuses the text.
    """

    def __init__(self, text: str, target: Target) -> None:
        import llvmlite.binding as llvm

        self._machine, self._module, self._code = target.machine(), None, b""  # the first initializes LLVM
        self._text = ""
        # A context of its own, because LLVM lets only one thread at a time work on what shares a context.
        self._context = _contexts[id(self)] = llvm.create_context()
        try:
            self._module = llvm.parse_assembly(text, self._context)
            self._module.triple = target.triple
            self._module.verify()
        except RuntimeError as error:
            self.close()
            raise CompileError(f"LLVM refuses the program: {error}", hint=_HINT) from error

    def compile(self) -> None:
        """The long part. It holds neither Python's lock nor llvmlite's, so threads compile modules side by side.

        Code is emitted from the optimized module as it reads back from its text: emitting changes a module, and the
        order in which a module lists the uses of a value is not part of its text. So `assembly` of the text is exactly
        the code that was emitted.
        """
        import llvmlite.binding as llvm

        optimize(self._module, self._machine)
        self._text = str(self._module)
        with llvm.parse_assembly(self._text, self._context) as module:
            self._code = _emit(module, self._machine)

    def result(self) -> Compiled:
        """What `compile` made."""
        return Compiled(self._code, self._text)

    def emit(self) -> bytes:
        """Object code of a module that is optimized already: of the text of a `Compiled`, its code."""
        return _emit(self._module, self._machine)

    def assembly(self) -> str:
        """Machine assembly of a module that is optimized already: of the text of a `Compiled`, that of its code."""
        return str(self._machine.emit_assembly(self._module))

    def close(self) -> None:
        """Frees the module; more than once does no harm."""
        if self._module is not None:
            self._module.close()
        _contexts.pop(id(self), None)

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def optimize(module: Any, machine: Any) -> None:
    """Runs the optimizing pipeline in place."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.slp_vectorization = False  # tile kernels are vectors already; loop kernels have loops
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()  # held: an interrupt during the call would be lost in its `__del__`
    _unlocked("LLVMPY_RunNewModulePassManager")(passes, module, builder)


def _emit(module: Any, machine: Any) -> bytes:
    """Object code of an optimized module."""
    from llvmlite.binding import ffi

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
    """A function of llvmlite's library without the lock that llvmlite puts around each, whatever it works on."""
    from llvmlite.binding import ffi

    locked = getattr(ffi.lib, name)
    function = ctypes.CDLL(ffi.lib._name)[name]
    function.argtypes, function.restype = locked.argtypes, locked.restype
    return function


def compile_module(text: str, target: Target) -> Compiled:
    """Compiles one module; `CompileError` if LLVM refuses it."""
    with Module(text, target) as module:
        module.compile()
        return module.result()


def assembly(text: str, target: Target) -> str:
    """Machine assembly of an optimized module."""
    with Module(text, target) as module:
        return module.assembly()


class Modules:
    """Compiles modules side by side, on as many cores as this process may use, while the caller writes more of them.

    Leaving the `with` statement early drops those that have not begun.

    Args:
        known: what was compiled before, by a digest of the text; it is not compiled again. Results join it.
    """

    def __init__(self, target: Target, known: MutableMapping[str, Compiled]) -> None:
        self._target, self._known = target, known
        self._pool = ThreadPoolExecutor(cpu_count(), "rlx-llvm")
        self._digests: dict[str, str] = {}
        self._found: dict[str, Compiled] = {}  # of its own, because others may drop what is known
        self._begun: dict[str, tuple[Module, Future[None]]] = {}

    def add(self, name: str, text: str) -> None:
        """Begins with a module; `CompileError` if LLVM refuses it, or one before."""
        self._collect([digest for digest, (_, future) in self._begun.items() if future.done()])
        self._digests[name] = digest = hashlib.sha256(text.encode()).hexdigest()
        if found := self._known.get(digest):
            self._found[digest] = found
        elif digest not in self._begun.keys() | self._found.keys():
            module = Module(text, self._target)
            self._begun[digest] = module, self._pool.submit(module.compile)

    def results(self, waiting: Callable[[], object] = lambda: None) -> dict[str, Compiled]:
        """Every module that was added, by its name; waits until they are compiled.

        Args:
            waiting: called before each one that is waited for. What it raises ends the wait.
        """
        for digest in list(self._begun):
            waiting()
            self._collect([digest])
        return {name: self._found[digest] for name, digest in self._digests.items()}

    def _collect(self, digests: list[str]) -> None:
        """Takes what was made of modules, and frees them, which are several times as large."""
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
