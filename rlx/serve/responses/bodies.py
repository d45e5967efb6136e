"""The bodies of `/v1/responses` and `/v1/responses/input_tokens`.

Server stage. The fields are those of `openai.types.responses.ResponseCreateParams`. Items of `input` are checked where
they are read, in `items.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.serve.fields import MAX_MESSAGES, MAX_PAIRS, MAX_TOOLS, Anyway, AtMost, Body, Ignored, hint, only

Text = str | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Include = Literal[
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "message.output_text.logprobs", "reasoning.encrypted_content",
]  # fmt: skip


class Reasoning(Body):
    """How the model reasons."""

    effort: Effort | None = None
    summary: Annotated[Any, hint("none")] = None  # the answer has the reasoning itself
    generate_summary: Ignored = None
    context: Annotated[Any, hint("auto")] = None
    mode: Annotated[Any, hint("standard")] = None


class TextFields(Body):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Annotated[Any, hint("medium")] = None


class InputBody(Body):
    """What makes the prompt of a response."""

    model: Text = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: Text = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextFields | None = None
    truncation: Literal["auto", "disabled"] | None = None

    previous_response_id: Any = None
    conversation: Any = None
    personality: Ignored = None


class ResponsesBody(InputBody):
    """The body of a request for a response."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    include: list[Include] | None = None
    metadata: Annotated[dict[str, str], AtMost(MAX_PAIRS)] | None = None

    store: Annotated[Any, hint(False)] = None
    user: Anyway = None
    safety_identifier: Anyway = None
    prompt_cache_key: Anyway = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    service_tier: Annotated[Any, hint("auto", "default")] = None
    client_metadata: Ignored = None
    stream_options: Annotated[Any, hint({}, {"include_obfuscation": False})] = None
    max_tool_calls: Anyway = None  # of tools that run at the provider: there are none
    access_programs: Ignored = None
    background_options: Ignored = None  # of `background`

    background: Annotated[Any, only(False)] = None
    prompt: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    context_management: Annotated[Any, only([])] = None
    image: Annotated[Any, only({}, {"context_compression": "auto"}, {"context_compression": "disabled"})] = None
