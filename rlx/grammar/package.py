"""The optional package llguidance, which parses grammars and computes masks.

Grammar stage. Everything that is specific to the package and not to one grammar: its import, its limits, its messages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from rlx.errors import GrammarError

_LIMITS = {
    "max_items_in_row": 2_000,  # ambiguity: alternatives that are followed at one place of the text
    "initial_lexer_fuel": 1_000_000,  # about 20 ms of regular expressions at the start
    "step_lexer_fuel": 100_000,  # about 10 ms for one mask
    "step_max_items": 50_000,  # about 3 ms for one mask
    "max_lexer_states": 50_000,  # about 100 MB at most
    "max_grammar_size": 100_000,  # symbols
    "verbose_errors": False,  # no states of the parser in messages
}

_NOT_ENFORCED = ("Unimplemented keys", "Unknown format")  # beginnings of messages


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
    return llguidance().LLParserLimits(**_LIMITS)


def grammar_error(text: str, where: str, is_schema: bool = False) -> GrammarError:
    """The error for a message of the package.

    Args:
        where: what the grammar is called, such as `json_schema`.
    """
    hint, text = None, text.replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        text = "no token of the model continues the answer as the grammar asks"
    if "too big" in text or "too large" in text or "limit" in text:
        hint = "make it smaller: fewer alternatives, shorter lists and less nesting"
    elif is_schema and text.startswith(_NOT_ENFORCED):
        hint = "leave it out, or have it ignored: lenient=True in Python, strict: false in a request"
    elif is_schema and text.startswith("oneOf"):
        text = "oneOf is not supported where more than one of its schemas may match"
        hint = "use anyOf, or have oneOf taken as anyOf: lenient=True in Python, strict: false in a request"
    return GrammarError(" ".join(text.split()), where=where, hint=hint)
