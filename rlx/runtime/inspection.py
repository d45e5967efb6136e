"""What the compiler made of a graph, to read: IR after each pass, kernels, LLVM modules, assembly, and the report.

All of it is stored with the program in the compile cache, so a program that was found there shows as much as one that
was just compiled. The assembly is made from the stored LLVM modules, and is exactly the stored code's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlx.codegen.target import Target
from rlx.errors import ArgumentError
from rlx.passes.report import Report

if TYPE_CHECKING:
    from rlx.runtime.compile import CompiledProgram
    from rlx.runtime.entry import Entry

REPORT = "explain.json"  # the file of an entry


class Inspectable:
    """Something with a compiled program that can be read stage by stage."""

    _compiled: CompiledProgram
    _target: Target

    def explain(self) -> Report:
        """What each pass did, by which rule and where, what rules missed and why, and which kernels were chosen.

        `print` it for text; `Report.as_dict` gives plain data.

        Raises:
            CacheError: the program was evicted from the compile cache since it was loaded.
        """
        return Report.from_json(self._compiled.files.read(REPORT))

    @property
    def stages(self) -> list[str]:
        """Names of the stages that `ir` knows, in order: "graph" as it was built, then the passes."""
        return [name.split("-", 1)[1] for name in self._stages]

    @property
    def kernels(self) -> list[str]:
        """Symbols of the kernels, each once."""
        return self._compiled.kernels

    def ir(self, stage: str = "layout") -> str:
        """The IR text after a pass: one of `stages`. "layout" is the last graph, "memory" the whole program.

        Raises:
            ArgumentError: there is no such stage.
            CacheError: as `explain`.
        """
        found = [name for name in self._stages if stage in (name, name.split("-", 1)[1])]
        if not found:
            raise unknown("stage", stage, self.stages)
        return self._read(f"ir/{found[0]}.txt")

    def source(self, kernel: str | None = None) -> str:
        """Readable source of the kernels: specialized Python, or the outline of a tile kernel.

        Args:
            kernel: a symbol of `kernels`, or a part of one; all kernels by default.

        Raises:
            ArgumentError: no kernel is called so.
            CacheError: as `explain`.
        """
        chosen = _matching(kernel, self.kernels)
        return "\n\n".join(f"# {symbol}\n\n{self._read(f'kernels/{symbol}.txt')}" for symbol in chosen)

    def llvm(self, kernel: str | None = None) -> str:
        """The optimized LLVM modules: the kernels, the step, the regions.

        Args:
            kernel: a symbol of `kernels`, the name of a region, "program" for the step, or a part of one of those.

        Raises:
            ArgumentError, CacheError: as `source`.
        """
        return "\n".join(f"; {name}\n{text}" for name, text in self._modules(kernel))

    def asm(self, kernel: str | None = None) -> str:
        """The machine code as assembly, module by module.

        Args:
            kernel: as in `llvm`.

        Raises:
            ArgumentError, CacheError: as `source`.
        """
        from rlx.codegen.llvm import assembly

        return "\n".join(f"# {name}\n{assembly(text, self._target)}" for name, text in self._modules(kernel))

    @property
    def _stages(self) -> list[str]:
        """With their numbers: "04-fuse"."""
        names = self._compiled.files.names
        return [name[len("ir/") : -len(".txt")] for name in names if name.startswith("ir/")]

    def _modules(self, kernel: str | None) -> Iterator[tuple[str, str]]:
        names = [name.removesuffix(".ll") for name in self._compiled.files.names if name.endswith(".ll")]
        return ((name, self._read(f"{name}.ll")) for name in _matching(kernel, names))

    def _read(self, name: str) -> str:
        return self._compiled.files.read(name).decode()


def disassembly(entry: Entry, name: str) -> str:
    """The assembly of an object file of a cache entry, for the entry's own target.

    It is made from the LLVM module that is stored beside the object. The first line warns if the LLVM of this
    installation makes other code of that module than the stored code.

    Args:
        name: such as "program.o".

    Raises:
        CacheError: the entry has no such file, or no module for it.
        CompileError: the LLVM of this installation cannot read the module.
    """
    from rlx.codegen.llvm import Module

    level, triple, cpu, features = (str(entry.key.target[word]) for word in ("level", "triple", "cpu", "features"))
    target = Target(level, triple, cpu, features)
    text = entry.read(f"{name.removesuffix('.o')}.ll").decode()
    with Module(text, target) as module:
        same = module.emit() == entry.read(name)
    with Module(text, target) as module:
        warning = "" if same else "# not exactly the stored code: it was made by another version of LLVM\n"
        return warning + module.assembly()


def _matching(kernel: str | None, names: Sequence[str]) -> list[str]:
    """The names that a kernel's name stands for: itself, else those that it is a part of.

    Raises:
        ArgumentError: there is none.
    """
    exact = [name for name in names if kernel in (None, name, name.rsplit("/", 1)[-1])]
    found = exact or [name for name in names if kernel and kernel in name]
    if not found:
        raise unknown("kernel", str(kernel), [name.rsplit("/", 1)[-1] for name in names])
    return found


def unknown(what: str, name: str, known: Sequence[str]) -> ArgumentError:
    """The error about a name that is none of the known ones."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, 1, 0.5)
    meant = f"Did you mean {close[0]}? " if close else ""
    return ArgumentError(f"no {what} is called {name!r}", hint=f"{meant}There are: {', '.join(known) or 'none'}.")
