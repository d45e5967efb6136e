"""The messages of Anthropic's API as the messages and tools of a conversation.

Server stage. A message there is a list of blocks. Its tool results become messages of their own, as templates have
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve import record
from rlx.serve.body import check_tool, shown
from rlx.serve.conversation import (
    Given,
    JsonObject,
    call_of,
    content_of,
    joined,
    parts_of,
    text_and_images,
    texts,
)
from rlx.serve.errors import invalid
from rlx.serve.media import ImageSource, base64_source

NONCE = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a text that is another one in each request: nothing after it could be found
in the prefix cache. It says nothing to a model."""


def messages_of(
    messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> list[JsonObject]:
    """The messages of a conversation.

    Messages of the role system become a part of the one at the beginning, which models know.

    Raises:
        ApiError: a message is malformed, or has a block that rlx has nothing for.
    """
    first = [] if system is None else _system(Given(system, "system"))
    found: list[JsonObject] = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), Given(message.get("content"), f"messages[{i}].content")
        if role == "system":
            first += _system(content)
        elif role == "user":
            found += _user(content)
        elif role == "assistant":
            found.append(_assistant(content))
        else:
            raise invalid(f"messages[{i}].role", f"expected user, assistant or system, found {shown(role)}")
    text = "\n\n".join(first)
    return [{"role": "system", "content": text}, *found] if text else found


def _system(content: Given) -> list[str]:
    """The texts of a system prompt, without the one that changes in each request."""
    given = [content.value] if isinstance(content.value, str) else [_text(block) for block in content.each()]
    found = [text.partition("\n")[2].lstrip("\n") if text.startswith(NONCE) else text for text in given]
    return [text for text in found if text]


def _user(content: Given) -> list[JsonObject]:
    """The messages that a message of the user stands for: results of tools, then what the user says and shows."""
    results, parts = list[JsonObject](), list[JsonObject]()
    if isinstance(content.value, str):
        return [{"role": "user", "content": content.value}]
    for block in content.each():
        if block.value.get("type") == "tool_result":
            inner = block.get("content")
            text, images = text_and_images("" if inner.value is None else content_of(inner, _KINDS))
            text = f"Error: {text}" if block.value.get("is_error") is True else text
            results.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": text})
            parts += images
        else:
            parts += parts_of(block, _KINDS)
    return [*results, {"role": "user", "content": joined(parts)}] if parts or not results else results


def _assistant(content: Given) -> JsonObject:
    """A message of the assistant."""
    if isinstance(content.value, str):
        return {"role": "assistant", "content": content.value}
    said, thoughts, calls = list[str](), list[str](), list[JsonObject]()
    for block in content.each():
        kind = block.value.get("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            arguments = dict(block.get("input").checked().value)
            calls.append(call_of(block.text("name"), arguments, block.text("id")))
        elif kind != "redacted_thinking":  # which another server has encrypted
            said.append(_text(block))
    message: JsonObject = {"role": "assistant", "content": "".join(said)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _text(block: Given) -> str:
    """The text of a block that can be nothing else."""
    (part,) = parts_of(block, {"text": texts()})
    return str(part["text"])


def _image(block: Given) -> list[JsonObject]:
    source = _source(block)
    if source.value.get("type") == "base64":
        return [base64_source(source.value.get("data"), f"{source.where}.data").part]
    if source.value.get("type") == "url":
        return [ImageSource(source.text("url"), f"{source.where}.url").part]
    raise invalid(f"{source.where}.type", f"expected base64 or url, found {shown(source.value.get('type'))}")


def _document(block: Given) -> list[JsonObject]:
    """A document of text."""
    source, given = _source(block), (block.value.get("title"), block.value.get("context"))
    head = [{"type": "text", "text": text} for text in given if isinstance(text, str)]
    if source.value.get("type") == "text":
        return [*head, *texts("data")(source)]
    if source.value.get("type") == "content":
        content = source.get("content")
        if isinstance(content.value, str):
            return [*head, {"type": "text", "text": content.value}]
        return [*head, *(part for each in content.each() for part in parts_of(each, _KINDS))]
    what = f"documents of type {source.value.get('type')!r} are not supported"
    raise invalid(f"{source.where}.type", what, "give its text, or images of its pages")


def _source(block: Given) -> Given:
    """What an image or a document is made of."""
    found = block.get("source")
    return found if isinstance(found.value, Mapping) else Given({}, found.where)


def _search_result(block: Given) -> list[JsonObject]:
    head = f"{block.text('title')} ({block.text('source')})"
    return [{"type": "text", "text": "\n".join([head, *map(_text, block.get("content").each())])}]


_KINDS = {"text": texts(), "image": _image, "document": _document, "search_result": _search_result}


# ---------------------------------------------------------------------------------------------- tools


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> list[JsonObject]:
    """The tools in the form of chat.

    Those of other types run at Anthropic, or are known to its models only: they are left out, which the header for
    ignored fields says.

    Raises:
        ApiError: a tool is malformed.
    """
    found = []
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if tool.get("type", "custom") not in ("custom", None):
            record.ignore(where)
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise invalid(f"{where}.input_schema", f"expected a JSON schema, found {shown(schema)}")
        function: JsonObject = {"name": tool.get("name"), "parameters": dict(schema)}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
        check_tool(found[-1], where, "input_schema")
    return found


def choice_of(choice: Any) -> Any:
    """The tool choice in the form of chat.

    Raises:
        ApiError: it is `tool` without a name.
    """
    if choice is None:
        return None
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "it is required")
    return {"type": "function", "function": {"name": choice.name}}
