"""Runs a vision tower: patches -> rows of the text model, by layers, and each layer by chunks of rows.

Third step of the vision stage. `rlx.models.towers` says which graphs the tower of a family has. All layers of equal
formats share one compiled program, which is bound to the weights of each in turn. So a tower compiles four programs for
a range of rows, and holds the rows, keys and values of one layer only. A chunk is what `Tower.steps` computes between
two pauses, in which the engine's loop serves others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.device import Workers
from rlx.backends.memory import Buffer
from rlx.backends.program import Program
from rlx.compiler.compile import CompiledProgram, Compiler, Progress
from rlx.compiler.profiling import step_flops
from rlx.compiler.state_memory import StateMemory, extents_of, states_of
from rlx.compiler.tensors import Tensors
from rlx.errors import ModelFileError, MultimodalError, named_refusals
from rlx.ir.dtypes import BF16, F32, DType
from rlx.ir.graph import Graph
from rlx.models.towers import TOWERS, Build
from rlx.models.vision import TowerModel
from rlx.models.vision_config import VisionConfig
from rlx.passes.capabilities import Capabilities, Layouts
from rlx.passes.layout import weight_bytes, weight_table
from rlx.passes.quantize import multiplies_bf16
from rlx.profile import CompileProfile
from rlx.vision.processors import Patches, finish
from rlx.vision.weights import TowerWeights

Inputs = Mapping[str, npt.NDArray[Any]]
Places = npt.NDArray[np.int32]


def place_inputs(config: VisionConfig, places: Places) -> Inputs:
    """Input name -> values, with one entry for each patch on the first axis.

    Args:
        places: i32 [N, 2], row and column of each patch.

    Raises:
        MultimodalError: the image has more rows or columns than the position table.
    """
    if config.family == "qwen35":
        return {**_interpolated(places, isqrt(config.positions)), "positions": places}
    rows, columns = places[:, 0], places[:, 1]
    if config.family == "gemma3":
        side = config.image_size // config.patch
        _check(max(rows.max(), columns.max()), side, config)
        return {"places": rows * side + columns}
    _check(max(rows.max(), columns.max()), config.positions, config)
    found = {"rows": rows, "columns": columns}
    return found if config.family == "gemma4_unified" else {**found, "positions": places}


def _check(most: int, size: int, config: VisionConfig) -> None:
    if most >= size:
        unit = config.patch * (config.merge if config.family == "gemma4_unified" else 1)
        what = f"the resized image has a side of {(most + 1) * unit} pixels, the model's positions end at {size * unit}"
        raise MultimodalError(what, where="image", hint="choose fewer tokens for an image, or cut the image")


def _interpolated(places: Places, side: int) -> Inputs:
    """Four rows of a square table for each patch, and their shares: bilinear, the corners of table and image meet."""
    low, high, part = [], [], []
    for axis in (0, 1):
        last = int(places[:, axis].max())
        at = places[:, axis] * ((side - 1) / last if last else 0.0)
        low.append(np.minimum(at.astype(np.int32), side - 1))
        high.append(np.minimum(low[-1] + 1, side - 1))
        part.append((at - low[-1]).astype(np.float32))
    (top, left), (bottom, right), (down, along) = low, high, part
    taps = np.stack([row * side + column for row in (top, bottom) for column in (left, right)], axis=1)
    shares = np.stack([a * b for a in (1 - down, down) for b in (1 - along, along)], axis=1)
    return {"taps": taps.astype(np.int32), "shares": shares.astype(np.float32)[:, None]}


Rows = npt.NDArray[np.float32]
Range = tuple[int, int]
Steps = Generator[None, None, Rows]

FEWEST_ROWS = 32  # of a chunk that was cut for the sake of time: below it, weights are read for too little arithmetic


class Bound(NamedTuple):
    """A graph with the weights that one part of the tower gives it.

    Attributes:
        number: of the graph, the same for equal graphs.
        weights: name in the graph -> canonical name.
    """

    graph: Graph
    number: int
    weights: Mapping[str, str]


@dataclass(frozen=True)
class TowerProgram:
    """A program of a tower that was compiled or loaded.

    Attributes:
        name: kind of its graph and rows, such as "layer-17-512".
        bucket: (smallest, largest) number of rows.
        seconds: time to compile or load it.
        reason: why it was compiled; "" if it was in the compile cache.
    """

    name: str
    bucket: Range
    compiled: CompiledProgram
    seconds: float
    reason: str


@dataclass
class TowerStats:
    """Counters of a tower.

    Attributes:
        images, rows: encoded images, and the rows that they became.
        seconds: time of encoding.
    """

    images: int = 0
    rows: int = 0
    seconds: float = 0.0


class Tower:
    """The vision tower of one model, ready to encode images. Weights are loaded, and programs compiled, at first use.

    One thread uses it at a time; encodings may alternate between their steps.

    Args:
        config, weights: of an open file; closed with the tower.
        profile: precision and buckets of the programs, those of a prefill.
        workers: returns the workers that compute.

    Attributes:
        stats: the counters.
        programs: the programs that were compiled or loaded so far.

    Raises:
        WeightError: a tensor is missing, or its shape or type is not what the configuration says.
    """

    def __init__(
        self,
        config: VisionConfig,
        weights: TowerWeights,
        profile: CompileProfile,
        compiler: Compiler,
        workers: Callable[[], Workers],
        progress: Progress | None = None,
    ) -> None:
        self.config, self.weights, self.stats = config, weights, TowerStats()
        self._profile, self._compiler, self._workers, self._progress = profile, compiler, workers, progress
        self._ranges, self._layouts = _ranges(profile), compiler.target.capabilities.layouts
        self._graphs = _Graphs.of(
            config, weights, _cache_dtype(config, profile, compiler.target.capabilities), self._layouts
        )
        self._tensors: Tensors | None = None
        self.programs: dict[tuple[int, Range], TowerProgram] = {}
        self._instances: dict[tuple[int, Range], Program] = {}
        self._seconds: dict[str, float] = {}  # of a row, by kind of graph, as last measured

    def encode(self, patches: Patches) -> Rows:
        """The rows of an image, float32 [patches.tokens, row_width].

        Raises:
            MultimodalError: the image has more rows or columns than the position table.
        """
        return finish(self.steps(patches))

    @named_refusals()
    def load(self) -> None:
        """Packs the weights, once."""
        if self._tensors is None:
            tensors = Tensors(self._compiler, self._workers())
            for name, value in self._graphs.constants.items():
                tensors.add_array(name, value)
            tensors.load(self._graphs.table, self.weights, self._progress)
            self._tensors = tensors

    def compile(self, rows: int | None = None) -> Iterator[TowerProgram]:
        """Compiles the programs of every bucket, or finds them in the compile cache, one by one.

        Args:
            rows: only programs that take this number of rows.
        """
        for bounds in self._ranges:
            if rows is None or bounds[0] <= rows <= bounds[1]:
                yield from (self._compiled(bound, bounds) for bound in self._graphs.distinct())

    def flops(self, patches: Patches) -> int:
        """Arithmetic operations of encoding an image."""
        graphs, count = self._graphs, len(patches.patches)
        every = [(graphs.embedding, count), *((each, count) for pair in graphs.layers for each in pair)]
        every += [(each, patches.tokens) for each in (graphs.head, *graphs.deepstack.values())]
        return sum(step_flops(each.graph, {"SEQ": rows, "PAST_SEQ": 0}) for each, rows in every)

    def close(self) -> None:
        """Releases memory and closes the file of the tower, if it has one of its own."""
        for program in self._instances.values():
            program.close()
        self._instances.clear()
        if self._tensors:
            self._tensors.close()
            self._tensors = None
        self.weights.close()

    # -- encoding -----------------------------------------------------------------------------------------------------

    def steps(self, patches: Patches, seconds: float | None = None) -> Steps:
        """Encodes an image piece by piece: a generator that pauses after each piece and returns the rows.

        Args:
            seconds: how long a piece should take at most, as far as the time of earlier ones tells; by default each
                piece is as large as the largest bucket.

        Raises:
            MultimodalError: the image has more rows or columns than the position table.
        """
        config, graphs = self.config, self._graphs
        places = place_inputs(config, patches.places)
        self.load()
        count, start = len(patches.patches), time.perf_counter()
        memory, size = self._compiler.backend.memory, 4 * config.hidden
        with closing(memory.allocate(count * size)) as x:
            values = {"patches": patches.patches, **places}
            for begin, end in self._chunks("embedding", count, seconds):
                self._run("embedding", graphs.embedding, begin, end, values).copy_to(_rows(x, size, begin, end))
                yield
            rows = np.empty((count // config.patches_per_row, config.row_width), np.float32)
            if graphs.layers:
                graph = graphs.layers[0][1].graph
                extents = extents_of(graph, self._layouts, count, self._ranges[-1][1])
                states = StateMemory(graph, memory, self._layouts, extents)
                with closing(states):
                    yield from self._layers(x, rows, states, places, seconds)
            yield from self._head("head", graphs.head, x, rows[:, : config.out_hidden], seconds)
        self.stats.images += 1
        self.stats.rows += len(rows)
        self.stats.seconds += time.perf_counter() - start
        return rows

    def _layers(
        self, x: Buffer, rows: Rows, states: StateMemory, places: Mapping[str, npt.NDArray[Any]], seconds: float | None
    ) -> Generator[None, None, None]:
        """All layers, in place: a layer's keys and values are complete before its first row is replaced.

        Args:
            rows: gets what is merged of inner layers.
        """
        config, size = self.config, 4 * self.config.hidden
        count, at = x.nbytes // size, config.out_hidden
        for number, (keys, layer) in enumerate(self._graphs.layers):
            for begin, end in self._chunks("keys", count, seconds):
                self._run("keys", keys, begin, end, places, _rows(x, size, begin, end), states, begin)
                yield
            for begin, end in self._chunks("layer", count, seconds):
                # Nothing is masked, so it does not matter which of all positions the rows are: the last ones.
                past, part = count - (end - begin), _rows(x, size, begin, end)
                self._run("layer", layer, begin, end, places, part, states, past).copy_to(part)
                yield
            if merger := self._graphs.deepstack.get(number):
                yield from self._head("deepstack", merger, x, rows[:, at : at + config.out_hidden], seconds)
                at += config.out_hidden

    def _head(
        self, kind: str, bound: Bound, x: Buffer, rows: Rows, seconds: float | None
    ) -> Generator[None, None, None]:
        """Merges rows of a layer into those of the text model."""
        size = x.nbytes // len(rows)
        for begin, end in self._chunks(kind, len(rows), seconds):
            found = self._run(kind, bound, begin, end, {}, _rows(x, size, begin, end))
            rows[begin:end] = found.contents(np.float32, (end - begin, -1))
            yield

    def _chunks(self, kind: str, count: int, seconds: float | None) -> Iterator[Range]:
        """(begin, end) of chunks of nearly equal size, as many rows as fit into the largest bucket and the time.

        A chunk stays in the bucket of all rows, if it can: other buckets have programs of their own.
        """
        most, begin = self._ranges[-1][1], 0
        least = self._range(min(count, most))[0]
        while begin < count:
            size = most
            if seconds is not None and kind in self._seconds:
                size = max(min(most, FEWEST_ROWS), min(most, int(seconds / self._seconds[kind])))
            rest = count - begin
            chunks = min(-(-rest // size), max(rest // least, -(-rest // most)))
            end = begin + -(-rest // chunks)
            yield begin, end
            begin = end

    def _range(self, rows: int) -> Range:
        """The range of rows whose program takes so many."""
        return next(each for each in self._ranges if each[0] <= rows <= each[1])

    def _run(
        self,
        kind: str,
        bound: Bound,
        begin: int,
        end: int,
        values: Mapping[str, npt.NDArray[Any]],
        x: Buffer | None = None,
        states: StateMemory | None = None,
        past: int = 0,
    ) -> Buffer:
        """Runs a graph for the rows begin .. end: its output "y", valid until the next run; keys have none.

        Args:
            values: of the inputs, for all rows.
            x: the input "x" for these rows.
        """
        program, start = self._program(bound, end - begin), time.perf_counter()
        assert self._tensors is not None
        program.bind({name: self._tensors.buffers[full] for name, full in bound.weights.items()})
        extents = {"SEQ": end - begin, "PAST_SEQ": past}
        if states is not None:
            program.bind(states.buffers)
            extents |= states.extents
        for name, array in program.inputs.items():
            if name == "x" and x is not None:
                program.fill(name, x)
                continue
            part = values[name][begin:end]
            array.reshape(-1)[: part.size] = part.reshape(-1)
        program.run(**extents)
        self._seconds[kind] = (time.perf_counter() - start) / (end - begin)
        return program.result("y", **extents) if "y" in bound.graph.outputs else program.arena.part(0, 0)

    def _program(self, bound: Bound, rows: int) -> Program:
        bounds = self._range(rows)
        key = bound.number, bounds
        if key not in self._instances:
            with named_refusals():
                self._instances[key] = self._compiled(bound, bounds).compiled.instance(self._workers())
        return self._instances[key]

    def _compiled(self, bound: Bound, bounds: Range) -> TowerProgram:
        key = bound.number, bounds
        if key not in self.programs:
            start, before = time.perf_counter(), len(self._compiler.compiled)
            found = self._compiler.program(bound.graph, self._profile.options(bounds, all_rows=True))
            reasons = (each.reason for each in self._compiler.compiled[before:] if each.digest == found.key.digest)
            name = f"{bound.graph.name.rpartition('-')[2]}-{bounds[0]}-{bounds[1]}"
            took = time.perf_counter() - start
            self.programs[key] = TowerProgram(name, bounds, found, took, next(reasons, ""))
        return self.programs[key]


def _rows(x: Buffer, size: int, begin: int, end: int) -> Buffer:
    """Rows begin .. end of a buffer; each takes `size` bytes."""
    return x.part(begin * size, (end - begin) * size)


def _ranges(profile: CompileProfile) -> tuple[Range, ...]:
    """(smallest, largest) number of rows of each program. A single row is no case of its own, as in text."""
    first, *rest = profile.ranges
    return ((1, rest[0][1]), *rest[1:]) if rest and first[1] == 1 else profile.ranges


def tower_table(config: VisionConfig, weights: TowerWeights, layouts: Layouts) -> dict[str, dict[str, Any]]:
    """Canonical name -> type, shape and layout in memory of every weight of a tower, as of `weight_table`.

    Raises:
        WeightError: a tensor is missing, or its shape or type is not what the configuration says.
    """
    return _Graphs.of(config, weights, F32, layouts).table


def memory_of(
    config: VisionConfig, weights: TowerWeights, profile: CompileProfile, capabilities: Capabilities, patches: int
) -> int:
    """Bytes that a tower takes: its packed weights, and the rows, keys and values of an image of so many patches.

    Raises:
        WeightError: as `tower_table`.
    """
    layouts = capabilities.layouts
    graphs = _Graphs.of(config, weights, _cache_dtype(config, profile, capabilities), layouts)
    found = weight_bytes(graphs.table, layouts) + 4 * config.hidden * patches
    if not graphs.layers:
        return found
    graph = graphs.layers[0][1].graph
    extents = extents_of(graph, layouts, patches, _ranges(profile)[-1][1])
    return found + sum(state.nbytes for state in states_of(graph, extents, layouts))


def _cache_dtype(config: VisionConfig, profile: CompileProfile, capabilities: Capabilities) -> DType:
    """The type of keys and values: that of the products of attention."""
    rounds = multiplies_bf16(config.head_dim, capabilities) and not profile.is_exact
    return BF16 if rounds else F32


@dataclass(frozen=True)
class _Graphs:
    """The graphs of a tower.

    Attributes:
        layers: the graphs "keys" and "layer" of each layer.
        deepstack: those of the mergers of inner layers, by the number of the layer.
        table: canonical name -> memory layout of every weight, see `weight_table`.
        constants: values that the graphs supply.
    """

    embedding: Bound
    layers: tuple[tuple[Bound, Bound], ...]
    head: Bound
    deepstack: dict[int, Bound]
    table: dict[str, dict[str, Any]]
    constants: dict[str, npt.NDArray[np.float32]]

    @staticmethod
    def of(config: VisionConfig, weights: TowerWeights, cache: DType, layouts: Layouts) -> _Graphs:
        builds = TOWERS[config.family]
        table: dict[str, dict[str, Any]] = {}
        constants: dict[str, npt.NDArray[np.float32]] = {}
        numbers: dict[str, int] = {}

        def make(kind: str, build: Build, place: str = "") -> Bound:
            model = TowerModel(Graph(f"{config.family}-vision-{kind}"), config, weights, cache, place)
            try:
                graph = build(model)
            except ModelFileError as error:
                where = None if error.where is None else weights.place(error.where)
                raise type(error)(error.what, where=where, hint=error.hint) from error
            constants.update(graph.constants)
            rows = weight_table(graph, layouts)
            names = {name: name if name in constants else model.file_name(name) for name in rows}
            table.update({names[name]: row for name, row in rows.items() if name not in constants})
            return Bound(graph, numbers.setdefault(graph.canonical(), len(numbers)), names)

        places = [f"v.blk.{layer}." for layer in range(config.layers)]
        embedding = make("embedding", builds.embedding)
        layers = tuple((make("keys", builds.keys, each), make("layer", builds.layer, each)) for each in places)
        deepstack: dict[int, Bound] = {}
        if builds.deepstack is not None:
            build = builds.deepstack
            deepstack = {layer: make("deepstack", build, f"v.deepstack.{layer}.") for layer in config.deepstack}
        return _Graphs(embedding, layers, make("head", builds.head), deepstack, table, constants)

    def distinct(self) -> list[Bound]:
        """One of each graph that must be compiled."""
        every = [
            self.embedding,
            *(bound for pair in self.layers for bound in pair),
            *self.deepstack.values(),
            self.head,
        ]
        return list({bound.number: bound for bound in every}.values())
