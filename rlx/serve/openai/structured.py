"""The grammar that an answer must follow, from the fields that ask for one. Server stage, under OpenAI's paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.serve.errors import invalid

if TYPE_CHECKING:
    from rlx.serve.chat_prompt import ChatPrompt
    from rlx.serve.model import ServedModel
    from rlx.serve.openai.bodies import StructureFields

_FIELDS = (
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar grammar json_schema "
    "regex ebnf"
).split()


async def grammar_of(model: ServedModel, body: StructureFields, prompt: ChatPrompt | None = None) -> Any:
    """The grammar of a body, and of the tools that it offers; None if there is none.

    Raises:
        ApiError: a grammar cannot be compiled, or there are several.
    """
    for name in _FIELDS:
        value = getattr(body, name)
        if value is not None and value != {"type": "text"}:
            raise invalid(name, "it is not supported yet")
    return None
