"""Writes the tables of options in docs/cli.md from the commands themselves: `python tools/site/option_tables.py`.

The page has a table between `<!-- options: NAME -->` and `<!-- end options -->`. NAME is a command, such as
`profile show`, or a group of options that several commands have: `model` and `answer`. After `without`, groups and
commands are named whose options the table leaves out; a line below it says which of them apply.
tests/cli/test_cli_page.py fails where the page shows something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from rlx.cli.command import ALIASES
from rlx.cli.main import cli
from rlx.cli.options import ending_options, engine_options, model_argument, sampling_options

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "cli.md"
_TABLE = re.compile(
    r"(?P<head><!-- options: (?P<name>[\w ]+?)(?: without (?P<without>[\w ,]+))? -->\n).*?(?=<!-- end options -->)",
    re.DOTALL,
)
_HIDDEN = ("help", "debug")  # every command has them

Options = dict[str, click.Option]


def groups() -> dict[str, Options]:
    """The options that several commands share."""

    def nothing(**values: object) -> None: ...

    model = click.command()(model_argument(engine_options(nothing)))
    answer = click.command()(ending_options(sampling_options(nothing)))
    return {"model": options_of(model), "answer": options_of(answer)}


def commands() -> dict[str, Options]:
    """The options of every command, by its name without `rlx`."""
    context, found = cli.make_context("rlx", ["run"], resilient_parsing=True), dict[str, Options]()
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        subcommands = command.commands if isinstance(command, click.Group) else {}
        subcommands = {each: sub for each, sub in subcommands.items() if not sub.hidden}
        assert command is not None
        found |= {f"{name} {each}": options_of(sub) for each, sub in subcommands.items()} or {name: options_of(command)}
    return found


def options_of(command: click.Command) -> Options:
    """The options of a command, by their longest name."""
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in _HIDDEN and not p.hidden]
    return {max(each.opts, key=len): each for each in options}


def row(name: str, option: click.Option) -> str:
    """An option as a row: its name with its value, its other names, and what it does."""
    context = click.Context(click.Command("rlx"))
    names, text = option.get_help_record(context) or ("", "")
    value = names.split(", ")[-1].removeprefix(name)
    short = [each for each in (*option.opts, *ALIASES.get(name, ())) if each != name]
    text = re.sub(r"\s*\[(?:default: (.+?))(?:; .*)?\]$", r" Default: \1.", text)
    text = re.sub(r"  \[.*\]$", "", text)
    shown = ", ".join(f"`{each}`" for each in (name + value, *dict.fromkeys(short)))
    return f"| {shown} | {text} |".replace("|", "\\|").replace("\\| ", "| ").replace(" \\|", " |")


def table(name: str, without: tuple[str, ...]) -> str:
    """The options of a command or group, and which of those that are described elsewhere apply, too."""
    shared, known = groups(), commands()
    own = (shared | known)[name]
    elsewhere = [(each, (shared | known)[each]) for each in without]
    rows = [row(each, option) for each, option in own.items() if not any(each in some for _, some in elsewhere)]
    lines = ["| option | what it does |", "|---|---|", *rows] if rows else []
    also = [_reference(each, some, own) for each, some in elsewhere if not own.keys().isdisjoint(some)]
    return "\n".join(["", *lines, *([""] if rows and also else []), *also, "", ""])


def _reference(name: str, options: Options, own: Options) -> str:
    """The sentence about options that are described elsewhere."""
    applies, missing = ([f"`{each}`" for each in options if (each in own) == is_own] for is_own in (True, False))
    is_group = name in groups()
    link = f"[options of the {name}](#options-of-the-{name})" if is_group else f"options of [rlx {name}](#rlx-{name})"
    if not missing:
        return f"The {link} apply."
    if len(missing) < len(applies):
        return f"The {link} apply, except for {', '.join(missing)}."
    return f"Of the {link}, these apply: {', '.join(applies)}."


def filled(page: str) -> str:
    """The text of a page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        return found["head"] + table(found["name"], tuple(filter(None, (found["without"] or "").split(", "))))

    return _TABLE.sub(made, page)


def described(page: str) -> Iterator[str]:
    """The names of the tables of a page."""
    return (found["name"] for found in _TABLE.finditer(page))


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
