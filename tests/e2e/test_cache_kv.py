"""States of prompts on disk (`cache_kv`): a runner that starts anew computes only the rest of a prompt, to the same
bits.

The expected logits are those of a runner that keeps nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.engine.kv import disk_kv_cache
from rlx.errors import ArgumentError
from rlx.store.kinds import PrefixStoreWarning
from rlx.store.store import Store

PROFILE: dict[str, Any] = {"buckets": {"seq": [1, 32]}}
#: Full caches, windows and shared caches; recurrent states.
FAMILIES = (pytest.param("gemma3n", marks=pytest.mark.slow), "qwen35")
IDS = np.random.default_rng(7).integers(3, 400, 2000).tolist()
SYSTEM = IDS[:300]

pytestmark = pytest.mark.filterwarnings("ignore::rlx.engine.opening.setup.ContextWarning")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is left where it is slower than computing; elsewhere tests do not depend on what the machine measures."""


@pytest.fixture(autouse=True)
def always_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(disk_kv_cache.DiskKVCache, "_pays", lambda *args: True)


def opened(path: Path, **options: Any) -> Any:
    usual = {"precision": "exact", "profile": PROFILE, "max_seq": 700, "threads": 2, "compile_ahead": False}
    return rlx.auto_runner(path, **{**usual, **options})


def model(goldens: Path, family: str = "llama") -> Path:
    path = goldens / family / "model-f16.gguf"
    return path if path.exists() else goldens / family / "hf"


def question(number: int) -> list[int]:
    return [*SYSTEM, *IDS[1000 + 20 * number : 1020 + 20 * number]]


def read(runner: Any) -> int:
    return int(runner.stats()["cache_kv_tokens_hit"])


def files(folder: Path, holds: str = "") -> list[Path]:
    """The files with pages of full caches, or with rings and recurrent states, or with both."""
    rows = [row for row in Store(folder).entries() if row.key and holds in str(row.key.options.get("holds", "-"))]
    return sorted(row.folder / "states.bin" for row in rows if "holds" in row.key.options)


def filled(path: Path, folder: Path, **options: Any) -> None:
    """Leaves the states of two prompts with a common beginning, which the third one then finds."""
    with opened(path, cache_kv=folder, **options) as runner:
        for number in range(3):
            runner.submit(rlx.Request(question(number), 4, stop_at_eog=False)).result()
    assert files(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_process_computes_only_the_rest(family: str, goldens: Path, tmp_path: Path) -> None:
    path = model(goldens, family)
    filled(path, tmp_path)
    with opened(path) as runner:
        alone = runner.prefill_logits(question(5))
        answer = runner.submit(rlx.Request(question(6), 8, stop_at_eog=False)).result()
    with opened(path, cache_kv=tmp_path) as again:
        found = again.prefill_logits(question(5))
        assert np.array_equal(found, alone), "the same bits"
        assert read(again) == len(SYSTEM) and again.stats()["reused_tokens"] == len(SYSTEM)
        assert again.submit(rlx.Request(question(6), 8, stop_at_eog=False)).result() == answer
        assert read(again) == len(SYSTEM), "memory has it now"
        assert again.stats()["requests"]["prompt_tokens"] == 20
    with opened(path, cache_kv=str(tmp_path), max_seq=500) as shorter:
        handle = shorter.submit(rlx.Request(question(6), 8, stop_at_eog=False))
        assert handle.result() == answer, "another length of the context, through the loop"
        assert shorter.stats()["requests"]["prompt_tokens"] < 30
    before = {file: file.read_bytes() for file in files(tmp_path)}
    with opened(path, cache_kv=tmp_path) as last:
        last.generate(question(6), 8, stop_at_eog=False)
        assert last.stats()["cache_kv_written_bytes"] == 0
    assert all(file.read_bytes() == data for file, data in before.items()), "nothing is written twice"


def test_requests_with_one_beginning_read_it_once(goldens: Path, tmp_path: Path) -> None:
    path = model(goldens, "qwen35")
    filled(path, tmp_path)
    with opened(path) as runner:
        alone = [runner.generate(question(number), 6, stop_at_eog=False) for number in range(5, 9)]
    with opened(path, cache_kv=tmp_path) as again:
        handles = [again.submit(rlx.Request(question(number), 6, stop_at_eog=False)) for number in range(5, 9)]
        assert [handle.result() for handle in handles] == alone
        assert read(again) == len(SYSTEM)
        assert again.stats()["requests"]["prompt_tokens"] <= 4 * 20
        assert again.stats()["reused_tokens"] >= 4 * len(SYSTEM)


def test_other_models_and_options_find_nothing(goldens: Path, tmp_path: Path) -> None:
    """What would have other bits: weights, precision, types of the cache. A copy under another name is the same."""
    filled(model(goldens), tmp_path / "kept")
    copy = tmp_path / "other" / "name.gguf"
    copy.parent.mkdir()
    data = bytearray(model(goldens).read_bytes())
    copy.write_bytes(data)
    with opened(copy, cache_kv=tmp_path / "kept") as runner:
        runner.prefill_logits(question(5))
        assert read(runner) == len(SYSTEM)
    data[-3] ^= 1  # the last bits of the last weight
    copy.write_bytes(data)
    for path, options in (
        (copy, {}),
        (model(goldens), {"precision": "auto"}),
        (model(goldens), {"kv_dtype": "f16"}),
        (model(goldens, "qwen3"), {}),
    ):
        with opened(path, cache_kv=tmp_path / "kept", **options) as runner:
            runner.prefill_logits(question(5))
            assert read(runner) == 0, (path, options)


@pytest.mark.parametrize(("family", "kind"), [("llama", "pages"), ("qwen35", "pages"), ("qwen35", "states")])
def test_damage_is_computed_again(family: str, kind: str, goldens: Path, tmp_path: Path) -> None:
    path = model(goldens, family)
    filled(path, tmp_path)
    with opened(path) as runner:
        alone = runner.prefill_logits(question(5))
    for file in files(tmp_path, kind):
        data = bytearray(file.read_bytes())
        data[-5] ^= 16
        file.write_bytes(data)
    with opened(path, cache_kv=tmp_path) as again:
        with pytest.warns(PrefixStoreWarning, match="is damaged") as seen:
            assert np.array_equal(again.prefill_logits(question(5)), alone)
        assert sum(each.category is PrefixStoreWarning for each in seen) == 1
        assert read(again) < len(SYSTEM)
    with opened(path, cache_kv=tmp_path) as healed:
        healed.prefill_logits([*question(5), 9])
        assert read(healed) == len(question(5)), "it was written again"


def test_what_is_used_again_is_written_while_the_process_runs(goldens: Path, tmp_path: Path) -> None:
    """The process is killed; what a second prompt began with is on disk, and what only one has used is not."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_cache_kv import *
runner = opened(Path({str(model(goldens))!r}), cache_kv={str(tmp_path)!r})
for number in range(2):
    runner.submit(rlx.Request(question(number), 4, stop_at_eog=False)).result()
runner.submit(rlx.Request(IDS[500:800], 4, stop_at_eog=False)).result()
end = time.monotonic() + 100
while len(files(Path({str(tmp_path)!r}))) < 2 and time.monotonic() < end:
    time.sleep(0.01)
os._exit(9)
"""
    found = subprocess.run([sys.executable, "-c", code], check=False, timeout=200, env={**os.environ})
    assert found.returncode == 9
    assert len(files(tmp_path)) == 2
    with opened(model(goldens), cache_kv=tmp_path) as again:
        again.prefill_logits(question(7))
        assert read(again) == len(SYSTEM)
        again.prefill_logits(IDS[500:800])
        assert read(again) == len(SYSTEM)


@pytest.mark.usefixtures("measured")
def test_reading_that_is_slower_than_computing_is_left(goldens: Path, tmp_path: Path) -> None:
    filled(model(goldens), tmp_path)
    with opened(model(goldens), cache_kv=tmp_path) as runner:
        kept = runner._engine.kept
        kept._speed, kept.rate = 1000.0, 1e6
        runner.prefill_logits(question(5))
        assert read(runner) == 0
        kept._speed, kept.rate = 1e15, 1e-3
        runner.prefill_logits([*SYSTEM, 9, 8, 7])
        assert read(runner) == 0, "memory has it"
        runner.prefill_logits(IDS[1000:1010])
        runner._engine.pool.index.clear()
        runner.prefill_logits(question(6))
        assert read(runner) == len(SYSTEM)


def test_options_and_folders(goldens: Path, tmp_path: Path) -> None:
    path = model(goldens)
    for options, match in (
        ({"cache_kv": ""}, "is not the path of a folder"),
        ({"cache_kv": 3}, "expected a path, found a int"),
        ({"cache_kv": tmp_path, "cache_kv_bytes": "much"}, "is not a size"),
        ({"cache_kv": tmp_path, "cache_kv_bytes": 0}, "cache_kv_bytes"),
    ):
        with pytest.raises(ArgumentError, match=match):
            opened(path, **options)
    (tmp_path / "file").write_text("")
    with pytest.warns(PrefixStoreWarning, match="is not used"), opened(path, cache_kv=tmp_path / "file") as runner:
        assert len(runner.generate(question(1), 4, stop_at_eog=False)) == 4
    table = {**PROFILE, "engine": {"cache_kv": str(tmp_path / "kept"), "cache_kv_bytes": "8MiB"}}
    with opened(path, profile=table) as runner:
        runner.generate(question(1), 4, stop_at_eog=False)
        assert runner.stats()["cache_kv_bytes"] == 8 << 20
    assert 0 < sum(file.stat().st_size for file in files(tmp_path / "kept")) <= 8 << 20
    with warnings.catch_warnings(), opened(path) as runner:
        warnings.simplefilter("error")
        assert "cache_kv_bytes" not in runner.stats()


def test_prompts_on_disk_are_kept_apart_by_their_salt(goldens: Path, tmp_path: Path) -> None:
    def ask(runner: Any, salt: str) -> int:
        before = read(runner)
        runner.submit(rlx.Request(question(5), 2, stop_at_eog=False, cache_salt=salt)).result()
        return read(runner) - before

    path = model(goldens)
    with opened(path, cache_kv=tmp_path) as runner:
        for number in range(3):
            runner.submit(rlx.Request(question(number), 2, stop_at_eog=False, cache_salt="one")).result()
    with opened(path, cache_kv=tmp_path) as again:
        assert [ask(again, salt) for salt in ("", "two", "one")] == [0, 0, len(SYSTEM)]
