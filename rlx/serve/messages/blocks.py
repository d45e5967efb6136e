"""The messages of Anthropic's API as the messages and tools of a conversation.

Server stage. A message there is a list of blocks. Its tool results become messages of their own, as templates have
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.serve import record
from rlx.serve.body import check_tool, shown, string
from rlx.serve.errors import invalid
from rlx.serve.media import ImageSource, base64_source

JsonObject = dict[str, Any]

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
    first = _system(system, "system")
    found: list[JsonObject] = []
    for i, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{i}]"
        if role == "system":
            first += _system(message.get("content"), f"{where}.content")
        elif role == "user":
            found += _user(message.get("content"), f"{where}.content")
        elif role == "assistant":
            found.append(_assistant(message.get("content"), f"{where}.content"))
        else:
            raise invalid(f"{where}.role", f"expected user, assistant or system, found {shown(role)}")
    text = "\n\n".join(first)
    return [{"role": "system", "content": text}, *found] if text else found


def _system(system: Any, where: str) -> list[str]:
    """The texts of a system prompt, without the one that changes in each request."""
    if system is None:
        return []
    if isinstance(system, str):
        return [text for text in [_without_nonce(system)] if text]
    texts = [_without_nonce(_text(block, at)) for block, at in _blocks(system, where)]
    return [text for text in texts if text]


def _without_nonce(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(NONCE) else text


def _user(content: Any, where: str) -> list[JsonObject]:
    """The messages that a message of the user stands for: results of tools, then what the user says and shows."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[JsonObject] = []
    parts: list[JsonObject] = []
    for block, at in _blocks(content, where):
        if block.get("type") == "tool_result":
            result, images = _result(block, at)
            results.append(result)
            parts += images  # templates have images in messages of users only
        else:
            parts += _parts(block, at)
    return [*results, {"role": "user", "content": parts}] if parts or not results else results


def _result(block: Mapping[str, Any], where: str) -> tuple[JsonObject, list[JsonObject]]:
    """The message of a tool's result, and its images."""
    content = block.get("content", "")
    inner = [] if content is None or isinstance(content, str) else list(_blocks(content, f"{where}.content"))
    parts = [part for each, at in inner for part in _parts(each, at)]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    text = content if isinstance(content, str) else text
    text = f"Error: {text}" if block.get("is_error") is True else text
    result = {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}
    return result, [part for part in parts if part["type"] == "image"]


def _assistant(content: Any, where: str) -> JsonObject:
    """A message of the assistant."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = list[str](), list[str](), list[JsonObject]()
    for block, at in _blocks(content, where):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "redacted_thinking":
            continue  # encrypted by another server
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise invalid(f"{at}.input", f"expected an object, found {shown(arguments)}")
            function = {"name": _string(block, "name", at), "arguments": dict(arguments)}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        else:
            texts.append(_text(block, at))
    message: JsonObject = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Blocks, each with its place in the request."""
    if not isinstance(content, list):
        raise invalid(where, f"expected a text or a list of blocks, found {shown(content)}")
    for i, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise invalid(f"{where}[{i}]", f"expected an object, found {shown(block)}")
    return [(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _parts(block: Mapping[str, Any], where: str) -> list[JsonObject]:
    """The parts that a block of a user stands for."""
    kind = block.get("type")
    if kind == "image":
        return [_image(block.get("source"), f"{where}.source").part]
    if kind == "document":
        return _document(block, where)
    if kind == "search_result":
        texts = [_text(each, at) for each, at in _blocks(block.get("content"), f"{where}.content")]
        head = f"{_string(block, 'title', where)} ({_string(block, 'source', where)})"
        return [{"type": "text", "text": "\n".join([head, *texts])}]
    return [{"type": "text", "text": _text(block, where)}]


def _document(block: Mapping[str, Any], where: str) -> list[JsonObject]:
    """A document of text."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    head = [
        {"type": "text", "text": text} for text in (block.get("title"), block.get("context")) if isinstance(text, str)
    ]
    if source.get("type") == "text":
        return [*head, {"type": "text", "text": _string(source, "data", f"{where}.source")}]
    if source.get("type") == "content":
        content = source.get("content")
        if isinstance(content, str):
            return [*head, {"type": "text", "text": content}]
        return head + [p for each, at in _blocks(content, f"{where}.source.content") for p in _parts(each, at)]
    what = f"documents of type {source.get('type')!r} are not supported"
    raise invalid(f"{where}.source.type", what, "give its text, or images of its pages")


def _image(source: Any, where: str) -> ImageSource:
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "base64":
        return base64_source(source.get("data"), f"{where}.data")
    if source.get("type") == "url":
        return ImageSource(_string(source, "url", where), f"{where}.url")
    raise invalid(f"{where}.type", f"expected base64 or url, found {shown(source.get('type'))}")


def _text(block: Mapping[str, Any], where: str) -> str:
    """The text of a block of text."""
    if block.get("type") != "text":
        raise invalid(f"{where}.type", f"blocks of type {block.get('type')!r} are not supported here")
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    return string(block.get(name), f"{where}.{name}")


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
