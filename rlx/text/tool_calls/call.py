"""A tool call as a whole, made of the pieces that a parser gives.

Text stage, used by the runners' chat methods.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlx.text.tool_calls.format import ToolCallDelta


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, which the model asks for.

        for call in answer.tool_calls:
            messages.append(call.result(FUNCTIONS[call.name](**call.arguments)))

    Attributes:
        id: of the call; its result refers to it.
        name: of the function. It may be one that is not there.
        arguments: by name. The model chose them: check them before they do harm. If the answer ended at `max_tokens`,
            those of the last call may be incomplete.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def result(self, value: Any) -> dict[str, Any]:
        """The message that tells the model what the call returned.

        Args:
            value: a text as it stands; anything else becomes JSON.
        """
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a message."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


def whole_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of an answer."""
    heads: dict[int, ToolCallDelta] = {}
    texts: dict[int, str] = {}
    for delta in deltas:
        heads.setdefault(delta.index, delta)
        texts[delta.index] = texts.get(delta.index, "") + delta.arguments
    return tuple(ToolCall(head.id, head.name, json.loads(texts[index])) for index, head in heads.items())
