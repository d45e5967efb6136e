"""The optional package llguidance, which parses grammars and computes masks.

Grammar stage. Everything that is specific to the package and not to one grammar: its import, its limits, its messages.
"""

from __future__ import annotations

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
