"""The compiler: turns a graph into a loaded program, through the compile cache.

Runtime stage, over the passes and a backend. A cache hit computes the key from the text of the symbolic graph and loads
the code; no pass runs, and neither Numba nor LLVM's passes are imported. A miss runs the pipeline and the backend, and
stores the code together with readable forms: IR after every pass, kernels, report. Each compile is reported to the
progress callback and to the logger "rlx".
"""

from __future__ import annotations

import itertools
import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rlx import backends, compiler, debug_output, env, ir, tracing
from rlx.arguments import whole
from rlx.backends.device import Code, Files, Loadable, OnKernel, Packer, Target, Workers
from rlx.backends.program import Manifest, Program
from rlx.compiler.tuned import tuned
from rlx.errors import ArgumentError, named_refusals
from rlx.ir.dtypes import DTYPES, DType
from rlx.ir.graph import Graph
from rlx.ir.op_table import CUSTOM, OPS
from rlx.passes.effective import effective
from rlx.passes.layout import packed_rows
from rlx.passes.options import BACKEND, Options
from rlx.platform import MAX_WORKERS, cpu_count, usable_cpus
from rlx.store.cache import CompileCache, checked_cache
from rlx.store.entry import Entry
from rlx.store.key import CompileKey, digest_text, versions
from rlx.tracing import span

T = TypeVar("T")

MAX_PER_CPU = 8  # worker threads: enough for tests, few enough that the machine still makes progress

#: Makes files, and says how far it is.
Build = Callable[[OnKernel], Files]

#: Called with what is done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

_LOG = logging.getLogger("rlx")
_LOG.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class CompiledProgram:
    """A loaded program: code, manifest and the stored files. All runners that need the same program share it.

    Attributes:
        files: the cache entry: `read(name) -> bytes` and `names`. It may be evicted at any time, so what a run needs is
            held here.
        final: text of the graph after all passes, whose node numbers the manifest uses.
        stats: of the compile: `seconds` by phase, and the number of `kernels`.
        options: it was compiled with.
        key: its compile key.
        cached: False if this process compiled it.
        seconds: time to compile or load.
        formats: `Backend.formats` of its device.
    """

    code: Code
    manifest: Mapping[str, Any]
    files: Entry
    final: str
    stats: Mapping[str, Any]
    options: Options
    key: CompileKey
    cached: bool
    seconds: float
    formats: Callable[[Manifest], Any]

    @property
    def object_bytes(self) -> int:
        """Size of the machine code."""
        return self.code.nbytes

    def instance(self, workers: Workers) -> Program:
        """A runnable instance of the program, with memory of its own."""
        program = self.code.instance(workers)
        if debug_output.shows(debug_output.KERNELS) or env.verify():
            compiler.debug.watch(program, self)
        _instances[program] = self, workers
        if tracing.recording is not None:
            compiler.step_trace.record(program, self, workers, tracing.recording)
        return program

    @property
    def kernels(self) -> list[str]:
        """Symbols of the kernels, each once."""
        calls = itertools.chain(*self.manifest["prologues"], *self.manifest["regions"])
        return sorted({symbol for _, symbol in calls})


@dataclass(frozen=True)
class Compilation:
    """A record of one compile in this process.

    Attributes:
        title: such as "program qwen3 prefill 17-512 avx512 (key 9f6ed498d007)".
        seconds: duration.
        digest: of the key, as `rlx cache` shows it.
        reason: why the cache did not have it, such as "no entry for this program has precision 'exact' (nearest: ...)".
    """

    title: str
    seconds: float
    digest: str
    reason: str


#: The programs that traces show, with what they are instances of, and their workers.
_instances: WeakKeyDictionary[Program, tuple[CompiledProgram, Workers]] = WeakKeyDictionary()


def _trace(trace: tracing.Trace) -> None:
    """Has the steps of all programs recorded."""
    for ref in _instances.keyrefs():  # a list: other threads may make programs meanwhile
        if (program := ref()) is not None:
            compiler.step_trace.record(program, *_instances[program], trace)


tracing.watch(_trace, lambda: compiler.step_trace.stop())


class Compiler:
    """Compiles graphs for one target through one cache.

    Args:
        target: the machine to compile for, of any backend; by default this machine's CPU at its best level. Numbers
            that `rlx tune` measured for it are read from the cache's folder, unless the target has its own.
        cache: the compile cache; by default a new one in memory over the default store.
        progress: called before each kernel with (what, kernels done, kernels in all), such as ("compiling the prefill
            program", 11, 31), and again with the last numbers while LLVM finishes. The total is 1 until the kernels are
            counted. It is called in the compiling thread, and not on cache hits.
        using: surrounds the time in which the entry of a digest is compiled or loaded, or waited for.

    Attributes:
        backend: the target's backend.
        compiled: records of its compiles, in order.

    Raises:
        ArgumentError: `cache` is no `CompileCache`.
    """

    def __init__(
        self,
        target: Target | None = None,
        cache: CompileCache | None = None,
        progress: Progress | None = None,
        using: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.cache = CompileCache.default() if cache is None else checked_cache(cache)
        self.target = tuned(target or backends.backend().target(), self.cache)
        self.backend = self.target.backend
        self.compiled: list[Compilation] = []
        self._progress, self._using = progress or (lambda what, done, total: None), using

    @property
    def native_loops(self) -> bool:
        """Whether programs generate many tokens in one call; not where every step is verified."""
        return self.backend.native_loops and not env.verify()

    def program(
        self, graph: Graph, options: Options, *, dump: Path | None = None, key: CompileKey | None = None
    ) -> CompiledProgram:
        """The program of a graph under these options, from the cache or compiled.

        Args:
            dump: a folder for the text after every pass.
            key: its `program_key`, for a caller who has it.
        """
        options = self._effective(graph, options)
        key = key or self.program_key(graph, options)
        start, built, what = time.perf_counter(), False, f"the {options.phase} program"

        def build(on_kernel: OnKernel) -> Files:
            nonlocal built
            built = True
            return compiler.build.build_program(graph, options, self.target, self.backend, on_kernel)

        def load(files: Entry) -> CompiledProgram:
            final = [name for name in files.names if name.startswith("ir/")][-1 - len(BACKEND)]
            manifest, stats = (json.loads(files.read(name)) for name in ("manifest.json", "stats.json"))
            text = files.read(final).decode()
            code = self.backend.load(Loadable(manifest, files, lambda: ir.text.loads(text), options))
            seconds = time.perf_counter() - start
            program = CompiledProgram(
                code, manifest, files, text, stats, options, key, not built, seconds, self.backend.formats
            )
            if debug_output.shows(debug_output.PASSES):
                compiler.debug.show_program(program, self.target)
            return program

        program = self._get(key, what, build, load)
        if dump:
            write_ir(program.files, dump)
        return program

    def program_key(self, graph: Graph, options: Options, name: str | None = None) -> CompileKey:
        """The compile key of `program`. Keys are equal if graph, target, versions and effective options are."""
        options = self._effective(graph, options)
        return self.key(
            kind="program",
            graph=digest_text(graph.canonical()),
            name=name or program_name(graph),
            phase=_role(graph, options),
            bucket=list(options.seq),
            states={n.name: n.dtype.name for n in graph.leaves("state").values()},
            profile={
                "precision": options.precision,
                "bf16_dots": options.bf16_dots,
                "bf16_tiles": options.bf16_tiles,
                "deterministic": options.deterministic,
                "fusions": list(options.fusions),
                "passes": list(options.passes),
            },
            options={
                "all_rows": options.all_rows,
                "symbols": [[s, list(b)] for s, b in options.symbols],
                "segments": options.segments,
                "paged": options.paged,
                "whole": list(options.whole),
                "packed": list(options.packed),
                "tuning": self.target.tuning,
                **self._custom(graph, options),
            },
        )

    def _custom(self, graph: Graph, options: Options) -> dict[str, dict[str, str]]:
        """For a graph that uses custom ops: the digests of their sources."""
        used = ir.custom.used_by(graph.nodes(), fused="custom" in options.fusions) if CUSTOM else {}
        return {"custom_ops": {name: op.digest for name, op in used.items()}} if used else {}

    def _get(self, key: CompileKey, what: str, build: Build, load: Callable[[Entry], T]) -> T:
        """Loads the entry of a key, and builds it first if the cache lacks it.

        Args:
            what: its name for progress messages.
            build: makes the files of the entry; it gets a callback for (kernels done, kernels in all).
            load: turns the files into the result.
        """
        total = 1

        def tell(done: int, count: int) -> None:
            nonlocal total
            total = count
            self._progress(f"compiling {what}", done, total)

        def telling() -> Files:
            reason, start = self.cache.why(key), time.perf_counter()
            debug_output.show(debug_output.CACHE, f"cache: {key.title} is compiled: {reason}")
            tell(0, total)
            with named_refusals(), span(f"compile {what}", "compile", key=key.title, reason=reason):
                files = build(tell)
            tell(total, total)
            self.compiled.append(Compilation(key.title, time.perf_counter() - start, key.digest, reason))
            debug_output.show(
                debug_output.CACHE, f"cache: {key.title} was compiled in {self.compiled[-1].seconds:.2f} s"
            )
            _LOG.info("compiled %s in %.2f s: %s", key.title, self.compiled[-1].seconds, reason)
            return files

        def loading(files: Entry) -> T:
            with span(f"load {what}", "compile", key=key.title):
                return load(files)

        with self._using(key.digest):
            return self.cache.get_or_compile(key, telling, loading)

    def _effective(self, graph: Graph, options: Options) -> Options:
        if env.verify():  # all values must still be there after the step
            options = replace(options, passes=tuple(name for name in options.passes if name != "reuse_memory"))
            if not self.target.capabilities.own_seen:
                options = replace(options, fusions=tuple(name for name in options.fusions if name != "prologue"))
        return effective(options, graph, self.target.capabilities)

    def workers(self, count: int) -> Workers:
        """Workers of the backend, for programs of this compiler."""
        return self.backend.workers(count, self)

    def packer(self, dtype: DType, workers: Workers) -> Packer:
        """The code that packs matrices of this type."""
        return self.backend.packer(dtype, workers, self)

    def prepare_packing(self, weights: Mapping[str, Any]) -> None:
        """Compiles the packers of weights, or finds them in the cache; loads nothing.

        Args:
            weights: of `rlx.passes.layout.weight_table`.
        """
        self.backend.prepare_packing({DTYPES[row["dtype"]] for row in packed_rows(weights).values()}, self)

    def once(self, what: str, build: Callable[[], Files], load: Callable[[Entry], T], **fields: Any) -> T:
        """As `rlx.backends.device.Builder.once`: `fields` are those of the key."""
        return self._get(self.key(**fields), what, lambda on_kernel: build(), load)

    def key(self, **fields: Any) -> CompileKey:
        """A key for this target and these versions of everything."""
        return CompileKey(target=self.target.describe(), versions=versions(self.backend), **fields)


class ThreadsWarning(UserWarning):
    """More worker threads were asked for than there are CPUs."""


def worker_count(*choices: Any) -> int:
    """The first choice that is not None; else RLX_THREADS, else the physical cores this process may use.

    More workers than CPUs wait for each other: 1024 of them on two CPUs took 17 times as long. Above the number of CPUs
    there is a warning; the limit is `MAX_PER_CPU` per CPU.

    Raises:
        ArgumentError: it is not a whole number from 1 to 1024.
    """
    found = next((choice for choice in choices if choice is not None), None)
    if found is None and env.threads() is None:
        return cpu_count()
    chosen = env.threads() if found is None else whole("threads", found, 1, MAX_WORKERS)
    assert chosen is not None
    cpus = max(1, int(usable_cpus()))
    if chosen <= cpus:
        return chosen
    used = min(chosen, MAX_PER_CPU * cpus)
    few = f"this process may use {cpus} CPU{'s' * (cpus != 1)}"
    cut = f"; {used} are used" if used < chosen else ""
    what = f"{chosen} threads are slower than {cpu_count()}, because {few}{cut}"
    warnings.warn(what, ThreadsWarning, stacklevel=4)
    return used


def program_name(graph: Graph) -> str:
    """The name of a program's model in keys: that of the graph and the number of weights, such as "qwen3 5.2M"."""
    weights = [node for name, node in graph.leaves("weight").items() if name not in graph.constants]
    count = sum(prod(dim for dim in node.shape if isinstance(dim, int)) for node in weights)
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= 0.9995 * unit:  # what three digits round up to the unit
            return f"{graph.name} {count / unit:.3g}{letter}"
    return f"{graph.name} {count}" if count else graph.name


def _role(graph: Graph, options: Options) -> str:
    """The phase of a program for people: that of its options, or a kind of it that differs in its outputs.

    "greedy" picks the likeliest token in place of logits, "verify" does so for several rows, which hold guesses, and
    "advance" moves recurrent states by the guesses that were right.
    """
    outputs = graph.outputs.values()
    if all(OPS[node.op].effect and node["aside"] for node in outputs):
        return "advance"
    if not options.segments and any(node.op == "pick" for node in outputs):
        return "greedy" if options.phase == "decode" else "verify"
    return options.phase


def write_ir(files: Entry, folder: Path) -> None:
    """Writes the IR after every pass, as stored with the program, into a folder: one file a pass.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files.names:
            if name.startswith("ir/"):
                (folder / name.removeprefix("ir/")).write_bytes(files.read(name))
    except OSError as error:
        what = f"the text after the passes cannot be written: {error.strerror}"
        raise ArgumentError(what, where=folder, hint="Give dump_ir another folder.") from error
