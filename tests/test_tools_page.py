"""docs/tools.md: its examples run on the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.machine

PAGE = (Path(__file__).parent.parent / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/tools.md, example {number + 1}", "exec"), names)
    roles = [message["role"] for message in names["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    called, result = names["messages"][1]["tool_calls"][0]["function"], names["messages"][2]
    assert called["name"] == "add"
    assert result["content"] == str(sum(json.loads(called["arguments"]).values()))
    assert json.loads(names["texts"][0]) == json.loads(called["arguments"])
    assert capsys.readouterr().out
