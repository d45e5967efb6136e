"""`rlx tune`: what was measured is kept, shown and used, and whatever is wrong with the file, the defaults hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlx.backends.cpu import autotune
from rlx.backends.cpu.autotune import Case
from rlx.backends.cpu.target import Target
from rlx.backends.cpu.tuning import Tuning
from rlx.cli.main import cli
from rlx.compiler import tuned
from rlx.compiler.compile import Compiler
from rlx.store.cache import CompileCache
from rlx.store.kinds import CacheWarning
from rlx.store.store import Store

DEFAULT = Target.host().default_tuning


class FarAhead:
    """A machine that likes its memory asked for 16 KiB ahead."""

    def __init__(self, target: Target, pool: Any, nbytes: int, builders: Any) -> None:
        pass

    def prepare(self, tuning: Tuning, case: Case) -> Callable[[], float]:
        return lambda: 0.5 if tuning.prefetch == 16384 else 1.0

    def __enter__(self) -> FarAhead:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own, and a machine that is quickly measured."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RLX_CACHE", raising=False)
    monkeypatch.setattr(autotune, "Bench", FarAhead)
    return tmp_path / "cache"


def rlx(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["tune", *args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def kept(folder: Path) -> Path:
    """The file with what was measured."""
    return tuned.path(Store(folder), Target.host())


def in_force() -> Tuning:
    """What a new compiler generates code with."""
    return Compiler(cache=CompileCache.default()).target.tuning


def test_what_is_measured_is_kept_and_used(folder: Path) -> None:
    assert in_force() == DEFAULT
    before = Compiler(cache=CompileCache.default())
    result = rlx()
    assert "faster than the defaults: prefetch 16384; kept in" in result.output
    assert "+0.0%" in result.output
    assert "-50.0%" in result.output
    assert "GB/s" in result.output
    assert in_force() == replace(DEFAULT, prefetch=16384)
    assert before.target.tuning == DEFAULT, "an open one stays as it is"
    entry = Store(folder).find(kept(folder).parent.name)
    assert entry.key is not None and entry.key.as_dict()["target"] == Target.host().describe()
    assert kept(folder).stat().st_mode & 0o077 == 0
    assert not list(folder.glob("tmp/*")), "a temporary file is left"


def test_show_and_reset(folder: Path) -> None:
    assert "the defaults; `rlx tune` measures" in rlx("--show").output
    assert "nothing was measured" in rlx("--reset").output
    rlx("--threads", "1")
    shown = rlx("--show").output
    assert all(name in shown for name in Tuning())
    assert "16384" in shown
    assert "with 1 thread," in shown
    assert "removed" in rlx("--reset").output
    assert not kept(folder).exists()
    assert in_force() == DEFAULT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: [1], "holds no tuning"),
        (lambda row: {**row, "tuning": 7}, "holds no tuning"),
        (lambda row: {**row, "tuning": {**row["tuning"], "unrolling": 4}}, "unknown key 'unrolling'"),
        (lambda row: {**row, "tuning": {**row["tuning"], "prefetch": -64}}, "prefetch = -64"),
        (lambda row: {**row, "tuning": {**row["tuning"], "prefetch": "64"}}, "prefetch = '64'"),
        (lambda row: {**row, "tuning": {n: v for n, v in row["tuning"].items() if n != "prefetch"}}, "no prefetch"),
        (None, "Expecting value"),
    ],
)
def test_numbers_that_cannot_be_used_are_a_warning(
    folder: Path, change: Callable[[dict[str, Any]], object] | None, message: str
) -> None:
    """They stand in a whole entry, as a shared folder may hold it."""
    rlx()
    store, text = Store(folder), "\x00" if change is None else json.dumps(change(json.loads(kept(folder).read_text())))
    store.put(store.open(kept(folder).parent.name).key, {tuned.FILE: text}, replace=True)
    assert_unused(folder, message)


@pytest.mark.parametrize("damage", [lambda text: text[:40], lambda text: "", lambda text: "[" * 100_000])
def test_a_damaged_file_is_a_warning(folder: Path, damage: Callable[[str], str]) -> None:
    rlx()
    kept(folder).write_text(damage(kept(folder).read_text()))
    assert_unused(folder, "is damaged and not used: wrong checksum of tuning.json")


def assert_unused(folder: Path, message: str) -> None:
    """A warning says why, the defaults hold, and the next measurement takes the place of what was there."""
    with pytest.warns(CacheWarning, match=message):
        assert in_force() == DEFAULT
    shown = rlx("--show").output
    assert re.search(message.partition(".*")[0], shown)
    assert "the defaults" in shown
    rlx()
    assert in_force() == replace(DEFAULT, prefetch=16384)


def test_an_entry_of_another_machine_or_target_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rlx()
    host = Target.host()
    target = replace(host, features=f"{host.features},-popcnt")  # a machine that lacks something
    assert tuned.find(Store(folder), target) is None
    tuned.keep(Store(folder), target, tuned.Measured(Tuning(prefetch=64), "2026-01-01", 1))
    found = tuned.find(Store(folder), target)
    assert found is not None
    assert found.tuning["prefetch"] == 64
    assert in_force().prefetch == 16384
    monkeypatch.setattr(tuned, "machine", lambda: "another CPU")
    assert in_force() == DEFAULT
