"""A grammar for the answer of a model that may think before it answers.

Grammar stage, over `rlx.text.answer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.grammar.grammar import Grammar
from rlx.text.answer import ThinkingTags
from rlx.text.tokenizer import Tokenizer


def after_thinking(grammar: Grammar, tokenizer: Tokenizer, prompt: Sequence[int]) -> Grammar:
    """The grammar, beginning after the model's thinking, if it thinks.

    Args:
        prompt: ids of the prompt. It may end inside the thinking, or behind it.
    """
    tags = ThinkingTags.of(tokenizer)
    if tags is None or grammar.thinking_end is not None or tags.is_closed(tokenizer, prompt):
        return grammar
    return grammar.after(tags.end, None if tags.is_open(tokenizer, prompt) else tags.begin)
