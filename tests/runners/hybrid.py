"""A small model with every kind of state, and the real engine over an interpreter instead of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx.backends.host import HOST
from rlx.backends.program import TokenRun, TokenSteps
from rlx.compiler.state_memory import Sizes, StateMemory
from rlx.engine.kv.pool import CachePool
from rlx.engine.model_runner import Limits, ModelRunner
from rlx.engine.programs.programs import Bucketing, ProgramSpec, ProgramTable
from rlx.engine.token_run import RunRow, all_tokens, begin_run
from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ, WINDOW_CTX, value
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.models.variants import EmbeddedRows
from rlx.passes.capabilities import Layouts
from rlx.profile import CompileProfile
from rlx.sampling.choice import choose_rows
from tests.single_sequence import SingleSequence

Array = np.ndarray[Any, Any]

VOCAB, WIDTH, HEADS, SIZE, TAPS, WINDOW = 24, 16, 2, 8, 4, 20
BUCKETS = (1, 4, 16)
KINDS = ("full", "ring", "conv", "delta")


def graph(kinds: Sequence[str] = KINDS, window: int = WINDOW) -> Graph:
    """A layer of each kind, and logits of every row."""
    g = Graph("hybrid")
    x = ops.embedding(g.weight("token_embd.weight", [VOCAB, WIDTH]), g.input("tokens", [SEQ], I32))
    inv_freq = g.constant("inv_freq", np.geomspace(1, 1e-2, SIZE // 2))
    angles = ops.rope_angles(g.input("positions", [SEQ], I32), inv_freq)
    layers: dict[str, Callable[..., Node]] = {"full": _attend, "ring": _attend, "conv": _convolve, "delta": _delta}
    for i, kind in enumerate(kinds):
        size = {"window": window if kind == "ring" else None} if layers[kind] is _attend else {}
        y = layers[kind](g, ops.rms_norm(x, eps=1e-6), i, angles, **size)
        x = x + ops.linear(y, g.weight(f"{i}.o", [WIDTH, WIDTH]))
    g.output("logits", ops.linear(ops.rms_norm(x, eps=1e-6), g.weight("head", [VOCAB, WIDTH])))
    return g


def _project(g: Graph, x: Node, name: str, *shape: int) -> Node:
    width = int(np.prod(shape))
    return ops.reshape(ops.linear(x, g.weight(name, [width, WIDTH])), [SEQ, *shape])


def _attend(g: Graph, x: Node, i: int, angles: Node, window: int | None) -> Node:
    q, k, v = (_project(g, x, f"{i}.{part}", HEADS, SIZE) for part in "qkv")
    shape = (HEADS, WINDOW_CTX if window else CTX, SIZE)
    keys = ops.kv_write(g.state(f"k.{i}", shape), ops.rope(k, angles, style="neox"), wrap=window is not None)
    values = ops.kv_write(g.state(f"v.{i}", shape), v, wrap=window is not None)
    return ops.attention(ops.rope(q, angles, style="neox"), keys, values, scale=1.0, window=window)


def _convolve(g: Graph, x: Node, i: int, angles: Node) -> Node:
    return ops.causal_conv(g.state(f"conv.{i}", (TAPS - 1, WIDTH)), x, g.weight(f"{i}.taps", [WIDTH, TAPS]))


def _delta(g: Graph, x: Node, i: int, angles: Node) -> Node:
    q, k, v = (_project(g, x, f"{i}.{part}", HEADS, SIZE) for part in "qkv")
    decay = ops.scale(ops.sigmoid(_project(g, x, f"{i}.decay", HEADS)), -0.1)
    beta = ops.sigmoid(_project(g, x, f"{i}.beta", HEADS))
    state = g.state(f"delta.{i}", (HEADS, SIZE, SIZE))
    y = ops.gated_delta(state, q, ops.rms_norm(k, eps=1e-6), v, decay, ops.scale(beta, 0.2), scale=SIZE**-0.5)
    return ops.reshape(y, [SEQ, WIDTH])


def weights(g: Graph) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    leaves = {n: leaf for n, leaf in g.leaves("weight").items() if n not in g.constants}
    return {n: rng.standard_normal([int(str(d)) for d in leaf.shape]) * 0.35 for n, leaf in leaves.items()}


def reference(g: Graph, ids: Sequence[int], **inputs: Array) -> Array:
    """The logits after every id: one pass in float64, from empty states that hold everything; with further inputs."""
    env = {"SEQ": len(ids), "PAST_SEQ": 0, "CTX": len(ids), "WINDOW_CTX": len(ids)}
    shapes = {n: [value(d, env) for d in leaf.shape] for n, leaf in g.leaves("state").items()}
    feeds = {**weights(g), **{n: np.zeros(shape) for n, shape in shapes.items()}}
    feeds |= {"tokens": np.array(ids, np.int32), "positions": np.arange(len(ids), dtype=np.int32), **inputs}
    return interp.run(g, feeds, env, dtype=np.float64)[0]["logits"]


#: Those of the engine here; a test may set smaller pages.
LAYOUTS = Layouts(page=64)


# As they are here, so that a test may put others in their place for sequences alone.
_READ, _WRITE, _COPY = StateMemory.read, StateMemory.write, StateMemory.copy_state


class Interpreted:
    """A program: the pool's states in memory before and after, the interpreter in between."""

    closed = False

    def __init__(self, engine: InterpretedEngine) -> None:
        self.engine, self.spec = engine, ProgramSpec((1, 1))
        self.then = Advancing(engine)
        self._inputs: dict[str, Array] = {
            name: np.zeros(64, np.int32) for name in ("tokens", "positions", "pages", "row_index", "visible")
        }
        self._inputs |= {"components": np.zeros((64, 3), np.int32), "rows": np.zeros((64, WIDTH), np.float32)}
        self.slots = 0, 0

    @property
    def inputs(self) -> dict[str, Array]:
        """Those of a program for the spec."""
        has, embeds = self._inputs, self.spec.embeds
        found = {name: has[name] for name in ("tokens", "positions", "pages")}
        if embeds is not None:
            found |= {name: has[name] for name in ("rows", "row_index")}
            found |= {"positions": has["components"]} if embeds.sections else {}
            found |= {"visible": has["visible"]} if embeds.two_way != "none" else {}
        return found

    def select_slot(self, slot: int, written: int) -> None:
        self.slots = self.then.slots = slot, written

    def run(self, **env: int) -> None:
        engine, at, rows = self.engine, env["PAST_SEQ"], env["SEQ"]
        assert at + rows <= min(engine.max_seq, env["PAGES"] * engine.pool.sizes.page)
        engine.rows += rows
        engine.before()
        places = Places(engine.pool.memory, self.inputs["pages"][: env["PAGES"]].copy(), *self.slots)
        feeds = places.values(engine.pool.memory.table)
        feeds |= {name: value[:rows] for name, value in self.inputs.items() if name != "pages"}
        graph = replace(self.spec, returns="last").variant(engine.graph)
        sizes = {**env, "CTX": env["PAGES"] * engine.pool.sizes.page}
        outputs, new = interp.run(graph, {**engine.values, **feeds}, sizes)
        for name, state in new.items():
            places.write(name, state)
        self.logits = outputs["logits"]
        self.then.saved = {name: value for name, value in outputs.items() if name.startswith("saved.")}
        engine.after()

    def prepare(self, extents: Mapping[str, int]) -> None:
        self.extents = extents

    def steps(self, run: TokenRun) -> TokenSteps:
        return TokenSteps(self, run)  # type: ignore[arg-type]

    def output(self, name: str, **env: int) -> Array:
        return np.array([self.logits[-1].argmax() if np.isfinite(self.logits).all() else -1])

    def begin(self, **env: int) -> None:
        self.run(**env)

    def values(self, name: str, **env: int) -> Array:
        return self.logits if self.spec.returns == "all" else self.logits[-1:]


class Advancing:
    """The program that takes verified rows into recurrent states."""

    closed = False

    def __init__(self, engine: InterpretedEngine) -> None:
        self.engine, self.saved = engine, dict[str, Array]()
        self.slots = 0, 0

    def select_slot(self, slot: int, written: int) -> None:
        self.slots = slot, written

    def run(self, **env: int) -> None:
        engine = self.engine
        engine.advanced += env["SEQ"]
        places = Places(engine.pool.memory, np.zeros(0, np.int32), *self.slots)
        feeds = places.values(engine.pool.memory.recurrent)
        feeds |= {name: value[: env["SEQ"]] for name, value in self.saved.items()}
        graph = ProgramSpec((1, 16), drafts="advance").variant(engine.graph)
        _, new = interp.run(graph, {**engine.values, **feeds}, env)
        for name, state in new.items():
            places.write(name, state)


@dataclass
class Places:
    """The states of one sequence."""

    memory: StateMemory
    pages: Array
    slot: int
    spare: int

    def values(self, names: Iterable[str]) -> dict[str, Array]:
        """The values of states, and of what is beside those that are recurrent, which nobody reads."""
        values = {name: self.read(name) for name in names}
        return {**values, **{f"{name}'": np.full_like(values[name], np.nan) for name in self.memory.recurrent}}

    def read(self, name: str) -> Array:
        memory, state = self.memory, self.memory.table[name]
        if name in memory.full:
            return _READ(memory, name, self.pages, 0, 0, len(self.pages) * memory.page)
        if name in memory.rings:
            return _READ(memory, name, memory.ring_pages(0, state.shape[1]), self.slot, 0, state.shape[1])
        return _COPY(memory, name, self.slot)

    def write(self, name: str, new: Array) -> None:
        memory = self.memory
        if name.endswith("'"):
            memory.slot_of(name.removesuffix("'"), self.spare).write(new)
        elif name in memory.full:
            _WRITE(memory, name, self.pages, 0, 0, new)
        elif name in memory.rings:
            _WRITE(memory, name, memory.ring_pages(0, new.shape[1]), self.slot, 0, new)
        else:
            memory.slot_of(name, self.slot).write(new)


class InterpretedPrograms:
    """One program for every spec."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.tables = {"decode": ProgramTable()}
        self.tables["decode"].limit(1)  # with a bound every call asks for its program

    def __getitem__(self, spec: ProgramSpec) -> Any:
        self._program.spec = spec
        return self._program


class InterpretedEngine(SingleSequence):
    """An engine with its own programs; `before` and `after` are called around the work of a step.

    Args:
        kv_bytes: size of the pool; by default that of four whole contexts.

    Attributes:
        rows: how many rows were computed so far.
        advanced: how many rows were taken into recurrent states after they were verified.
    """

    choose = staticmethod(choose_rows)

    def __init__(
        self,
        g: Graph,
        max_seq: int = 300,
        buckets: tuple[int, ...] = BUCKETS,
        kv_bytes: int | None = None,
        embeds: EmbeddedRows = EmbeddedRows(),  # noqa: B008  (frozen)
    ) -> None:
        self.graph, self.max_seq, self.rows, self.advanced = g, max_seq, 0, 0
        layouts = LAYOUTS
        self.most_rows, self._identity, self._path = buckets[-1], "a model", "toy.gguf"
        self.values = {n: w.astype(np.float32) for n, w in weights(g).items()}
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        nbytes = (
            4 * Sizes.of(g, layouts, max_seq, buckets[-1]).sequence_bytes(max_seq) if kv_bytes is None else kv_bytes
        )
        self.pool = CachePool(g, HOST, layouts, max_seq=max_seq, rows=buckets[-1], kv_bytes=nbytes)
        programs: Any = InterpretedPrograms(Interpreted(self))
        limits = Limits(max_seq, buckets[-1], buckets[-1], VOCAB, embeds, (WIDTH,))
        bucketing = Bucketing(CompileProfile(buckets=buckets).ranges)
        self.model_runner = ModelRunner(programs, self.pool, bucketing, limits, lambda: None)

    def greedy(self, token: int, count: int, stops: Sequence[int] = ()) -> list[int]:
        row = RunRow(self._sequence, token, count, stops)
        run = begin_run(self.model_runner, [row], self.choose)
        assert run is not None
        return all_tokens(run, row)

    def beside(self, ids: Sequence[int]) -> Array:
        """The logits after some ids on a sequence of their own, which leaves nothing."""
        sequence = self.pool.open(shared=False)
        self.model_runner.reserve(sequence, ids)
        try:
            *_, last = self.model_runner.pieces(sequence, ids)
            return np.asarray(last)[0]
        finally:
            sequence.close()

    def close(self) -> None:
        self.pool.close()
