"""The folder of states of prompts: what is found, what damage does, the limit, and several processes at once.

The states are numbers that follow from the keys, so the expected ones are computed here.
"""

from __future__ import annotations

import multiprocessing
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.engine.kv import prefix_store
from rlx.engine.kv.prefix_store import BLOCK, PrefixStore
from rlx.store.key import CompileKey
from rlx.store.kinds import PrefixStoreWarning
from rlx.store.store import Store

pytestmark = pytest.mark.any_machine

PAGE, PAGE_BYTES, MODEL = 64, 96, "a model"
KEYS = np.random.default_rng(3).integers(-(2**60), 2**60, 3000)

Array = np.ndarray[Any, Any]


def opened(folder: Path, limit: int | None = None, states: bool = False, model: str = MODEL) -> PrefixStore:
    store = PrefixStore(folder, limit, page=PAGE, page_bytes=PAGE_BYTES, has_states=states)
    store.use(CompileKey("prefix", model))
    return store


def page(keys: Array, number: int) -> bytes:
    """What stands for the states of a page: it depends on all keys before its end."""
    total = int(np.bitwise_xor.reduce(keys[: (number + 1) * PAGE])) & (2**63 - 1)
    return struct.pack("<Q", total) * (PAGE_BYTES // 8)


def put(store: PrefixStore, keys: Array, first: int = 0) -> list[bool]:
    """Writes the pages of all keys from a block on, a block at a time."""
    digests, found, used = store.digests(keys), [], time.time()
    for start in range(first, len(keys), BLOCK):
        end = min(start + BLOCK, len(keys))
        pages = [page(keys, number) for number in range(start // PAGE, -(-end // PAGE))]
        found.append(store.write_pages(digests, end, pages, used=used))
    return found


def got(store: PrefixStore, keys: Array) -> int:
    """How many positions of some keys are found; whole pages of them are checked."""
    found = store.find(store.digests(keys), len(keys))
    if found is None:
        return 0
    for run in found.runs:
        entry = store.open_run(run)
        if entry is None:
            return run.start
        for number in range(run.start // PAGE, run.used // PAGE):
            pages = store.read(entry, number - run.start // PAGE, 1, PAGE_BYTES)
            if pages is None:
                return number * PAGE
            assert pages.tobytes() == page(keys, number)
    return found.length


def entries(folder: Path) -> list[Path]:
    """The folders of the entries, by the positions that they hold."""
    rows = [row for row in Store(folder).entries() if row.key is not None]
    return [row.folder for row in sorted(rows, key=lambda row: row.key.options["positions"])]  # type: ignore[union-attr]


def nbytes(folder: Path) -> int:
    return sum(row.nbytes for row in Store(folder).entries())


def test_a_beginning_is_found_to_the_position(tmp_path: Path) -> None:
    put(opened(tmp_path), KEYS[:700])
    store = opened(tmp_path)
    other = KEYS[1000:1300]
    for shared in (0, 1, 63, 64, 255, 256, 257, 512, 600, 699, 700):
        assert got(store, np.concatenate([KEYS[:shared], other])) == shared, shared
    assert got(store, KEYS[:500]) == 500 and got(store, KEYS[:3000]) == 700
    assert got(opened(tmp_path, model="another"), KEYS[:700]) == 0, "the states of another model"
    assert got(store, np.concatenate([other, KEYS[:700]])) == 0


def test_branches_share_what_they_have_in_common(tmp_path: Path) -> None:
    store, branches = opened(tmp_path), [np.concatenate([KEYS[:600], KEYS[at : at + 300]]) for at in (1000, 2000)]
    for keys in branches:
        runs = store.covering(store.digests(keys), len(keys))
        covered = runs[-1].used if runs else 0
        assert covered == (0 if keys is branches[0] else 600)
        put(store, keys, covered // BLOCK * BLOCK)
    assert len(entries(tmp_path)) == 4 + 2, "the first two blocks once"
    assert [got(opened(tmp_path), keys) for keys in branches] == [900, 900]


def test_states_end_where_they_were_taken(tmp_path: Path) -> None:
    store = opened(tmp_path, states=True)
    put(store, KEYS[:900])
    for end in (300, 600):
        assert store.write_states(store.digests(KEYS), end, struct.pack("<Q", end) * 5)
    for length, expected in ((900, 600), (600, 600), (599, 300), (299, None)):
        found = store.find(store.digests(KEYS[:length]), length)
        assert (found and found.length) == expected
        if found is not None:
            entry = store.open_states(found)
            assert entry is not None
            (part,) = store.read(entry, 0, 1, 40)  # type: ignore[misc]
            assert part.tobytes() == struct.pack("<Q", found.length) * 5
            assert found.runs[-1].used == found.length
    other = np.concatenate([KEYS[:450], KEYS[2000:2100]])
    assert store.find(store.digests(other), 550).length == 300  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["key.json", "checksums.json", "large.json", "prefix.bin", "states.bin"])
@pytest.mark.parametrize("harm", ["first byte", "last byte", "cut short", "empty", "longer", "gone"])
def test_a_damaged_entry_is_removed_with_one_warning(harm: str, name: str, tmp_path: Path) -> None:
    put(opened(tmp_path), KEYS[:768])
    second = entries(tmp_path)[1]
    whole = (second / name).read_bytes()
    harms = {
        "first byte": bytes([whole[0] ^ 1]) + whole[1:],
        "last byte": whole[:-1] + bytes([whole[-1] ^ 1]),
        "cut short": whole[:-1],
        "empty": b"",
        "longer": whole + b"x",
    }
    (second / name).write_bytes(harms[harm]) if harm in harms else (second / name).unlink()
    store = opened(tmp_path)
    with pytest.warns(PrefixStoreWarning, match="is damaged and not used") as seen:
        found = got(store, KEYS[:768])
    assert found in (256, 256 + 3 * 64) and len(seen) == 1 and store.store.damaged == 1
    assert not second.exists(), "it is removed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert got(store, KEYS[:768]) == 256
    put(store, KEYS[:768])
    assert (second / name).read_bytes() == whole and got(store, KEYS[:768]) == 768, "and written again"


def test_the_folder_stays_below_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "TOUCH", 0.0)
    one = opened(tmp_path / "one")
    put(one, KEYS[:256])
    size = nbytes(tmp_path / "one")
    store = opened(tmp_path / "two", limit=5 * size)
    prompts = [np.concatenate([KEYS[i : i + 1], KEYS[:511]]) for i in range(6)]
    for keys in prompts:
        put(store, keys)
        assert nbytes(tmp_path / "two") <= 5 * size
        found = store.find(store.digests(prompts[0]), 512)
        assert found is not None and found.length == 512, "what is used stays"
        store.touch(found.addresses)
        time.sleep(0.01)
    assert store.store.evicted >= 6 and got(store, prompts[1]) == 0
    assert store.stats()["cache_kv_used_bytes"] <= 5 * size
    with pytest.warns(PrefixStoreWarning, match="cache_kv_bytes raises it"):
        assert put(opened(tmp_path / "small", limit=100), KEYS[:256]) == [False]
    assert not entries(tmp_path / "small")


def test_the_end_of_a_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, KEYS[:1024])
    store.store.limit = nbytes(tmp_path) * 2 // 3
    put(store, KEYS[2000:2256])
    assert got(store, KEYS[:1024]) == 256 and got(store, KEYS[2000:2256]) == 256


def _hammer(folder: str, seed: int, problems: Any) -> None:
    """Writes and reads prompts that all processes share, below a limit that keeps evicting."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store, rng = opened(Path(folder), limit=40_000), np.random.default_rng(seed)
            for _ in range(30):
                keys = np.concatenate(
                    [KEYS[: int(rng.integers(0, 4)) * 200], KEYS[1000 + int(rng.integers(3)) :][:300]]
                )
                put(store, keys)
                got(store, keys)  # asserts what it reads
    except BaseException as error:
        problems.put(repr(error))


def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn")
    problems = context.Queue()
    processes = [context.Process(target=_hammer, args=(str(tmp_path), seed, problems)) for seed in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert problems.empty(), problems.get()
    assert nbytes(tmp_path) <= 60_000
    assert not list(tmp_path.glob("tmp/*")) and not Store(tmp_path).verify()
