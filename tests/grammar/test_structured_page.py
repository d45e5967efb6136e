"""Every block of docs/structured.md runs, and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page, names = (ROOT / "docs" / "structured.md").read_text(), dict[str, object]()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "docs/structured.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "uniqueItems" in shown and re.search(r"^#[0-9a-f]{6}$", shown, re.MULTILINE)


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "structured.py"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(
        r"the hero: a (fox|dog|cat), \d+ years old, with [012] friends\nthe end: (happy|sad)\n", done.stdout
    )
