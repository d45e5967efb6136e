"""The input of the Responses API as the messages and tools of a conversation.

Server stage. Models have one system message, at the beginning: `instructions` and all messages of the roles system and
developer become it. Consecutive items of the assistant (reasoning, texts, calls) become one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve import record
from rlx.serve.body import check_tool
from rlx.serve.conversation import Given, JsonObject, call_of, content_of, text_and_images, texts
from rlx.serve.custom_tools import INPUT, as_function
from rlx.serve.errors import ApiError, invalid
from rlx.serve.media import ImageSource

_ROLES = ("user", "assistant", "system", "developer")
_NO_STORE = "the server stores no responses"


def refuse_stored(body: Any) -> None:
    """Refuses what needs stored responses.

    Raises:
        ApiError: as said.
    """
    hint = "leave it out, and send the whole conversation as `input`: earlier items, with `output` of earlier responses"
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise invalid(name, _NO_STORE, hint, code="unsupported_parameter")


def messages_of(items: str | Sequence[Mapping[str, Any]] | None, instructions: str | None) -> list[JsonObject]:
    """The messages of a conversation.

    Args:
        items: the field `input`.

    Raises:
        ApiError: an item is malformed or of a kind that rlx has nothing for.
    """
    system = [instructions] if instructions else []
    found: list[JsonObject] = []
    if isinstance(items, str):
        found.append({"role": "user", "content": items})
    for i, item in enumerate(items if items is not None and not isinstance(items, str) else ()):
        _add(Given(item, f"input[{i}]"), system, found)
    if not found:
        raise invalid("input", "there is no message", 'give a text, or [{"role": "user", "content": "..."}]')
    return [{"role": "system", "content": "\n\n".join(system)}, *found] if system else found


def _add(item: Given, system: list[str], found: list[JsonObject]) -> None:
    """Adds one item of the input."""
    kind = item.value.get("type", "message" if "role" in item.value else None)
    if kind == "message":
        _add_message(item, system, found)
    elif kind == "reasoning":
        if text := _reasoning(item):
            message = _assistant(found)
            message["reasoning_content"] = f"{message.get('reasoning_content', '')}\n{text}".lstrip("\n")
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        given = (
            {INPUT: item.text("input")} if kind == "custom_tool_call" else arguments.text() and arguments.arguments()
        )
        call = call_of(item.text("name"), given or {}, item.text("call_id"))
        _assistant(found).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text, images = text_and_images(content_of(item.get("output"), _KINDS))
        found.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": text})
        if images:
            found.append({"role": "user", "content": images})
    elif kind == "item_reference":
        raise invalid(item.where, _NO_STORE, "send the item itself")
    else:
        hint = "there are message, reasoning, function_call, custom_tool_call and their outputs"
        raise invalid(f"{item.where}.type", f"items of type {kind!r} are not supported", hint)


def _add_message(item: Given, system: list[str], found: list[JsonObject]) -> None:
    role = item.value.get("role")
    if role not in _ROLES:
        raise invalid(f"{item.where}.role", f"expected one of {', '.join(_ROLES)}, found {role!r}")
    content = content_of(item.get("content"), _KINDS)
    if role == "user":
        found.append({"role": "user", "content": content})
    elif not isinstance(content, str):
        raise invalid(f"{item.where}.content", f"a message of the role {role} has no images")
    elif role == "assistant":
        _assistant(found)["content"] += content
    else:
        system.append(content)


def _assistant(found: list[JsonObject]) -> JsonObject:
    """The message of the assistant that is being written."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _reasoning(item: Given) -> str:
    """The text of a reasoning item: what the model wrote, else its summary. One of another server may have neither."""
    for name in ("content", "summary"):
        if parts := item.get(name).each() if item.value.get(name) else ():
            return "\n".join(part.text("text") for part in parts)
    return ""


def _image(part: Given) -> list[JsonObject]:
    if part.value.get("file_id") is not None:
        raise invalid(f"{part.where}.file_id", "the server stores no files", "give `image_url`, a data URI")
    return [ImageSource(part.text("image_url"), f"{part.where}.image_url").part]


_KINDS = {
    **dict.fromkeys(("input_text", "output_text", "text"), texts()),
    "refusal": texts("refusal"),
    "input_image": _image,
}


# ---------------------------------------------------------------------------------------------- tools


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> list[JsonObject]:
    """The functions and custom tools, these as functions, in the form of chat. Compiles grammars.

    Tools of other types run at a provider, or are a client's own: agents list them whatever server they talk to, so
    they are left out, which the header for ignored fields says. `tools` of the response shows what remains.

    Raises:
        ApiError: a tool is malformed.
    """
    found = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") == "function":
            names = ("name", "description", "parameters", "strict")
            function = {name: tool[name] for name in names if tool.get(name) is not None}
        elif tool.get("type") == "custom":
            function = as_function(tool, f"tools[{i}]")
        else:
            record.ignore(f"tools[{i}]")
            continue
        found.append({"type": "function", "function": function})
        check_tool(found[-1], f"tools[{i}]", "parameters")
    return found


def custom_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The custom tools by name."""
    return {str(tool.get("name")): tool for tool in tools or () if tool.get("type") == "custom"}


def tools_json(functions: Sequence[JsonObject], custom: Mapping[str, Mapping[str, Any]]) -> list[JsonObject]:
    """Functions as the response shows them, custom tools as they were sent."""
    empty = {"description": None, "parameters": None, "strict": None}
    return [
        {**custom[name]} if (name := each["function"].get("name")) in custom else
        {"type": "function", **empty, **each["function"]} for each in functions
    ]  # fmt: skip


def choice_of(choice: Any, functions: list[JsonObject]) -> tuple[Any, list[JsonObject]]:
    """The tool choice in the form of chat, and the functions that remain for it.

    Raises:
        ApiError: it has a form that rlx has nothing for.
    """
    if not isinstance(choice, Mapping):
        if not functions and choice in ("auto", "none"):
            return None, functions
        return choice, functions
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}, functions
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required") and isinstance(choice.get("tools"), list):
        names = [each.get("name") for each in choice["tools"] if isinstance(each, Mapping)]
        remaining = [each for each in functions if each["function"].get("name") in names]
        return choice["mode"] if remaining or choice["mode"] == "required" else None, remaining
    raise _unknown_choice(kind)


def _unknown_choice(kind: Any) -> ApiError:
    hint = "give auto, none, required, a function, a custom tool or allowed_tools"
    return invalid("tool_choice", f"the type {kind!r} is not supported", hint)
