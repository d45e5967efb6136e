"""Structured output: what the text of an answer must look like, and the state of one answer under it.

Grammar stage, beside sampling: `Grammar` says what, `GrammarCompiler` makes it ready for one vocabulary, and a
`Constraint` follows one answer and says which tokens may come next.
"""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.grammar.answers import after_thinking, calls_grammar
    from rlx.grammar.compiler import GrammarCompiler
    from rlx.grammar.constraint import Constraint
    from rlx.grammar.grammar import Grammar, chosen_grammar, parsed

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "after_thinking", "calls_grammar", "chosen_grammar", "parsed"]

_HOMES = {
    "Constraint": "rlx.grammar.constraint",
    "Grammar": "rlx.grammar.grammar",
    "GrammarCompiler": "rlx.grammar.compiler",
    **dict.fromkeys(("after_thinking", "calls_grammar"), "rlx.grammar.answers"),
    **dict.fromkeys(("chosen_grammar", "parsed"), "rlx.grammar.grammar"),
}

__getattr__ = names_of("rlx.grammar", _HOMES)
