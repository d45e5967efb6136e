"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. Server stage.

The fields of bodies are those of `anthropic.types.MessageCreateParams`, and the sampling options that older clients
send. Content blocks are checked where they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rlx.arguments import without_none
from rlx.grammar import Grammar
from rlx.json_file import JsonObject
from rlx.serve import record
from rlx.serve.answers import Asked, Delta, Finished, ObjectWriter, Progress, answered
from rlx.serve.errors import OVERFLOW, SHAPES, ApiError, invalid
from rlx.serve.fields import changed_sample, check_tool, form_grammar
from rlx.serve.http import MAX_MESSAGES, Anyway, Body, hints, in_thread, new_router, shown, unsupported
from rlx.serve.media import ImageSource, base64_source
from rlx.serve.openai.bodies import Count, Positive, Share, Stops, Text, Tools
from rlx.serve.prompts import (
    ChatPrompt,
    JsonValue,
    call_of,
    chat_prompt,
    check_continued,
    content_of,
    effort_variables,
    grammar_maker,
    joined,
    parts_of,
    switch_variables,
    text_and_images,
    texts,
)

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server


_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


class MessageWriter(ObjectWriter):
    """Writes a message, or the events of a stream.

    Args:
        model: the model's name.
        prompt_tokens: of the prompt.
        asked: what is to be generated.

    Attributes:
        message: the message as it is now.
    """

    def __init__(self, model: str, prompt_tokens: int, asked: Sequence[Asked] = ()) -> None:
        super().__init__(asked)
        self.message: JsonObject = {
            "id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": usage_json(Finished(prompt_tokens)),
        }  # fmt: skip
        self._open = False
        self._arguments = ""

    def begin(self) -> Iterator[JsonObject]:
        yield {"type": "message_start", "message": {**self.message, "content": []}}
        yield {"type": "ping"}

    def delta(self, delta: Delta) -> Iterator[JsonObject]:
        if delta.thinking:
            yield from self._text("thinking", delta.thinking)
        if delta.text:
            yield from self._text("text", delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield error_json(error)

    def waiting(self, progress: Progress) -> bytes:
        return self.written({"type": "ping"})

    def whole(self) -> JsonObject:
        return self.message

    def _text(self, kind: str, text: str) -> Iterator[JsonObject]:
        """More reasoning or text."""
        if not self._open or self._block["type"] != kind:
            yield from self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._block[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: Any) -> Iterator[JsonObject]:
        """More of a tool call: its first piece has the name."""
        if call.name:
            yield from self._start({"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": {}})
        if call.arguments:
            self._arguments += call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    @property
    def _block(self) -> JsonObject:
        """The content block that is being written."""
        found: JsonObject = self.message["content"][-1]
        return found

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": len(self.message["content"]) - 1, "delta": delta}

    def _start(self, block: JsonObject) -> Iterator[JsonObject]:
        yield from self._stop()
        self.message["content"].append(block)
        self._open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": len(self.message["content"]) - 1, "content_block": {**block}}

    def _stop(self) -> Iterator[JsonObject]:
        if not self._open:
            return
        self._open = False
        if self._block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})  # the sign that the reasoning is complete
        elif self._block["type"] == "tool_use":
            self._block["input"] = json.loads(self._arguments or "{}")
        yield {"type": "content_block_stop", "index": len(self.message["content"]) - 1}

    def finished(self, numbers: Finished) -> Iterator[JsonObject]:
        yield from self._stop()
        stop = self.ended.stop if isinstance(self.ended.stop, str) else None
        reason = _STOPS[self.ended.finish_reason] if stop is None else "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": stop}
        self.message |= {**ended, "usage": usage_json(numbers)}
        yield {"type": "message_delta", "delta": ended, "usage": self.message["usage"]}
        yield {"type": "message_stop"}


def usage_json(usage: Finished) -> JsonObject:
    """Numbers of tokens. Those of the prompt that were found in the cache count apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def tool_use_id(call_id: str) -> str:
    """The id of a call as Anthropic's clients know them."""
    return f"toolu_{call_id.removeprefix('call_')}"


def error_json(error: ApiError) -> JsonObject:
    """The body of an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = f"prompt is too long: {error}" if error.code == OVERFLOW else str(error)  # Claude Code then compacts
    return {"type": "error", "error": {"type": kind, "message": message, **error.details}}


SHAPES["/v1/messages"] = SHAPES["/messages"] = error_json


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


@hints("compaction billing_policy user_profile_id workspace_id betas", speed=["standard"])  # the last are headers, too
@unsupported(mcp_servers=[[]])
class CountBody(Body):
    """The body of a request for the number of tokens of a prompt."""

    model: Text = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the name of `output_config.format` in the beta

    cache_control: Anyway = None  # prefixes are cached
    context_management: dict[str, Any] | None = None


@hints("metadata inference_geo diagnostics fallback_credit_token", service_tier=["auto", "standard_only"])
@unsupported("compaction container")
class MessagesBody(CountBody):
    """The body of a request for a message."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Positive | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    fallbacks: Anyway = None  # other models for requests that the model declines: it declines none
    thread: dict[str, Any] | None = None


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
    prompt = _prompt(model, body)
    changes = without_none(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    asked = model.asked(
        prompt.context,
        body.max_tokens,
        changed_sample(model.default_sample, changes),
        stop=tuple(body.stop_sequences or ()),
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        grammar=grammar_maker(model, _text_grammar(body), prompt),
    )
    return MessageWriter(model.name, len(prompt.context), [asked])


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
    first = [] if system is None else _system(JsonValue(system, "system"))
    found: list[JsonObject] = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), JsonValue(message.get("content"), f"messages[{i}].content")
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


def _system(content: JsonValue) -> list[str]:
    """The texts of a system prompt, without the one that changes in each request."""
    blocks = [content.value] if isinstance(content.value, str) else [_text(block) for block in content.each()]
    found = [text.partition("\n")[2].lstrip("\n") if text.startswith(NONCE) else text for text in blocks]
    return [text for text in found if text]


def _user(content: JsonValue) -> list[JsonObject]:
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


def _assistant(content: JsonValue) -> JsonObject:
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


def _text(block: JsonValue) -> str:
    """The text of a block that can be nothing else."""
    (part,) = parts_of(block, {"text": texts()})
    return str(part["text"])


def _image(block: JsonValue) -> list[JsonObject]:
    source = _source(block)
    if source.value.get("type") == "base64":
        return [base64_source(source.value.get("data"), f"{source.where}.data").part]
    if source.value.get("type") == "url":
        return [ImageSource(source.text("url"), f"{source.where}.url").part]
    raise invalid(f"{source.where}.type", f"expected base64 or url, found {shown(source.value.get('type'))}")


def _document(block: JsonValue) -> list[JsonObject]:
    source, labels = _source(block), (block.value.get("title"), block.value.get("context"))
    head = [{"type": "text", "text": text} for text in labels if isinstance(text, str)]
    if source.value.get("type") == "text":
        return [*head, *texts("data")(source)]
    if source.value.get("type") == "content":
        content = source.get("content")
        if isinstance(content.value, str):
            return [*head, {"type": "text", "text": content.value}]
        return [*head, *(part for each in content.each() for part in parts_of(each, _KINDS))]
    what = f"documents of type {source.value.get('type')!r} are not supported"
    raise invalid(f"{source.where}.type", what, "give its text, or images of its pages")


def _source(block: JsonValue) -> JsonValue:
    """The bytes or the address of an image or a document."""
    found = block.get("source")
    return found if isinstance(found.value, Mapping) else JsonValue({}, found.where)


def _search_result(block: JsonValue) -> list[JsonObject]:
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
