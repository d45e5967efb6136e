"""docs/api.md: every name it gives is there, and so is every test that it says covers it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlx
import rlx.runners

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (?P<original>.+?) \| (?P<here>.+?) \| (?P<test>.+?) \|$", re.M)
NAME = re.compile(r"`([A-Z]\w+)\.(\w+)|`(\w+)\(")
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
ROWS = [match for match in ROW.finditer(PAGE) if match["original"] != "original" and "---" not in match["original"]]


def find(owner: str) -> object:
    return getattr(rlx, owner, None) or getattr(rlx.runners, owner)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["original"])
def test_what_a_row_names_is_there(row: re.Match[str]) -> None:
    for owner, attribute, function in NAME.findall(row["here"]):
        assert hasattr(find(owner), attribute) if owner else find(function)
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", row["test"])
    assert names, "every row names a test"
    for name in names:
        assert f"def {name}(" in tests


def test_every_choice_of_a_builder_is_on_the_page() -> None:
    methods = [name for name in vars(rlx.runners.builder.RunnerBuilder) if not name.startswith("_")]
    listed = PAGE[PAGE.index("Builder:") :]
    assert [name for name in methods if f"`{name}`" not in listed] == []
    assert len(ROWS) >= 20
