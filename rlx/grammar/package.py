"""The optional package llguidance, which parses grammars and computes masks: its import, its limits, its messages.

Grammar stage. The package wraps a regular expression into a grammar of its own, and its messages speak of places there;
here they speak of the text that a user gave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from rlx.errors import GrammarError

LIMITS = {
    "max_items_in_row": 2_000,  # ambiguity: alternatives that are followed at one place of the text
    "initial_lexer_fuel": 1_000_000,  # about 20 ms of regular expressions at the start
    "step_lexer_fuel": 100_000,  # about 10 ms for one mask
    "step_max_items": 50_000,  # about 3 ms for one mask
    "max_lexer_states": 50_000,  # about 100 MB at most
    "max_grammar_size": 100_000,  # symbols
    "verbose_errors": False,  # no states of the parser in messages
}

_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
#: Kinds of tokens whose masks llguidance keeps, so that it need not walk through them: blanks, and what may stand in a
#: string of JSON, by length, because a `maxLength` leaves room for a number of characters.
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(_CHARACTER + f"{{1,{most}}}" for most in (2, 4, 6, 8, 10, 12, 15, 20, 30)),
    _CHARACTER + "+",
]


def llguidance() -> Any:
    """The package; `GrammarError` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        what = "structured output needs the package llguidance, which is not installed"
        raise GrammarError(what, hint="install it: pip install 'rlx[structured]'") from None
    return llguidance


@cache
def limits() -> Any:
    """Bounds on what a grammar may cost, in time and memory. Beyond them is an error of the package."""
    return llguidance().LLParserLimits(**LIMITS)


_NOT_ENFORCED = ("Unimplemented keys", "Unknown format")  # beginnings of messages
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)  # the lines around a place
_EXPRESSION = re.compile(r"regex parse error:\n {4}(?P<text>[^\n]*)\n {4}(?P<blanks> *)\^+\nerror: (?P<what>[^\n]*)")
_WRAPPED = re.compile(r'(failed to compile JSON schema|invalid regex ".*?" \(in regex\)): ', re.DOTALL)
_EDGES = re.compile(r"lookarounds not supported yet; (\w+) in regex /.*/", re.DOTALL)
_SMALLER = "make it smaller: fewer alternatives, shorter lists and less nesting"
LENIENT = ", or enforce the rest: lenient=True"  # the end of a hint; interfaces without Python have other words
DEAD_END = "no token of the model continues the answer as the grammar asks"
_LONGEST = 400  # characters of a message


def grammar_error(message: str, name: str, kind: str = "lark", text: str = "", hint: str | None = None) -> GrammarError:
    """The error for a message of the package.

    Args:
        name: what the grammar is called, such as `json_schema`.
        kind, text: of the grammar, as the user gave it; of a translation the text is "".
        hint: the way out, if it is known.
    """
    what = message.replace("<non-verbose/>", "").strip()
    if what.startswith("NoExtension"):
        what = DEAD_END
    if "too big" in what or "too large" in what or "limit" in what or "fuel" in what or "too many" in what:
        hint = hint or _SMALLER
    elif kind == "json_schema" and what.startswith(_NOT_ENFORCED):
        hint = f"leave it out{LENIENT}"
    elif kind == "json_schema" and what.startswith("oneOf"):
        what = "oneOf is not supported where more than one of its schemas may match"
        hint = f"use anyOf{LENIENT}"
    return GrammarError(_shortened(_placed(what, kind, text)), where=name, hint=hint)


def _placed(what: str, kind: str, text: str) -> str:
    """A message with the place in the user's text."""
    place = ""
    if found := _PLACE.match(what):
        what = what[found.end() :]
        place = f"line {found[1]}, column {found[2]}: " if kind == "lark" and text else ""
    what = _WRAPPED.sub("", _EXCERPT.sub("", what))
    if _EDGES.search(what):
        what = "anchors and word boundaries are not supported: an expression matches the whole text"
        return place + what
    expression = _EXPRESSION.search(what)
    if expression is None:
        return place + what
    return place + _of_expression(expression, kind, text)


def _of_expression(found: re.Match[str], kind: str, text: str) -> str:
    """The error of a regular expression, and at which of its characters, from 0 on."""
    at = len(found["blanks"])
    if kind == "regex" and text:
        return f"character {_unescaped(text, at)}: {found['what']}"
    what = f"character {at}: {found['what']}"
    if kind == "json_schema" and text:
        path = next((path for path, value in _patterns(json.loads(text), "") if value == found["text"]), None)
        if path is not None:
            return f"{path}: {what}"
    return f"the expression {found['text'][:80]!r}: {what}"


def _unescaped(text: str, at: int) -> int:
    """The place in a text of what the package shows at `at`: it writes line breaks as two characters."""
    shown = 0
    for i, char in enumerate(text):
        if shown >= at:
            return i
        shown += 2 if char == "\n" else 1
    return len(text)


def _patterns(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    """The regular expressions of a schema, each with its place."""
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from _patterns(each, f"{path}[{i}]")
    elif isinstance(schema, dict):
        for name, each in schema.items():
            inner = f"{path}.{name}" if path else name
            if name == "pattern" and isinstance(each, str):
                yield inner, each
            elif name == "patternProperties" and isinstance(each, dict):
                yield from ((inner, pattern) for pattern in each)
            yield from _patterns(each, inner)


def _shortened(what: str) -> str:
    what = " ".join(what.split())
    return what if len(what) <= _LONGEST else what[:_LONGEST] + "..."
