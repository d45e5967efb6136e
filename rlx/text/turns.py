"""The end-of-turn token: the control token that the chat template puts behind an answer.

Text stage, used by `tokenizer.py`. Model files name the end-of-text token, but often not the end-of-turn token. It is
found by rendering the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.errors import ChatTemplateError
from rlx.text.vocabulary import TokenType

if TYPE_CHECKING:
    from rlx.text.chat import ChatTemplate
    from rlx.text.tokenizer import Tokenizer

_QUESTION, _ANSWER = {"role": "user", "content": "qzquestion"}, {"role": "assistant", "content": "qzanswer"}


def turn_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """The control token behind an answer, if the template puts the same one there before a next turn and at the end.

    A token that follows in one case only belongs to something else, such as the head of the next turn. If the template
    cannot be rendered the result is empty; using the template raises its error.
    """
    if tokenizer.chat_template is None:
        return frozenset()
    from rlx.text.chat import template_of

    try:
        template = template_of(tokenizer)
        last, inner = (_behind_answer(tokenizer, template, messages) for messages in ([], [_QUESTION]))
    except ChatTemplateError:
        return frozenset()
    return frozenset({last}) if last is not None and last == inner else frozenset()


def _behind_answer(tokenizer: Tokenizer, template: ChatTemplate, more: list[dict[str, str]]) -> int | None:
    """The control token that follows the answer in a conversation that goes on with `more`, spaces aside."""
    text = template.render([_QUESTION, _ANSWER, *more], add_generation_prompt=False)
    _, found, behind = text.partition(_ANSWER["content"])
    for first in tokenizer.control_splitter.split(behind.lstrip()) if found else ():
        return first if isinstance(first, int) and tokenizer.vocabulary.types[first] == TokenType.CONTROL else None
    return None
