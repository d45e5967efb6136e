"""Whatever the system refuses, at whatever moment: errors have names, nothing is damaged and nothing is left behind.
And kills at random moments: a handful, or with TEST_KILLS=1000 as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import inject, injected
from kill_nine import Harness, key, run

import rlx
from rlx.export.convert import convert
from rlx.export.quantize import quantize
from rlx.store.cache import CompileCache
from rlx.store.store import Store

FILES: dict[str, bytes | str] = {"program.o": b"x" * 5000, "ir/00-graph.txt": "x", "manifest.json": "{}"}
MOST = 400  # faults of a kind in one action


def whole(root: Path) -> None:
    """What must hold of a store after every fault: it opens, entries are whole, nothing temporary of ours is left."""
    store = Store(root)
    store.collect()
    assert store.verify(discard=False) == []
    assert list((root / "tmp").glob(f"*-{os.getpid()}-*")) == []  # other processes may be writing


@pytest.mark.parametrize(("what", "kind"), [("put", "files"), ("put", "threads"), ("look", "files")])
def test_a_store(what: str, kind: str, tmp_path: Path) -> None:
    root, number = tmp_path / "cache", iter(range(10**6))
    Store(root).put(key(-1), FILES)

    def put() -> None:
        assert Store(root).put(key(next(number)), FILES).read("program.o") == FILES["program.o"]
        assert Store(root).put(key(-1), FILES, replace=True).read("program.o") == FILES["program.o"]

    def look() -> None:
        store = Store(root)
        found = store.get(key(-1))
        assert found is None or found.read("program.o") == FILES["program.o"]
        store.entries(), store.stored_keys(), store.stats(), store.verify()
        store.remove(key(-1).digest)

    def check() -> None:
        whole(root)
        assert Store(root).put(key(-1), FILES).folder is not None

    fired = inject(kind, {"put": put, "look": look}[what], check, MOST)
    assert len(fired) >= (8 if kind == "files" else 1)
    assert len(fired) < MOST, "every call was reached"


@pytest.mark.parametrize("kind", ["files", "threads", "memory", "maps"])
@pytest.mark.parametrize("what", ["convert", "quantize"])
def test_a_convert(what: str, kind: str, goldens: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "out", Store()
    out = folder / "out.gguf"
    folder.mkdir()
    source = goldens / "qwen3" / ("hf" if what == "convert" else "model-f16.gguf")

    def write() -> None:
        if what == "convert":
            convert(source, out, "F16", force=True)
        else:
            quantize(source, out, "Q8_0", threads=2, force=True)

    write()
    right = out.read_bytes()

    def check() -> None:
        assert out.read_bytes() == right, "the old file or the new one, which are equal here"
        assert [path.name for path in folder.iterdir()] == ["out.gguf"]

    fired = inject(kind, write, check, MOST)
    assert fired
    whole(store.root)


@pytest.mark.parametrize("kind", ["files", "threads", "memory", "maps"])
def test_a_load(kind: str, goldens: Path, tmp_path: Path) -> None:
    """A model is opened and computes, with its programs in the cache."""
    model, store = goldens / "qwen3" / "model-f16.gguf", Store(tmp_path / "cache")

    def run(threads: int = 2) -> list[float]:
        with rlx.auto_runner(model, max_seq=64, threads=threads, cache=CompileCache(store=Store(store.root))) as runner:
            logits: list[float] = runner.predict_logits([5]).tolist()
            return logits

    right = run()
    results: list[list[float]] = []
    fired = inject(kind, lambda: results.append(run()), lambda: whole(store.root), MOST)
    assert fired
    assert all(result == right for result in results)


def test_the_harness_finds_what_it_looks_for(tmp_path: Path) -> None:
    def bare(kind: str) -> Callable[[], None]:
        return lambda: print(inject(kind, lambda: open(tmp_path / "x", "wb").close(), lambda: None, 5))

    with pytest.raises(OSError, match="Input/output error") as caught:
        bare("files")()
    assert "after fault 1 of the kind 'files'" in str(caught.value.__notes__)
    with (
        injected("files", 2) as fault,
        pytest.raises(OSError, match="Too many open files"),
        open(tmp_path / "y", "wb") as file,
    ):
        file.write(b"x")
    assert fault.fired == "write"


# ---------------------------------------------------------------------------------------------------------- kill -9


@pytest.mark.system("locks")  # without them, what a killed writer leaves goes after a day
@pytest.mark.filterwarnings("ignore:the limit of the compile cache")
def test_a_handful_of_kills(goldens: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    kills = int(os.environ.get("TEST_KILLS", "12"))
    harness = run(kills, 0, goldens / "qwen3" / "hf", tmp_path / "work")
    assert harness.problems == []
    assert harness.counts["store"] == harness.counts["convert"] == kills // 2


def test_the_harness_sees_damage_and_what_is_left(goldens: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    harness = Harness(tmp_path / "work", goldens / "qwen3" / "hf", 0)
    harness.look("store")
    assert harness.problems == []
    (harness.root / key(0).digest[:2] / key(0).digest / "program.o").write_bytes(b"?")
    (harness.out.parent / "model.gguf.partial").write_text("x")
    harness.out.write_bytes(b"?")
    with pytest.warns(UserWarning, match="damaged"):
        harness.look("store")
    assert ["wrong checksum" in harness.problems[0], "file is damaged" in harness.problems[1]] == [True, True]
    assert "left behind" in harness.problems[2]
