"""Ollama's requests: bodies, messages, and `options` as sampling options and as what ends an answer.

Server stage. The fields are those of the request types in the `ollama` package. Images are in base64 in a field of
their own; arguments of tool calls are objects; results of tools name the tool, not the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.body import MAX_BREAKERS, MAX_MESSAGES, MAX_STOPS, MAX_TEXTS, MAX_TOOLS, Body, Ignored, hint, only, shown
from rlx.serve.conversation import Given, JsonObject, Part, call_of
from rlx.serve.errors import invalid
from rlx.serve.fields import changed_sample, sampling_changes
from rlx.serve.media import base64_source

Text = str | None
Stop = Annotated[str, Field(min_length=1)]
Think = bool | Literal["low", "medium", "high", "max"] | None
Format = Literal["", "json"] | dict[str, Any] | None
KeepAlive = float | int | str | None  # the model stays, whatever it says


class Options(Body):
    """Options of an answer. Those of how a model is loaded and computed, which change no answer, are hints."""

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # -1 and -2 are no limit but the context
    num_ctx: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    repetition_window: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=MAX_BREAKERS)] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None

    num_gpu: Annotated[Any, hint(0, -1)] = None
    main_gpu: Annotated[Any, hint(0)] = None
    low_vram: Annotated[Any, hint(True, False)] = None
    use_mmap: Annotated[Any, hint(True)] = None
    use_mlock: Annotated[Any, hint(False)] = None
    numa: Annotated[Any, hint(False)] = None
    num_batch: Ignored = None
    num_thread: Annotated[Any, hint(0)] = None
    num_keep: Annotated[Any, hint(0)] = None  # of a prompt that is cut: messages go as a whole
    f16_kv: Annotated[Any, hint(True)] = None
    logits_all: Annotated[Any, hint(False)] = None

    vocab_only: Annotated[Any, only(False)] = None
    embedding_only: Annotated[Any, only(False)] = None
    penalize_newline: Annotated[Any, only(True)] = None
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
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: Annotated[bool | None, hint(False)] = None  # an answer ends where the context does


class ChatBody(AnswerBody):
    """The body of `/api/chat`."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class GenerateBody(AnswerBody):
    """The body of `/api/generate`."""

    prompt: Text = None
    system: Text = None
    raw: bool | None = None
    images: list[str] | None = None
    context: list[Annotated[int, Field(ge=0)]] | None = None

    suffix: Text = None
    template: Text = None
    width: Annotated[Any, only(0)] = None
    height: Annotated[Any, only(0)] = None
    steps: Annotated[Any, only(0)] = None


class EmbedBody(ModelBody):
    """The body of `/api/embed`."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(ModelBody):
    """The body of `/api/embeddings`, the older form of `/api/embed`."""

    prompt: Text = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class ShowBody(ModelBody):
    """The body of `/api/show`."""

    verbose: bool | None = None
    system: Ignored = None
    template: Ignored = None
    options: Ignored = None


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
        made = _message(Given(message, f"messages[{i}]"))
        if made["role"] == "tool":
            made["tool_call_id"] = _answered(message, called)
        called += made.get("tool_calls", ())
        found.append(made)
    return found


def _message(message: Given) -> JsonObject:
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


def user_content(message: Given, field: str = "content") -> str | list[Part]:
    """A text, or parts of a text and its images, which come first."""
    said = "" if message.value.get(field) is None else message.text(field)
    if not message.value.get("images"):
        return said
    images = message.get("images")
    if not isinstance(images.value, list):
        raise invalid(images.where, f"expected an array of images in base64, found {shown(images.value)}")
    parts = [base64_source(image, f"{images.where}[{i}]").part for i, image in enumerate(images.value)]
    return [*parts, {"type": "text", "text": said}]


def _call(call: Given, number: int) -> JsonObject:
    function = call.get("function").checked()
    arguments = dict(function.get("arguments").checked().value)
    ident = call.value["id"] if isinstance(call.value.get("id"), str) else f"call_{number}"
    return call_of(function.text("name"), arguments, ident)


def _answered(message: Mapping[str, Any], called: list[JsonObject]) -> str:
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

_RENAMED = {"repetition_penalty": "repeat_penalty", "repetition_window": "repeat_last_n"}
_NAMES = {each.name: f"options.{_RENAMED.get(each.name, each.name)}" for each in fields(SampleOpts)}


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
