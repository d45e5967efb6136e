"""Where the prompt of `rlx run` comes from, above all stdin in every form that a process may have it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from rlx import platform
from rlx.cli import prompt
from rlx.cli.prompt import Words, piped


class Stdin:
    """The read end of a pipe in the place of stdin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read, self.write = os.pipe()
        self.file = os.fdopen(read)
        monkeypatch.setattr(sys, "stdin", self.file)

    def send(self, text: str, close: bool = True) -> None:
        os.write(self.write, text.encode())
        if close:
            self.close()

    def close(self) -> None:
        os.close(self.write)
        self.write = -1


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(prompt, "WAIT_SECONDS", 0.05)
    found = Stdin(monkeypatch)
    yield found
    found.file.close()
    if found.write >= 0:
        found.close()


def test_a_pipe_is_put_before_the_prompt(stdin: Stdin) -> None:
    stdin.send("a text ✓\nin two lines\n")
    assert Words(("Summarize",)).resolve() == (None, "a text ✓\nin two lines\n\nSummarize")


def test_a_pipe_that_never_sends_is_left_out_with_a_word(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    assert Words(("Hi",)).resolve() == (None, "Hi")
    assert "Warning: stdin is a pipe that sent nothing for 0.05 s" in capsys.readouterr().err


def test_nothing_is_read_where_the_user_says_so(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    stdin.send("not this")
    assert Words(("Hi",), stdin=False).resolve() == (None, "Hi")
    assert capsys.readouterr().err == ""


def test_a_slow_pipe_is_waited_for_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch, stdin: Stdin) -> None:
    fail = pytest.fail
    monkeypatch.setattr(platform.current(), "wait_readable", lambda *args: fail("it does not look how long it takes"))
    stdin.send("late")
    assert piped(True) == "late"


def test_a_dash_is_all_of_stdin(stdin: Stdin) -> None:
    stdin.send("the prompt")
    assert Words(("-",)).resolve() == (None, "the prompt")


def test_in_a_process_of_its_own() -> None:
    """An inherited pipe that stays open, a closed descriptor, and a text."""
    code = "from rlx.cli import prompt; prompt.WAIT_SECONDS = 0.05\nprint(repr(prompt.Words(('Hi',)).resolve()))"
    read, write = os.pipe()
    run = [sys.executable, "-c", code]
    for stdin, said in ((read, "(None, 'Hi')"), (subprocess.DEVNULL, "(None, 'Hi')")):
        done = subprocess.run(run, stdin=stdin, capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout.strip() == said
    os.close(read)
    os.close(write)
    code = f"from rlx.cli.main import open_missing; open_missing()\n{code}"
    closed = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, code], capture_output=True, text=True, timeout=300
    )
    assert closed.stdout.strip() == "(None, 'Hi')", closed.stderr
    done = subprocess.run(run, input="text", capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == r"(None, 'text\n\nHi')"
