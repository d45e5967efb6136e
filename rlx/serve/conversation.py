"""Messages in OpenAI's form, checked field by field, as the chat templates take them.

Server stage, below the APIs: those of other forms convert theirs to this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve.body import shown
from rlx.serve.custom_tools import call_of
from rlx.serve.errors import ApiError, invalid

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEDIA = {"input_audio": "audio", "audio_url": "audio", "video_url": "video", "file": "a file"}


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template.

    A developer speaks as the system. The arguments of tool calls become objects.

    Raises:
        ApiError: there is none, or one is malformed; the error names the field.
    """
    if not messages:
        raise invalid("messages", "it is empty", "send at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def merged_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the system at the beginning become one: chat templates take one."""
    found = list(messages)
    leading = next((i for i, each in enumerate(found) if each["role"] != "system"), len(found))
    if leading > 1 and all(isinstance(each["content"], str) for each in found[:leading]):
        text = "\n\n".join(each["content"] for each in found[:leading])
        found[:leading] = [{"role": "system", "content": text}]
    return found


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = _modern(message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"expected {', '.join(ROLES)}, found {shown(role)}")
    found = {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "tool":
        found["tool_call_id"] = _text(message.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "assistant":
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking is not None:
            found["reasoning_content"] = _text(thinking, f"{where}.reasoning_content")
        if message.get("tool_calls"):
            found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
        if found["content"] is None and isinstance(message.get("refusal"), str):
            found["content"] = message["refusal"]
    if found["content"] is None:
        if role != "assistant":
            raise invalid(f"{where}.content", "it is required")
        if "tool_calls" not in found:
            raise invalid(f"{where}.content", "there is neither content nor a tool call")
        found["content"] = ""
    return found


def _modern(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in today's form: calls and results once had the name of the function in place of an id."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": f"call_{message.get('name')}"}
    call = message.get("function_call")
    if isinstance(call, Mapping) and not message.get("tool_calls"):
        return {**message, "tool_calls": [{"id": f"call_{call.get('name')}", "type": "function", "function": call}]}
    return message


def _content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"expected a string or an array of parts, found {shown(content)}")
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, f"expected a part with a type, found {shown(part)}")
    if kind in ("text", "input_text", "output_text", "refusal"):
        key = "refusal" if kind == "refusal" else "text"
        return {"type": "text", "text": _text(part.get(key), f"{where}.{key}")}
    if kind in _MEDIA:
        raise invalid(f"{where}.type", f"the model does not take {_MEDIA[kind]}", code="unsupported_content")
    if kind not in ("image_url", "input_image", "image"):
        raise invalid(f"{where}.type", f"expected text or image_url, found {shown(kind)}")
    return dict(part)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid(where, "it is required" if value is None else f"expected a string, found {shown(value)}")
    return value


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(where, f"expected an array, found {shown(calls)}")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, dict) and isinstance(custom := call.get("custom"), dict):
        call = {**call, "function": call_of(custom.get("name"), _text(custom.get("input"), f"{where}.custom.input"))}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", "it is required")
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **found} if isinstance(call.get("id"), str) else found


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """The arguments of a call as an object, which templates write in their own way."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            raise invalid(where, f"expected the text of a JSON object, found {shown(value)}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(where, f"expected the text of a JSON object, found {shown(value)}")
    return value


#: What a chat template gets from elsewhere, and arguments of the functions that render it.
RESERVED = frozenset({
    "tokenizer", "model", "messages", "tools", "trust_content", "images", "takes_images", "bos_token", "eos_token",
    "continue_final_message", "check",
})  # fmt: skip


def checked_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further variables of a chat template.

    Raises:
        ApiError: one of them has a field of its own, or is not for requests to set.
    """
    found = dict(variables or {})
    for name in found:
        if name in RESERVED:
            raise invalid(f"chat_template_kwargs.{name}", "it cannot be set here", "leave it out")
    adds = found.get("add_generation_prompt", True)
    if not isinstance(adds, bool):
        raise invalid("add_generation_prompt", f"expected true or false, found {shown(adds)}")
    return found


def last_answer(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last message, which an answer is to continue.

    Raises:
        ApiError: it is not the assistant's, or calls tools.
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        what = "only a text of the assistant can be continued"
        raise ApiError(400, f"messages[{len(messages) - 1}]: {what}", param="continue_final_message")
    return last


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a conversation of nothing but the message that the answer is to continue.

    Raises:
        ApiError: as said.
    """
    if all(message["role"] == "system" for message in messages[:-1]):
        hint = "begin with a message of the user"
        raise invalid("messages", "there is nothing before the message that the answer continues", hint)
