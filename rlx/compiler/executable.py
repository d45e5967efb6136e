"""The compiler as a library: `rlx.compile(graph) -> Executable`, a function over NumPy arrays without a model file."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import backends
from rlx.arguments import known_arguments, whole
from rlx.backends.device import Target
from rlx.closing import Closing
from rlx.compiler import guards
from rlx.compiler.compile import CompiledProgram, Compiler, worker_count
from rlx.compiler.inspection import Inspectable
from rlx.compiler.profiling import LEAST_BYTES, MEMORY_BYTES, measure_step, step_bytes
from rlx.compiler.state_memory import StateMemory, extents_of
from rlx.compiler.tensors import Tensors
from rlx.errors import ArgumentError, BusyError
from rlx.ir import dims, text
from rlx.ir.dtypes import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.ops import declared, transposed
from rlx.ir.verify import verify
from rlx.passes.layout import ROWS_LAYOUT
from rlx.passes.options import MAX_PAST, MAX_SLOTS
from rlx.passes.segments import SEGMENTS_INPUT
from rlx.profile import CompileProfile, ProfileLike
from rlx.report.source import Machine
from rlx.store.cache import CompileCache

if TYPE_CHECKING:
    from rlx.report.page import ReportPage

_DEFAULTED = frozenset(("SEQ", "PAST_SEQ", "CTX", "WINDOW_CTX"))
DEFAULT_SEQ, DEFAULT_CTX = (1, 512), 1024


class Executable(Inspectable, Closing):
    """A compiled graph with its own memory.

    Call it with one array per input. Symbols are inferred from the inputs' shapes; symbols that occur in no shape
    (`PAST_SEQ`) are given by name and default to their lowest value. Weights are bound once with `bind`, or passed like
    inputs. States start as zeros and keep the values that calls write.

    Args:
        room: the capacities of the states, as `extents_of` takes them.
        slots: how many sequences the states are of; None if all rows belong to one sequence.

    Attributes:
        graph: the graph after all passes.
    """

    def __init__(
        self,
        compiled: CompiledProgram,
        compiler: Compiler,
        source: Graph,
        *,
        threads: int,
        room: tuple[int, int, int | None],
        slots: int | None,
    ) -> None:
        self._compiled, self._target, self._compiler = compiled, compiler.target, compiler
        self._closed = False
        self._pool = compiler.workers(threads)
        self._tensors = Tensors(compiler, self._pool)
        self._program = compiled.instance(self._pool)
        self.graph: Graph = text.loads(compiled.final)
        form = self.graph if slots is None else source  # the states of a single sequence
        layouts = self._target.capabilities.layouts
        extents = extents_of(form, layouts, *room, slots or 1)
        self._states = StateMemory(form, compiler.backend.memory, layouts, extents)
        self._slots = slots
        rows = compiled.manifest["inputs"]
        self._input_shapes = {name: tuple(map(dims.parse_dim, row["shape"])) for name, row in rows.items()}
        self._rooms, self._ids = guards.rooms(form, layouts.page), guards.row_numbers(self.graph)
        self._program.bind(self._states.buffers)
        weights = compiled.manifest["weights"]
        self._order = [name for name in source.inputs if name in rows] + [n for n in rows if n not in source.inputs]
        self.bind(**{name: value for name, value in source.constants.items() if _leaves(name, weights)})

    def bind(self, **weights: Any) -> Executable:
        """Sets weights by name.

        Args:
            weights: numbers of the weight's shape, or the bytes of its storage type as uint8: for a quantized weight
                the blocks as in a GGUF file. bf16 weights may also be uint16.

        Raises:
            ArgumentError: a name is unknown, or an array is neither.
        """
        self._check_open()
        rows = self._compiled.manifest["weights"]
        for name, value in weights.items():
            leaves = _leaves(name, rows)
            if not leaves:
                raise ArgumentError(f"no weight is called {name!r}", hint=f"Weights: {', '.join(rows) or 'none'}.")
            for leaf in leaves:
                self._bind_one(leaf, rows[leaf], value if leaf == name else _transposed(name, value, rows[leaf]))
        self._program.bind(self._tensors.buffers)
        return self

    def _bind_one(self, name: str, row: Mapping[str, Any], value: Any) -> None:
        if not all(size.isdecimal() for size in row["shape"]):
            raise ArgumentError(
                f"the size of weight {name!r} is not known: its shape is [{', '.join(row['shape'])}]",
                hint="Give rlx.compile a number for each symbol of it, or make it an input of the graph.",
            )
        shape, dtype = tuple(map(int, row["shape"])), DTYPES[row["dtype"]]
        if row["layout"] == ROWS_LAYOUT:
            self._tensors.add_array(name, guards.numbers(f"weight {name!r}", value, shape, np.float32))
            return
        raw = guards.storage(f"weight {name!r}", value, shape, dtype)
        if row["layout"] == "file":
            self._tensors.add_table(name, raw.copy())  # the caller may modify the array
        else:
            self._tensors.add_matrix(name, raw, dtype, *shape)

    def __call__(self, *arrays: Any, **values: Any) -> dict[str, np.ndarray]:
        """Runs one step.

        Args:
            arrays: inputs in the order in which the graph declared them.
            values: inputs (and weights) by name; values of symbols as integers.

        Returns:
            A copy of every output, by name.

        Raises:
            ArgumentError: a name is unknown or missing, a shape does not fit, a value is out of its range, or the
                caches have no room for the step.
            BusyError: the executable is closed.
        """
        self._check_open()
        manifest = self._compiled.manifest
        values = {**self._by_name(arrays, values), **values}
        weights = {name: value for name, value in values.items() if _leaves(name, manifest["weights"])}
        self.bind(**weights)
        self._program.check_bound(declared)
        free = set(manifest["symbols"]) - set(manifest["inputs"])
        symbols = {name: value for name, value in values.items() if name in free}
        inputs = {k: v for k, v in values.items() if k not in weights and k not in symbols}
        env, ready = self._extents(self._inputs(inputs), symbols)
        for name, value in ready.items():
            self._program.inputs[name].reshape(-1)[: value.size] = value.reshape(-1)
        self._program.run(**env)
        return {name: self._program.output(name, **env).copy() for name in manifest["outputs"]}

    def _by_name(self, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Maps positional inputs to their names."""
        order = self._order
        if len(arrays) > len(order):
            hint = f"The graph declares {', '.join(order) or 'none'}; weights and symbols are given by name."
            raise ArgumentError(f"{len(arrays)} arrays for {len(order)} inputs", hint=hint)
        found = dict(zip(order, arrays, strict=False))
        if twice := found.keys() & named.keys():
            raise ArgumentError(f"inputs are given twice: {', '.join(sorted(twice))}", hint="Give them by name.")
        return found

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The inputs converted to arrays of their types."""
        rows = self._compiled.manifest["inputs"]
        for names, what in ((given.keys() - rows, "unknown"), (rows.keys() - given, "missing")):
            if names:
                has = ", ".join(rows) or "none"
                raise ArgumentError(f"inputs are {what}: {', '.join(sorted(names))}", hint=f"The graph has: {has}.")
        kinds = {name: np.dtype(DTYPES[row["dtype"]].numpy or "uint8") for name, row in rows.items()}
        return {name: guards.of_kind(f"input {name!r}", given[name], kinds[name]) for name in rows}

    def _extents(
        self, inputs: dict[str, np.ndarray], given: Mapping[str, Any]
    ) -> tuple[dict[str, int], dict[str, np.ndarray]]:
        """The values of the symbols, from the inputs' shapes and from the caller; checks the inputs against them."""
        bounds = self._compiled.manifest["bounds"]
        env = self._states.extents | {s: whole(s, value, *bounds[s]) for s, value in given.items()}
        for symbol, size in self._states.extents.items():
            if env[symbol] != size:
                hint = f'It is fixed when compiling: bind={{"{symbol}": ...}}.'
                raise ArgumentError(f"{symbol} is {env[symbol]}, the caches have room for {size}", hint=hint)
        rows = self._compiled.manifest["inputs"]
        for name, shape in self._input_shapes.items():
            for dim, size in zip(shape, inputs[name].shape, strict=False):
                symbol, value = _solved(dim, size)
                if symbol in bounds:
                    env.setdefault(symbol, whole(f"input {name!r}: {symbol}", value, *bounds[symbol]))
        env = {symbol: low for symbol, (low, _) in bounds.items()} | env
        for name, row in rows.items():
            want = tuple(dims.value(d, env) for d in self._input_shapes[name])
            if inputs[name].shape != want:
                found = f"expected shape {list(want)}, found {list(inputs[name].shape)}"
                raise ArgumentError(found, where=f"input {name!r}", hint=_symbolic(row["shape"]))
        places = [env]
        if self._slots is not None:
            places = guards.check_segments(inputs[SEGMENTS_INPUT], self._slots, env)
        for room in self._rooms:
            for place in places:
                room.check(place)
        for ids in self._ids:
            ids.check(inputs, env)
        return {s: env[s] for s in self._compiled.manifest["symbols"]}, inputs

    def _check_open(self) -> None:
        if self._closed:
            raise BusyError("the executable was closed", where=f"program {self._program.name}")

    def reset(self) -> None:
        """Sets recurrent states to zeros. Caches need no reset: a call reads only earlier positions."""
        self._check_open()
        for slot in range(self._slots or 1):
            self._states.zero_recurrent(slot)

    # -- inspection; `Inspectable` has ir, source, llvm, asm and explain -------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        """Seconds of each compile stage, kernels, bytes, and whether the program came from the cache on disk."""
        sizes = {"object_bytes": self._compiled.object_bytes, "arena_bytes": self._program.arena_bytes}
        return {**self._compiled.stats, **sizes, "cached": self._compiled.cached}

    def report(self, path: Path | str | None = None, *, measure: Mapping[str, Any] | None = None) -> ReportPage:
        """As `Inspectable.report`, with times if there is something to run.

        Args:
            measure: arguments of a call, by name: it is repeated and timed, and the limits of the machine are measured.
                States keep what these calls write.

        Raises:
            OutputError: the file cannot be written.
            ArgumentError, BusyError: as the call; `ArgumentError` also where the backend is not made for speed.

        Example: `exe.report("report.html", measure={"x": batch})`.
        """
        if measure is None:
            return super().report(path)
        self(**measure)  # with clear errors, and the symbol values of the call
        times = measure_step(self._program, lambda: self._timed(measure), self._program.extents)
        backend, moved = self._compiler.backend, step_bytes(self.graph, {"SEQ": 1, **self._program.extents})
        bandwidth = backend.bandwidth(self._pool, min(max(moved, LEAST_BYTES), MEMORY_BYTES))
        machine = Machine(bandwidth, backend.peaks(self._pool, self._compiler), self._pool.n)
        return self._report_page(path, machine, times)

    def _timed(self, values: Mapping[str, Any]) -> float:
        start = time.perf_counter()
        self(**values)
        return time.perf_counter() - start

    def close(self) -> None:
        """Stops the workers and releases the memory. Can be called more than once."""
        self._closed = True
        self._pool.close()
        self._program.close()
        self._tensors.close()
        self._states.close()

    def __repr__(self) -> str:
        return f"<Executable {self._program.name}, {self._target.level}, {len(self._compiled.kernels)} kernels>"


@known_arguments
def compile(
    graph: Graph,
    bind: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    profile: ProfileLike = None,
    device: str | None = None,
    target: Target | str | None = None,
    threads: int | None = None,
    cache: CompileCache | None = None,
    dump_ir: Path | str | None = None,
    segments: int | None = None,
) -> Executable:
    """Compiles a graph to native code.

    Args:
        bind: values of symbols (an int, or a (lowest, highest) range), and of weights (see `Executable.bind`).
            Defaults: `SEQ` (1, 512); `CTX`, the capacity of caches, 1024; `WINDOW_CTX`, that of rings, what their
                windows need.
        precision: "exact" (the default) or "auto", see `rlx.passes.options.Options`.
        profile: a `CompileProfile`, a table or a file: precision, fusions, passes, target level, threads and compile
            cache, unless an argument sets them. A SEQ of 1, and `segments`, use the decode phase, otherwise prefill.
            Family, buckets and type of the KV cache apply only to runners.
        device: what to run on, see `rlx.devices()`: the CPU by default.
        target: "native", a level such as "avx2", one with changes such as "avx512-vnni", or a `Target`.
        threads: number of workers; by default the physical cores.
        cache: the compile cache; by default the one on disk.
        dump_ir: a folder for the text after every pass.
        segments: makes a batch program, whose rows belong to several sequences: the states have this many slots, one
            a sequence. The program then has one more input, `segments` i32[SEGMENTS, 4], with up to this many rows: for
            each run of rows of one sequence the first row, the number of rows, the tokens that the sequence holds
            already, and its slot.

    Raises:
        GraphError, ShapeError: the graph does not verify.
        ArgumentError: `bind` has an unknown name, or a value is out of its range or missing.
        ProfileError: the profile has an unknown key or value.
        CompileError: an op has no kernel for these types.
        TargetError: there is no such device, or it has no such level.
    """
    if not isinstance(graph, Graph):
        raise ArgumentError(f"expected a Graph, found {graph!r}", where="compile", hint="rlx.Graph(name) begins one")
    verify(graph)
    chosen = CompileProfile.load(profile).with_precision(precision, "exact")
    bounds, weights = _split(graph, bind or {})
    ctx = bounds.pop("CTX", (DEFAULT_CTX, DEFAULT_CTX))[1]
    window_ctx = bounds.pop("WINDOW_CTX", (None, None))[1]
    slots = None if segments is None else whole("segments", segments, 1, MAX_SLOTS)
    seq = bounds.pop("SEQ", DEFAULT_SEQ)
    if slots is not None:
        bounds["SEGMENTS"] = (1, slots)
    rest = {"all_rows": True, "segments": slots is not None, "symbols": tuple(bounds.items())}
    options = chosen.options(seq, **rest)
    cache = CompileCache.default(chosen.cache, chosen.capacity) if cache is None else cache
    if target is None or isinstance(target, str):
        target = backends.backend(device).target(target or chosen.level)
    compiler = Compiler(target, cache)
    compiled = compiler.program(graph, options, dump=Path(dump_ir) if dump_ir else None)
    workers = worker_count(threads, chosen.threads)
    room = ctx, options.seq[1], window_ctx
    executable = Executable(compiled, compiler, graph, threads=workers, room=room, slots=slots)
    held = compiled.manifest["weights"]
    return executable.bind(**{name: value for name, value in weights.items() if _leaves(name, held)})


def _split(graph: Graph, given: Mapping[str, Any]) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """Splits `bind` into ranges of symbols and values of weights."""
    known = {*graph.symbols, *_DEFAULTED}
    weights = {name: value for name, value in given.items() if name not in known}
    leaves = graph.leaves("weight")
    for name in (name for name in weights if not _leaves(name, leaves)):
        has = ", ".join([*sorted(graph.symbols), *graph.leaves("weight")])
        raise ArgumentError(f"the graph has no symbol and no weight {name!r}", where="bind", hint=f"It has: {has}.")
    for name in set(graph.symbols) - given.keys() - _DEFAULTED:
        hint = f'Give its lowest and highest value: bind={{"{name}": (1, 64)}}.'
        raise ArgumentError(f"the symbol {name} has no range", where=f"graph {graph.name!r}", hint=hint)
    return {name: _range(name, value) for name, value in given.items() if name in known}, weights


def _solved(dim: dims.DimLike, size: int) -> tuple[str, int]:
    """The only symbol of a dim, and its value if the dim is `size`, rounded down; no symbol if there is not one."""
    if not isinstance(dim, dims.Dim) or len(dim.terms) != 1:
        return "", 0
    ((symbol, factor),) = dim.terms
    return symbol, (size - dim.const) // factor


def _leaves(name: str, leaves: Container[str]) -> list[str]:
    """The weights that take their values from `name`: itself and its transpose, see `rlx.ops.transpose`."""
    return [leaf for leaf in (name, transposed(name)) if leaf in leaves]


def _symbolic(shape: list[str]) -> str | None:
    """A hint about a shape with symbols."""
    return None if all(dim.isdigit() for dim in shape) else f"Its shape is [{', '.join(shape)}]."


def _transposed(name: str, value: Any, row: Mapping[str, Any]) -> np.ndarray:
    """The transpose of the value for the weight `name`; `row` describes the transposed weight."""
    shape = tuple(map(int, row["shape"][::-1]))
    given = np.asarray(value)
    if given.shape != shape:
        raise ArgumentError(f"expected shape {list(shape)}, found {list(given.shape)}", where=f"weight {name!r}")
    return np.ascontiguousarray(given.T)


def _range(name: str, value: Any) -> tuple[int, int]:
    low, high = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    least = 1 if name in ("SEQ", "CTX", "WINDOW_CTX") else 0
    return whole(name, low, least, MAX_PAST), whole(name, high, least, MAX_PAST)
