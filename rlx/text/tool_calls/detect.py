"""Which format of tool calls a model writes: its chat template and vocabulary say.

Text stage, behind `ToolFormat.of`.
"""

from __future__ import annotations

from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.tagged import HermesFormat, XmlFormat


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format; None without a chat template."""
    template = tokenizer.chat_templates.get("tool_use") or tokenizer.chat_template
    if template is None:
        return None
    return XmlFormat() if "<function=" in template else HermesFormat()
