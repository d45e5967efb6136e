"""What decoding allocates (nothing), and what a closed runner leaves behind (nothing)."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resident import rss_bytes

import rlx
from rlx.backends.cpu.launch.native import NativeProgram
from rlx.backends.host import AlignedBuffer
from rlx.engine.engine import Engine
from rlx.store.cache import CompileCache

pytestmark = pytest.mark.any_machine

STEPS = 200
PAIR = {"buckets": {"seq": [1, 16]}}
MB = 1 << 20


@pytest.fixture(scope="module")
def runner(goldens: Path) -> Iterator[Any]:
    path = goldens / "qwen3" / "model-f16.gguf"
    with rlx.auto_runner(path, max_seq=STEPS + 64, profile=PAIR, threads=2) as runner:
        yield runner


@pytest.fixture
def session(runner: Any) -> Any:
    """A runner in the middle of a generation: everything that is made once has been made."""
    runner.prefill_logits([1, 2, 3])
    for token in range(8):
        runner.decode_logits(token)
    return runner


def addresses(engine: Engine) -> dict[str, Any]:
    """Where everything lies that a step touches, and the objects it goes through."""
    programs = {
        (phase, key): (
            id(p),
            p.arena,
            p._args.tobytes(),
            p._context.tobytes(),
            id(p.inputs["tokens"]),
            id(p._code),
        )
        for phase, table in engine.tables.items()
        for key, p in table.programs.items()
    }
    return {"programs": programs, "states": engine.pool.memory.buffers, "weights": dict(engine._tensors.buffers)}


def test_decoding_touches_the_same_memory_from_the_first_token_on(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = session._engine
    made: list[str] = []
    for kind in (AlignedBuffer, NativeProgram):
        init = kind.__init__

        def counted(self: Any, *args: Any, _init: Any = init, _name: str = kind.__name__, **options: Any) -> None:
            made.append(_name)
            _init(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", counted)
    before, cache = addresses(engine), engine.stats()["cache"]
    for token in range(STEPS):
        session.decode_logits(token)
    assert made == []
    assert addresses(engine) == before
    assert engine.stats()["cache"] == cache, "no program was asked for"
    session.predict_logits([1, 2, 3])
    assert made == [], "the pool has room for a sequence of its own"
    AlignedBuffer(1).close()
    assert made == ["AlignedBuffer"], "the counter counts"


def bytes_of_rlx() -> int:
    """What lines of the package have allocated and still hold; other threads of the process may allocate, too."""
    gc.collect()  # empties the interpreter's free lists as well
    package = tracemalloc.Filter(True, str(Path(rlx.__file__).parent / "*"))
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([package]).traces)


def test_decoding_allocates_nothing_that_stays(session: Any) -> None:
    """In Python: a step makes the array that it returns and a few small objects, all gone with the next."""
    row = 4 * session.vocab_size
    tracemalloc.start()
    try:
        session.decode_logits(1)
        gc.collect()
        held = bytes_of_rlx()
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        for token in range(STEPS):
            session.decode_logits(token)
        _, peak = tracemalloc.get_traced_memory()
        held = bytes_of_rlx() - held
    finally:
        tracemalloc.stop()
    assert held < 2048, f"{held / STEPS} bytes a token stay"
    assert peak - start < 2 * row + 65536, "two rows at a time, and what the interpreter keeps for later use"


def test_the_results_are_the_callers_own(session: Any) -> None:
    kept = [session.decode_logits(token) for token in range(4)]
    copies = [row.copy() for row in kept]
    session.decode_logits(5)
    session.predict_logits([1, 2, 3])
    assert all(np.array_equal(row, copy) for row, copy in zip(kept, copies, strict=True))
    assert all(row.flags.owndata or row.base.flags.owndata for row in kept)


def test_closing_gives_the_memory_back(demo_model: Path) -> None:
    """Ten times: open, generate, close. The cache of loaded programs is shared, as in a server.

    The closed runners are kept, so that it is `close` that gives back and not the garbage collector.
    """
    cache, sizes, closed = CompileCache.default(), [], []
    for _ in range(11):
        with rlx.auto_runner(demo_model, profile=PAIR, cache=cache, max_seq=256) as runner:
            runner.generate([1, 2, 3], 8, stop_at_eog=False)
            held = runner.stats()
        closed.append(runner)
        sizes.append(rss_bytes())
    assert held["weights_bytes"] > 5 * MB, "a leak would show"
    assert sizes[-1] - sizes[0] < 3 * MB, [size // MB for size in sizes]


def test_resident_memory_is_the_file_the_cache_and_little_more(demo_model: Path) -> None:
    """The file's own pages are given back when they are packed."""
    gc.collect()
    before = rss_bytes()
    with rlx.auto_runner(demo_model, profile=PAIR, max_seq=256) as runner:
        runner.predict_logits([1, 2, 3])
        grown, held = rss_bytes() - before, runner.stats()
    allowed = held["weights_bytes"] + held["kv_used_bytes"] + held["arena_bytes"] + 16 * MB
    assert grown < allowed, f"{grown / MB:.1f} MB, of which {allowed / MB:.1f} are accounted for"
