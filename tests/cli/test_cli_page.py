"""docs/cli.md: it lists every command, option and alias, and what it shows runs."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pages import DOCS, shell_lines, text

from rlx import env
from rlx.cli.command import ALIASES
from rlx.cli.main import cli
from rlx.profile.option import options_of
from rlx.runners.opening.options import EngineOptions
from rlx.serve.options import ServerOptions

PAGE = text(DOCS / "cli.md")
CONTEXT = cli.make_context("rlx", ["run"], resilient_parsing=True)
OPTION_ROW = re.compile(r"^\| `(--[^`]+)` \| (.*?) \| .+ \|$", re.MULTILINE)
# What runs here as it stands, on the demo model and in a moment.
QUICK = [
    "rlx run Hello --max-tokens 2 --no-stdin",
    "rlx inspect",
    "rlx inspect --tensors",
    "rlx compile --check",
    "rlx compile --check --shape qwen3-0.6b --weights Q8_0",
    "rlx profile show",
    "rlx cache ls",
    "rlx cache stats",
    "rlx tune --show",
]


def section(title: str) -> str:
    return re.split(rf"^## {title}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]


def leaves() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name in cli.list_commands(CONTEXT):
        command = cli.get_command(CONTEXT, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= {f"{name} {each}": sub for each, sub in command.commands.items()}
        else:
            found[name] = command
    return found


def listed(text: str) -> dict[str, list[str]]:
    """Option, without the value that it takes -> the aliases in its row."""
    return {names.split()[0]: re.findall(r"`([^`]+)`", also) for names, also in OPTION_ROW.findall(text)}


@pytest.mark.parametrize("name", list(leaves()))
def test_every_option_of_a_command_is_in_its_section(name: str) -> None:
    text = section(f"rlx {name.split()[0]}")
    params = [p for p in leaves()[name].params if isinstance(p, click.Option) and p.name != "help"]
    options = {max(p.opts, key=len): p for p in params if "--debug" not in p.opts and p.opts != ["--help"]}
    found = listed(text)
    shared = listed(section("Options of the model")) | listed(section("Options of the answer"))
    if "--dump-ir" in options:
        found |= shared
    assert set(options) <= set(found), set(options) - set(found)
    for option in options:
        assert found[option] == list(ALIASES.get(option, ())), option
    assert f"rlx {name}" in text


def test_options_of_the_model_are_explained_as_in_the_help() -> None:
    rows = dict(re.findall(r"^\| `--([\w-]+)[^`]*` \| .* \| (.+) \|$", section("Options of the model"), re.MULTILINE))
    options = {name: each for name, each in options_of(EngineOptions).items() if each.is_flag}
    assert rows == {name.replace("_", "-"): f"{each.help}." for name, each in options.items()}


def test_no_section_has_an_option_that_no_command_has() -> None:
    known = {max(p.opts, key=len) for command in leaves().values() for p in command.params}
    assert set(listed(PAGE)) <= known


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


@pytest.mark.parametrize("example", QUICK)
def test_it_runs_on_the_demo_model(example: str) -> None:
    result = CliRunner().invoke(cli, shlex.split(example)[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_the_variables_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(RLX_\w+)` \| .+ \| .+ \| .+ \|$", section("Environment"), re.MULTILINE)
    assert rows == [variable.name for variable in env.VARIABLES]


def test_options_of_the_server_are_explained_as_in_the_help() -> None:
    rows = dict(re.findall(r"^\| `--([\w-]+)[^`]*` \| .* \| (.+) \|$", section("rlx serve"), re.MULTILINE))
    for name, each in options_of(ServerOptions).items():
        assert rows[name.replace("_", "-")] == f"{each.help}.".replace("`", ""), name
