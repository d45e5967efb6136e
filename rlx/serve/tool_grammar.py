"""The grammar of an answer that may or must call tools, and may have a form of its own.

Server stage, used by all APIs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from anyio import move_on_after, to_thread

from rlx.errors import DeadlineError
from rlx.grammar import Grammar, after_thinking
from rlx.grammar.tool_calls import calls_grammar
from rlx.serve import record

if TYPE_CHECKING:
    from rlx.serve.chat_prompt import ChatPrompt
    from rlx.serve.model import ServedModel


async def answer_grammar(
    model: ServedModel,
    make: Callable[[], Grammar] | None,
    prompt: ChatPrompt | None = None,
    timeout: float | None = None,
) -> Grammar | None:
    """The grammar of an answer, ready for the model. A few are made at once, and the others wait without a thread.

    Where calls are forced, the answer is nothing but calls. Where the model decides, calls follow their schemas, and an
    answer without a call follows the grammar of the text. It begins after the model's thinking.

    Args:
        make: makes the grammar of the text; None for free text.
        prompt: of a conversation, which may offer tools.
        timeout: seconds after which the request fails, beside the limits of the server.

    Raises:
        ToolError: tools are forced, or strict, and the schema of one cannot be enforced; or the grammar of the text
            cannot stand beside tools.
        GrammarError: the grammar cannot be compiled.
        DeadlineError: the time of the request ended while it waited.
    """
    if make is None and (prompt is None or not prompt.tools):
        return None
    found = record.current()
    with move_on_after(timeout if found is None else found.time_left(timeout)):
        return await to_thread.run_sync(lambda: _ready(model, make, prompt), limiter=model.grammar_turns)
    hint = "give it more time, or send fewer grammars at once"
    raise DeadlineError("the request was not finished in time: its grammar waited", where="timeout", hint=hint)


def _ready(model: ServedModel, make: Callable[[], Grammar] | None, prompt: ChatPrompt | None) -> Grammar | None:
    grammar = None if make is None else make()
    found = grammar if prompt is None else _joined(grammar, prompt)
    if found is None:
        return None
    if prompt is not None and prompt.begins:
        found = after_thinking(found, model.tokenizer, prompt.context.ids)
    model.runner.grammars.compile(found)  # kept for the generation
    return found


def _joined(grammar: Grammar | None, prompt: ChatPrompt) -> Grammar | None:
    form, tools, choice = prompt.tool_format, prompt.tools, prompt.choice
    if form is None or not tools:
        return grammar
    return calls_grammar(form, tools, choice, prompt.parallel, None if choice.forced else grammar)
