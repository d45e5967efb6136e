"""Structured output: what the text of an answer must look like, and the state of one answer under it.

Grammar stage, beside sampling: `Grammar` says what, `GrammarCompiler` makes it ready for one vocabulary, and a
`Constraint` follows one answer and says which tokens may come next.
"""

from rlx.grammar.answers import after_thinking
from rlx.grammar.compiler import GrammarCompiler
from rlx.grammar.constraint import Constraint
from rlx.grammar.grammar import Grammar

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "after_thinking"]
