"""Ollama's messages as the messages and tools of a conversation.

Server stage. Images are in base64 in a field of their own; arguments of tool calls are objects; results of tools name
the tool, not the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve.errors import invalid
from rlx.serve.fields import shown
from rlx.serve.media import base64_source

JsonObject = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """The messages of a conversation.

    Raises:
        ApiError: a message is malformed.
    """
    found: list[JsonObject] = []
    called: list[JsonObject] = []  # the calls that have no result yet
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        made = _message(message, where)
        if made["role"] == "tool":
            made["tool_call_id"] = _answered(message, called)
        called += made.get("tool_calls", ())
        found.append(made)
    return found


def _message(message: Mapping[str, Any], where: str) -> JsonObject:
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(_ROLES)}, found {shown(role)}")
    found: JsonObject = {"role": role, "content": user_content(message.get("content"), message.get("images"), where)}
    if role == "tool" and isinstance(message.get("tool_name"), str):
        found["name"] = message["tool_name"]
    if role == "assistant":
        thinking = message.get("thinking")
        if thinking:
            found["reasoning_content"] = _string(thinking, f"{where}.thinking")
        if message.get("tool_calls"):
            found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return found


def user_content(text: Any, images: Any, where: str = "", field: str = "content") -> Any:
    """A text, or parts of a text and its images, which come first."""
    said = "" if text is None else _string(text, f"{where}.{field}".lstrip("."))
    if not images:
        return said
    place = f"{where}.images".lstrip(".")
    if not isinstance(images, list):
        raise invalid(place, f"expected an array of images in base64, found {shown(images)}")
    parts = [base64_source(image, f"{place}[{i}]").part for i, image in enumerate(images)]
    return [*parts, {"type": "text", "text": said}]


def _calls(calls: Any, where: str) -> list[JsonObject]:
    if not isinstance(calls, list):
        raise invalid(where, f"expected an array, found {shown(calls)}")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise invalid(f"{where}[{i}].function", "it is required")
        arguments = function.get("arguments")
        if not isinstance(arguments, Mapping):
            raise invalid(f"{where}[{i}].function.arguments", f"expected an object, found {shown(arguments)}")
        name = _string(function.get("name"), f"{where}[{i}].function.name")
        identity = call["id"] if isinstance(call.get("id"), str) else f"call_{i}"
        found.append({"id": identity, "type": "function", "function": {"name": name, "arguments": dict(arguments)}})
    return found


def _answered(message: Mapping[str, Any], called: list[JsonObject]) -> str:
    """The id of the call that a result belongs to: as said, else the first open call of that tool, or of any."""
    if isinstance(message.get("tool_call_id"), str):
        return str(message["tool_call_id"])
    name = message.get("tool_name")
    same = [call for call in called if call["function"]["name"] == name]
    for call in (same or called)[:1]:
        called.remove(call)
        return str(call["id"])
    return "call_0"


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid(where, f"expected a string, found {shown(value)}")
    return value
