"""Tries grammars in a process of their own before the main process reads them.

Grammar stage, under `Grammar`. A grammar of a request may be hostile: it may nest so deep that the parser's stack
overflows, or need any time and memory. `trial_main.py` is the program of the process, which has limits of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlx.errors import GrammarError
from rlx.grammar.package import LIMITS, SLICES, llguidance
from rlx.text.confined import NOT_STARTED, Confined, ConfinedError

CPU_SECONDS = 1.0  # of one grammar: ordinary ones take milliseconds
WALL_SECONDS = 20.0
_MEMORY = 512 << 20  # bytes of address space, of which the process takes 200 MB before the first grammar
_STACK = 1 << 20  # bytes: an eighth of what threads of the main process have, so that what passes here passes there
_KEPT = 128  # results
_SMALLER = "make it smaller: fewer alternatives and repetitions, shorter lists, less nesting, fewer patterns at once"
_CHILD = Confined(
    str(Path(__file__).with_name("trial_main.py")),
    memory=_MEMORY,
    stack=_STACK,
    cpu_seconds=CPU_SECONDS,
    wall_seconds=WALL_SECONDS,
)


@dataclass(frozen=True)
class Trial:
    """The result of a trial of a grammar.

    Attributes:
        error: the message of llguidance, or of the process; "" if it can be used.
        hint: the way out, where the message needs one.
        warnings: what is not enforced.
        seconds: CPU time that it took, which also says about how much memory it keeps.
        text: of a grammar in llama.cpp's syntax, the translation to Lark's.
    """

    error: str
    hint: str | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    text: str = ""


def start() -> None:
    """Starts the process without waiting for it, so that the first grammar finds it ready."""
    llguidance()
    _asked(_CHILD.start)


def tried(kind: str, text: str, options: tuple[tuple[str, bool | str], ...] = ()) -> Trial:
    """The result of compiling a grammar.

    Args:
        kind: as of `Grammar`, or `gbnf`, which is only translated.

    Raises:
        GrammarError: llguidance is not installed, or no process can be started.
    """
    llguidance()
    return _tried(kind, text, options)


@lru_cache(maxsize=_KEPT)
def _tried(kind: str, text: str, options: tuple[tuple[str, bool | str], ...]) -> Trial:
    request = {"kind": kind, "text": text, "options": dict(options), "limits": LIMITS, "slices": SLICES}
    found = _asked(lambda: _CHILD.call(request))
    if isinstance(found, Trial) and "CPU time" not in found.error:
        found = _asked(lambda: _CHILD.call(request))  # of a process that has kept nothing of grammars before
    if isinstance(found, Trial):
        return found
    return Trial(
        found["error"], None, tuple(found.get("warnings", ())), found.get("seconds", 0.0), found.get("text", "")
    )


def _asked(call: Any) -> Any:
    """The answer of the process, or what its end says of the grammar."""
    try:
        return call()
    except ConfinedError as error:
        if error.kind == NOT_STARTED:
            what = f"it cannot be checked: {error}"
            raise GrammarError(what, where="grammar", hint="try again, or allow more processes") from error
        if error.kind == "TimeoutError":
            raise GrammarError(f"it cannot be checked: {error}", where="grammar", hint="try again") from error
        if error.kind == "MemoryError":
            return Trial("it takes too much memory", _SMALLER)
        if error.kind is not None:
            return Trial(str(error), _SMALLER)
        return Trial(_ended(str(error)), _SMALLER)


def _ended(text: str) -> str:
    """Why a grammar ended the process."""
    if "status" not in text:
        return text
    return "it takes too much memory, or its rules or references are nested too deep"
