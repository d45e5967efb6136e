"""The bodies of Ollama's paths.

Server stage. The fields are those of the request types in the `ollama` package. `options` are read in `options.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.serve.fields import MAX_MESSAGES, MAX_TEXTS, MAX_TOOLS, Body, Ignored, hint, only

Text = str | None
Think = bool | Literal["low", "medium", "high", "max"] | None
Format = Literal["", "json"] | dict[str, Any] | None
KeepAlive = float | int | str | None  # the model stays, whatever it says


class ModelBody(Body):
    """A body that names a model, by `model` or, as older clients do, by `name`."""

    model: Text = None
    name: Text = None


class AnswerBody(ModelBody):
    """What `/api/chat` and `/api/generate` share."""

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
