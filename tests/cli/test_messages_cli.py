"""What messages of the command line look like: files are no options, lines break at words, no name stands twice."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from terminal import Terminal

from rlx.cli.main import cli
from rlx.cli.output import wrapped


@pytest.mark.parametrize(
    "words",
    [["run", "model", "hi"], ["run", "profile", "hi"], ["chat", "model"], ["serve", "threads"], ["inspect", "model"],
     ["run", "--image", "image", "hi"], ["run", "--file", "file"], ["bench", "model"], ["ppl", "tokens"],
     ["quantize", "threads", "out.gguf", "Q8_0"], ["convert", "type", "out.gguf"], ["report", "device"]],
)  # fmt: skip
def test_a_file_that_is_called_like_an_option_is_no_option(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(word for word in words[1:] if not word.startswith("-"))
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2 and f"Error: {name}: " in result.stderr, result.stderr
    (tmp_path / name).mkdir()
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2 and f"Error: {name}: " in result.stderr, result.stderr


@pytest.mark.parametrize("option", ["--json-schema", "--grammar", "--image", "--file", "--chat-template", "--profile"])
def test_the_systems_reason_stands_without_its_number_and_the_name_again(option: str) -> None:
    said = CliRunner().invoke(cli, ["run", option, "nope.xyz", "hi", "--no-stdin"]).stderr
    assert "Errno" not in said and said.count("nope.xyz") == 1


def test_lines_break_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = (
        "Error: a-long-path/with-hyphens.gguf: there is no such file or directory.\n  see: rlx pull org/repo "
        + "x" * 60
    )
    found = wrapped(text, Terminal())
    assert found.split() == text.split() and len(found.splitlines()) > 3
    assert all(len(line) <= 40 for line in found.splitlines() if "xxx" not in line)
    assert wrapped(text, io.StringIO()) == text
