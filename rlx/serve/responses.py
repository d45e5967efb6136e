"""/v1/responses, without a store: OpenAI's newer API for conversations. Server stage.

The fields of bodies are those of `openai.types.responses.ResponseCreateParams`, the shapes of answers those of the
types in `openai.types.responses`. An answer in one piece and a stream are made by the same `ResponseWriter`, so that
they agree. Items of `input` are checked where they are read.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rlx.arguments import without_none
from rlx.json_file import JsonObject
from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.answers import Asked, Delta, Finished, ObjectWriter, Progress, answered
from rlx.serve.custom_tools import INPUT, as_function
from rlx.serve.errors import ApiError, invalid
from rlx.serve.fields import changed_sample, check_tool, form_grammar
from rlx.serve.http import (
    MAX_MESSAGES,
    MAX_PAIRS,
    Anyway,
    AtMost,
    Body,
    comment,
    hints,
    in_thread,
    new_router,
    only,
    unsupported,
)
from rlx.serve.media import ImageSource
from rlx.serve.openai.bodies import Effort, Positive, Share, Text, Tools, TopLogprobs
from rlx.serve.openai.completions import logprob_dicts
from rlx.serve.prompts import (
    ChatPrompt,
    JsonValue,
    call_of,
    content_of,
    effort_variables,
    fitting_prompt,
    grammar_maker,
    text_and_images,
    texts,
)

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # kind of a call -> the field with its text
#: Kind of an item -> how its id begins, and what events of its text are called.
_NAMES = {
    "reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"), "custom_tool_call": ("ctc", "custom_tool_call_input"),
}  # fmt: skip
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # status -> code of a failed response; else server_error


def new_id(prefix: str) -> str:
    """An id such as `msg_0f3e...`."""
    return f"{prefix}_{uuid4().hex}"


@dataclass
class _Item:
    """An output item that is being written.

    Attributes:
        kind: reasoning, message, function_call or custom_tool_call.
        index: its place in `output`.
        text: its reasoning, text, arguments or input so far.
        place: what events say of where it is.
    """

    kind: str
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    logprobs: list[JsonObject] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix, self.event = _NAMES[self.kind]
        self.id = new_id(prefix)
        self.place: JsonObject = {"item_id": self.id, "output_index": self.index}
        if self.kind not in _CALLS:
            self.place["content_index"] = 0

    def as_json(self, status: str) -> JsonObject:
        """The item, as it is in `output`."""
        if self.kind in _CALLS:
            call = {_CALLS[self.kind]: self.text, "call_id": self.call_id, "name": self.name}
            return {"id": self.id, "type": self.kind, "status": status, **call}
        if self.kind == "reasoning":
            content = [self.part()] if self.text else []
            return {"id": self.id, "type": self.kind, "status": status, "summary": [], "content": content}
        content = [self.part()] if self.text or status != "in_progress" else []
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self) -> JsonObject:
        """Its content part."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponseWriter(ObjectWriter):
    """Writes a response, or the events of a stream.

    Args:
        fields: those of the response object that repeat the request, `model` and `tools` among them.
        custom: names of the custom tools.
        asked: what is to be generated.

    Attributes:
        response: the response object as it is now.
    """

    def __init__(self, fields: JsonObject, custom: Container[str] = (), asked: Sequence[Asked] = ()) -> None:
        super().__init__(asked)
        self._custom = custom
        self.response: JsonObject = {
            "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "error": None, "incomplete_details": None, "output": [], "usage": None, **fields,
        }  # fmt: skip
        self._item: _Item | None = None
        self._number = 0
        self._logprobs: list[JsonObject] = []

    def begin(self) -> Iterator[JsonObject]:
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def delta(self, delta: Delta) -> Iterator[JsonObject]:
        self._logprobs += logprob_dicts(delta.logprobs, as_id=False)
        if delta.thinking:
            yield from self._text("reasoning", delta.thinking)
        if delta.text:
            yield from self._text("message", delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield from self._close("incomplete")
        code = _CODES.get(error.status, "server_error")
        self.response |= {"status": "failed", "error": {"code": code, "message": str(error)}}
        yield self._event("response.failed", response=self._snapshot())

    def waiting(self, progress: Progress) -> bytes:
        return comment("the prompt is computed")

    def whole(self) -> JsonObject:
        return self.response

    # ---------------------------------------------------------------------------------------------- items

    def _text(self, kind: str, text: str) -> Iterator[JsonObject]:
        """More reasoning or text."""
        if self._item is None or self._item.kind != kind:
            yield from self._open(kind)
        logprobs, self._logprobs = self._logprobs, []  # of the tokens that were held back, too
        yield self._longer(text, logprobs if kind == "message" else None)

    def _call(self, call: Any) -> Iterator[JsonObject]:
        """More of a tool call: its first piece has the name."""
        if call.name:
            kind = "custom_tool_call" if call.name in self._custom else "function_call"
            yield from self._open(kind, call.name, call.id)
        if call.arguments:
            yield self._longer(call.arguments)

    def _longer(self, text: str, logprobs: list[JsonObject] | None = None) -> JsonObject:
        """More text of the item that is being written."""
        item = self._item
        assert item is not None
        item.text += text
        item.logprobs += logprobs or ()
        return self._event(f"response.{item.event}.delta", **item.place, delta=text, **without_none(logprobs=logprobs))

    def _open(self, kind: str, name: str = "", call_id: str = "") -> Iterator[JsonObject]:
        yield from self._close("completed")
        item = self._item = _Item(kind, len(self.response["output"]), name, call_id)
        self.response["output"].append(item.as_json("in_progress"))
        yield self._event("response.output_item.added", output_index=item.index, item=item.as_json("in_progress"))
        if kind not in _CALLS:
            yield self._event("response.content_part.added", **item.place, part=item.part())

    def _close(self, status: str) -> Iterator[JsonObject]:
        """Ends the item that is being written, if there is one."""
        item, self._item = self._item, None
        if item is None:
            return
        done: JsonObject = {_CALLS.get(item.kind, "text"): item.text}
        done |= {"name": item.name} if item.kind in _CALLS else {}
        done |= {"logprobs": item.logprobs} if item.kind == "message" else {}
        yield self._event(f"response.{item.event}.done", **item.place, **done)
        if item.kind not in _CALLS:
            yield self._event("response.content_part.done", **item.place, part=item.part())
        self.response["output"][item.index] = item.as_json(status)
        yield self._event("response.output_item.done", output_index=item.index, item=item.as_json(status))

    def finished(self, numbers: Finished) -> Iterator[JsonObject]:
        is_cut = self.ended.finish_reason == "length"
        if self._item is None and not self.response["output"]:
            yield from self._open("message")  # clients look for a message, though it is empty
        yield from self._close("incomplete" if is_cut else "completed")
        status = "incomplete" if is_cut else "completed"
        self.response |= {"status": status, "usage": usage_json(numbers)}
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self._snapshot())

    def _snapshot(self) -> JsonObject:
        return {**self.response, "output": list(self.response["output"])}

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def usage_json(usage: Finished) -> JsonObject:
    """Numbers of tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_ALL = "the server stores no responses: send the whole conversation as `input`, with `output` of earlier responses"
Include = Literal[
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "message.output_text.logprobs", "reasoning.encrypted_content",
]  # fmt: skip


@hints("generate_summary", summary=["none"], context=["auto"], mode=["standard"])  # the answer has the reasoning itself
class Reasoning(Body):
    """How the model reasons."""

    effort: Effort | None = None


@hints(verbosity=["medium"])
class TextFields(Body):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None


@hints("personality")
class InputBody(Body):
    """The fields that make the prompt of a response."""

    model: Text = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: Text = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextFields | None = None
    truncation: Literal["auto", "disabled"] | None = None

    previous_response_id: Annotated[Any, only(instead=_ALL)] = None
    conversation: Annotated[Any, only(instead=_ALL)] = None


@hints(
    "prompt_cache_retention prompt_cache_options client_metadata access_programs background_options",
    store=[False], service_tier=["auto", "default"], stream_options=[{}, {"include_obfuscation": False}],
)  # fmt: skip
@unsupported(
    "prompt moderation", background=[False], context_management=[[]],
    image=[{}, {"context_compression": "auto"}, {"context_compression": "disabled"}],
)  # fmt: skip
class ResponsesBody(InputBody):
    """The body of a request for a response."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Positive | None = None
    top_p: Share | None = None
    top_logprobs: TopLogprobs | None = None
    stream: bool | None = None
    include: list[Include] | None = None
    metadata: Annotated[dict[str, str], AtMost(MAX_PAIRS)] | None = None
    user: Anyway = None
    safety_identifier: Anyway = None
    prompt_cache_key: Anyway = None
    max_tool_calls: Anyway = None  # of tools that run at the provider: there are none


# ---------------------------------------------------------------------------------------------- paths


def router(server: Server) -> APIRouter:
    """`POST /responses` and `POST /responses/input_tokens`."""
    found = new_router(tags=["responses"])

    @found.post("/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The model's answer to a conversation of items."""
        model = server.named(body.model)
        return await answered(server, request, model, lambda: _writer(model, body), body.stream)

    @found.post("/responses/input_tokens")
    async def input_tokens(body: InputBody) -> dict[str, Any]:
        """The number of tokens of a prompt."""
        model = server.named(body.model)
        prompt, _ = await in_thread(lambda: _prompt(model, body))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.context)}

    @found.get("/responses/{response_id}")
    @found.delete("/responses/{response_id}", include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Always an error: responses are not stored."""
        hint = "keep the response that `POST /v1/responses` has returned"
        raise ApiError(404, f"the server stores no responses, and has no {response_id!r}", hint=hint)

    return found


def _prompt(model: ServedModel, body: InputBody, most: int | None = None) -> tuple[ChatPrompt, list[Any]]:
    """The prompt of a body, and the functions in it.

    Args:
        most: tokens of the answer.
    """
    functions = functions_of(body.tools)
    choice, functions = choice_of(body.tool_choice, functions)
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = effort_variables(model, effort, "reasoning.effort")
    try:
        prompt = fitting_prompt(
            model,
            messages_of(body.input, body.instructions),
            most,
            cuts=body.truncation == "auto",
            tools=functions or None,
            tool_choice=choice,
            parallel=body.parallel_tool_calls is not False,
            variables=variables,
            custom=frozenset(custom_of(body.tools)),
        )
    except ApiError as error:
        error.param = "input" if error.param == "messages" else error.param
        raise
    return prompt, functions


def _writer(model: ServedModel, body: ResponsesBody) -> ResponseWriter:
    prompt, functions = _prompt(model, body, body.max_output_tokens)
    sample = changed_sample(model.default_sample, without_none(temperature=body.temperature, top_p=body.top_p))
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    text_format = body.text.format if body.text is not None else None
    asked = model.asked(
        prompt.context,
        body.max_output_tokens,
        sample,
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        grammar=grammar_maker(model, form_grammar(text_format, "text.format"), prompt),
    )
    return ResponseWriter(_echo(model, body, sample, functions), custom_of(body.tools), [asked])


def _echo(model: ServedModel, body: ResponsesBody, sample: SampleOpts, functions: list[Any]) -> dict[str, Any]:
    """The fields of a response that say how it was asked for."""
    reasoning = body.reasoning
    text_format = body.text.format if body.text is not None else None
    return {
        "model": model.name,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sample.temperature,
        "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools_json(functions, custom_of(body.tools)),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sample.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


_ROLES = ("user", "assistant", "system", "developer")


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
        _add(JsonValue(item, f"input[{i}]"), system, found)
    if not found:
        raise invalid("input", "there is no message", 'give a text, or [{"role": "user", "content": "..."}]')
    return [{"role": "system", "content": "\n\n".join(system)}, *found] if system else found


def _add(item: JsonValue, system: list[str], found: list[JsonObject]) -> None:
    kind = item.value.get("type", "message" if "role" in item.value else None)
    if kind == "message":
        _add_message(item, system, found)
    elif kind == "reasoning":
        if text := _reasoning(item):
            message = _assistant(found)
            message["reasoning_content"] = f"{message.get('reasoning_content', '')}\n{text}".lstrip("\n")
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        parsed = (
            {INPUT: item.text("input")} if kind == "custom_tool_call" else arguments.text() and arguments.arguments()
        )
        call = call_of(item.text("name"), parsed or {}, item.text("call_id"))
        _assistant(found).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text, images = text_and_images(content_of(item.get("output"), _KINDS))
        found.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": text})
        if images:
            found.append({"role": "user", "content": images})
    elif kind == "item_reference":
        raise invalid(item.where, "the server stores no responses", "send the item itself")
    else:
        hint = "there are message, reasoning, function_call, custom_tool_call and their outputs"
        raise invalid(f"{item.where}.type", f"items of type {kind!r} are not supported", hint)


def _add_message(item: JsonValue, system: list[str], found: list[JsonObject]) -> None:
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


def _reasoning(item: JsonValue) -> str:
    """The text of a reasoning item: what the model wrote, else its summary. One of another server may have neither."""
    for name in ("content", "summary"):
        if parts := item.get(name).each() if item.value.get(name) else ():
            return "\n".join(part.text("text") for part in parts)
    return ""


def _image(part: JsonValue) -> list[JsonObject]:
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
    hint = "give auto, none, required, a function, a custom tool or allowed_tools"
    raise invalid("tool_choice", f"the type {kind!r} is not supported", hint)
