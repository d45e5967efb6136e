"""A small model with every kind of state, and the real engine over an interpreter instead of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlx.ir import interp, ops
from rlx.ir.dims import CTX, SEQ, WINDOW_CTX, value
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.profile import CompileProfile
from rlx.runners.engine.bucketing import Bucketing
from rlx.runners.engine.engine import Engine
from rlx.runners.engine.program_spec import ProgramSpec
from rlx.runtime.kv import States
from rlx.runtime.session import Session

Array = np.ndarray[Any, Any]

VOCAB, WIDTH, HEADS, SIZE, TAPS, WINDOW = 24, 16, 2, 8, 4, 20
BUCKETS = (1, 4, 16)
KINDS = ("full", "ring", "conv", "delta")


def graph(kinds: Sequence[str] = KINDS, window: int = WINDOW) -> Graph:
    """A layer of each kind, and logits of every row."""
    g = Graph("hybrid")
    x = ops.embedding(g.weight("embedding", [VOCAB, WIDTH]), g.input("tokens", [SEQ], I32))
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


def reference(g: Graph, ids: Sequence[int]) -> Array:
    """The logits after every id: one pass in float64, from empty states that hold everything."""
    env = {"SEQ": len(ids), "PAST_SEQ": 0, "CTX": len(ids), "WINDOW_CTX": len(ids)}
    shapes = {n: [value(d, env) for d in leaf.shape] for n, leaf in g.leaves("state").items()}
    feeds = {**weights(g), **{n: np.zeros(shape) for n, shape in shapes.items()}}
    feeds |= {"tokens": np.array(ids, np.int32), "positions": np.arange(len(ids), dtype=np.int32)}
    return interp.run(g, feeds, env, dtype=np.float64)[0]["logits"]


# As they are here, so that a test may put others in their place for the session alone.
_COPY, _PUT = States.copy, States.put
_COPY_POSITIONS, _PUT_POSITIONS = States.copy_positions, States.put_positions


class Interpreted:
    """A program: the engine's states in memory before and after, the interpreter in between."""

    closed = False

    def __init__(self, engine: InterpretedEngine) -> None:
        self.engine, self.wanted = engine, ProgramSpec((1, 1))
        self.then = Advancing(engine)
        self.inputs = {name: np.zeros(64, np.int32) for name in ("tokens", "positions")}

    def run(self, **env: int) -> None:
        engine, states, at, rows = self.engine, self.engine._session.states, env["PAST_SEQ"], env["SEQ"]
        assert at + rows <= engine.max_seq
        assert self.inputs["positions"][:rows].tolist() == list(range(at, at + rows))
        engine.rows += rows
        engine.before()
        feeds = _all(states, states.table)
        feeds |= {name: given[:rows] for name, given in self.inputs.items()}
        graph = replace(self.wanted, greedy=False).variant(engine.graph)
        outputs, new = interp.run(graph, {**engine.values, **feeds}, env)
        for name, state in new.items():
            _write(states, name, state)
        self.logits = outputs["logits"]
        self.then.kept = {name: value for name, value in outputs.items() if name.startswith("kept.")}
        engine.after()

    def repeat(self, count: int, rows: int, stops: Sequence[int], seconds: float, env: Mapping[str, int]) -> list[int]:
        found: list[int] = []
        for past in range(env["PAST_SEQ"], env["PAST_SEQ"] + count):
            self.run(**{**env, "PAST_SEQ": past})
            finite = bool(np.isfinite(self.logits).all())
            found.append(int(self.logits[-1].argmax()) if finite else -1)
            if not finite or found[-1] in stops:
                break
            self.inputs["tokens"][0], self.inputs["positions"][0] = found[-1], past + 1
        return found

    def output(self, name: str, **env: int) -> Array:
        return self.logits if self.wanted.all_rows else self.logits[-1:]

    def bind(self, addresses: Any) -> None: ...


class Advancing:
    """The program that takes verified rows into recurrent states."""

    def __init__(self, engine: InterpretedEngine) -> None:
        self.engine, self.kept = engine, dict[str, Array]()

    def run(self, **env: int) -> None:
        engine, states = self.engine, self.engine._session.states
        engine.advanced += env["SEQ"]
        feeds = _all(states, states.names("recurrent"))
        feeds |= {name: value[: env["SEQ"]] for name, value in self.kept.items()}
        _, new = interp.run(ProgramSpec((1, 16), advances=True).variant(engine.graph), {**engine.values, **feeds}, env)
        for name, state in new.items():
            _write(states, name, state)


def _all(states: States, names: Iterable[str]) -> dict[str, Array]:
    """The values of states, and of what is beside those that are recurrent, which nobody reads."""
    values = {name: _read(states, name) for name in names}
    return {**values, **{f"{name}'": np.full_like(values[name], np.nan) for name in states.names("recurrent")}}


def _read(states: States, name: str) -> Array:
    state = states.table[name]
    return _COPY_POSITIONS(states, name, 0, state.shape[1]) if state.kind in ("full", "ring") else _COPY(states, name)


def _write(states: States, name: str, new: Array) -> None:
    if name.endswith("'"):
        states.turn ^= 1
        _PUT(states, name.removesuffix("'"), new)
        states.turn ^= 1
    elif states.table[name].kind in ("full", "ring"):
        _PUT_POSITIONS(states, name, 0, new)
    else:
        _PUT(states, name, new)


class InterpretedPrograms:
    """One program for everything that is wanted."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def __getitem__(self, wanted: ProgramSpec) -> Any:
        self._program.wanted = wanted
        return self._program

    def bind(self, states: Any) -> None:
        self._program.bind(states)


class InterpretedEngine(Engine):
    """The engine with its own programs; `before` and `after` are called around the work of a step.

    Attributes:
        rows: how many rows were computed so far.
        advanced: how many rows were taken into recurrent states after they were verified.
    """

    def __init__(self, g: Graph, max_seq: int = 300, buckets: tuple[int, ...] = BUCKETS) -> None:
        self.graph, self.max_seq, self.rows, self.advanced = g, max_seq, 0, 0
        self.config: Any = SimpleNamespace(vocab_size=VOCAB)
        self.most_rows = buckets[-1]
        self._setup: Any = SimpleNamespace(profile=CompileProfile(buckets=buckets))
        self._loaded, self.identity = True, "a model"
        self._weights: Any = SimpleNamespace(loader=SimpleNamespace(path="toy.gguf"))
        self.values = {n: w.astype(np.float32) for n, w in weights(g).items()}
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self._programs: Any = InterpretedPrograms(Interpreted(self))
        self.bucketing = Bucketing(self._setup.profile.ranges)
        self._session: Session = self.new_session()
        self._home = self._session

    @property
    def _identity(self) -> str:
        return self.identity

    def close(self) -> None:
        self._states.close()
