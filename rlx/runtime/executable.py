"""The compiler as a library: `rlx.compile(graph) -> Executable`, a function over NumPy arrays without a model file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.codegen.target import Target
from rlx.errors import ArgumentError
from rlx.ir import dims, text
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.verify import verify
from rlx.passes.options import MAX_PAST, Options
from rlx.profile import CompileProfile
from rlx.runtime.cache import CompileCache
from rlx.runtime.compile import CompiledProgram, Compiler
from rlx.runtime.kv import States
from rlx.runtime.limits import worker_count
from rlx.runtime.tensors import Tensors
from rlx.runtime.threads import WorkerPool

Bound = int | tuple[int, int]


class Executable:
    """A compiled graph with memory of its own.

    Call it with one array an input, by name; symbols are read off the inputs' shapes, and those that no shape shows
    (`PAST_SEQ`) are given by name and default to their lowest value. Weights are bound once with `bind`, or passed
    like inputs. States start as zeros and keep what a call wrote.

    Attributes:
        graph: the graph as it was compiled, after all passes.
        stats: seconds of each compile stage, kernels, bytes, and whether this call compiled or loaded it.
    """

    def __init__(
        self,
        compiled: CompiledProgram,
        compiler: Compiler,
        constants: Mapping[str, np.ndarray],
        *,
        threads: int,
        ctx: int,
    ) -> None:
        self._compiled, self._target = compiled, compiler.target
        self._pool = WorkerPool(threads, compiler.runtime())
        self._tensors = Tensors(compiler, self._pool)
        self._program = compiled.instance(self._pool)
        self.graph: Graph = text.loads(self._read(self._stage("layout")))
        self._states = States(self.graph, ctx)
        self._program.bind(self._states.addresses)
        self.bind(**{name: value for name, value in constants.items() if name in compiled.manifest["weights"]})

    def bind(self, **weights: np.ndarray) -> Executable:
        """Sets weights by name: float arrays of the weight's shape, or the raw uint8 blocks of a quantized one."""
        rows = self._compiled.manifest["weights"]
        for name, value in weights.items():
            if name not in rows:
                raise ArgumentError(f"no weight is called {name!r}", hint=f"Weights: {', '.join(rows) or 'none'}.")
            self._bind_one(name, rows[name], np.asarray(value))
        self._program.bind(self._tensors.addresses)
        return self

    def _bind_one(self, name: str, row: Mapping[str, Any], value: np.ndarray) -> None:
        shape, dtype = tuple(map(int, row["shape"])), DTYPES[row["dtype"]]
        if row["layout"] == "rows":
            self._tensors.add_array(name, _as_shape(name, value, shape))
            return
        if dtype.numpy == "float32":
            value = _as_shape(name, value, shape)
        self._tensors.add_matrix(name, np.ascontiguousarray(value).view(np.uint8).reshape(-1), dtype, *shape)

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Runs one step.

        Args:
            arrays: inputs (and weights) by name; values of symbols as integers.

        Returns:
            A copy of every output, by name.

        Raises:
            ArgumentError: a name is unknown or missing, or a shape does not fit.
        """
        given = {k: v for k, v in arrays.items() if k not in self._compiled.manifest["symbols"]}
        self.bind(**{k: v for k, v in given.items() if k in self._compiled.manifest["weights"]})
        inputs = {k: v for k, v in given.items() if k not in self._compiled.manifest["weights"]}
        env = self._extents(inputs, {k: int(v) for k, v in arrays.items() if k not in given})
        for name, value in inputs.items():
            view = self._program.inputs[name]
            rows = np.asarray(value)
            view.reshape(-1)[: rows.size] = rows.reshape(-1)
        self._program.run(**env)
        return {name: self._program.output(name, **env).copy() for name in self._compiled.manifest["outputs"]}

    def _extents(self, inputs: Mapping[str, Any], given: Mapping[str, int]) -> dict[str, int]:
        """Values of the symbols, from the inputs' shapes and what the caller gave."""
        rows = self._compiled.manifest["inputs"]
        wrong = set(inputs) ^ set(rows)
        if wrong:
            raise ArgumentError(f"inputs {sorted(wrong)} are missing or unknown", hint=f"Inputs: {', '.join(rows)}.")
        lowest = {s: low for s, (low, _) in self._compiled.manifest["bounds"].items()}
        env = lowest | {"CTX": self._states.ctx} | dict(given)
        for name, row in rows.items():
            for dim, size in zip(row["shape"], np.shape(inputs[name]), strict=False):
                if dim in env:
                    env[dim] = size
        for name, row in rows.items():
            want = tuple(dims.value(dims.parse_dim(d), env) for d in row["shape"])
            if np.shape(inputs[name]) != want:
                raise ArgumentError(f"expected shape {list(want)}, found {list(np.shape(inputs[name]))}", where=name)
        return {s: env[s] for s in self._compiled.manifest["symbols"]}

    # -- what was made --------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        entry = json.loads(self._read("stats.json"))
        sizes = {"object_bytes": len(self._compiled.files.read("program.o")), "arena_bytes": self._program.arena_bytes}
        return {**entry, **sizes}

    def ir(self, stage: str = "layout") -> str:
        """The text after a pass: a stage's name or number, such as "fuse" or "memory"."""
        return self._read(self._stage(stage))

    def source(self, kernel: str | None = None) -> str:
        """Readable source of one kernel, or of all."""
        chosen = [kernel] if kernel else self._compiled.kernels
        return "\n\n".join(self._read(f"kernels/{symbol}.txt") for symbol in chosen)

    def llvm(self) -> str:
        """The optimized LLVM module."""
        return self._read("program.ll")

    def asm(self) -> str:
        """The machine code as assembly."""
        from rlx.codegen.llvm import assembly

        return assembly(self.llvm(), self._target)

    def _stage(self, name: str) -> str:
        found = [f for f in self._compiled.files.names if f.startswith("ir/") and name in f]
        if not found:
            stages = sorted(f[3:-4] for f in self._compiled.files.names if f.startswith("ir/"))
            raise ArgumentError(f"no stage is called {name!r}", hint=f"Stages: {', '.join(stages)}.")
        return found[0]

    def _read(self, name: str) -> str:
        return self._compiled.files.read(name).decode()

    def close(self) -> None:
        """Stops the workers and frees the memory."""
        self._pool.close()
        self._program.close()
        self._tensors.close()
        self._states.close()

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _as_shape(name: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if value.shape != shape:
        raise ArgumentError(f"expected shape {list(shape)}, found {list(value.shape)}", where=f"weight {name!r}")
    return value.astype(np.float32)


def compile(
    graph: Graph,
    bind: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    profile: CompileProfile | Mapping[str, Any] | Path | str | None = None,
    target: Target | str | None = None,
    threads: int | None = None,
    cache: CompileCache | None = None,
    dump_ir: Path | str | None = None,
) -> Executable:
    """Compiles a graph to native code.

    Args:
        bind: values of symbols (an int, or a (lowest, highest) range), and of weights (arrays). `SEQ` defaults to
            (1, 512), `CTX`, the capacity of caches, to 1024.
        precision: "exact" (the default) or "auto", see `rlx.passes.options.Options`.
        profile: a `CompileProfile`, a table or a file: precision, fusions, target level and threads, where the
            arguments do not say; its buckets and cache type are for runners.
        target: "generic", "avx2", "avx512", "native", or a `Target`.
        threads: workers; the physical cores by default.
        cache: the compile cache; the default one on disk otherwise.
        dump_ir: a folder for the text after every pass.

    Raises:
        GraphError, ShapeError: the graph does not verify.
        ProfileError: the profile has an unknown key or value.
        CompileError: an op has no kernel for these types.
    """
    verify(graph)
    chosen = CompileProfile.load(profile)
    values = dict(bind or {})
    bounds = {s: _range(values.pop(s)) for s in list(values) if s in graph.symbols or s in ("SEQ", "CTX")}
    ctx = bounds.pop("CTX", (1024, 1024))[1]
    others = tuple(sorted((s, b) for s, b in bounds.items() if s != "SEQ"))
    mode = precision or chosen.precision or "exact"
    options = Options(mode, bounds.get("SEQ", (1, 512)), all_rows=True, fusions=chosen.fusions, symbols=others)
    compiler = Compiler(target if isinstance(target, Target) else Target.host(target or chosen.level), cache)
    compiled = compiler.program(graph, options, dump=Path(dump_ir) if dump_ir else None)
    workers = worker_count(threads, chosen.threads)
    executable = Executable(compiled, compiler, graph.constants, threads=workers, ctx=min(ctx, MAX_PAST))
    return executable.bind(**values)


def _range(value: Bound) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
