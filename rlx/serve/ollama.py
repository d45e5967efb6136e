"""Ollama's paths: answers, what the models are, and the registry, which a server of chosen models has not.

Server stage; paths for vectors are in `openai/embeddings.py`. The fields of bodies are those of the request types in
the `ollama` package. Images are in base64 in a field of their own; arguments of tool calls are objects; results of
tools name the tool, not the call. An answer is one object, or a line of JSON for each piece. Clients choose by what is
listed here: a model that is said to call tools is given some.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

import rlx
from rlx.grammar import Grammar
from rlx.json_file import JsonObject
from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.answers import Delta, End, Finished, ObjectWriter, Progress, answered
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.fields import RENAMED, changed_sample, sampling_changes, schema_grammar
from rlx.serve.http import (
    LINES,
    MAX_MESSAGES,
    Body,
    OpenRoute,
    hint,
    hints,
    json_bytes,
    json_response,
    only,
    shown,
    unsupported,
)
from rlx.serve.media import base64_source
from rlx.serve.model import ServedModel
from rlx.serve.openai.bodies import SamplingFields, Stop, Stops, Text, Tools, TopLogprobs
from rlx.serve.openai.completions import logprob_dicts
from rlx.serve.prompts import (
    ChatPrompt,
    JsonValue,
    Part,
    call_of,
    chat_prompt,
    check_continued,
    effort_variables,
    filled_in,
    fitting_prompt,
    grammar_maker,
    switch_variables,
)

if TYPE_CHECKING:
    from rlx.serve.server import Server


Think = bool | Literal["low", "medium", "high", "max"] | None
Format = Literal["", "json"] | dict[str, Any] | None
KeepAlive = float | int | str | None  # the model stays, whatever it says


@hints(
    "num_batch",
    num_gpu=[0, -1], main_gpu=[0], low_vram=[True, False], use_mmap=[True], use_mlock=[False], numa=[False],
    num_thread=[0], num_keep=[0], f16_kv=[True], logits_all=[False],
)  # fmt: skip
@unsupported(vocab_only=[False], embedding_only=[False], penalize_newline=[True])
class Options(SamplingFields):
    """Options of an answer. Those of how a model is loaded and computed, which change no answer, are hints."""

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # -1 and -2 are no limit but the context
    num_ctx: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | Stops | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_window: int | None = None
    tfs_z: Annotated[Any, only(1, 1.0, instead="give `min_p` or `top_n_sigma`")] = None


class ModelBody(Body):
    """A body that names a model, by `model` or, as older clients do, by `name`."""

    model: Text = None
    name: Text = None


class AnswerBody(ModelBody):
    """The fields that `/api/chat` and `/api/generate` share."""

    stream: bool | None = None
    options: Options | None = None
    format: Format = None
    keep_alive: KeepAlive = None
    think: Think = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: bool | None = None
    shift: Annotated[bool | None, hint(False)] = None  # an answer ends where the context does


class ChatBody(AnswerBody):
    """The body of `/api/chat`."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None


@unsupported(width=[0], height=[0], steps=[0])
class GenerateBody(AnswerBody):
    """The body of `/api/generate`."""

    prompt: Text = None
    system: Text = None
    raw: bool | None = None
    images: list[str] | None = None
    context: list[Annotated[int, Field(ge=0)]] | None = None
    suffix: Text = None
    template: Text = None


@hints("system template options")
class ShowBody(ModelBody):
    """The body of `/api/show`."""

    verbose: bool | None = None


# ---------------------------------------------------------------------------------------------- messages

_ROLES = ("system", "user", "assistant", "tool")


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """The messages of a conversation.

    Raises:
        ApiError: a message is malformed.
    """
    found: list[JsonObject] = []
    called: list[JsonObject] = []  # the calls that have no result yet
    for i, message in enumerate(messages):
        made = _message(JsonValue(message, f"messages[{i}]"))
        if made["role"] == "tool":
            made["tool_call_id"] = _said(message, called)
        called += made.get("tool_calls", ())
        found.append(made)
    return found


def _message(message: JsonValue) -> JsonObject:
    role = message.value.get("role")
    if role not in _ROLES:
        raise invalid(f"{message.where}.role", f"expected one of {', '.join(_ROLES)}, found {shown(role)}")
    found: JsonObject = {"role": role, "content": user_content(message)}
    if role == "tool" and isinstance(message.value.get("tool_name"), str):
        found["name"] = message.value["tool_name"]
    if role == "assistant":
        if message.value.get("thinking"):
            found["reasoning_content"] = message.text("thinking")
        if message.value.get("tool_calls"):
            found["tool_calls"] = [_call(call, i) for i, call in enumerate(message.get("tool_calls").each())]
    return found


def user_content(message: JsonValue, field: str = "content") -> str | list[Part]:
    """A text, or parts of a text and its images, which come first."""
    said = "" if message.value.get(field) is None else message.text(field)
    if not message.value.get("images"):
        return said
    images = message.get("images")
    if not isinstance(images.value, list):
        raise invalid(images.where, f"expected an array of images in base64, found {shown(images.value)}")
    parts = [base64_source(image, f"{images.where}[{i}]").part for i, image in enumerate(images.value)]
    return [*parts, {"type": "text", "text": said}]


def _call(call: JsonValue, number: int) -> JsonObject:
    function = call.get("function").checked()
    arguments = dict(function.get("arguments").checked().value)
    ident = call.value["id"] if isinstance(call.value.get("id"), str) else f"call_{number}"
    return call_of(function.text("name"), arguments, ident)


def _said(message: Mapping[str, Any], called: list[JsonObject]) -> str:
    """The id of the call that a result belongs to: as said, else the first open call of that tool, or of any."""
    if isinstance(message.get("tool_call_id"), str):
        return str(message["tool_call_id"])
    name = message.get("tool_name")
    same = [call for call in called if call["function"]["name"] == name]
    for call in (same or called)[:1]:
        called.remove(call)
        return str(call["id"])
    return "call_0"


# ---------------------------------------------------------------------------------------------- options

_NAMES = {each.name: f"options.{each.name}" for each in fields(SampleOpts)}
_NAMES |= {own: f"options.{name}" for name, own in RENAMED.items()}


def options_of(options: Options | None, default: SampleOpts, context: int) -> dict[str, Any]:
    """The options of a request as arguments of `ServedModel.asked`: `sample`, and perhaps `max_tokens` and `stop`.

    A larger context than there is, which many clients always ask for, is a hint: what fits is answered.

    Args:
        default: what options that are missing stand for.
        context: number of tokens that the context holds.

    Raises:
        ApiError: an option is out of its range.
    """
    options, found = options or Options(), dict[str, Any]()
    if options.num_predict is not None:
        found["max_tokens"] = None if options.num_predict < 0 else options.num_predict
    if options.stop is not None:
        found["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    if (options.num_ctx or 0) > context:
        record.ignore("options.num_ctx")
    return {"sample": changed_sample(default, sampling_changes(options), _NAMES), **found}


Kind = Literal["chat", "generate"]


def now() -> str:
    """The time, as RFC 3339 writes it."""
    return f"{datetime.now(UTC).isoformat(timespec='microseconds').removesuffix('+00:00')}Z"


class OllamaWriter(ObjectWriter):
    """Writes one object, or a line of JSON for each piece.

    Args:
        kind: whether it answers `/api/chat` or `/api/generate`.
        model: the name that the request used.
        started: `time.perf_counter()` when the request came.

    Attributes:
        context: ids of the prompt, and of the answer behind them; the last object then has them as `context`.
    """

    media_type = LINES

    def __init__(self, kind: Kind, model: str, started: float) -> None:
        super().__init__(())
        self._kind, self._model, self._started = kind, model, started
        self.context: list[int] = []
        self._objects: list[JsonObject] = []
        self._calls: list[JsonObject] = []

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield error_json(error)

    def waiting(self, progress: Progress) -> bytes:
        return self.written(self.piece())

    def written(self, found: JsonObject) -> bytes:
        return json_bytes(found) + b"\n"

    def keep(self, found: JsonObject) -> None:
        self._objects.append(found)

    def whole(self) -> JsonObject:
        return joined(self._kind, self._objects)

    def delta(self, delta: Delta) -> Iterator[JsonObject]:
        if self.context:
            self.context += delta.tokens
        for call in delta.tool_calls:
            yield from self._call(call)
        if delta.text or delta.thinking or delta.logprobs:
            logprobs = {"logprobs": logprob_dicts(delta.logprobs, as_id=False)} if delta.logprobs else {}
            yield {**self.piece(delta.text, delta.thinking), **logprobs}

    def end(self, end: End) -> Iterator[JsonObject]:
        yield from self._called()
        self.ended = end

    def finished(self, numbers: Finished) -> Iterator[JsonObject]:
        yield self.done("length" if self.ended.finish_reason == "length" else "stop", numbers)

    def _call(self, call: Any) -> Iterator[JsonObject]:
        if call.name:
            yield from self._called()
            self._calls = [{"id": call.id, "index": call.index, "name": call.name, "arguments": ""}]
        self._calls[-1]["arguments"] += call.arguments

    def _called(self) -> Iterator[JsonObject]:
        """The tool call that is complete, if there is one."""
        calls, self._calls = self._calls, []
        for call in calls:
            function = {
                "index": call["index"],
                "name": call["name"],
                "arguments": json.loads(call["arguments"] or "{}"),
            }
            yield self.piece(calls=[{"id": call["id"], "function": function}])

    def piece(self, text: str = "", thinking: str = "", calls: list[JsonObject] | None = None) -> JsonObject:
        """An object that is not the last one."""
        head = {"model": self._model, "created_at": now()}
        more = {"thinking": thinking} if thinking else {}
        if self._kind == "generate":
            return {**head, "response": text, **more, "done": False}
        called = {"tool_calls": calls} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **more, **called}, "done": False}

    def done(self, reason: str, numbers: Finished | None = None) -> JsonObject:
        """The last object of a stream."""
        found = {**self.piece(), "done": True, "done_reason": reason}
        if numbers is not None:
            total = time.perf_counter() - self._started
            found |= {
                "total_duration": int(total * 1e9), "load_duration": 0,
                "prompt_eval_count": numbers.prompt_tokens, "prompt_eval_duration": int(numbers.prompt_ms * 1e6),
                "eval_count": numbers.completion_tokens, "eval_duration": int(numbers.decode_ms * 1e6),
            }  # fmt: skip
        return {**found, "context": self.context} if self.context else found


def joined(kind: Kind, pieces: Sequence[JsonObject]) -> JsonObject:
    """The objects of a stream as the one object of an answer that is not streamed."""
    text = "content" if kind == "chat" else "response"
    inner = [piece["message"] if kind == "chat" else piece for piece in pieces]
    whole = {**inner[-1], text: "".join(each[text] for each in inner)}
    if thinking := "".join(each.get("thinking", "") for each in inner):
        whole["thinking"] = thinking
    if calls := [call for each in inner for call in each.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    found = {**pieces[-1], "message": whole} if kind == "chat" else whole
    if logprobs := [info for piece in pieces for info in piece.get("logprobs", ())]:
        found["logprobs"] = logprobs
    return found


def error_json(error: ApiError) -> JsonObject:
    """The body of an error."""
    return {"error": str(error)}


SHAPES["/api/"] = error_json

_REGISTRY = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")


def router(server: Server) -> APIRouter:
    """`POST /api/chat` and `POST /api/generate`."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.post("/api/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        return await answer(body, request, "chat", _chat, is_empty=not body.messages)

    @found.post("/api/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """The model's answer to a prompt."""
        is_empty = not body.prompt and not body.images and not body.suffix
        return await answer(body, request, "generate", _generate, is_empty=is_empty)

    async def answer(
        body: AnswerBody, request: Request, kind: Kind, prepare: Callable[..., OllamaWriter], *, is_empty: bool
    ) -> Response:
        model = named(server, body)
        writer = OllamaWriter(kind, body.model or body.name or "", time.perf_counter())
        if is_empty:
            return _loaded(writer, body)
        return await answered(server, request, model, partial(prepare, model, body, writer), body.stream is not False)

    for path in _REGISTRY:
        found.add_api_route(f"/api/{path}", _registry, methods=["POST", "DELETE", "GET"], include_in_schema=False)
    return found


async def _registry() -> Response:
    """Models come and go with the server."""
    hint = "stop it, and start `rlx serve MODEL` with others; `rlx pull` downloads models"
    raise ApiError(501, "the server has the models that were chosen when it started", hint=hint)


def named(server: Server, body: ModelBody) -> ServedModel:
    """The model that a request names, also with Ollama's default tag.

    Raises:
        ApiError: there is no such model.
    """
    name = body.model if body.model is not None else body.name
    if not name:
        raise invalid("model", "it is required")
    bare = name.removesuffix(":latest")
    return server.named(bare if server.find(bare) else name)


def _refuse_beside(body: GenerateBody, field: str, others: Sequence[str]) -> None:
    """Refuses what only a chat template has a place for, beside a field that leaves it out."""
    for name in others:
        if getattr(body, name):
            raise invalid(name, f"it cannot be together with {field}", "leave one of them out")


def _grammar(form: Any) -> Callable[[], Grammar] | None:
    """The maker of the grammar of the field `format`."""
    if not form:
        return None
    return Grammar.json_object if form == "json" else partial(schema_grammar, form, "format")


def _loaded(writer: OllamaWriter, body: AnswerBody) -> Response:
    """The answer to a request without a prompt, by which Ollama's clients load a model, or unload it."""
    return json_response(writer.done("unload" if body.keep_alive in (0, "0", "0s") else "load"))


def _chat(model: ServedModel, body: ChatBody, writer: OllamaWriter) -> OllamaWriter:
    """The writer, which asks for the answer to a conversation."""
    messages = messages_of(body.messages or ())
    if continues := messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        check_continued(messages)
    options = _options(model, body)
    prompt = fitting_prompt(
        model,
        messages,
        options.get("max_tokens"),
        cuts=body.truncate is not False,
        tools=body.tools or None,
        variables=_variables(model, body),
        continues=continues,
    )
    return _asking(model, body, prompt, options, writer)


def _generate(model: ServedModel, body: GenerateBody, writer: OllamaWriter) -> OllamaWriter:
    """The writer, which asks for what comes after a prompt."""
    if body.template and body.template != model.tokenizer.chat_template:
        hint = "send the formatted text with raw, or start the server with --chat-template"
        raise invalid("template", "a request cannot change the chat template", hint, code="unsupported_parameter")
    if body.suffix:
        _refuse_beside(body, "suffix", ("raw", "system", "images", "context", "think"))
        prompt = ChatPrompt(model.checked(filled_in(model, body.prompt or "", body.suffix)))
    elif body.raw:
        _refuse_beside(body, "raw", ("system", "images", "context", "think"))
        model.check_length([body.prompt or ""], "prompt")
        prompt = ChatPrompt(model.checked(model.tokenizer.encode(body.prompt or "", parse_special=True)))
    else:
        content = user_content(JsonValue({"prompt": body.prompt, "images": body.images}, ""), "prompt")
        system = [{"role": "system", "content": body.system}] if body.system else []
        prompt = chat_prompt(model, [*system, {"role": "user", "content": content}], variables=_variables(model, body))
        if body.context:
            prompt = _continued(model, prompt, body.context)
        if prompt.context.images is None:
            writer.context = list(prompt.context.ids)
    return _asking(model, body, prompt, _options(model, body), writer)


def _continued(model: ServedModel, prompt: ChatPrompt, context: list[int]) -> ChatPrompt:
    """A prompt after the tokens of an earlier answer, as `context` has them."""
    if prompt.context.images is not None:
        raise invalid("context", "it cannot be together with images", "send the conversation to /api/chat")
    ids, bos = prompt.context.ids, model.tokenizer.bos_id
    more = ids[1:] if bos is not None and ids[:1] == [bos] else ids
    return replace(prompt, context=model.checked([*context, *more], "context"))


def _options(model: ServedModel, body: AnswerBody) -> dict[str, Any]:
    return options_of(body.options, model.default_sample, model.runner.max_seq)


def _variables(model: ServedModel, body: AnswerBody) -> dict[str, Any]:
    if isinstance(body.think, str):
        return effort_variables(model, body.think, "think")
    return switch_variables(model, body.think, "think")


def _asking(
    model: ServedModel, body: AnswerBody, prompt: ChatPrompt, options: dict[str, Any], writer: OllamaWriter
) -> OllamaWriter:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "it needs logprobs", "set logprobs to true")
    asked = model.asked(
        prompt.context,
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar_maker(model, _grammar(body.format), prompt),
        **options,
    )
    writer.asked = [asked]
    return writer


VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients ask for it, and some refuse older ones."""
_NEVER = "9999-12-31T23:59:59Z"


def describe_router(server: Server) -> APIRouter:
    """The paths that describe the server and its models."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def alive() -> Response:
        """That there is a server, where it has no page."""
        return Response("rlx is running", media_type="text/plain")

    @found.get("/api/version")
    async def version() -> JsonObject:
        """The version of Ollama's API."""
        return {"version": VERSION, "rlx": rlx.__version__}

    @found.get("/api/tags")
    async def tags() -> JsonObject:
        """The models that are served, each under all of its names."""
        return {"models": [tag(model, name) for model in server.models for name in model.names]}

    @found.get("/api/ps")
    async def running() -> JsonObject:
        """The models that are served: they stay in memory."""
        return {"models": [_running(model) for model in server.models]}

    @found.post("/api/show")
    async def show(body: ShowBody) -> JsonObject:
        """The facts and abilities of the model."""
        return description(named(server, body))

    return found


def description(model: ServedModel) -> JsonObject:
    """The description of a model: what it is and can do."""
    sample = model.default_sample
    parameters = {name: getattr(sample, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "license": "",
        "modelfile": f"# {model.name}, served by rlx {rlx.__version__}",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": model.tokenizer.chat_template or "",
        "details": details(model),
        "model_info": _info(model),
        "capabilities": list(model.capabilities),
        "modified_at": created_at(model),
    }


def details(model: ServedModel) -> JsonObject:
    """The kind of a model's weights."""
    return {
        "parent_model": "",
        "format": model.file.format,
        "family": model.runner.config.arch,
        "families": [model.runner.config.arch],
        "parameter_size": _count(model.sizes[0]),
        "quantization_level": model.quantization,
    }


def tag(model: ServedModel, name: str) -> JsonObject:
    """A model in a list, under one of its names."""
    return {
        "name": name,
        "model": name,
        "modified_at": created_at(model),
        "size": model.file_bytes,
        "digest": hashlib.sha256(f"{model.file.path}:{model.file_bytes}".encode()).hexdigest(),
        "details": details(model),
    }


def _running(model: ServedModel) -> JsonObject:
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": model.runner.max_seq}
    return {**tag(model, model.name), **more}


def _info(model: ServedModel) -> JsonObject:
    """Sizes, under the keys of GGUF files."""
    config, arch = model.runner.config, model.runner.config.arch
    return {
        "general.architecture": arch,
        "general.basename": model.name,
        "general.parameter_count": model.sizes[0],
        f"{arch}.block_count": config.layers,
        f"{arch}.context_length": model.runner.max_seq,
        f"{arch}.embedding_length": config.hidden,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.vocab_size": config.vocab_size,
    }


def created_at(model: ServedModel) -> str:
    """When the model was opened, in RFC 3339."""
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")


def _count(parameters: int) -> str:
    """A number of parameters as names of models have it, such as 4.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)


ROUTERS = (router, describe_router)
