"""A toy engine option: one field gives an argument, its documentation, a builder method, a flag and a profile key."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rlx import env
from rlx.cli.options import command_line_option
from rlx.engine.opening.options import EngineOptions, takes_options
from rlx.errors import ArgumentError, UnknownArgumentError
from rlx.profile.option import option

pytestmark = pytest.mark.any_machine


def _size(value: Any) -> int:
    return env.parse_size(str(value), "room")


@dataclass(frozen=True, kw_only=True)
class ToyOptions(EngineOptions):
    room: int | str | None = option(
        None,
        "Memory for toys",
        python="bytes, or a text such as `2G`",
        default="none",
        key="toys.room",
        parse=_size,
        metavar="SIZE",
    )
    tidy: bool | None = option(None, "Whether toys are put away")
    speed: float | None = option(None, "How fast they go", low=0, metavar="X")


@takes_options(ToyOptions)
def opened(path: Any = None, *, options: ToyOptions) -> tuple[Any, ToyOptions]:
    """Opens a toy.

    Args:
        path: where it is.
        options: the fields of `ToyOptions`.

    Raises:
        ArgumentError: an option is out of its range.
    """
    return path, options


def test_it_is_an_argument_with_documentation() -> None:
    assert opened("here", room="2K", threads=2) == ("here", ToyOptions(room="2K", threads=2))
    assert list(inspect.signature(opened).parameters)[-3:] == ["room", "tidy", "speed"]
    assert "    room: memory for toys; bytes, or a text such as `2G`; by default none.\n" in str(opened.__doc__)
    assert str(opened.__doc__).index("    speed: how fast they go.\n\nRaises:") > 0
    with pytest.raises(UnknownArgumentError, match=r"there is no argument 'roam'\. Did you mean room=\?"):
        opened("here", roam=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"room": "much"}, "room: 'much' is not a size above 0. Write 500M or 2G"),
        ({"room": "9" * 400 + "G"}, "is too large a size"),
        ({"tidy": 1}, "tidy is 1, expected true or false"),
        ({"speed": -1.5}, "speed is -1.5, expected a number of at least 0"),
        ({"speed": True}, "speed is True, expected a number"),
        ({"kv_dtype": "f61"}, "kv_dtype is 'f61', expected one of f32, f16, bf16, q8_0, q4_0. Did you mean 'f16'?"),
    ],
)
def test_its_values_are_checked_before_anything_is_opened(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        opened("here", **values)


def test_it_is_an_option_of_the_command_line() -> None:
    @click.command()
    def play(**values: Any) -> None:
        click.echo(json.dumps(values, sort_keys=True))

    for name in ("room", "tidy", "speed"):
        play = command_line_option(name, ToyOptions)(play)
    run = CliRunner().invoke
    given = run(play, ["--room", "2K", "--no-tidy", "--speed", "0.5"]).output
    assert json.loads(given) == {"speed": 0.5, "tidy": False, "room": "2K"}
    assert json.loads(run(play, []).output) == {"speed": None, "tidy": None, "room": None}
    assert "--room SIZE         Memory for toys; by default none." in run(play, ["--help"]).output
    for wrong in (["--room", "much"], ["--speed", "-1"]):
        assert run(play, wrong).exit_code == 2, wrong
