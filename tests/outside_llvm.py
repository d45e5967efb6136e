"""LLVM runs outside of the emulator: the emulated Python sends a module's text to a process of the machine itself.

`tools/emulate.py` starts the other side (`serve`) and names its socket in RLX_TEST_LLVM. Code is a function of the text
and the target, so it is what LLVM in the emulator would give, some thirty times as fast.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from rlx.backends.cpu import llvm
from rlx.backends.cpu.target import Target
from rlx.errors import CompileError

ENV = "RLX_TEST_LLVM"


class OutsideModule(llvm.Module):
    """A module that the other side compiles."""

    def __init__(self, text: str, target: Target) -> None:
        self._given, self._target, self._module = text, target, None

    def compile(self) -> None:
        with Client(os.environ[ENV], "AF_UNIX") as other:
            other.send((self._given, self._target.level, self._target.triple, self._target.cpu, self._target.features))
            self._code, self._text = other.recv()
        if not self._code:
            raise CompileError(self._text)

    def assembly(self) -> str:
        with llvm_module(self._given, self._target) as module:
            return str(module.assembly())


llvm_module = llvm.Module


def use() -> None:
    """From now on the other side compiles modules."""
    setattr(llvm, "Module", OutsideModule)  # noqa: B010


@contextmanager
def serve(path: Path) -> Iterator[None]:
    """Compiles, in the `with` block, what comes in at a socket."""
    import llvmlite.binding

    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    path.unlink(missing_ok=True)
    with Listener(str(path), "AF_UNIX", backlog=64) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        yield
    path.unlink(missing_ok=True)


def _accept(listener: Listener) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: Connection) -> None:
    with connection:
        text, *target = connection.recv()
        try:
            compiled = llvm.compile_module(text, Target(*target))
            connection.send((compiled.code, compiled.text))
        except CompileError as error:
            connection.send((b"", str(error)))
