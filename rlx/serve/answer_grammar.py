"""The grammar of an answer: of the text that the request asks for, and of the tools that it offers.

Server stage, below the APIs. Where a model may think first, the grammar begins behind its thinking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.grammar import Grammar, after_thinking
from rlx.grammar.tool_calls import calls_grammar
from rlx.serve.errors import invalid
from rlx.serve.model import in_thread

if TYPE_CHECKING:
    from rlx.serve.chat_prompt import ChatPrompt
    from rlx.serve.model import ServedModel


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
    if prompt.choice.forced and text is not None:
        raise invalid(field, "it cannot be together with a tool choice that asks for a call", "leave one of them out")
    found = calls_grammar(prompt.tool_format, prompt.tools, prompt.choice, prompt.parallel, text)
    return found and after_thinking(found, model.tokenizer, prompt.context.ids)
