"""The tables of speed: one source, and the same table on every page that shows one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from pages import ROOT

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
