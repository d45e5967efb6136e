"""Chat templates that take the place of a model's own: from a file, as a text, or by the name of a widespread form.

Text stage, in front of `tokenizer.py`: the option `chat_template` of an engine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlx.errors import ArgumentError
from rlx.json_file import read_text

_WHERE = "chat_template"
_JINJA = ("{{", "{%")
_HEADED = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>{{ '\n\n' }}"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
_TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else 'user' }}{{ '\n' }}"
    "{{ message.content | trim }}<end_of_turn>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model{{ '\n' }}{% endif %}"
)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
NAMED = {"chatml": _CHATML, "llama3": _HEADED, "gemma": _TURNS}
"""The forms that have a name: those of Qwen and many others, of Llama 3, and of Gemma 1 to 3."""


def template_text(value: Any) -> str:
    """The source of a chat template.

    Args:
        value: a path, a name of `NAMED`, or the source itself, which is a text with `{{` or `{%`.

    Raises:
        ArgumentError: it is none of these, or the file cannot be read.
    """
    if isinstance(value, str) and any(mark in value for mark in _JINJA):
        return value
    if isinstance(value, str) and value in NAMED:
        return NAMED[value]
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ArgumentError(f"{value!r} is no path", where=_WHERE, hint="name a file with a Jinja template")
    file = Path(os.fsdecode(value)).expanduser()
    try:
        return read_text(file, ArgumentError)
    except ArgumentError as error:
        hint = f"name a file with a Jinja template, or one of {', '.join(NAMED)}"
        raise ArgumentError(f"{str(value)[:200]!r}: {error.what}", where=_WHERE, hint=hint) from None
