"""The options of the server: what they refuse, and where keys come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rlx.cli.options import command_line_option
from rlx.errors import ArgumentError
from rlx.profile.option import options_of
from rlx.serve.options import ServerOptions

KEY, OTHER = "sk-0123456789", "other-key-of-a-file"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", 65536, "port is 65536, expected a whole number from 0 to 65535"),
        ("queue", -1, "queue is -1"),
        ("timeout", float("nan"), "timeout is nan"),
        ("max_body_mb", 0, "max_body_mb is 0"),
        ("host", ("http://localhost",), "no name of a machine"),
        ("host", "localhost", "expected a tuple of strings"),
        ("cors_origin", ("example.org",), "https://example.org"),
        ("cors_origin", ("https://a.org/path",), "no origin"),
        ("api_key", ("short",), "at least 8"),
        ("api_key", ("two words of text",), "without spaces"),
        ("alias", "a-name", "expected a tuple of strings"),
        ("media_domains", ("https://example.org/a",), "is no host"),
        ("media_domains", ("10.0.0.0/40",), "is no host"),
        ("media_path", "/no/such/folder", "is no folder"),
        ("max_images", 0, "max_images is 0"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said.replace("(", r"\(")):
        ServerOptions(**{name: value})


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{OTHER}\n{KEY}\n")
    monkeypatch.setenv("RLX_API_KEY", "key-of-the-environment")
    found = ServerOptions(api_key=(KEY,), api_key_file=file).resolved()
    assert found.api_key == (KEY, OTHER, "key-of-the-environment")
    assert found.resolved() == replace(found)


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    assert KEY not in repr(ServerOptions(api_key=(KEY,)))
    (tmp_path / "keys").write_text("bad key here\n")
    with pytest.raises(ArgumentError, match="line 1") as caught:
        ServerOptions(api_key_file=tmp_path / "keys").resolved()
    assert "bad key here" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str | None) -> None:
    """Otherwise a mistyped name would open the server to everybody."""
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ArgumentError, match="keys"):
        ServerOptions(api_key_file=tmp_path / "keys").resolved()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ((), True), (("127.0.0.1",), True), (("127.0.0.2", "localhost"), True), (("[::1]",), True),
        (("0.0.0.0",), False), (("127.0.0.1", "::"), False),
    ],
)  # fmt: skip
def test_what_listens_on_this_machine_only(host: tuple[str, ...], is_local: bool) -> None:
    assert ServerOptions(host=host).is_local is is_local


def test_every_field_is_an_option_of_the_command_line() -> None:
    @click.command()
    def command(**values: Any) -> None:
        for name, value in values.items():
            click.echo(f"{name}={value!r}")

    for name, each in options_of(ServerOptions).items():
        assert each.is_flag
        command = command_line_option(name, ServerOptions)(command)
    typed = ["--api-key", KEY, "--api-key", OTHER, "--no-page", "--cors-origin", "HTTPS://A.org/", "--port", "0"]
    found = CliRunner().invoke(command, typed).output.split("\n")
    assert {f"api_key={(KEY, OTHER)!r}", "page=False", "metrics=True", "log_prompts=False", "port=0"} <= set(found)
    assert "at least 8" in CliRunner().invoke(command, ["--api-key", "x"]).output
