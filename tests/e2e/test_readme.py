"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_example_for_python(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    shutil.copy(demo_model, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out == "27 + 45 = 72.\n"
