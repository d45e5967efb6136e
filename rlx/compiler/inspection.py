"""Inspection of a compiled program: IR after each pass, kernels, LLVM modules, assembly, and the report.

All of it is stored with the program in the compile cache, so a program from the cache shows the same as one that was
just compiled. The assembly is generated from the stored LLVM modules and is that of the stored code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import backends, env, report
from rlx.arguments import nearest
from rlx.backends.device import Target
from rlx.errors import ArgumentError, CacheError
from rlx.notebook import card
from rlx.passes.report import Report
from rlx.report.source import KernelText, Machine, Source, StepTimes, Subject

if TYPE_CHECKING:
    from rlx.compiler.compile import CompiledProgram
    from rlx.report.page import ReportPage
    from rlx.store.entry import Entry

REPORT = "explain.json"  # the file of an entry


class Inspectable:
    """An object with a compiled program whose stages can be read."""

    _compiled: CompiledProgram
    _target: Target

    def explain(self) -> Report:
        """The report: what each pass did and by which rule, near misses with reasons, and the chosen kernels.

        `print` it for text; `Report.as_dict` gives plain data.

        Raises:
            CacheError: the program was evicted from the compile cache after it was loaded.
        """
        return Report.from_json(self._compiled.files.read(REPORT))

    @property
    def stages(self) -> list[str]:
        """Names of the stages that `ir` accepts, in order: "graph" as built, then the passes."""
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
            kernel: a name in `kernels`, or a part of one; all kernels by default.

        Raises:
            ArgumentError: no kernel has this name.
            CacheError: as `explain`.
        """
        chosen = _matching(kernel, self.kernels)
        return "\n\n".join(f"# {symbol}\n\n{self._read(f'kernels/{symbol}.txt')}" for symbol in chosen)

    def llvm(self, kernel: str | None = None) -> str:
        """The optimized LLVM modules: the kernels, the step, the regions.

        Args:
            kernel: a name in `kernels`, the name of a region, "program" for the step, or a part of one of those.

        Raises:
            ArgumentError, CacheError: as `source`.
        """
        return "\n".join(f"; {name}\n{text}" for name, text in self._modules(kernel))

    def asm(self, kernel: str | None = None, form: str | None = None) -> str:
        """The machine code as assembly, module by module.

        Args:
            kernel: as in `llvm`.
            form: "ptx" or "sass", for a card; by default what is assembly for the device.

        Raises:
            ArgumentError, CacheError: as `source`; `ArgumentError` also if the device lacks the form.
        """
        target = self._target
        parts = [f"# {name}\n{target.backend.assembly(text, target, form)}" for name, text in self._modules(kernel)]
        return "\n".join(parts)

    def report(self, path: str | Path | None = None) -> ReportPage:
        """The report as one HTML page: graph, passes, schedule, kernels and memory.

        Args:
            path: a file to write it to.

        Raises:
            OutputError: the file cannot be written.
            CacheError: as `explain`.

        Example: `exe.report("report.html")`.
        """
        return self._report_page(path)

    def _report_page(
        self, path: str | Path | None, machine: Machine | None = None, times: StepTimes | None = None
    ) -> ReportPage:
        subject = Subject(self._compiled.manifest["name"], machine=machine)
        page = report.page.make_page(subject, [self.report_source(times=times)])
        if path is not None:
            page.write(path)
        return page

    def report_source(self, name: str | None = None, times: StepTimes | None = None) -> Source:
        """The facts of the program that a report shows.

        Args:
            name: of the program.
            times: of a measured step.
        """
        compiled, key = self._compiled, self._compiled.key
        stages = [(name, self._read(f"ir/{name}.txt")) for name in self._stages]
        files = [file for file in compiled.files.names if file.startswith("kernels/") or file.endswith(".ll")]
        names = sorted({file.rpartition(".")[0] for file in files})
        stats = {**compiled.stats, "object_bytes": compiled.object_bytes, "digest": key.digest}
        return Source(
            name or f"{key.phase}-{compiled.options.seq[0]}-{compiled.options.seq[1]}",
            key.phase,
            compiled.options.seq,
            stages,
            compiled.options,
            self._target.level,
            self.explain(),
            compiled.manifest,
            {each: partial(self._kernel_text, each) for each in names},
            stats | {"cached": compiled.cached, "seconds_here": compiled.seconds},
            times,
            passes=self._target.backend.passes(compiled.options.phase),
        )

    def _kernel_text(self, name: str) -> KernelText:
        """The texts of a module, such as "kernels/norm_8f0a"."""
        has = self._compiled.files.names
        source, llvm = (self._read(file) if file in has else "" for file in (f"{name}.txt", f"{name}.ll"))
        return KernelText(source, llvm, self._target.backend.assembly(llvm, self._target) if llvm else "")

    def _repr_html_(self) -> str:
        rows = [("stages", " > ".join(self.stages)), ("kernels", len(self.kernels))]
        try:
            folds = [("what the passes did", str(self.explain())), ("program: regions and places", self.ir("memory"))]
        except CacheError as error:  # it was evicted
            folds = [("the compile cache no longer has it", str(error))]
        return card(repr(self).strip("<>"), rows, folds)

    @property
    def _stages(self) -> list[str]:
        """Stage names with numbers: "04-fuse"."""
        names = self._compiled.files.names
        return [name[len("ir/") : -len(".txt")] for name in names if name.startswith("ir/")]

    def _modules(self, kernel: str | None) -> Iterator[tuple[str, str]]:
        names = [name.removesuffix(".ll") for name in self._compiled.files.names if name.endswith(".ll")]
        if not names:
            hint = "Look at `ir` or `explain`." if env.jit() else "RLX_JIT is 0; unset it."
            raise ArgumentError("the program has no machine code", where=f"target {self._target.level}", hint=hint)
        return ((name, self._read(f"{name}.ll")) for name in _matching(kernel, names))

    def _read(self, name: str) -> str:
        return self._compiled.files.read(name).decode()


def disassembly(entry: Entry, name: str) -> str:
    """The assembly of an object file of a cache entry, for the entry's own target.

    It is generated from the LLVM module stored beside the object. The first line is a warning if this installation's
    LLVM generates other code from that module than the stored code.

    Args:
        name: such as "program.o".

    Raises:
        CacheError: the entry has no such file, or no module for it.
        CompileError: the LLVM of this installation cannot read the module.
    """
    text = entry.read(f"{name.removesuffix('.o')}.ll").decode()
    return backends.backend().stored_assembly(entry.key.target, text, entry.read(name))


def _matching(kernel: str | None, names: Sequence[str]) -> list[str]:
    """The names that match: the exact name, else all names that contain it.

    Raises:
        ArgumentError: there is none.
    """
    exact = [name for name in names if kernel in (None, name, name.rsplit("/", 1)[-1])]
    found = exact or [name for name in names if kernel and kernel in name]
    if not found:
        raise unknown("kernel", str(kernel), [name.rsplit("/", 1)[-1] for name in names])
    return found


def unknown(what: str, name: str, known: Sequence[str]) -> ArgumentError:
    """The error for an unknown name."""
    close = nearest(name, known, cutoff=0.5)
    meant = f"Did you mean {close[0]}? " if close else ""
    return ArgumentError(f"no {what} is called {name!r}", hint=f"{meant}There are: {', '.join(known) or 'none'}.")
