"""Chat templates in place of a model's own: by name, from a file, as a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.errors import ArgumentError
from rlx.text import ChatTemplate
from rlx.text.chat import NAMED, template_text

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go"},
]
#: The forms as the authors of the models describe them.
FORMS = {
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nGo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
    "<start_of_turn>user\nGo<end_of_turn>\n<start_of_turn>model\n",
}
SHOUT = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"


@pytest.mark.parametrize("name", list(NAMED))
def test_a_name_is_the_form_of_a_family(name: str) -> None:
    assert ChatTemplate(NAMED[name], bos_token="<s>").render(TALK) == FORMS[name]


def test_a_template_is_a_file_a_name_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUT)
    assert template_text(file) == template_text(str(file)) == template_text(SHOUT) == SHOUT
    assert template_text("chatml") == NAMED["chatml"]


@pytest.mark.parametrize("value", ["no-such.jinja", ".", "", 5, "chat\0ml"])
def test_anything_else_is_refused_before_a_model_is_opened(value: Any) -> None:
    with pytest.raises(ArgumentError, match="chat_template"):
        rlx.auto_runner("demo", chat_template=value)
