"""docs/cli.md: it lists every command, option and alias, and what it shows runs."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from types import ModuleType
from typing import Any

import click
import pytest
from pages import DOCS, ROOT, shell_lines, text

from rlx import env
from rlx.cli.main import cli

PAGE = text(DOCS / "cli.md")
CONTEXT = cli.make_context("rlx", ["run"], resilient_parsing=True)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "site"))
    return import_module("option_tables")


def section(title: str) -> str:
    return re.split(rf"^## {title}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]


def test_the_tables_of_options_are_those_of_the_commands(tables: ModuleType) -> None:
    commands = tables.commands()
    assert tables.filled(PAGE) == PAGE, "the options have changed: run `python tools/site/option_tables.py`"
    assert sorted(tables.described(PAGE)) == sorted([*tables.groups(), *(name for name in commands if commands[name])])
    assert all(f"rlx {name}" in section(f"rlx {name.split()[0]}") for name in commands)


def test_every_example_is_understood() -> None:
    examples = [line for line in shell_lines(DOCS / "cli.md") if re.match(r"(?:.*\| )?rlx \w", line)]
    assert len(examples) > 25
    for example in examples:
        words = shlex.split(re.split(r" [<>] ", example.split("| ")[-1])[0])[1:]
        name, rest = words[0], words[1:]
        command: Any = cli.get_command(CONTEXT, name)
        assert command is not None, example
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(name, list(rest), CONTEXT)  # UsageError if it does not parse


def test_the_variables_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(RLX_\w+)` \| .+ \| .+ \| .+ \|$", section("Environment"), re.MULTILINE)
    assert rows == [variable.name for variable in env.VARIABLES]
