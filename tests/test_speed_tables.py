"""The tables of speed: one source, and the same table on every page that shows one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT

SECTION = """<!-- begin m-Q8_0.gguf, avx2, 1 threads, CPU -->
A CPU; 2026-01-02, load 0.

| tokens/s | rlx | of the limit | llama.cpp | ratio |
| --- | ---: | ---: | ---: | ---: |
| prefill 512 | 1,200 (1,100-1,300) | 1% of 9 GFLOP/s | 400 (390-410) | **3.00** |

| MB | peak |
| --- | ---: |
| rlx | 586 |
<!-- end m-Q8_0.gguf, avx2, 1 threads, CPU -->
"""
DATA = """
model = "m"
title = "M"
formats = ["Q8_0"]
[tasks]
"prefill 512" = "a prompt"
[machines]
"CPU" = "avx2, 1 threads, CPU"
[[runs]]
machine = "CPU"
format = "Q8_0"
"prefill 512" = { rlx = 500, "llama.cpp" = 200 }
"""


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "site"))
    import speed

    yield speed
    del sys.modules["speed"]


def test_pages_show_what_was_measured(speed: ModuleType) -> None:
    for name in speed.PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        assert "<!-- begin speed: llama.cpp -->" in page, name
        assert page == speed.filled(page), f"{name} shows other numbers: run `python tools/site/speed.py`"


def test_a_table_is_made_of_a_section_and_of_separate_runs(speed: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs" / "data").mkdir(parents=True)
    (tmp_path / "docs" / "measurements.md").write_text(SECTION)
    (tmp_path / "docs" / "data" / "speed.toml").write_text(DATA)
    made = speed.filled("a\n<!-- begin speed: llama.cpp -->\nold\n<!-- end speed -->\nb\n", tmp_path)
    assert "old" not in made and made.startswith("a\n<!-- begin") and made.endswith("<!-- end speed -->\nb\n")
    assert "2026-01-02" in made and "| CPU, a prompt | 2.5 to 3.0 |" in made
    with pytest.raises(speed.SpeedError, match="no machine"):
        speed.table("another", tmp_path)
    (tmp_path / "docs" / "measurements.md").write_text("")
    with pytest.raises(speed.SpeedError, match="lacks the section"):
        speed.table("llama.cpp", tmp_path)
