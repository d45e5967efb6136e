"""Where model and prompt of `rlx run` come from: arguments, options, a file, and stdin; other commands' texts."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from rlx import platform
from rlx.cli.answering import readable
from rlx.errors import PromptError, file_error
from rlx.weights.locate import can_be_downloaded, is_model

STDIN = "-"
WAIT_SECONDS = 3.0
"""How long a pipe may stay silent before it counts as one that never sends."""
MAX_BYTES = 64 << 20  # more text than any context holds


@dataclass(frozen=True)
class Words:
    """The words that were typed.

    Attributes:
        positional: the arguments.
        model, prompt, file: the values of `--model`, `--prompt` and `--file`.
        stdin: True reads it to its end, False never; None: what `piped` finds.
    """

    positional: tuple[str, ...]
    model: str | None = None
    prompt: str | None = None
    file: str | None = None
    stdin: bool | None = None

    def resolve(self) -> tuple[str | None, str]:
        """The model, None for the demo model, and the prompt: what stdin holds, an empty line, and what was typed.

        Raises:
            click.UsageError: the words cannot be told apart.
            PromptError: there is no prompt, or a file of it cannot be read.
        """
        model, typed = self._split()
        if typed == STDIN:
            parts = [read_text(STDIN)]
        else:
            context = piped(self.stdin)
            if typed is not None and model is None and self.model is None and not self._named_prompt:
                model, typed = _told_apart(typed, context)
            parts = [context.rstrip("\r\n"), typed or ""] if context.strip() else [typed or ""]
        prompt = "\n\n".join(part for part in parts if part)
        if not prompt and typed is None and not self.positional:
            raise click.UsageError("Missing PROMPT, the text that the model shall answer.")
        if not prompt:
            hint = 'give the text that the model shall answer: rlx run "Tell me a story."'
            raise PromptError("it is empty", where="prompt", hint=hint)
        return model, prompt

    @property
    def _named_prompt(self) -> bool:
        return self.prompt is not None or self.file is not None

    def _split(self) -> tuple[str | None, str | None]:
        """The model and the text that was typed, each None where nothing stands for it."""
        if self.prompt is not None and self.file is not None:
            raise click.UsageError("--prompt and --file exclude each other")
        words, model, prompt = [*self.positional], self.model, None
        if self._named_prompt:
            prompt = read_text(self.file) if self.file is not None else readable(str(self.prompt))
        elif words:
            prompt = words.pop()
            prompt = prompt if prompt == STDIN else readable(prompt)
        if model is None and words:
            model = words.pop(0)
        if words:
            found = shlex.join(self.positional)
            raise click.UsageError(f"expected [MODEL] PROMPT, found {found}: put the prompt in quotes")
        return model, prompt


def piped(stdin: bool | None) -> str:
    """The text on stdin; "" where it is a terminal, closed, or a pipe that sends nothing.

    A file is read, and a pipe or socket once it sends something or ends within `WAIT_SECONDS`; a process may have
    inherited one that is open and never sends. A warning says when that is so.

    Args:
        stdin: True waits for the end, however long; False reads nothing.
    """
    stream = sys.stdin
    if stdin is False or stream.closed:
        return ""
    if stdin is None:
        try:
            return "" if stream.isatty() or not _sends() else read_text(STDIN)
        except OSError:  # it is there and cannot be read, as that of a process in the background
            return ""
    return read_text(STDIN)


def _sends() -> bool:
    """Whether reading stdin will come to something soon: it is no pipe, or one with data or an end."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # not a file of the system's: all of it is there
        return True
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return True
    if platform.current().wait_readable([descriptor], WAIT_SECONDS) != []:
        return True
    click.echo(
        f"Warning: stdin is a pipe that sent nothing for {WAIT_SECONDS:g} s, and is left out. "
        "--stdin waits for it, --no-stdin does not look",
        err=True,
    )
    return False


def read_text(name: str, most: int = MAX_BYTES, *, strict: bool = False) -> str:
    """The text in a file, or on stdin for "-".

    Args:
        most: bytes.
        strict: refuses what is no UTF-8; otherwise such bytes become U+FFFD.

    Raises:
        PromptError: a file cannot be read, there are too many bytes, or they are no UTF-8.
        OSError: stdin cannot be read.
    """
    path = Path(name).expanduser()
    if name == STDIN:
        found = sys.stdin.buffer.read(most + 1)
    else:
        try:
            with path.open("rb") as file:
                found = file.read(most + 1)
        except OSError as error:
            raise file_error(PromptError, "the file cannot be read", error, path) from error
    where = "stdin" if name == STDIN else path
    if len(found) > most:
        raise PromptError(f"there are more than {most >> 20} MiB", where=where, hint="give a shorter text")
    try:
        return found.decode(errors="strict" if strict else "replace")
    except UnicodeDecodeError as error:
        raise PromptError(f"it is no UTF-8 text (byte {error.start})", where=where, hint="give a text file") from error


def _told_apart(word: str, context: str) -> tuple[str | None, str | None]:
    """A lone argument as (model, prompt): it is a model if it is called like one, and then stdin is the prompt."""
    if not is_model(word) and not can_be_downloaded(word):
        return None, word
    if not context.strip():
        quoted = shlex.quote(word)
        raise click.UsageError(f"'{word}' is a model, and there is no prompt: rlx run {quoted} PROMPT")
    return word, None
