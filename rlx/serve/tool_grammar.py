"""The grammar of an answer that may or must call tools, and may have a form of its own.

Server stage, used by all APIs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlx.errors import GrammarError, ToolError
from rlx.grammar import Grammar, after_thinking
from rlx.serve.errors import invalid
from rlx.text.tool_calls import ToolChoice

if TYPE_CHECKING:
    from rlx.serve.chat_prompt import ChatPrompt
    from rlx.text.tokenizer import Tokenizer

_START = re.compile(r"^start\b", re.MULTILINE)


def with_tools(tokenizer: Tokenizer, grammar: Grammar | None, prompt: ChatPrompt) -> Grammar | None:
    """The grammar of an answer to a conversation; it begins after the model's thinking.

    Where calls are forced, the answer is nothing but calls. Where the model decides, calls follow their schemas, and an
    answer without a call follows `grammar`.

    Args:
        grammar: of the text; None for free text.

    Raises:
        ToolError: tools are forced, or strict, and the schema of one cannot be expressed.
        ApiError: `grammar` and tools cannot be together.
    """
    found = _joined(grammar, prompt)
    if found is None or not prompt.begins:
        return found
    return after_thinking(found, tokenizer, prompt.context.ids)


def _joined(grammar: Grammar | None, prompt: ChatPrompt) -> Grammar | None:
    form, tools, choice = prompt.tool_format, prompt.tools, prompt.choice
    if form is None or not tools:
        return grammar
    if choice.forced:
        return _lark(form.grammar(tools, choice, prompt.parallel))
    if grammar is not None:
        forced = form.grammar(tools, ToolChoice("required"), prompt.parallel)
        return _lark(f"start: said | calls\nsaid: {_rule(grammar)}\n{_START.sub('calls', forced)}")
    return _lark(form.grammar(tools, choice, prompt.parallel)).lazy(form.trigger, repeats=prompt.parallel)


def _lark(text: str) -> Grammar:
    try:
        return Grammar.lark(text)
    except GrammarError as error:
        raise ToolError(f"the schema of a tool cannot be enforced: {error.what}", where="tools") from error


def _rule(grammar: Grammar) -> str:
    """A grammar as the right side of a rule in Lark's syntax."""
    try:
        return grammar.rule
    except GrammarError:
        hint = "use a JSON schema, or tool_choice none"
        raise invalid("tools", "they cannot be together with a grammar", hint) from None
