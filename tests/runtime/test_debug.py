"""RLX_DEBUG: each level shows what it promises, on stderr alone, and nothing where it is off."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.store.cache import CompileCache
from rlx.store.store import Store

X = np.ones((2, 32), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the program."""
    folder = tmp_path_factory.mktemp("cache") / "rlx"
    steps(folder)
    return folder


def steps(folder: Path, count: int = 1) -> None:
    graph = rlx.Graph("one")
    graph.output("y", ops.linear(graph.input("x", [rlx.SEQ, 32]), graph.weight("w", [32, 32])))
    with rlx.compile(graph, bind={"SEQ": (1, 8), "w": np.eye(32)}, cache=CompileCache(store=Store(folder))) as exe:
        for _ in range(count):
            assert np.array_equal(exe(x=X)["y"], X)


Shown = Callable[..., str]


@pytest.fixture
def shown(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    def at(level: str, count: int = 1) -> str:
        monkeypatch.setenv("RLX_DEBUG", level)
        steps(folder, count)
        gc.collect()
        output = capsys.readouterr()
        assert not output.out
        return output.err

    return at


def test_without_the_variable_nothing_is_shown(shown: Shown) -> None:
    assert shown("") == shown("0") == ""


def test_level_1_says_where_a_program_was_found(shown: Shown, folder: Path) -> None:
    text = shown("1")
    assert re.search(r"^rlx: cache: program .* \(key \w+\) found in ", text, re.M) and str(folder) in text
    assert "kernels of" not in text


def test_level_1_says_why_a_program_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLX_DEBUG", "1")
    steps(tmp_path / "empty")
    text = capsys.readouterr().err
    assert re.search(r"^rlx: cache: program one\b.* is compiled: .+$", text, re.M)
    assert re.search(r"^rlx: cache: program one\b.* was compiled in \d+\.\d\d s$", text, re.M)


@pytest.mark.parametrize(
    ("level", "there", "missing"),
    [
        ("3", "simplify: no change", "# linear_f32"),
        ("4", "# linear_f32", 'graph "one" prefill {'),
        ("5", 'graph "one" prefill {', "define void @step"),
        ("6", "define void @step", ".text"),
        ("7", ".text", "nothing is missing"),
    ],
)
def test_levels_3_to_7_show_the_program(shown: Shown, level: str, there: str, missing: str) -> None:
    text = shown(level)
    assert there in text and missing not in text and "kernels of one/prefill: 1 step," in text
