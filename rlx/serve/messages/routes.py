"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. Server stage.

The fields of bodies are those of `anthropic.types.MessageCreateParams`, and the sampling options that older clients
send. Content blocks are checked where they are read, in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rlx.arguments import without_none
from rlx.grammar import Grammar
from rlx.serve import record
from rlx.serve.answers import answered
from rlx.serve.body import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Anyway, Body, Ignored, hint, only, shown
from rlx.serve.conversation import (
    Given,
    JsonObject,
    call_of,
    check_continued,
    content_of,
    joined,
    parts_of,
    text_and_images,
    texts,
)
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.fields import changed_sample, check_tool, form_grammar
from rlx.serve.http import in_thread, new_router
from rlx.serve.media import ImageSource, base64_source
from rlx.serve.messages.output import MessageWriter, error_json
from rlx.serve.prompts import ChatPrompt, chat_prompt, effort_variables, grammar_maker, switch_variables

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

SHAPES["/v1/messages"] = SHAPES["/messages"] = error_json

Text = str | None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Body):
    """The form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Body):
    """Whether and what the model has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text = None
    disable_parallel_tool_use: bool | None = None


class CountBody(Body):
    """The body of a request for the number of tokens of a prompt."""

    model: Text = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the name of `output_config.format` in the beta

    cache_control: Anyway = None  # prefixes are cached
    speed: Annotated[Any, hint("standard")] = None
    context_management: dict[str, Any] | None = None
    mcp_servers: Annotated[Any, only([])] = None
    compaction: Ignored = None
    billing_policy: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None  # the client sends this one and the next as headers
    betas: Ignored = None


class MessagesBody(CountBody):
    """The body of a request for a message."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    metadata: Ignored = None
    service_tier: Annotated[Any, hint("auto", "standard_only")] = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    fallbacks: Anyway = None  # other models for requests that the model declines: it declines none
    fallback_credit_token: Ignored = None
    thread: dict[str, Any] | None = None

    compaction: Annotated[Any, only()] = None
    container: Annotated[Any, only()] = None


# ---------------------------------------------------------------------------------------------- paths


def router(server: Server) -> APIRouter:
    """`POST /messages` and `POST /messages/count_tokens`."""
    found = new_router(tags=["messages"])

    @found.post("/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        model = server.named(body.model)
        _refuse_thread(body.thread)
        return await answered(server, request, model, lambda: _writer(model, body), body.stream)

    @found.post("/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        """The number of tokens of a prompt."""
        model = server.named(body.model)
        prompt = await in_thread(lambda: _prompt(model, body))
        return {"input_tokens": len(prompt.context)}

    return found


def _prompt(model: ServedModel, body: CountBody) -> ChatPrompt:
    _check_edits(body.context_management)
    choice, tools = choice_of(body.tool_choice), tools_of(body.tools)
    disabled = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use is True
    messages = messages_of(body.messages, body.system)
    if continues := bool(messages) and messages[-1]["role"] == "assistant":
        check_continued(messages)
    variables = _variables(model, body)
    return chat_prompt(model, messages, tools or None, choice, not disabled, variables, continues)


def _variables(model: ServedModel, body: CountBody) -> dict[str, Any]:
    """The template's variables for reasoning."""
    effort, thinking = body.output_config.effort if body.output_config is not None else None, body.thinking
    variables = effort_variables(model, effort, "output_config.effort")
    if thinking is not None and thinking.type in ("enabled", "disabled"):
        variables |= switch_variables(model, thinking.type == "enabled", "thinking.type", thinking.type)
    return variables


def _refuse_thread(thread: dict[str, Any] | None) -> None:
    """Refuses conversations that the server keeps, by the codes that have clients send the whole conversation."""
    if thread is not None:
        code = "thread_not_found" if thread.get("type") == "continue" else "thread_unsupported_request"
        details = {"details": {"error_code": code, "unsupported": ["thread"]}}
        what, hint = "thread: the server keeps no conversations", "leave it out, and send all messages"
        raise ApiError(400, what, param="thread", code=code, hint=hint, details=details)


def _check_edits(management: dict[str, Any] | None) -> None:
    """Refuses edits of the conversation other than leaving out old reasoning, which templates do anyway."""
    for i, edit in enumerate((management or {}).get("edits") or ()):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith("clear_thinking"):
            what = f"{shown(kind)} is not supported"
            raise invalid(f"context_management.edits[{i}].type", what, "leave it out: the server edits no conversation")


def _writer(model: ServedModel, body: MessagesBody) -> MessageWriter:
    """The writer of the answer."""
    prompt = _prompt(model, body)
    changes = without_none(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    asked = model.asked(
        prompt.context,
        body.max_tokens,
        changed_sample(model.default_sample, changes),
        stop=_stops(body),
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        grammar=grammar_maker(model, _text_grammar(body), prompt),
    )
    return MessageWriter(model.name, len(prompt.context), [asked])


def _stops(body: MessagesBody) -> tuple[str, ...]:
    stops = body.stop_sequences or []
    if "" in stops:
        raise invalid(f"stop_sequences[{stops.index('')}]", "it is empty, and would end every answer at once")
    return tuple(stops)


def _text_grammar(body: CountBody) -> Callable[[], Grammar] | None:
    """The maker of the grammar of `output_config.format`, or of its older name."""
    form = body.output_config.format if body.output_config is not None else None
    field = "output_format" if form is None else "output_config.format"
    return form_grammar(body.output_format if form is None else form, field, ("json_schema",))


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
    """The bytes or the address of an image or a document."""
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
