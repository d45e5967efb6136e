"""The functions that a model may call, as a caller describes them.

Text stage. The form is that of the OpenAI API, also without the outer object:

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema of an object}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.errors import ToolError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
CHOICES = ("auto", "none", "required")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that the model may call.

    Attributes:
        name: its name.
        parameters: the JSON schema of its arguments; by default there are none.
        description: what it does.
        strict: whether the arguments must follow the schema even where the model decides whether it calls.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    description: str = ""
    strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the single arguments by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class ToolChoice:
    """Whether and what the model has to call.

    Attributes:
        mode: `auto` lets the model decide, `none` forbids calls, `required` asks for a call.
        name: the one tool to call; None for any.
    """

    mode: str = "auto"
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode == "required"


def checked_tools(tools: Any, where: str = "tools") -> tuple[Tool, ...]:
    """The tools that a caller means.

    Raises:
        ToolError: an entry is no function, has no usable name, or two have the same name.
    """
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise ToolError(f"expected a list of tools, found a {type(tools).__name__}", where=where)
    found = [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]
    names: set[str] = set()
    for i, tool in enumerate(found):
        if tool.name in names:
            raise ToolError(f"two tools are called {tool.name!r}", where=f"{where}[{i}]", hint="rename one of them")
        names.add(tool.name)
    return tuple(found)


def _tool(value: Any, where: str) -> Tool:
    if not isinstance(value, Mapping):
        raise ToolError(f"expected a JSON object, found a {type(value).__name__}", where=where)
    if (kind := value.get("type", "function")) != "function":
        raise ToolError(f"type is {kind!r}, expected 'function'", where=f"{where}.type")
    if "function" in value:
        value, where = value["function"], f"{where}.function"
    if not isinstance(value, Mapping):
        raise ToolError(f"expected a JSON object, found a {type(value).__name__}", where=where)
    name, parameters, about = value.get("name"), value.get("parameters"), value.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        hint = "a name has 1 to 128 letters, digits and _ . : / -"
        raise ToolError(f"the name is {name!r}", where=f"{where}.name", hint=hint)
    if parameters is not None and not isinstance(parameters, Mapping):
        what = f"expected a JSON schema, found a {type(parameters).__name__}"
        raise ToolError(what, where=f"{where}.parameters")
    if (kind := (parameters or {}).get("type", "object")) != "object":
        raise ToolError(f"type is {kind!r}, expected 'object'", where=f"{where}.parameters.type")
    if about is not None and not isinstance(about, str):
        raise ToolError(f"expected a text, found a {type(about).__name__}", where=f"{where}.description")
    return Tool(name, parameters or NO_PARAMETERS, about or "", value.get("strict") is True)


def checked_choice(choice: Any, tools: Sequence[Tool], where: str = "tool_choice") -> ToolChoice:
    """A caller's choice of calls: `auto`, `none`, `required`, or a tool as
    `{"type": "function", "function": {"name": ...}}`. None is `auto` with tools, else `none`.

    Raises:
        ToolError: it has none of these forms, asks for a call without tools, or names a tool that is not there.
    """
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(choice, ToolChoice):
        return choice
    name = None
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type", "function") != "function" or not isinstance(name, str):
            hint = 'give {"type": "function", "function": {"name": ...}}'
            raise ToolError(f"expected a function's name, found {str(dict(choice))[:80]}", where=where, hint=hint)
    elif choice not in CHOICES:
        hint = 'give {"type": "function", "function": {"name": ...}} for one tool'
        raise ToolError(f"found {choice!r}, expected {', '.join(CHOICES)}", where=where, hint=hint)
    if not tools and choice != "none":
        raise ToolError("there are no tools", where=where, hint="give tools, or leave tool_choice out")
    if name is not None and name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools)
        raise ToolError(f"there is no tool {name!r}", where=where, hint=f"the tools are {known}")
    return ToolChoice("required", name) if name is not None else ToolChoice(choice)
