"""Tool calls: the formats in which models write them, found from the chat template and vocabulary of a model.

Text stage. `format.py` is the interface; each format is a row; `tools.py` checks what a caller gives, and brings
conversations with calls into the form that chat templates take.
"""

from typing import TYPE_CHECKING

from rlx.lazy import names_of

if TYPE_CHECKING:
    from rlx.text.tool_calls.format import CallParser, Part, ToolCall, ToolCallDelta, ToolFormat, new_call_id
    from rlx.text.tool_calls.tools import Tool, ToolChoice, checked_choice, checked_tools

__all__ = [
    "CallParser",
    "Part",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "checked_choice",
    "checked_tools",
    "new_call_id",
]

_OF_TOOLS = ("Tool", "ToolChoice", "checked_choice", "checked_tools")

__getattr__ = names_of(
    "rlx.text.tool_calls",
    {**dict.fromkeys(__all__, "rlx.text.tool_calls.format"), **dict.fromkeys(_OF_TOOLS, "rlx.text.tool_calls.tools")},
)
