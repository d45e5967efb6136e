"""The folder of states of prompts: what is found, what damage does, the limit, and several processes at once.

The states are numbers that follow from the keys, so the expected ones are computed here.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.engine.kv import prefix_folder, prefix_store
from rlx.engine.kv.prefix_file import MAGIC
from rlx.engine.kv.prefix_names import BLOCK, Digests
from rlx.engine.kv.prefix_store import PrefixStore, PrefixStoreWarning

pytestmark = pytest.mark.any_machine

PAGE, PAGE_BYTES, MODEL = 64, 96, bytes(range(32))
KEYS = np.random.default_rng(3).integers(-(2**60), 2**60, 3000)

Array = np.ndarray[Any, Any]


def opened(folder: Path, limit: int | None = None, states: bool = False, model: bytes = MODEL) -> PrefixStore:
    store = PrefixStore(folder, limit, page=PAGE, page_bytes=PAGE_BYTES, has_states=states)
    store.use(model, "{}")
    return store


def page(keys: Array, number: int) -> bytes:
    """What stands for the states of a page: it depends on all keys before its end."""
    total = int(np.bitwise_xor.reduce(keys[: (number + 1) * PAGE])) & (2**63 - 1)
    return struct.pack("<Q", total) * (PAGE_BYTES // 8)


def put(store: PrefixStore, keys: Array) -> list[bool]:
    """Writes the pages of all keys, a block at a time."""
    digests, found = Digests(keys), []
    for start in range(0, len(keys), BLOCK):
        end = min(start + BLOCK, len(keys))
        pages = [page(keys, number) for number in range(start // PAGE, -(-end // PAGE))]
        found.append(store.write_pages(digests, start, end, pages))
    return found


def got(store: PrefixStore, keys: Array) -> int:
    """How many positions of some keys are found; whole pages of them are checked."""
    found = store.find(Digests(keys), len(keys))
    if found is None:
        return 0
    for run in found.runs:
        file = store.open_run(run)
        if file is None:
            return run.start
        with file:
            for number in range(run.start // PAGE, run.used // PAGE):
                parts = store.read(file, run.name, number - run.start // PAGE, 1)
                if parts is None:
                    return number * PAGE
                assert parts.tobytes() == page(keys, number)
    return found.length


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".pages", ".states"))


def test_a_beginning_is_found_to_the_position(tmp_path: Path) -> None:
    put(opened(tmp_path), KEYS[:700])
    store = opened(tmp_path)
    other = KEYS[1000:1300]
    for shared in (0, 1, 63, 64, 255, 256, 257, 512, 600, 699, 700):
        assert got(store, np.concatenate([KEYS[:shared], other])) == shared, shared
    assert got(store, KEYS[:500]) == 500 and got(store, KEYS[:3000]) == 700
    assert got(opened(tmp_path, model=MODEL[::-1]), KEYS[:700]) == 0, "the states of another model"
    assert got(store, np.concatenate([other, KEYS[:700]])) == 0


def test_branches_share_what_they_have_in_common(tmp_path: Path) -> None:
    store, branches = opened(tmp_path), [np.concatenate([KEYS[:600], KEYS[at : at + 300]]) for at in (1000, 2000)]
    for keys in branches:
        runs = store.covering(Digests(keys), len(keys))
        covered = runs[-1].used if runs else 0
        assert covered == (0 if keys is branches[0] else 600)
        digests = Digests(keys)
        for start in range(covered // BLOCK * BLOCK, 900, BLOCK):
            end = min(start + BLOCK, 900)
            store.write_pages(digests, start, end, [page(keys, n) for n in range(start // PAGE, -(-end // PAGE))])
    assert len(files(tmp_path)) == 4 + 2, "the first two blocks once"
    assert [got(opened(tmp_path), keys) for keys in branches] == [900, 900]


def test_states_end_where_they_were_taken(tmp_path: Path) -> None:
    store = opened(tmp_path, states=True)
    put(store, KEYS[:900])
    for end in (300, 600):
        assert store.write_states(Digests(KEYS), end, struct.pack("<Q", end) * 5)
    for length, expected in ((900, 600), (600, 600), (599, 300), (299, None)):
        found = store.find(Digests(KEYS[:length]), length)
        assert (found and found.length) == expected
        if found is not None:
            file = store.open_states(found, 40)
            assert file is not None and found.states is not None
            with file:
                (part,) = store.read(file, found.states, 0, 1)  # type: ignore[misc]
            assert part.tobytes() == struct.pack("<Q", found.length) * 5
            assert found.runs[-1].used == found.length
    other = np.concatenate([KEYS[:450], KEYS[2000:2100]])
    assert store.find(Digests(other), 550).length == 300  # type: ignore[union-attr]


#: What is done to a file, given its bytes; each is a class of bytes of the format.
DAMAGE = {
    "magic": lambda data: b"X" + data[1:],
    "version": lambda data: data[:8] + b"\x09" + data[9:],
    "count of parts": lambda data: data[:12] + b"\xff\xff\xff\x7f" + data[16:],
    "start": lambda data: data[:16] + b"\x01" + data[17:],
    "end": lambda data: data[:24] + b"\xff" * 8 + data[32:],
    "size of a part": lambda data: data[:32] + b"\xff" * 8 + data[40:],
    "rate": lambda data: data[:44] + b"\x01" + data[45:],
    "model": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "digest": lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:],
    "keys": lambda data: data[:120] + bytes([data[120] ^ 1]) + data[121:],
    "digests of parts": lambda data: data[: 112 + 8 * 256 + 3] + b"\x55\x66" + data[112 + 8 * 256 + 5 :],
    "a part": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut short": lambda data: data[:-1],
    "cut in the header": lambda data: data[:50],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "another file": lambda data: b"PK\x03\x04" + bytes(len(data)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_removed_with_one_warning(kind: str, tmp_path: Path) -> None:
    put(opened(tmp_path), KEYS[:768])
    second = files(tmp_path)[1]
    whole = second.read_bytes()
    assert whole.startswith(MAGIC) and second.name.startswith("00000100")
    damaged = DAMAGE[kind](whole)
    assert damaged != whole
    second.write_bytes(damaged)
    store = opened(tmp_path)
    with pytest.warns(PrefixStoreWarning, match="is damaged and is not used") as seen:
        found = got(store, KEYS[:768])
    assert found in (256, 256 + 3 * 64) and len(seen) == 1 and store.counters.damaged == 1
    assert not second.exists(), "it is removed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert got(store, KEYS[:768]) == 256
    put(store, KEYS[:768])
    assert second.read_bytes() == whole and got(store, KEYS[:768]) == 768, "and written again"


def test_what_is_no_file_of_states_is_left_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, KEYS[:300])
    folder = files(tmp_path)[0].parent
    strange = [folder / "notes.txt", folder / "00000000-x.pages", tmp_path / "mine.pages"]
    for path in strange:
        path.write_text("mine")
    (folder / f"{0:08x}-{Digests(KEYS)[0]}-{256:08x}-{'0' * 32}.pages").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / f"{0:08x}-{Digests(KEYS)[0]}-{128:08x}-{'1' * 32}.pages")
    again = opened(tmp_path)
    with pytest.warns(PrefixStoreWarning):
        assert got(again, KEYS[:200]) == 200
    opened(tmp_path, limit=1).size.make_room(1)
    assert [path for path in files(folder) if path.is_file() and path not in strange] == []
    assert all(path.exists() for path in strange)


def test_the_folder_stays_below_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_folder, "RESCAN", 0.0)
    monkeypatch.setattr(prefix_store, "TOUCH", 0.0)
    one = opened(tmp_path / "one")
    put(one, KEYS[:256])
    size = files(tmp_path)[0].stat().st_size
    store = opened(tmp_path, limit=5 * size)
    prompts = [np.concatenate([KEYS[i : i + 1], KEYS[:511]]) for i in range(6)]
    for keys in prompts:
        put(store, keys)
        assert sum(path.stat().st_size for path in files(tmp_path) if path.parent.parent == tmp_path) <= 5 * size
        found = store.find(Digests(prompts[0]), 512)
        assert found is not None and found.length == 512, "what is used stays"
        store.touch(found.names)
        time.sleep(0.01)
    assert store.size.evictions >= 6 and got(store, prompts[1]) == 0
    assert store.stats()["cache_kv_used_bytes"] <= 5 * size
    with pytest.warns(PrefixStoreWarning, match="raise cache_kv_bytes"):
        assert put(opened(tmp_path / "small", limit=1000), KEYS[:256]) == [False]
    assert not files(tmp_path / "small")


def test_the_default_limit_follows_the_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    store = opened(tmp_path)
    assert 0 < store.size.limit <= min(64 << 30, free.f_bavail * free.f_frsize // 9)


@pytest.mark.system("permissions")
def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(PrefixStoreWarning, match="is not used") as seen:
        store = opened(tmp_path / "file")
    assert len(seen) == 1 and put(store, KEYS[:256]) == [False] and got(store, KEYS[:256]) == 0
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.warns(PrefixStoreWarning, match="every user of this machine can write it"):
        assert put(opened(shared), KEYS[:256]) == [False]
    full = opened(tmp_path / "full")
    put(full, KEYS[:256])
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        patch.setattr(prefix_store.prefix_file, "write", _refuse)
        assert put(full, KEYS[:1024]) == [False] * 4
        assert put(full, KEYS[:1024]) == [False] * 4
    assert [str(each.message) for each in found if "No space left" in str(each.message)], found
    assert len(found) == 1 and got(full, KEYS[:1024]) == 256, "it still reads"


def _refuse(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def _hammer(folder: str, seed: int, problems: Any) -> None:
    """Writes and reads prompts that all processes share, below a limit that keeps evicting."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store, rng = opened(Path(folder), limit=40_000), np.random.default_rng(seed)
            for _ in range(60):
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
    processes = [context.Process(target=_hammer, args=(str(tmp_path), seed, problems)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert problems.empty(), problems.get()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 60_000
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.system("locks")
def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    put(opened(tmp_path), KEYS[:256])
    folder = files(tmp_path)[0].parent
    code = (
        "import os, sys; from pathlib import Path; from rlx.partial_file import into_place\n"
        f"with into_place(Path({str(folder)!r}) / {('0' * 8 + '-' + 'a' * 32 + '.states')!r}) as partial:\n"
        "    partial.write_bytes(b'half'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 9
    assert list(folder.glob("*.partial"))
    store = opened(tmp_path)
    assert got(store, KEYS[:256]) == 256
    put(store, KEYS[:512])
    assert not list(folder.glob("*.partial")), "the next writer removes it"
