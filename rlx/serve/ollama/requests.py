"""Ollama's requests: bodies, messages, and `options` as sampling options and as what ends an answer.

Server stage. The fields are those of the request types in the `ollama` package. Images are in base64 in a field of
their own; arguments of tool calls are objects; results of tools name the tool, not the call. Options that say how a
model is loaded are decided when the server starts: they are hints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.sampling import SampleOpts
from rlx.serve import record
from rlx.serve.body import (
    MAX_BREAKERS,
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TEXTS,
    MAX_TOOLS,
    Body,
    Ignored,
    changed_sample,
    hint,
    is_one_of,
    only,
    shown,
    string,
    unknown_field,
)
from rlx.serve.errors import invalid
from rlx.serve.media import base64_source

JsonObject = dict[str, Any]
Text = str | None
Think = bool | Literal["low", "medium", "high", "max"] | None
Format = Literal["", "json"] | dict[str, Any] | None
KeepAlive = float | int | str | None  # the model stays, whatever it says


class ModelBody(Body):
    """A body that names a model, by `model` or, as older clients do, by `name`."""

    model: Text = None
    name: Text = None


class AnswerBody(ModelBody):
    """The fields that `/api/chat` and `/api/generate` share."""

    stream: bool | None = None
    options: dict[str, Any] | None = None
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
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(ModelBody):
    """The body of `/api/embeddings`, the older form of `/api/embed`."""

    prompt: Text = None
    options: dict[str, Any] | None = None
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
        where = f"messages[{i}]"
        made = _message(message, where)
        if made["role"] == "tool":
            made["tool_call_id"] = _answered(message, called)
        called += made.get("tool_calls", ())
        found.append(made)
    return found


def _message(message: Mapping[str, Any], where: str) -> JsonObject:
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(_ROLES)}, found {shown(role)}")
    found: JsonObject = {"role": role, "content": user_content(message.get("content"), message.get("images"), where)}
    if role == "tool" and isinstance(message.get("tool_name"), str):
        found["name"] = message["tool_name"]
    if role == "assistant":
        thinking = message.get("thinking")
        if thinking:
            found["reasoning_content"] = string(thinking, f"{where}.thinking")
        if message.get("tool_calls"):
            found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return found


def user_content(text: Any, images: Any, where: str = "", field: str = "content") -> Any:
    """A text, or parts of a text and its images, which come first."""
    said = "" if text is None else string(text, f"{where}.{field}".lstrip("."))
    if not images:
        return said
    place = f"{where}.images".lstrip(".")
    if not isinstance(images, list):
        raise invalid(place, f"expected an array of images in base64, found {shown(images)}")
    parts = [base64_source(image, f"{place}[{i}]").part for i, image in enumerate(images)]
    return [*parts, {"type": "text", "text": said}]


def _calls(calls: Any, where: str) -> list[JsonObject]:
    if not isinstance(calls, list):
        raise invalid(where, f"expected an array, found {shown(calls)}")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise invalid(f"{where}[{i}].function", "it is required")
        arguments = function.get("arguments")
        if not isinstance(arguments, Mapping):
            raise invalid(f"{where}[{i}].function.arguments", f"expected an object, found {shown(arguments)}")
        name = string(function.get("name"), f"{where}[{i}].function.name")
        identity = call["id"] if isinstance(call.get("id"), str) else f"call_{i}"
        found.append({"id": identity, "type": "function", "function": {"name": name, "arguments": dict(arguments)}})
    return found


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

_RENAMED = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "repetition_window"}
_NAMES = {field.name: f"options.{field.name}" for field in fields(SampleOpts)}
_NAMES |= {own: f"options.{name}" for name, own in _RENAMED.items()}
_OWN = {field.name for field in fields(SampleOpts)} - {"logit_bias"}
_COUNTS = {"top_k", "seed", "repetition_window", "mirostat", "dry_allowed_length", "dry_penalty_last_n"}

#: Options of how a model is loaded and computed, which change no answer -> values that ask for what is so anyway.
_HINTS: dict[str, tuple[Any, ...]] = {
    "num_gpu": (0, -1),
    "main_gpu": (0,),
    "low_vram": (True, False),
    "use_mmap": (True,),
    "use_mlock": (False,),
    "numa": (False,),
    "num_batch": (),
    "num_thread": (0,),
    "num_keep": (0,),  # of a prompt that is cut: messages go as a whole
    "f16_kv": (True,),
    "logits_all": (False,),
}
#: Options that would change answers -> the value that changes nothing, and the way out for others.
_FIXED: dict[str, tuple[Any, str]] = {
    "vocab_only": (False, "the model is loaded"),
    "embedding_only": (False, "the model is loaded"),
    "penalize_newline": (True, "line breaks are penalized like other tokens"),
    "tfs_z": (1, "give `min_p` or `top_n_sigma` instead"),
}


def options_of(options: Mapping[str, Any] | None, default: SampleOpts, context: int) -> dict[str, Any]:
    """The options of a request as arguments of `ServedModel.asked`: `sample`, and perhaps `max_tokens` and `stop`.

    Args:
        default: what options that are missing stand for.
        context: number of tokens that the context holds.

    Raises:
        ApiError: an option is unknown, out of its range, or asks for what the server does not do.
    """
    changes, found = dict[str, Any](), dict[str, Any]()
    for name, value in (options or {}).items():
        field = f"options.{name}"
        if value is None:
            continue
        if name == "num_predict":
            found["max_tokens"] = _max_tokens(value, field)
        elif name == "stop":
            found["stop"] = _stops(value, field)
        elif name == "num_ctx":
            _check_context(value, context, field)
        elif name in _HINTS:
            if not is_one_of(value, _HINTS[name]):
                record.ignore(field)
        elif name in _FIXED:
            _check_fixed(name, value, field)
        elif (own := _RENAMED.get(name, name)) in _OWN:
            changes[own] = _converted(own, value, field)
        else:
            known = (*_OWN, *_RENAMED, *_HINTS, *_FIXED, "num_predict", "num_ctx", "stop")
            raise unknown_field(field, [f"options.{each}" for each in known])
    return {"sample": changed_sample(default, changes, _NAMES), **found}


def _converted(name: str, value: Any, field: str) -> Any:
    if name == "dry_sequence_breakers":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise invalid(field, f"expected an array of strings, found {shown(value)}")
        if len(value) > MAX_BREAKERS:
            raise invalid(field, f"expected at most {MAX_BREAKERS} strings, found {len(value)}")
        return tuple(value)
    kinds, expected = (int, "an integer") if name in _COUNTS else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise invalid(field, f"expected {expected}, found {shown(value)}")
    if name == "seed":
        return None if value == -1 else value % 2**64
    if name in ("repetition_window", "dry_penalty_last_n"):
        return None if value < 0 else value
    return max(0, value) if name == "top_k" else value


def _max_tokens(value: Any, field: str) -> int | None:
    """The maximum number of tokens; Ollama writes -1 and -2 for no limit but the context."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -2:
        raise invalid(field, f"expected an integer of at least 0, or -1, found {shown(value)}")
    return None if value < 0 else value


def _stops(value: Any, field: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise invalid(field, f"expected at most {MAX_STOPS} strings that are not empty, found {shown(value)}")
    return tuple(texts)


def _check_context(value: Any, context: int, field: str) -> None:
    """A larger context than there is, which many clients always ask for, is a hint: what fits is answered."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise invalid(field, f"expected an integer, found {shown(value)}")
    if value > context:
        record.ignore(field)


def _check_fixed(name: str, value: Any, field: str) -> None:
    same, way_out = _FIXED[name]
    if value != same:
        raise invalid(field, f"{shown(value)} is not what the server does, and a request cannot change it", way_out)
