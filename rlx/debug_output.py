"""The output of RLX_DEBUG: text on stderr about what rlx does, more of it at each level.

Every part may use this module. A level shows what the levels below it show.
"""

from __future__ import annotations

import contextlib
import sys

from rlx import env

CACHE, KERNELS, PASSES, SOURCE, IR, LLVM, ASM = range(1, 8)


def shows(level: int) -> bool:
    """Whether RLX_DEBUG asks for this level.

    Raises:
        ArgumentError: the variable is no number from 0 to 7.
    """
    return env.debug_level() >= level


def show(level: int, text: str) -> None:
    """Writes lines to stderr, each with `rlx: ` in front, if RLX_DEBUG asks for this level."""
    if shows(level):
        say(text)


def say(text: str) -> None:
    """Writes lines to stderr, each with `rlx: ` in front, at every level."""
    if sys.stderr is not None:
        lines = "".join(f"rlx: {line}\n" for line in text.rstrip("\n").split("\n"))
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(lines)


def show_whole(level: int, title: str, text: str) -> None:
    """Writes a title, and below it a text as it is, which may then be cut out and used."""
    show(level, title)
    if shows(level) and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text if text.endswith("\n") else text + "\n")
