"""The messages of requests: one reader for all APIs, field by field, to the form that chat templates take.

Server stage, below the APIs. An API says which kinds of parts a content may have, and which messages its own become:
here is what they are read with, and OpenAI's form, which is the one that chat templates know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.serve.body import shown
from rlx.serve.custom_tools import INPUT
from rlx.serve.errors import ApiError, invalid

JsonObject = dict[str, Any]


class Given:
    """A value of a request and its place, such as `messages[0].content`, which errors name.

    Attributes:
        value: as JSON has it.
        where: its place.
    """

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where

    def get(self, name: str) -> Given:
        """A field of an object; its value is None if there is none."""
        return Given(self.value.get(name), f"{self.where}.{name}".lstrip("."))

    def each(self) -> list[Given]:
        """The objects of an array.

        Raises:
            ApiError: it is something else.
        """
        if not isinstance(self.value, list):
            raise invalid(self.where, f"expected an array, found {shown(self.value)}")
        return [Given(value, f"{self.where}[{i}]").checked() for i, value in enumerate(self.value)]

    def checked(self) -> Given:
        """The field, which has an object.

        Raises:
            ApiError: it has something else.
        """
        if not isinstance(self.value, Mapping):
            raise invalid(self.where, f"expected an object, found {shown(self.value)}")
        return self

    def text(self, name: str | None = None) -> str:
        """The string that it is, or that its field `name` is.

        Raises:
            ApiError: it is none.
        """
        if name is not None:
            return self.get(name).text()
        if not isinstance(self.value, str):
            what = "it is required" if self.value is None else f"expected a string, found {shown(self.value)}"
            raise invalid(self.where, what)
        return self.value

    def arguments(self) -> JsonObject:
        """The arguments of a call, an object or the text of one, as an object: templates write it in their own way.

        Raises:
            ApiError: it is neither.
        """
        found = self.value
        try:
            found = (json.loads(found) if found.strip() else {}) if isinstance(found, str) else found
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping) and self.value is not None:
            raise invalid(self.where, f"expected the text of a JSON object, found {shown(self.value)}")
        return dict(found or {})


# ---------------------------------------------------------------------------------------------- contents

Part = JsonObject
Kinds = Mapping[str, Callable[[Given], Sequence[Part]]]
"""The kinds of parts of an API -> the parts of chat that one becomes."""


def texts(name: str = "text") -> Callable[[Given], list[Part]]:
    """Reads a part that is the text of a field."""
    return lambda part: [{"type": "text", "text": part.text(name)}]


def parts_of(part: Given, kinds: Kinds) -> Sequence[Part]:
    """The parts of chat that a part becomes.

    Raises:
        ApiError: the API has no such kind.
    """
    kind = part.checked().value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        what = f"parts of type {shown(kind)} are not supported here, expected {', '.join(kinds)}"
        raise invalid(f"{part.where}.type", what, code="unsupported_content")
    return kinds[kind](part)


def content_of(content: Given, kinds: Kinds) -> str | list[Part]:
    """A content: a text, or parts of which one is no text.

    Raises:
        ApiError: it is something else.
    """
    if isinstance(content.value, str):
        return content.value
    if not isinstance(content.value, list):
        found = "it is required" if content.value is None else f"found {shown(content.value)}"
        raise invalid(content.where, f"{found}, expected a string or an array of parts")
    return joined([part for each in content.each() for part in parts_of(each, kinds)])


def joined(parts: Sequence[Part]) -> str | list[Part]:
    """Parts as one text, if all of them are texts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def text_and_images(content: str | list[Part]) -> tuple[str, list[Part]]:
    """The text of a content, and its images: templates have these in messages of users only."""
    if isinstance(content, str):
        return content, []
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    return text, [part for part in content if part["type"] != "text"]


def call_of(name: str, arguments: JsonObject, ident: str | None = None) -> JsonObject:
    """A call of a message of the assistant."""
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if ident is None else {"id": ident, **found}


# ---------------------------------------------------------------------------------------------- chat

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _as_it_is(part: Given) -> list[Part]:
    """An image, which `media.py` reads."""
    return [dict(part.value)]


_KINDS: Kinds = {
    **dict.fromkeys(("text", "input_text", "output_text"), texts()), "refusal": texts("refusal"),
    **dict.fromkeys(("image_url", "input_image", "image"), _as_it_is),
}  # fmt: skip


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Messages in OpenAI's form as chat templates take them. A developer speaks as the system.

    Raises:
        ApiError: there is none, or one is malformed; the error names the field.
    """
    if not messages:
        raise invalid("messages", "it is empty", "send at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(sent: Any, where: str) -> JsonObject:
    message = Given(sent, where).checked()
    given = message.value = _modern(sent)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"expected {', '.join(ROLES)}, found {shown(role)}")
    found: JsonObject = {"role": ROLES[role]}
    if isinstance(given.get("name"), str):
        found["name"] = given["name"]
    if role == "tool":
        found["tool_call_id"] = message.text("tool_call_id")
    if role == "assistant":
        if (thinking := given.get("reasoning_content") or given.get("reasoning")) is not None:
            found["reasoning_content"] = Given(thinking, f"{where}.reasoning_content").text()
        if given.get("tool_calls"):
            found["tool_calls"] = [_call(call) for call in message.get("tool_calls").each()]
        if given.get("content") is None:
            refusal = given.get("refusal")
            if "tool_calls" not in found and not isinstance(refusal, str):
                raise invalid(f"{where}.content", "there is neither content nor a tool call")
            return found | {"content": refusal if isinstance(refusal, str) else ""}
    return found | {"content": content_of(message.get("content"), _KINDS)}


def _modern(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in today's form: calls and results once had the name of the function in place of an id."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": f"call_{message.get('name')}"}
    call = message.get("function_call")
    if isinstance(call, Mapping) and not message.get("tool_calls"):
        return {**message, "tool_calls": [{"id": f"call_{call.get('name')}", "type": "function", "function": call}]}
    return message


def _call(call: Given) -> JsonObject:
    ident = call.value["id"] if isinstance(call.value.get("id"), str) else None
    if isinstance(call.value.get("custom"), Mapping):
        custom = call.get("custom")
        return call_of(custom.text("name"), {INPUT: custom.text("input")}, ident)
    function = call.get("function").checked()
    return call_of(function.text("name"), function.get("arguments").arguments(), ident)


def merged_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the system at the beginning become one: chat templates take one."""
    found = list(messages)
    leading = next((i for i, each in enumerate(found) if each["role"] != "system"), len(found))
    if leading > 1 and all(isinstance(each["content"], str) for each in found[:leading]):
        text = "\n\n".join(each["content"] for each in found[:leading])
        found[:leading] = [{"role": "system", "content": text}]
    return found


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
