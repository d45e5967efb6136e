"""The grammar of an answer: of the text that the request asks for, and of the tools that it offers.

Server stage, below the APIs. Where a model may think first, the grammar begins behind its thinking.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlx.grammar import Grammar, after_thinking
from rlx.serve.errors import invalid
from rlx.serve.model import in_thread
from rlx.text.tool_calls import ToolChoice

if TYPE_CHECKING:
    from rlx.serve.chat_prompt import ChatPrompt
    from rlx.serve.model import ServedModel

_START = re.compile(r"^start(?=\s*:)", re.MULTILINE)


async def answer_grammar(
    model: ServedModel, prompt: ChatPrompt, text: Grammar | None, field: str = "response_format"
) -> Grammar | None:
    """What an answer must look like; None if it is free.

    Args:
        prompt: has the tools, and how the model writes calls.
        text: what the request asks for, where it does.
        field: what that is called in the request.

    Raises:
        ApiError: a call is asked for as well as a text.
        GrammarError, ToolError: a grammar cannot be expressed.
    """
    if text is None and prompt.tool_format is None:
        return None
    return await in_thread(lambda: _answer_grammar(model, prompt, text, field))


def _answer_grammar(model: ServedModel, prompt: ChatPrompt, text: Grammar | None, field: str) -> Grammar | None:
    found = text if prompt.tool_format is None else _with_tools(prompt, text, field)
    return found and after_thinking(found, model.tokenizer, prompt.context.ids)


def _with_tools(prompt: ChatPrompt, text: Grammar | None, field: str) -> Grammar:
    """The grammar of an answer that may call tools, or must."""
    tool_format, tools, parallel = prompt.tool_format, prompt.tools, prompt.parallel
    assert tool_format is not None
    if prompt.choice.forced:
        if text is not None:
            raise invalid(
                field, "it cannot be together with a tool choice that asks for a call", "leave one of them out"
            )
        return Grammar.lark(tool_format.grammar(tools, prompt.choice, parallel))
    if text is not None:
        calls = tool_format.grammar(tools, ToolChoice("required"), parallel)
        return Grammar.lark(f"start: answer | calls\n{_renamed(calls, 'calls')}\n{_rule(text, 'answer')}")
    return Grammar.lark(tool_format.grammar(tools, prompt.choice, parallel)).lazy(tool_format.trigger, repeats=parallel)


def _rule(grammar: Grammar, name: str) -> str:
    """A grammar as a rule of a larger one."""
    if grammar.kind == "json_schema":
        return f"{name}: %json {grammar.text}"
    if grammar.kind == "regex":
        return f"{name}: /{grammar.text.replace('/', chr(92) + '/')}/"
    return _renamed(grammar.text, name)


def _renamed(lark: str, name: str) -> str:
    """A grammar in Lark's syntax whose first rule has another name."""
    return _START.sub(name, lark)
