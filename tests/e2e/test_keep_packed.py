"""keep_packed: the first start leaves a packed copy of the weights, later ones map it; damage, limits and policies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import rlx
from rlx import ResourceError, platform
from rlx.cli.main import cli
from rlx.compiler.packed_cache import DATA
from rlx.env import Policy
from rlx.store.cache import CompileCache
from rlx.store.entry import Listing
from rlx.store.kinds import CacheWarning
from rlx.store.store import Store
from rlx.weights import open_weights

IDS = [5, 9, 2, 77, 31]


@pytest.fixture
def model(tmp_path: Path, demo_model: Path) -> Path:
    return Path(shutil.copy(demo_model, tmp_path / "model.gguf"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A cache folder with the programs that these tests run."""
    folder = tmp_path_factory.mktemp("filled")
    for precision in ("auto", "exact"):
        start(demo_model, Store(folder), keep=False, precision=precision)
    return folder


@pytest.fixture
def store(tmp_path: Path, filled: Path) -> Store:
    return Store(shutil.copytree(filled, tmp_path / "cache"))


def start(
    model: Path, store: Store, policy: Policy = "on", keep: bool = True, precision: str = "auto"
) -> tuple[np.ndarray, int, int]:
    """Logits, bytes of weights of the process's own, and bytes mapped from a copy."""
    cache = CompileCache(store=store, policy=policy)
    with rlx.auto_runner(model, threads=2, max_seq=32, precision=precision, cache=cache, keep_packed=keep) as runner:
        stats = runner.stats()
        return runner.predict_logits(IDS), stats["weights_bytes"], stats["kept_bytes"]


def copies(store: Store) -> list[Listing]:
    return [row for row in store.entries() if row.key and row.key.kind == "weights"]


def test_the_first_start_packs_into_a_file_that_all_map(model: Path, store: Store) -> None:
    plain, whole, none = start(model, store, keep=False)
    assert none == 0 and not copies(store)
    first, own, mapped = start(model, store)
    (copy,) = copies(store)
    assert copy.key is not None and copy.key.name == "model.gguf"
    assert copy.nbytes > 0.9 * whole
    assert mapped == (copy.folder / DATA).stat().st_size and own < 0.1 * whole
    second, *sizes = start(model, store)
    assert sizes == [own, mapped]
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(second, plain)
    assert [row.digest for row in copies(store)] == [copy.digest]


@pytest.mark.parametrize("damage", ["cut", "gone", "layout"])
def test_a_damaged_copy_is_made_again(model: Path, store: Store, damage: str) -> None:
    expected = start(model, store)[0]
    (copy,) = copies(store)
    if damage == "cut":
        os.truncate(copy.folder / DATA, 4096)
    elif damage == "gone":
        (copy.folder / DATA).unlink()
    else:
        (copy.folder / "layout.json").write_text("{}")
    with pytest.warns(CacheWarning, match="is damaged and not used"):
        found, _, mapped = start(model, store)
    np.testing.assert_array_equal(found, expected)
    assert mapped > 0 and store.damaged == 1
    assert start(model, store)[2] > 0 and store.damaged == 1


def test_a_flipped_bit_is_found_by_verify(model: Path, store: Store) -> None:
    start(model, store)
    (copy,) = copies(store)
    data = bytearray((copy.folder / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (copy.folder / DATA).write_bytes(data)
    assert store.verify() == [(copy.digest, f"wrong checksum of {DATA}")]
    assert not copies(store)


def test_another_file_of_the_same_name_and_size_gets_a_copy_of_its_own(model: Path, store: Store) -> None:
    before = start(model, store)[0]
    with open_weights(model) as loader:
        data = bytearray(model.read_bytes())
        at = data.index(loader.raw("blk.0.ffn_down.weight").tobytes())
    data[at : at + 2] = np.float16(0.5).tobytes()  # the scale of the first block
    model.write_bytes(data)
    after = start(model, store)[0]
    assert len(copies(store)) == 2
    assert not np.array_equal(before, after)


def test_a_read_only_cache_is_read_and_not_written(model: Path, store: Store) -> None:
    start(model, store, keep=False)
    assert start(model, store, "readonly")[2] == 0 and not copies(store)
    start(model, store)
    assert start(model, store, "readonly")[2] > 0
    (copy,) = copies(store)
    os.truncate(copy.folder / DATA, 4096)
    with pytest.warns(CacheWarning, match="is damaged"):
        assert start(model, store, "readonly")[2] == 0
    assert len(copies(store)) == 1


def test_weights_beyond_the_memory_are_an_error_or_mapped(
    model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = start(model, store, keep=False)[0]
    monkeypatch.setattr(platform.current(), "available_memory", lambda: 1 << 20)
    lack = r"the packed weights need 0\.0 GiB of memory, 0\.0 GiB are available"
    with pytest.raises(ResourceError, match=lack + r".*Give keep_packed=True, with RLX_CACHE_LIMIT above 1G: .*mapped"):
        start(model, store, keep=False)
    with pytest.warns(CacheWarning), pytest.raises(ResourceError, match=lack + r".*Set RLX_CACHE_LIMIT above 1G, so"):
        start(model, Store(store.root, limit=2_000_000))
    assert not copies(store)
    np.testing.assert_array_equal(start(model, store)[0], expected)


def test_the_command_line_lists_and_removes_it(model: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(store.root))
    run = CliRunner()
    said = run.invoke(cli, ["run", str(model), "Hi", "--max-tokens", "1", "--keep-packed"])
    assert said.exit_code == 0, said.output
    (row,) = [
        row for row in json.loads(run.invoke(cli, ["cache", "ls", "--json"]).output) if row["key"]["kind"] == "weights"
    ]
    assert row["nbytes"] > 4_000_000
    assert "weights: 1" in run.invoke(cli, ["cache", "stats"]).output
    assert "model.gguf" in run.invoke(cli, ["cache", "inspect", row["digest"][:16]]).output
    assert run.invoke(cli, ["cache", "prune", row["digest"]]).exit_code == 0
    assert not copies(store)
