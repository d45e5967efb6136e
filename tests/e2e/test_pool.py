"""The cache pool under a real engine: what is shared is computed and stored once, and nothing is lost when it is full.

Expected logits come from a sequence of its own that uses no prefix (`alone`), which the golden files check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.backends.host import HOST, HostMemory
from rlx.engine.engine import Engine
from rlx.engine.kv import pool as cache_pool
from rlx.engine.kv.pool import pool_bytes
from rlx.engine.kv.sequence import Sequence as PoolSequence
from rlx.engine.model_runner import Segment
from rlx.errors import ArgumentError, BusyError, PoolFullError, ResourceError
from rlx.platform import Platform
from rlx.platform.linux import Linux

Array = np.ndarray[Any, Any]

PROFILE: dict[str, Any] = {"buckets": {"seq": [1, 32]}}
FAMILIES = {"llama": "full", "gemma3": "windows", "qwen35": "recurrent"}
CLOSE = 2e-5  # of the largest logit
IDS = np.random.default_rng(0).integers(3, 400, 2000).tolist()

pytestmark = pytest.mark.filterwarnings("ignore::rlx.engine.opening.setup.ContextWarning")


def opened(goldens: Path, family: str, **options: Any) -> Engine:
    path = goldens / family / "model-f16.gguf"
    return Engine.open(path, precision="exact", profile=PROFILE, threads=2, **{"max_seq": 1100, **options})


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest, goldens: Path) -> Iterator[Engine]:
    made = opened(goldens, request.param)
    yield made
    made.close()


def fed(engine: Engine, sequence: PoolSequence, prompt: Sequence[int]) -> Array:
    """Appends what a sequence lacks of a prompt, in chunks as a caller would; the logits after the last."""
    found: Array | None = None
    while len(sequence) < len(prompt):
        end = min(sequence.call_end(len(sequence), engine.most_rows), len(prompt))
        (found,) = engine.step([Segment(sequence, prompt[len(sequence) : end])])  # type: ignore[assignment]
    assert found is not None
    return found


def alone(engine: Engine, prompt: Sequence[int]) -> Array:
    sequence = engine.open_sequence(shared=False)
    try:
        return fed(engine, sequence, prompt)
    finally:
        sequence.close()


def same(found: Array, want: Array) -> bool:
    return bool(np.abs(found - want).max() <= CLOSE * np.abs(want).max())


def test_rows_that_decode_stay_together_while_a_larger_program_is_compiled(engine: Engine) -> None:
    prompts, engine.model_runner.is_pending = [IDS[:9], IDS[20:32], IDS[50:70]], lambda spec: spec.seq[1] > 8
    first, prompt, last = (engine.open_sequence(shared=False) for _ in prompts)
    for sequence, ids in zip((first, last), prompts, strict=False):
        fed(engine, sequence, ids)
    found = engine.step([Segment(first, [5]), Segment(prompt, prompts[2]), Segment(last, [6])])
    assert [spec.seq for spec in engine.tables["batch"].programs] == [(2, 8)]
    for logits, ids in zip(found, ([*prompts[0], 5], prompts[2], [*prompts[1], 6]), strict=True):
        assert logits is not None and same(logits, alone(engine, ids))


def test_a_common_prefix_is_computed_and_stored_once(engine: Engine) -> None:
    """32 requests that share 1,000 tokens; the next token of all is one batch step."""
    prefix, pool = IDS[:1000], engine.pool
    prompts = [[*prefix, *IDS[1000 + 7 * i : 1010 + 7 * i]] for i in range(32)]
    sequences, rows = [], 0
    for prompt in prompts:
        sequence = engine.open_sequence(prompt)
        sequence.mark(len(prefix))
        rows += len(prompt) - len(sequence)
        logits = fed(engine, sequence, prompt)
        sequences.append(sequence)
        if len(sequences) == 1:
            first_pages, first_bytes = pool.pages.used, pool.used_bytes
    assert same(logits, alone(engine, prompts[-1]))
    assert rows <= 1010 + 31 * 10, "the prefix is computed once"
    assert pool.hit == sum(map(len, prompts)) - rows
    pages = pool.pages.used - first_pages
    assert pages <= 31, "each request has one page of its own, in which it parts from the others"
    slots = pool.sizes.slot_bytes * 31
    copies = pool.index.checkpoint_bytes
    assert pool.used_bytes - first_bytes <= pages * pool.sizes.page_bytes + slots + copies
    found = engine.step([Segment(sequence, [5]) for sequence in sequences])
    for i in (0, 13, 31):
        logits = found[i]  # type: ignore[assignment]
        assert same(logits, alone(engine, [*prompts[i], 5]))
    for sequence in sequences:
        sequence.close()
    assert pool.pages.used <= first_pages + 32, "what ended stays known, and nothing else"
    again = engine.open_sequence(prompts[3])
    assert len(again) >= 1000
    assert same(fed(engine, again, prompts[3]), alone(engine, prompts[3]))


def test_a_prompt_finds_what_open_sequences_have_of_it_and_looks_at_no_others(engine: Engine) -> None:
    running, inserted = engine.open_sequence(IDS[:9]), list[int]()
    insert = engine.pool.index.insert

    def counted(keys: Array, table: Array) -> None:
        inserted.append(len(keys))
        insert(keys, table)

    engine.pool.index.insert = counted  # type: ignore[method-assign, assignment]
    fed(engine, running, IDS[:9])
    other = [IDS[0] + 1, *IDS[1:30]]
    engine.open_sequence(other).close()
    assert not inserted, "its first id is another one"
    engine.open_sequence([*IDS[:6], *other]).close()
    assert inserted == [9], "it may begin with these"
    fed(engine, running, IDS[:30])
    for prompt in ([*IDS[:9], IDS[9] + 1, *IDS[:9]], IDS[:9]):
        engine.open_sequence(prompt).close()
        assert inserted == [9], "it ends, or goes on otherwise"
    longer = engine.open_sequence([*IDS[:30], 5])
    assert inserted == [9, 30]
    if not engine.pool.sizes.slot_bytes:
        assert len(longer) == 30
    assert same(fed(engine, longer, [*IDS[:30], 5]), alone(engine, [*IDS[:30], 5]))


def test_segments_of_every_size_share_a_step(engine: Engine) -> None:
    """A decode row, a prompt's chunk, a short prompt and rows that may be rejected, in one batch."""
    parts = [(IDS[:40], [7]), (IDS[100:130], IDS[130:150]), ([], IDS[200:205]), (IDS[300:309], [1, 2, 3])]
    sequences = [engine.open_sequence() for _ in parts]
    for sequence, (before, _) in zip(sequences, parts, strict=True):
        if before:
            fed(engine, sequence, before)
    modes: list[Any] = ["last", "none", "all", "all"]
    segments = [
        Segment(sequence, tokens, mode, drafts=i == 3)
        for i, (sequence, (_, tokens), mode) in enumerate(zip(sequences, parts, modes, strict=True))
    ]
    last, none, short, drafts = engine.step(segments)
    assert none is None and last is not None and short is not None and drafts is not None
    assert same(last, alone(engine, [*IDS[:40], 7]))
    assert short.shape == (5, engine.config.vocab_size) and drafts.shape == (3, engine.config.vocab_size)
    assert same(short[2], alone(engine, IDS[200:203]))
    assert same(drafts[1], alone(engine, [*IDS[300:309], 1, 2]))
    sequences[3].rewind(11)  # the last draft was wrong
    found = engine.step([Segment(sequences[3], [9]), Segment(sequences[1], [8])])
    assert same(found[0], alone(engine, [*IDS[300:309], 1, 2, 9]))  # type: ignore[arg-type]
    assert same(found[1], alone(engine, [*IDS[100:150], 8]))  # type: ignore[arg-type]
    kept = [rows.copy() for rows in found if rows is not None]
    views = engine.compute([Segment(sequences[3], [4]), Segment(sequences[1], [5])])
    assert same(views[0], alone(engine, [*IDS[300:309], 1, 2, 9, 4]))  # type: ignore[arg-type]
    assert np.array_equal(found, kept), "copies outlive the next step"


def test_a_paused_sequence_goes_on_with_the_same_bits(engine: Engine) -> None:
    sequence, other = engine.open_sequence(), engine.open_sequence()
    fed(engine, sequence, IDS[:150])
    fed(engine, other, IDS[:150])
    sequence.pause()
    assert not len(sequence.pages) and not sequence.memory.slots
    assert engine.stats()["paused_bytes"] >= 3 * engine.pool.sizes.page_bytes
    with pytest.raises(BusyError, match="the sequence is paused"):
        engine.step([Segment(sequence, [3])])
    stranger = engine.open_sequence()
    fed(engine, stranger, IDS[500:700])  # takes pages and slots
    sequence.resume()
    assert engine.stats()["paused_bytes"] == 0
    found = engine.step([Segment(sequence, [3])])[0]
    want = engine.step([Segment(other, [3])])[0]
    assert np.array_equal(found, want)  # type: ignore[arg-type]


def test_a_small_pool_forgets_and_refuses(goldens: Path) -> None:
    """With room for about two prompts: the least recently used goes; what never fits is a named error."""
    for family in FAMILIES:
        sizes = opened(goldens, family, load=False)
        room = sizes.pool.sizes
        nbytes = 8 * room.page_bytes + 3 * room.slot_bytes
        sizes.close()
        engine = opened(goldens, family, kv_bytes=nbytes)
        pool = engine.pool
        for at in (0, 300, 600, 900):
            prompt = IDS[at : at + 150]
            sequence = engine.open_sequence(prompt)
            assert same(fed(engine, sequence, prompt), alone(engine, prompt))
            sequence.close()
            assert pool.used_bytes <= nbytes
        assert engine.stats()["prefix_evictions"] > 0
        held, refused = list[PoolSequence](), None
        while refused is None:
            assert len(held) < 40
            held.append(engine.open_sequence())
            try:
                engine.step([Segment(held[-1], IDS[40 * len(held) :][:150])])
            except PoolFullError as error:
                refused = error
        assert str(refused).startswith("kv_bytes: the pool of ") and refused.total == nbytes
        assert refused.available < refused.needed <= refused.total
        assert len(held[-1]) == 0, "nothing was computed"
        held[0].pause()
        assert same(fed(engine, held[-1], IDS[:120]), alone(engine, IDS[:120])), "there is room now"
        for sequence in held:
            sequence.close()
        engine.close()


def test_a_nan_stays_in_its_sequence(engine: Engine) -> None:
    """NaN in the states of one: the others keep their bits, and so does whoever gets its memory next."""
    broken, sound = engine.open_sequence(), engine.open_sequence()
    fed(engine, broken, IDS[:70])
    fed(engine, sound, IDS[100:170])
    memory = engine.pool.memory
    if memory.full:
        for grid in map(memory._pages_of, memory.full):
            grid.put(broken.pages, np.full_like(grid.take(broken.pages), 0xFF))
    for name in (*memory.rings, *memory.recurrent):
        memory.slot_of(name, broken.memory.slot).view(memory.table[name].element)[...] = np.nan
    found = engine.step([Segment(broken, [3]), Segment(sound, [4])])
    assert np.isnan(found[0]).all()  # type: ignore[arg-type]
    assert same(found[1], alone(engine, [*IDS[100:170], 4]))  # type: ignore[arg-type]
    pages = broken.pages.tolist()
    broken.discard()
    assert not any(memory._pages_of(name).take(pages).any() for name in memory.full)
    again = engine.open_sequence(IDS[:70])
    assert same(fed(engine, again, IDS[:70]), alone(engine, IDS[:70]))


def refuse(*_: Any, **__: Any) -> Any:
    raise ResourceError("the system refuses memory")


def test_the_size_of_the_pool(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, match in (("much", "is not a size"), (0, "kv_bytes"), (1000, "one page of 64 positions takes")):
        with pytest.raises(ArgumentError, match=match):
            opened(goldens, "llama", kv_bytes=value, load=False)
    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "allocate", refuse)
        with pytest.raises(ResourceError, match=r"kv_bytes: the system refuses 2.1 MB for the pool of caches \(a page"):
            opened(goldens, "llama", kv_bytes="2MiB", load=False)
    engine = opened(goldens, "llama", kv_bytes="2MiB", load=False)
    assert engine.stats()["kv_bytes"] == 2 << 20
    sizes, one = engine.pool.sizes, engine.pool.sizes.sequence_bytes(4096)
    assert pool_bytes(HOST, None, sizes, 4096, 1 << 60) == one, "at least one sequence"
    assert pool_bytes(HOST, None, sizes, 64, 0) == 64 * sizes.sequence_bytes(64), "at most 64"
    engine.close()


def test_memory_that_is_there(tmp_path: Path) -> None:
    """The least of what the system and every level of the cgroup leave."""
    (tmp_path / "proc/self").mkdir(parents=True)
    assert Linux(tmp_path).available_memory() == math.inf and Platform().available_memory() == math.inf, "unknown"
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    5000 kB\n")
    assert Linux(tmp_path).available_memory() == 5000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a"
    (group / "b").mkdir(parents=True)
    (group / "b/memory.max").write_text("max\n")
    (group / "b/memory.current").write_text("70\n")
    assert Linux(tmp_path).available_memory() == 5000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    assert Linux(tmp_path).available_memory() == 701_000
    (tmp_path / "proc/self/cgroup").write_text("3:memory:/c\n")
    old = tmp_path / "sys/fs/cgroup/memory/c"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("9000\n")
    (old / "memory.usage_in_bytes").write_text("4000\n")
    assert Linux(tmp_path).available_memory() == 5000


def test_writing_over_what_others_rely_on(engine: Engine) -> None:
    """A sequence goes back and on another way: what it published before stays as it was."""
    sequence = engine.open_sequence()
    fed(engine, sequence, IDS[:100])
    sequence.publish()
    sequence.rewind(70)
    assert same(engine.append(sequence, IDS[300:320]), alone(engine, [*IDS[:70], *IDS[300:320]]))
    longer = [*IDS[:100], 5, 6]
    other = engine.open_sequence(longer)
    assert len(other) == 100 or engine.pool.memory.has_slots
    assert same(fed(engine, other, longer), alone(engine, longer))


def test_memory_is_given_back_while_others_need_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended goes when the system is short of memory; what runs stays, and its logits are right."""
    pool = engine.pool
    monkeypatch.setattr(cache_pool, "LOOK", 0.0)
    monkeypatch.setattr(cache_pool, "STEP", 0)
    first = engine.open_sequence(IDS[:200])
    fed(engine, first, IDS[:200])
    first.close()
    held, running = pool.used_bytes, engine.open_sequence(IDS[300:400])
    fed(engine, running, IDS[300:400])
    assert pool.used_bytes > held and pool.index.known(np.array(IDS[:200])) == 200
    monkeypatch.setattr(cache_pool, "available_memory", lambda memory: 0)
    found = fed(engine, running, IDS[300:440])
    assert pool.index.known(np.array(IDS[:200])) == 0
    assert same(found, alone(engine, IDS[300:440]))
    running.close()
