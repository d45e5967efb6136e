"""Which format of tool calls a model writes: its chat template and vocabulary say.

Text stage, behind `ToolFormat.of`.
"""

from __future__ import annotations

from rlx.errors import ChatTemplateError
from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls.bare import LlamaFormat, PromptedFormat
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4, GemmaFormat
from rlx.text.tool_calls.tagged import HermesFormat, XmlFormat


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the chat template asks for; None without a chat template, or if it cannot be rendered.

    A template that does not show tools to the model gets the prompted form, whatever the vocabulary has.
    """
    from rlx.text.chat import template_of

    if tokenizer.chat_template is None and "tool_use" not in tokenizer.chat_templates:
        return None
    try:
        template = template_of(tokenizer, tools=True)
    except ChatTemplateError:
        return None
    if not template.takes_tools:
        return PromptedFormat(tokenizer)
    for marks in (GEMMA4, FUNCTION_GEMMA):
        if marks.begin in template.source:
            return GemmaFormat(marks, tokenizer)
    if "<function=" in template.source:
        return XmlFormat(tokenizer)
    if "<tool_call>" in template.source:
        return HermesFormat(tokenizer)
    return LlamaFormat(tokenizer)
