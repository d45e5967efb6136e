"""The tools of a chat: functions, custom tools, and the older fields `functions` and `function_call`.

Server stage, under OpenAI's paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.serve.body import shown
from rlx.serve.custom_tools import as_function
from rlx.serve.errors import invalid

if TYPE_CHECKING:
    from rlx.serve.openai.bodies import ChatBody
    from rlx.text.tool_calls import ToolCallDelta

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Offered:
    """The tools that a chat offers.

    Attributes:
        tools: functions.
        choice: whether one has to be called, as `rlx.text.tool_calls.checked_choice` takes it.
        custom: names of those that stand for custom tools.
        legacy: whether the body has `functions`, and the answer `function_call`.
    """

    tools: list[JsonObject] | None = None
    choice: Any = None
    custom: frozenset[str] = frozenset()
    legacy: bool = False

    @property
    def reason(self) -> str:
        """The `finish_reason` of an answer that calls."""
        return "function_call" if self.legacy else "tool_calls"

    def call_json(self, call: ToolCallDelta) -> JsonObject:
        """A call of an answer."""
        if call.name in self.custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def offered(body: ChatBody) -> Offered:
    """The tools of a body. Compiles grammars.

    Raises:
        ApiError: a custom tool or a choice is malformed, or fields contradict each other.
    """
    if body.functions:
        if body.tools:
            raise invalid("functions", "it cannot be together with tools", "use tools")
        choice = {"type": "function", "function": body.function_call}
        named = isinstance(body.function_call, dict)
        functions = [{"type": "function", "function": each} for each in body.functions]
        return Offered(functions, choice if named else body.function_call, legacy=True)
    if isinstance(body.function_call, dict):
        raise invalid("function_call", "there are no functions", "give tools and tool_choice")
    tools, custom = list[JsonObject](), set[str]()
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") == "custom":
            function = as_function(tool.get("custom"), f"tools[{i}].custom")
            custom.add(str(function["name"]))
            tool = {"type": "function", "function": function}
        tools.append(tool)
    return _chosen(tools, body.tool_choice, frozenset(custom))


def _chosen(tools: list[JsonObject], choice: Any, custom: frozenset[str]) -> Offered:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # some clients send it flat, as the Responses API has it
        tools, choice = _allowed(tools, allowed if isinstance(allowed, Mapping) else {})
    elif isinstance(choice, Mapping) and choice.get("type") == "custom":
        choice = {"type": "function", "function": choice.get("custom")}
    if not tools and choice in ("auto", "none"):
        choice = None
    return Offered(tools or None, choice, custom)


def _allowed(tools: list[JsonObject], allowed: Mapping[str, Any]) -> tuple[list[JsonObject], str]:
    """The tools that a choice leaves, and the choice among them."""
    mode, entries, where = allowed.get("mode"), allowed.get("tools"), "tool_choice.allowed_tools"
    if mode not in ("auto", "required"):
        raise invalid(f"{where}.mode", f"expected auto or required, found {shown(mode)}")
    if not isinstance(entries, list):
        raise invalid(f"{where}.tools", f"expected an array, found {shown(entries)}")
    known = {_name(tool): tool for tool in tools}
    for i, entry in enumerate(entries):
        if _name(entry) not in known:
            raise invalid(f"{where}.tools[{i}]", f"there is no tool {shown(_name(entry))}", "name one of tools")
    return [known[name] for name in dict.fromkeys(map(_name, entries))], mode


def _name(tool: Any) -> str:
    """The name in a tool, or in what refers to one."""
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function") or tool.get("custom") or tool
    return str(inner.get("name")) if isinstance(inner, Mapping) else ""
