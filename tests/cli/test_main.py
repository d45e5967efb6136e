"""The command itself: help, version, errors and exit codes, progress bars, `rlx compile`, `rlx devices`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine, Opened, install
from terminal import Terminal

import rlx
from rlx import env
from rlx.cli.main import Commands, cli, debug_option
from rlx.cli.output import Bars
from rlx.errors import CacheError

HEAVY = {"numba", "llvmlite", "gguf", "jinja2", "rich", "tokenizers"}
COMMANDS = [
    "run", "chat", "serve", "compile", "profile", "inspect", "report", "batch", "bench", "embed",
    "rerank", "ppl", "eval", "trace", "tune",
    "devices", "doctor", "pull", "list", "rm", "convert", "quantize", "imatrix", "cache",
]  # fmt: skip


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group with a command `boom` that raises what it is given."""
    group = Commands("rlx", params=[*cli.params])
    raised: list[BaseException] = []

    @click.command()
    @debug_option
    def boom() -> None:
        raise raised[0]

    monkeypatch.setattr(group, "get_command", lambda ctx, name: boom)

    def invoke(error: BaseException, *args: str) -> Any:
        raised[:] = [error]
        return CliRunner().invoke(group, args or ("boom",))

    return invoke


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


# ---------------------------------------------------------------------------------------------------- help


def test_help_lists_the_commands() -> None:
    for flag in ("--help", "-h"):
        result = CliRunner().invoke(cli, [flag])
        assert result.exit_code == 0
        commands, variables = re.split(r"Commands:|Environment:", result.stdout)[1:]
        assert re.findall(r"^  (\w+) {2,}\w", commands, re.MULTILINE) == COMMANDS
        assert "..." not in commands, "the first sentence of a command's help is short enough"
        assert re.findall(r"^  (\w+) {2,}\w", variables, re.MULTILINE) == [v.name for v in env.VARIABLES]


def test_help_of_every_command_is_light_and_says_what_it_does() -> None:
    """Each names what is loaded after it: the first that is heavy is the one to blame."""
    out = fresh(
        "import sys; from click.testing import CliRunner; from rlx.cli.main import cli\n"
        f"for command in {COMMANDS}:\n"
        "    text = CliRunner().invoke(cli, [command, '--help']).stdout\n"
        f"    print(command, text.startswith('Usage: '), sorted({HEAVY} & set(sys.modules)))"
    )
    assert out.splitlines() == [f"{command} True []" for command in COMMANDS]


@pytest.mark.parametrize("args", [["--frobnicate"], ["run", "--frobnicate", "Hi"], ["frobnicate"]])
def test_an_unknown_word_is_a_mistake(args: list[str]) -> None:
    result = CliRunner().invoke(cli, args)
    assert (result.exit_code, "Error: No such" in result.stderr) == (2, True)


# ---------------------------------------------------------------------------------------------------- errors


def test_an_error_is_one_message(failing: Any) -> None:
    result = failing(CacheError("it is full", where="/cache", hint="rlx cache prune frees it"))
    assert (result.exit_code, result.output) == (2, "Error: /cache: it is full. rlx cache prune frees it.\n")


def test_a_bug_says_that_it_is_one(failing: Any) -> None:
    result = failing(ValueError("odd"))
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: unexpected ValueError: odd\. --debug shows .*\n", result.output)
    assert "unexpected KeyError." in failing(KeyError()).output


@pytest.mark.parametrize("args", [("--debug", "boom"), ("boom", "--debug")])
@pytest.mark.parametrize(("error", "exit_code"), [(CacheError("it is full"), 2), (ValueError("odd"), 1)])
def test_debug_adds_the_traceback(failing: Any, args: tuple[str, ...], error: Exception, exit_code: int) -> None:
    result = failing(error, *args)
    assert result.exit_code == exit_code
    assert "Traceback (most recent call last)" in result.stderr
    assert str(error) in result.stderr.splitlines()[-1]


def test_an_interrupt_is_quiet_and_130(failing: Any) -> None:
    result = failing(KeyboardInterrupt())
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize("words", [("inspect", "demo"), ("doctor", "--no-measure"), ("cache", "ls")])
def test_streams_that_are_closed_are_no_error(words: tuple[str, ...]) -> None:
    """Python has None in place of them, and `inspect` was a bug of rlx then."""
    closing = [sys.executable, "-m", "rlx", *words]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&-', "sh", *closing], stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *closing], timeout=300).returncode == 0


def test_a_closed_pipe_is_no_error() -> None:
    """`rlx inspect --tensors | head -1`, with more text than a pipe holds."""
    command = [sys.executable, "-m", "rlx", "inspect", "--tensors", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


@pytest.mark.system("full")
@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("devices",)])
def test_a_full_disk_is_one_message(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "rlx", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "Error: No space left on device. Make room, or write to another disk.\n"


# ---------------------------------------------------------------------------------------------------- compile


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return install(monkeypatch, lambda path: FakeEngine())


def test_compile_prints_a_line_a_program(opened: Opened, demo_model: Path) -> None:
    options = ["--profile", "p.toml", "--dump-ir", "ir", "--batch", "4"]
    result = CliRunner().invoke(cli, ["compile", str(demo_model), *options])
    assert result.exit_code == 0, result.output
    assert opened.engines[0].prepared == 4
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["decode", "1", "0.500", "s", "9", "kernels", "4", "kB", "compiled", "0" * 12],
        ["prefill", "2-16", "0.010", "s", "12", "kernels", "9", "kB", "cached", "0" * 12],
    ]
    assert re.fullmatch(r"2 programs, 1 compiled, in \d+\.\d\d s\n", result.stderr)
    assert (opened.options["profile"], opened.options["dump_ir"]) == ("p.toml", "ir")
    assert opened.engines[0].closed


def test_compile_in_json(opened: Opened, demo_model: Path) -> None:
    found = json.loads(CliRunner().invoke(cli, ["compile", str(demo_model), "--json"]).stdout)
    assert found["compiled"] == 1
    assert [p["phase"] for p in found["programs"]] == ["decode", "prefill"]
    assert found["programs"][1] == {
        "phase": "prefill", "bucket": [2, 16], "kernels": 12, "object_bytes": 9000, "seconds": 0.01, "cached": True,
        "digest": "0" * 64, "reason": "",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- bars


def test_bars_show_in_a_terminal_only() -> None:
    for file, shown in ((Terminal(), True), (StringIO(), False)):
        with Bars(file=file) as bars:
            bars.waiting("opening [the] model")
            bars("packing weights", 1, 4)
            bars("packing weights", 4, 4)
        written = file.getvalue()
        assert ("packing weights" in written) == shown
        assert ("opening [the] model" in written) == shown
        assert bool(written) == shown


# ---------------------------------------------------------------------------------------------------------- devices


def test_each_device_has_a_line() -> None:
    done = CliRunner().invoke(cli, ["devices"])
    assert done.exit_code == 0, done.output
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(lines) == ["cpu", "reference", "cuda"]
    assert "free" in lines["cpu"]
    assert ("free" in lines["cuda"]) == ("cuda" in rlx.devices())
