"""Sessions of models with every kind of state: whatever was trimmed, restored, interrupted or done beside, the next
logits are those of one pass over the session's ids, in float64 and through caches that hold everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import hybrid
import numpy as np
import pytest

from rlx.compiler.state_memory import StateMemory
from rlx.engine.kv import pool as pool_module
from rlx.engine.kv.snapshot import Snapshot
from rlx.errors import ArgumentError, NumericalError, PromptError, SnapshotError
from rlx.ir.graph import Graph
from rlx.passes.capabilities import Layouts

Array = np.ndarray[Any, Any]

CEILING = 2e-5  # of the largest logit: float32 through four layers
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, hybrid.VOCAB, 400).tolist()
GRAPHS = {
    "full": hybrid.graph(("full", "full")),
    "ring": hybrid.graph(("ring", "full")),
    "recurrent": hybrid.graph(("conv", "delta")),
    "all": hybrid.graph(),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of 64 positions instead of 128, which the interpreter can do with: sessions may be shorter."""
    monkeypatch.setattr(hybrid, "LAYOUTS", Layouts(page=16))


@pytest.fixture(params=GRAPHS)
def engine(request: pytest.FixtureRequest) -> Iterator[hybrid.InterpretedEngine]:
    made = hybrid.InterpretedEngine(GRAPHS[request.param])
    yield made
    made.close()


@pytest.fixture
def mixed() -> Iterator[hybrid.InterpretedEngine]:
    made = hybrid.InterpretedEngine(GRAPHS["all"])
    yield made
    made.close()


def agrees(graph: Graph, ids: Sequence[int], found: Array) -> bool:
    """Whether these are the logits after the last of the ids, or after the last ones."""
    rows = np.atleast_2d(found)
    want = hybrid.reference(graph, ids)[-len(rows) :]
    return bool(np.abs(rows - want).max() <= CEILING * np.abs(want).max())


def goes_on(engine: hybrid.InterpretedEngine, count: int = 3) -> bool:
    """Whether the session is what its ids say: some more of them give the right logits."""
    found = engine.forward(IDS[300 : 300 + count], all_rows=True)
    return agrees(engine.graph, engine.ids, found)


# ---------------------------------------------------------------------------------------------------- forward


def greedily(engine: hybrid.InterpretedEngine, token: int, count: int, stops: Sequence[int]) -> list[int]:
    """As many tokens as are wanted, or to a stop."""
    found: list[int] = []
    while len(found) < count and not (found and found[-1] in stops):
        found += engine.greedy(found[-1] if found else token, count - len(found), stops)
    return found


@pytest.mark.parametrize("stop", [False, True], ids=["whole", "stopped"])
def test_a_greedy_run(engine: hybrid.InterpretedEngine, stop: bool) -> None:
    """The likeliest tokens one by one, and a session that can go on and back as if each had been a step of its own."""
    logits = engine.forward(IDS[:40])
    want, first = [], int(logits.argmax())
    for _ in range(70):
        want.append(int(engine.forward([want[-1] if want else first]).argmax()))
    end = want.index(want[45]) if stop else 69
    engine.trim(40)
    assert greedily(engine, first, 70, [want[45]] if stop else ()) == want[: end + 1]
    assert engine.ids == [*IDS[:40], first, *want[:end]]
    assert goes_on(engine)
    engine.trim(engine.past - 5)
    assert goes_on(engine)


def test_a_run_with_a_nan_is_a_named_error(mixed: hybrid.InterpretedEngine) -> None:
    mixed.forward(IDS[:20])
    kept = mixed.values
    mixed.values = {**kept, "head": kept["head"] * np.float32("nan")}
    with pytest.raises(NumericalError, match="position 20: a logit is NaN or infinite"):
        mixed.greedy(3, 5)
    mixed.values = kept
    assert mixed.ids == IDS[:20] and goes_on(mixed)


# ---------------------------------------------------------------------------------------------------- trim


@pytest.mark.parametrize("length", [0, 1, 30, 59, 60, 61, 85, 95, 101, 150])
def test_trim(engine: hybrid.InterpretedEngine, length: int) -> None:
    """After a prompt of 60, 25 single tokens, another turn of 16, and 49 single tokens."""
    engine.forward(IDS[:60])
    for token in IDS[60:85]:
        engine.forward([token])
    engine.forward(IDS[85:101])
    for token in IDS[101:150]:
        engine.forward([token])
    engine.trim(length)
    assert engine.ids == IDS[:length]
    assert goes_on(engine)
    engine.trim(max(0, length - 1))
    assert goes_on(engine, 1)


def test_what_a_trim_costs(engine: hybrid.InterpretedEngine) -> None:
    """Nothing for full caches; for the others nothing at the end of a prompt, and at most the way from there."""
    free = "full" in str(engine.graph) or not engine.current.recurrent
    engine.forward(IDS[:60])
    for token in IDS[60:90]:
        engine.forward([token])
    before = engine.rows
    engine.trim(60)
    engine.forward([1])
    assert engine.rows == before + 1, "the end of the prompt is a checkpoint"
    engine.trim(61)
    engine.forward(IDS[:9])
    assert engine.rows == before + 10, "nothing was cut"
    for token in IDS[:100]:
        engine.forward([token])
    before = engine.rows
    engine.trim(75)
    engine.forward([1])
    replayed = engine.rows - before - 1
    kinds = {state.kind for state in engine.pool.memory.table.values()}
    assert replayed == (0 if kinds == {"full"} else 5)
    assert free or replayed
    assert agrees(engine.graph, [*engine.ids, 2], engine.forward([2]))


def test_checkpoints_are_bounded(mixed: hybrid.InterpretedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of what a length needs: the recurrent states and the window; the least recently used go first."""
    row, recurrent = 2 * hybrid.HEADS * hybrid.SIZE * 4, (hybrid.TAPS - 1) * hybrid.WIDTH * 4 + hybrid.HEADS * 256
    pages = {60: 4 - 2, 70: 5 - 3, 80: 5 - 3}  # of 16 positions, from the one with position length - 19 on
    for at in range(0, 80, 10):
        mixed.forward(IDS[at : at + 10])
    assert lengths(mixed) == [10, 20, 30, 40, 50, 60, 70], "a copy is made before the states change"
    mixed.forward([1])
    assert lengths(mixed)[-1] == 80
    before = mixed.pool.index.checkpoint_bytes
    newest = mixed.pool.index.checkpoint(mixed.current.keys(80))
    assert newest is not None and newest.nbytes == recurrent + pages[80] * 16 * row
    monkeypatch.setattr(pool_module, "CHECKPOINT_SHARE", mixed.pool.kv_bytes // (3 * newest.nbytes))
    mixed.forward(IDS[:2])
    mixed.forward([1])
    assert lengths(mixed) == [70, 80, 83]
    assert mixed.pool.index.checkpoint_bytes <= 3 * newest.nbytes < before
    monkeypatch.setattr(pool_module, "CHECKPOINT_SHARE", mixed.pool.kv_bytes)
    mixed.pool.index.drop_checkpoints(0)
    mixed.forward(IDS[:2])
    mixed.forward([1])
    assert lengths(mixed) == []
    before = mixed.rows
    mixed.trim(80)
    assert goes_on(mixed)
    assert mixed.rows == before + 83, "everything anew, since nothing was kept"


def lengths(engine: hybrid.InterpretedEngine) -> list[int]:
    """Lengths with a checkpoint."""
    return sorted(length for node in engine.pool.index.nodes() for length in node.checkpoints)


# ---------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("length", [0, 5, 16, 64, 65, 130])
def test_a_snapshot_goes_on_as_the_session_would_have(engine: hybrid.InterpretedEngine, length: int) -> None:
    if length:
        engine.forward(IDS[:length])
    snapshot = engine.snapshot()
    assert (snapshot.position, list(snapshot.ids)) == (length, IDS[:length])
    follow = engine.forward(IDS[200:210])
    engine.restore(snapshot)
    assert engine.ids == IDS[:length]
    assert np.array_equal(engine.forward(IDS[200:210]), follow), "the same bits"
    other = hybrid.InterpretedEngine(engine.graph, max_seq=150, buckets=(1, 64))  # with larger rings
    other.forward(IDS[250:290])
    other.restore(snapshot)
    assert agrees(engine.graph, [*IDS[:length], *IDS[200:210]], other.forward(IDS[200:210]))
    engine.restore(other.snapshot())
    assert goes_on(engine)
    other.close()


def test_a_pending_replay_is_done_before_a_snapshot(mixed: hybrid.InterpretedEngine) -> None:
    mixed.forward(IDS[:40])
    mixed.forward(IDS[40:41])
    mixed.forward(IDS[41:42])
    mixed.trim(41)
    snapshot = mixed.snapshot()
    mixed.reset()
    mixed.restore(snapshot)
    assert mixed.ids == IDS[:41]
    assert goes_on(mixed)


def test_a_snapshot_of_something_else_is_refused(mixed: hybrid.InterpretedEngine) -> None:
    mixed.forward(IDS[:30])
    good = mixed.snapshot()

    def refused(snapshot: Snapshot, match: str, kind: type[Exception] = ArgumentError) -> None:
        with pytest.raises(kind, match=match):
            mixed.restore(snapshot)
        assert mixed.ids == IDS[:30]

    for wrong in (-1, 10**6):
        ids = (*good.ids[:-1], wrong)
        refused(replace(good, ids=ids), f"the snapshot has the token id {wrong}, expected ids from 0", SnapshotError)
    mixed._identity = "another model"
    refused(good, "the snapshot is of another model .a model, this is another mode.")
    mixed._identity = "a model"
    refused(5, "expected a Snapshot, found a int")  # type: ignore[arg-type]
    other = hybrid.InterpretedEngine(GRAPHS["ring"])
    refused(other.snapshot(), "state 'conv.2': the snapshot has nothing, the session recurrent f32")
    other.close()
    formats = {**good.formats, "k.1": "ring f16 [2, 8]"}
    refused(Snapshot(good.ids, good.arrays, formats, good.model), r"'k.1': the snapshot has ring f16 \[2, 8\]")
    for name, array in (("k.0", good.arrays["k.0"][:, :29]), ("k.1", good.arrays["k.1"][:, :18]), ("conv.2", None)):
        arrays = {n: a for n, a in {**good.arrays, name: array}.items() if a is not None}
        refused(Snapshot(good.ids, arrays, good.formats, good.model), f"'{name}': the snapshot's array is .* expected")
    small = hybrid.InterpretedEngine(GRAPHS["all"], max_seq=20)
    with pytest.raises(PromptError, match="30 tokens does not fit the context of 20"):
        small.restore(good)
    small.close()
    assert goes_on(mixed)


# ---------------------------------------------------------------------------------------------------- interrupts


class Stop(KeyboardInterrupt):
    """The user's Ctrl-C."""


def stop_at(call: int) -> Any:
    """A function that stops at one of its calls."""
    left = iter(range(call, -1, -1))

    def stop(*_: Any, **__: Any) -> None:
        if next(left, -1) == 0:
            raise Stop

    return stop


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [0, 2])
def test_an_interrupted_step_does_not_count(engine: hybrid.InterpretedEngine, when: str, step: int) -> None:
    """Whole chunks before it do."""
    engine.forward(IDS[:50])
    engine.forward(IDS[50:51])
    setattr(engine, when, stop_at(step))
    with pytest.raises(Stop):
        engine.forward(IDS[51:120])
    assert engine.ids == IDS[: 51 + 16 * step]
    setattr(engine, when, lambda: None)
    assert goes_on(engine)
    assert engine.past == 54 + 16 * step


@pytest.mark.parametrize("method", ["save_slot", "load_slot", "zero_recurrent", "copy_page", "release_slot"])
@pytest.mark.parametrize("call", [0, 1])
def test_an_interrupt_while_states_are_copied(
    mixed: hybrid.InterpretedEngine, monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    """While a checkpoint is made, or put back: the session is what it was before that verb, or after."""
    mixed.forward(IDS[:60])
    done, stop = getattr(StateMemory, method), stop_at(call)

    def hooked(self: Any, *args: Any) -> Any:
        stop()
        return done(self, *args)

    monkeypatch.setattr(StateMemory, method, hooked)
    verbs = [(mixed.forward, [token]) for token in IDS[60:130]] + [
        (mixed.trim, 65),
        (mixed.forward, [1]),
        (mixed.trim, 3),
    ]
    for verb, argument in verbs:
        try:
            verb(argument)
        except Stop:
            mixed.pool.recover()
    assert len(mixed.ids) == 3
    assert goes_on(mixed)


# ---------------------------------------------------------------------------------------------------- all together


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["ring", "all"])
def test_any_order_of_everything(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(name)])
    engine = hybrid.InterpretedEngine(GRAPHS[name], max_seq=260)
    ids: list[int] = []
    kept = [engine.snapshot()]
    for _ in range(40):
        verb = rng.choice(["decode", "prompt", "trim", "far", "snapshot", "restore", "beside", "stop"])
        new = rng.integers(0, hybrid.VOCAB, 1 if verb == "decode" else int(rng.integers(1, 50))).tolist()
        new = new[: 260 - len(ids)]
        if verb == "decode":
            for token in new * 7 if len(ids) + 7 < 260 else []:
                engine.forward([token])
                ids.append(token)
        elif verb in ("prompt", "stop") and new:
            engine.after = stop_at(1) if verb == "stop" else lambda: None
            try:
                engine.forward(new)
                ids += new
            except Stop:
                ids += new[: engine.past - len(ids)]
            engine.after = lambda: None
        elif verb in ("trim", "far"):
            del ids[max(0, len(ids) - int(rng.integers(0, 8 if verb == "trim" else 120))) :]
            engine.trim(len(ids))
        elif verb == "snapshot":
            kept.append(engine.snapshot())
        elif verb == "restore":
            chosen = kept[int(rng.integers(len(kept)))]
            engine.restore(chosen)
            ids = list(chosen.ids)
        elif verb == "beside" and new:
            engine.beside(new)
        assert engine.ids == ids
    engine.trim(min(len(ids), 250))
    assert goes_on(engine)
    engine.close()
