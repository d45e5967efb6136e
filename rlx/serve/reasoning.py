"""How much a model reasons, from the words of the APIs to variables of its chat template.

Server stage, below the APIs.
"""

from __future__ import annotations

from typing import Any

from rlx.serve import record
from rlx.serve.errors import invalid
from rlx.text.answer import ThinkingTags
from rlx.text.chat import thinking_variables
from rlx.text.tokenizer import Tokenizer

_EFFORT, _SWITCH = "reasoning_effort", "enable_thinking"


def can_think(tokenizer: Tokenizer) -> bool:
    """Whether a model reasons before it answers, always or if it is told to."""
    return ThinkingTags.of(tokenizer) is not None


def effort_variables(tokenizer: Tokenizer, effort: str | None, field: str) -> dict[str, Any]:
    """The template's variables for an effort; nothing for None.

    A template that only knows whether the model reasons is told so: `none` is off, any other effort is on.

    Args:
        field: what the effort is called in the request.

    Raises:
        ApiError: the model always reasons, and shall not.
    """
    if effort is None:
        return {}
    template = tokenizer.chat_template or ""
    if _EFFORT in template:
        switch = {_SWITCH: effort != "none"} if _SWITCH in template else {}
        return {_EFFORT: effort, **switch}
    if effort != "none" and _SWITCH not in template:
        record.ignore(field)  # it reasons as it always does, or never
        return {}
    return switch_variables(tokenizer, effort != "none", field, effort)


def switch_variables(tokenizer: Tokenizer, thinks: bool | None, field: str, value: object = None) -> dict[str, Any]:
    """The template's variables for reasoning that is on or off; nothing for None.

    Agents ask every model to reason. One that cannot answers without.

    Raises:
        ApiError: the model always reasons, and shall not.
    """
    if thinks is None:
        return {}
    if _SWITCH in (tokenizer.chat_template or ""):
        return thinking_variables(tokenizer, thinks, field)
    if thinks == can_think(tokenizer):
        return {}
    if thinks:
        record.ignore(field)
        return {}
    shown = value if value is not None else thinks
    what = f"{shown!r} is not possible: the model always reasons before it answers"
    raise invalid(field, what, "leave the field out")
