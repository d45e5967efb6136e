"""docs/python.md, the reference for Python users: it has every method, and its examples run on the demo model."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.engine.opening.options import RunnerOptions, meanings
from rlx.runners import Model

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
SPANS = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.S)))))


def public(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize("owner", [Model, rlx.TokenGenerator, rlx.Answer, rlx.Step, rlx.TokenLogprob])
def test_every_method_is_on_the_page(owner: type) -> None:
    assert public(owner) - SPANS - {"FAMILY"} == set()


def test_every_option_of_opening_a_model_has_its_row() -> None:
    """With the text of its field, which `help(rlx.auto_runner)` shows, too."""
    section = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", PAGE.split("## Open a model")[1].split("\n## ")[0])
    table = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.M))
    assert {name: table[name] for name in meanings(RunnerOptions)} == meanings(RunnerOptions)
