"""The functions that a model may call, as a caller describes them; conversations with calls, as templates take them.

Text stage. The form of a tool is that of the OpenAI API, also without the outer object:

    {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema of an object}}

Callers write messages as that API does, too: calls in `tool_calls` of an assistant's message, with arguments as JSON
text, and each result in a message of the role `tool`. Chat templates differ:

- All take arguments as an object, and many need the name of the function beside a result.
- Some take one call a message.
- Mistral's take ids of nine letters and digits, Kimi's such as `functions.f:0`.
- Gemma 4's first templates take results in the assistant's message, as `tool_responses`.
- Templates without tools get texts: `prompted`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlx.errors import ToolError

if TYPE_CHECKING:
    from rlx.text.chat import ChatTemplate


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
CHOICES = ("auto", "none", "required")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that the model may call.

    Attributes:
        name: its name.
        parameters: the JSON schema of its arguments; by default there are none.
        strict: whether all of the schema is enforced, and what cannot be is an error; None: where a call is forced.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    strict: bool | None = None

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
        what = "it is required" if name is None else f"the name is {name!r}"
        raise ToolError(what, where=f"{where}.name", hint=hint)
    if parameters is not None and not isinstance(parameters, Mapping):
        what = f"expected a JSON schema, found a {type(parameters).__name__}"
        raise ToolError(what, where=f"{where}.parameters")
    if (kind := (parameters or {}).get("type", "object")) != "object":
        raise ToolError(f"type is {kind!r}, expected 'object'", where=f"{where}.parameters.type")
    if about is not None and not isinstance(about, str):
        raise ToolError(f"expected a text, found a {type(about).__name__}", where=f"{where}.description")
    strict = value.get("strict")
    return Tool(name, parameters or NO_PARAMETERS, strict if isinstance(strict, bool) else None)


def checked_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """A caller's choice of calls: `auto`, `none`, `required`, or a tool as
    `{"type": "function", "function": {"name": ...}}`. None is `auto` with tools, else `none`.

    Raises:
        ToolError: it has none of these forms, asks for a call without tools, or names a tool that is not there.
    """
    where = "tool_choice"
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
    elif not isinstance(choice, str) or choice not in CHOICES:
        hint = 'give {"type": "function", "function": {"name": ...}} for one tool'
        raise ToolError(f"found {choice!r}, expected {', '.join(CHOICES)}", where=where, hint=hint)
    if not tools and choice != "none":
        raise ToolError("there are no tools", where=where, hint="give tools, or leave tool_choice out")
    if name is not None and name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools)
        raise ToolError(f"there is no tool {name!r}", where=where, hint=f"the tools are {known}")
    return ToolChoice("required", name) if name is not None else ToolChoice(choice)


Messages = list[dict[str, Any]]
_ANSWERS_TOOLS = re.compile(r"""==\s*['"]tool['"]""")  # in a template that knows the role
_INSTRUCTIONS = """You can call functions. To call one, answer with a JSON object of this form and nothing else:
{"name": "name of the function", "parameters": {"name of a parameter": its value}}
To call several, write one object a line. If you need no function, answer in words.
The functions:"""


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls or results of tools."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def with_calls(messages: Sequence[dict[str, Any]], template: ChatTemplate) -> Messages:
    """Messages whose calls and results have the form that a template with tools takes.

    Raises:
        ToolError: a call has no name, or its arguments are no JSON object.
    """
    found = _plain(messages)
    for text, new_id in _IDS:
        if text in template.source:
            found = _with_ids(found, new_id)
    if "tool_responses" in template.source and not _ANSWERS_TOOLS.search(template.source):
        return _with_responses(found)
    if any(len(message.get("tool_calls") or ()) > 1 for message in found) and not template.takes_several_calls:
        return _one_call_each(found)
    return found


def _plain(messages: Sequence[dict[str, Any]]) -> Messages:
    """Messages with arguments as objects, results with names, and texts as contents."""
    names: dict[str, str] = {}
    found = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id")))
            message = {**message, "content": message.get("content") or ""} | ({"name": name} if name else {})
        elif message.get("tool_calls"):
            calls = message["tool_calls"]
            if not isinstance(calls, list):
                raise ToolError(f"expected a list, found a {type(calls).__name__}", where=f"messages[{i}].tool_calls")
            calls = [_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls)]
            names |= {str(call.get("id")): call["function"]["name"] for call in calls}
            message = {**message, "tool_calls": calls, "content": message.get("content") or ""}
        found.append(message)
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ToolError(f"expected a JSON object, found a {type(call).__name__}", where=where)
    function, inner = call.get("function", call), f"{where}.function" if "function" in call else where
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ToolError("a call needs the name of a function", where=f"{inner}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are no JSON: {error}", where=f"{inner}.arguments") from None
    if arguments is not None and not isinstance(arguments, dict):
        what = f"expected a JSON object, found a {type(arguments).__name__}"
        raise ToolError(what, where=f"{inner}.arguments")
    named = {"name": function["name"], "arguments": arguments or {}}
    return {**({"id": call["id"]} if "id" in call else {}), "type": "function", "function": named}


def _nine(old: str, name: str, index: int) -> str:
    return old if re.fullmatch("[A-Za-z0-9]{9}", old) else hashlib.sha256(old.encode()).hexdigest()[:9]


def _numbered(old: str, name: str, index: int) -> str:
    return f"functions.{name}:{index}"


#: What the template has in it -> `(id, name of the function, number of the call)`: the id that it takes.
_IDS: tuple[tuple[str, Callable[[str, str, int], str]], ...] = (
    ("[TOOL_CALLS]", _nine),
    ("<|tool_call_argument_begin|>", _numbered),
)


def _with_ids(messages: Messages, new_id: Callable[[str, str, int], str]) -> Messages:
    """Calls and results with other ids."""
    ids: dict[str, str] = {}
    found = []
    for message in messages:
        if message["role"] == "tool" and str(message.get("tool_call_id")) in ids:
            message = {**message, "tool_call_id": ids[str(message["tool_call_id"])]}
        elif message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                old = str(call.get("id", f"call {len(ids)}"))
                ids[old] = new_id(old, call["function"]["name"], len(ids))
                calls.append({**call, "id": ids[old]})
            message = {**message, "tool_calls": calls}
        found.append(message)
    return found


def _with_responses(messages: Messages) -> Messages:
    """Results as `tool_responses` of a message of the assistant."""
    found: Messages = []
    for message in messages:
        if message["role"] != "tool":
            found.append(message)
            continue
        response = {"name": message.get("name", "unknown"), "response": _value(message["content"])}
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        last = found[-1]
        found[-1] = {**last, "tool_responses": [*last.get("tool_responses", ()), response]}
    return found


def _value(content: Any) -> Any:
    """A result as an object, if it is the text of one."""
    try:
        found = json.loads(content) if isinstance(content, str) and content.lstrip().startswith("{") else content
    except (ValueError, RecursionError):
        return content
    return found if isinstance(found, dict) else content


def _one_call_each(messages: Messages) -> Messages:
    """Each call in a message of its own, followed by its result."""
    found: Messages = []
    waiting: Messages = []  # further calls of the last message that had several
    for message in messages:
        if message["role"] == "tool" and waiting:
            ids, called = [each["tool_calls"][0].get("id") for each in waiting], message.get("tool_call_id")
            if called in ids:
                found.append(waiting.pop(ids.index(called)))
            found.append(message)
            continue
        found += waiting
        waiting = []
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            waiting = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in calls[1:]]
            message = {**message, "tool_calls": calls[:1]}
        found.append(message)
    return found + waiting


def prompted(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> Messages:
    """The conversation for a template that knows no tools: texts describe the tools, the calls and the results.

    A result is a message of the user. It is joined with the user's next one, because many templates take no two
    messages of one role in a row.

    Raises:
        ToolError: a call has no name, or its arguments are no JSON object.
    """
    found: Messages = []
    after_result = False
    for message in _plain(messages):
        is_result, said = message["role"] == "tool", _said(message)
        if found and found[-1]["role"] == said["role"] == "user" and (is_result or after_result):
            said = {**said, "content": _joined(found.pop()["content"], said["content"], "\n\n")}
        found.append(said)
        after_result = is_result
    return _described(found, tools, template) if tools else found


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """A message without calls and results: texts take their place."""
    if message["role"] == "tool":
        name = f" of {message['name']}" if message.get("name") else ""
        return {"role": "user", "content": _joined(f"Result{name}:", message["content"])}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [json.dumps({"name": each["name"], "parameters": each["arguments"]}, ensure_ascii=False) for each in calls]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**said, "content": _joined(message["content"], "\n".join(lines))} if lines else said


def _described(messages: Messages, tools: Sequence[Mapping[str, Any]], template: ChatTemplate) -> Messages:
    """The conversation with a description of the tools at its beginning."""
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    text = "\n".join([_INSTRUCTIONS, *functions])
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": _joined(first["content"], text, "\n\n")}, *messages[1:]]
    if template.takes_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": _joined(text, first["content"], "\n\n")}, *messages[1:]]


def _joined(a: Any, b: Any, between: str = "\n") -> Any:
    """Two contents as one: texts, or lists of parts."""
    if isinstance(a, str) and isinstance(b, str):
        return between.join(text for text in (a, b) if text)
    return [*_parts(a), *_parts(between), *_parts(b)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
