"""A handful of kills; `kill_nine.py` does a thousand by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_nine import Harness, key, run


@pytest.mark.system("locks")  # without them, what a killed writer leaves goes after a day
@pytest.mark.filterwarnings("ignore:the limit of the compile cache")
def test_a_handful_of_kills(goldens: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    harness = run(12, 0, goldens / "qwen3" / "hf", tmp_path / "work")
    assert harness.problems == []
    assert (harness.counts["store"], harness.counts["convert"]) == (6, 6)


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
