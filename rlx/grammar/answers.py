"""The grammars of answers that may begin with thinking, or call tools.

Grammar stage, over `rlx.text`, whose formats of tool calls write the grammars. Used by the chat methods of runners and
by the server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

from rlx.errors import GrammarError, ToolError
from rlx.grammar.grammar import Grammar, generated
from rlx.grammar.package import llguidance
from rlx.text.answer import ThinkingTags
from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls.format import AUTO, ToolFormat
from rlx.text.tool_calls.tools import Tool, ToolChoice


def after_thinking(grammar: Grammar, tokenizer: Tokenizer, prompt: Sequence[int]) -> Grammar:
    """The grammar, beginning after the model's thinking, if it thinks.

    Args:
        prompt: ids of the prompt. It may end inside the thinking, or behind it.
    """
    tags = ThinkingTags.of(tokenizer)
    if tags is None or grammar.thinking_end is not None or tags.is_closed(tokenizer, prompt):
        return grammar
    return grammar.after(tags.end, None if tags.is_open(tokenizer, prompt) else tags.begin)


_ANSWER = "answer_without_calls"  # the rule for it
_START = re.compile(r"\bstart\b")


def calls_grammar(
    tool_format: ToolFormat | None,
    tools: Sequence[Tool],
    choice: ToolChoice = AUTO,
    parallel: bool = True,
    text: Grammar | None = None,
) -> Grammar | None:
    """The grammar of an answer if there are tools; None if it may be anything.

    With `auto` the text is free until a call begins, so that it costs nothing. This is a help for the model: where
    llguidance is not installed, and no tool is `strict`, nothing is enforced.

    Args:
        tool_format: how the model writes calls; None for a model that cannot call tools.
        tools: what it may call.
        choice: whether it must.
        parallel: whether it may call several.
        text: what an answer without calls must look like.

    Raises:
        ToolError: the schema of a tool cannot be enforced; a call is required and `text` given; or the model cannot
            call tools.
        GrammarError: llguidance is not installed.
    """
    if not tools or choice.mode == "none":
        return text
    if tool_format is None:
        raise ToolError("the model has no chat template, so it cannot call tools", where="tools")
    if choice.forced and text is not None:
        hint = "leave one of them out, or use tool_choice auto"
        raise ToolError("a call is required, and the text has a form of its own", where="tool_choice", hint=hint)
    is_free = not choice.forced and text is None
    if is_free and find_spec("llguidance") is None and not any(tool.strict for tool in tools):
        return None
    llguidance()
    if text is None:
        grammar = generated(tool_format.grammar(tools, choice, parallel, None, _error_of))
        return grammar.lazy(tool_format.trigger, repeats=parallel) if is_free else grammar
    calls = tool_format.grammar(tools, choice, parallel, _ANSWER, _error_of)
    return generated(calls + _rule(text))


@lru_cache(maxsize=256)
def _error_of(text: str) -> str:
    """The error of the grammar of a tool's arguments; an empty text if nothing is."""
    try:
        generated(text)
    except GrammarError as error:
        return error.what
    return ""


def _rule(text: Grammar) -> str:
    """A grammar as the rule `answer` of a larger one."""
    if text.kind != "lark":
        return f"{_ANSWER}: {text.rule}\n"
    if len(_START.findall(text.text)) != 1:
        raise ToolError("the grammar refers to its rule start, which it may not beside tools", where="grammar")
    return _START.sub(_ANSWER, text.text) + "\n"
