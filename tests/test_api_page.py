"""docs/api.md: each of its rows has a call in `test_seed_api.py`, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_seed_api import GENERATOR, RUNNER

import rlx
from rlx.engine.opening.options import RunnerOptions
from rlx.profile.option import options_of
from rlx.runners.builder import RunnerBuilder

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## (?P<owner>\w+).*?$(?P<body>.*?)(?=^## |\Z)", re.M | re.S)
ROW = re.compile(r"^\| `(?P<item>\w+)[^`]*` \| (?P<here>.+?) \|$", re.M)
ITEMS = {
    f"{part['owner']}.{row['item']}": row["here"]
    for part in SECTION.finditer(PAGE)
    for row in ROW.finditer(part["body"])
}
NAMED = re.compile(r"`(\w+)[(`]")


def test_every_row_is_called_and_every_call_has_a_row() -> None:
    assert set(ITEMS) == {*RUNNER, *(f"GemmaGenerator.{name}" for name in GENERATOR)}


@pytest.mark.parametrize("item", ITEMS)
def test_what_a_row_names_is_there(item: str) -> None:
    named = NAMED.findall(ITEMS[item])
    assert named or item == "LmRunner.Send", "every row says what the item is called here"
    there = {*dir(getattr(rlx, item.split(".")[0])), *dir(rlx)}
    assert [name for name in named if name not in there] == []


def test_every_choice_of_a_builder_is_on_the_page() -> None:
    options = options_of(RunnerOptions)  # docs/python.md has those
    methods = [name for name in vars(RunnerBuilder) if not name.startswith("_") and name not in options]
    listed = PAGE[PAGE.index("Builder:") :]
    assert [name for name in methods if f"`{name}`" not in listed] == []
