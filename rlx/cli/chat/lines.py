"""Reads the user's messages where there is no line editor: a pipe, a file, a terminal that knows no more than lines."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator

import click

from rlx.cli.interrupts import Interrupts

PROMPT = "> "
AGAIN = "Ctrl-C again or Ctrl-D ends the chat"
_QUOTES = '"""'


def is_unfinished(text: str) -> bool:
    r"""Whether a message goes on in the next line: behind `\` at its end, and inside of `\"\"\"`."""
    if text.lstrip().startswith(_QUOTES):
        return _QUOTES not in text.lstrip().removeprefix(_QUOTES)
    return text.endswith("\\")


def message(text: str) -> str:
    r"""A typed message without what joined its lines: `\` in front of line breaks, or `\"\"\"` around it."""
    inner = text.strip()
    if inner.startswith(_QUOTES):
        return inner.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


def piped(interrupts: Interrupts) -> Iterator[str]:
    """The lines of stdin; `KeyboardInterrupt` for Ctrl-C while it waits for one."""
    for line in _read_lines(interrupts):
        if line is None:
            raise KeyboardInterrupt
        yield line


def asked(interrupts: Interrupts) -> Iterator[str]:
    """Messages from a terminal without line editing. Twice Ctrl-C raises `KeyboardInterrupt`."""
    lines, held, warned = _read_lines(interrupts), "", False
    _ask("")
    for line in lines:
        if line is None and warned and not held:
            click.echo(err=True)
            raise KeyboardInterrupt
        warned = line is None and not held
        held = "" if line is None else held + line
        if line is None:
            click.echo(f"\n({AGAIN})" if warned else "", err=True)
        elif is_unfinished(held):
            held += "\n"
        else:
            yield message(held)
            held = ""
        _ask(held)
    click.echo(err=True)  # the shell goes on in a line of its own


def _ask(held: str) -> None:
    """Writes the prompt, to whichever of stdout and stderr is a terminal."""
    for stream in (sys.stdout, sys.stderr):
        if stream and stream.isatty():
            stream.write("  " if held else PROMPT)
            stream.flush()
            return


def _read_lines(interrupts: Interrupts) -> Iterator[str | None]:
    """Lines without their ends; None for a Ctrl-C. A line may end with the input."""
    if sys.stdin is None:
        return
    try:
        fd = sys.stdin.fileno()
    except (io.UnsupportedOperation, ValueError, AttributeError):  # no file: what a program put there
        yield from map(_text, getattr(sys.stdin, "buffer", sys.stdin))
        return
    data = b""
    while True:
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            yield _text(line)
        if not interrupts.wait_readable(fd):
            data = b""
            yield None
        elif more := os.read(fd, 1 << 16):
            data += more
        else:
            break
    if data:
        yield _text(data)


def _text(line: bytes | str) -> str:
    return (line if isinstance(line, str) else line.decode("utf-8", "replace")).rstrip("\r\n")
