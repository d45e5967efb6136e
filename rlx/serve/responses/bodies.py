"""The bodies of `/v1/responses` and `/v1/responses/input_tokens`.

Server stage. The fields are those of `openai.types.responses.ResponseCreateParams`. Items of `input` are checked where
they are read, in `items.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.serve.fields import Body, Ignored, only

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
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[Any, only("standard")] = None


class TextFields(Body):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Annotated[Any, only("medium")] = None


class InputBody(Body):
    """What makes the prompt of a response."""

    model: Text = None
    input: str | list[dict[str, Any]] | None = None
    instructions: Text = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextFields | None = None
    truncation: Annotated[Any, only("disabled")] = None

    previous_response_id: Any = None
    conversation: Any = None
    personality: Annotated[Any, only()] = None


class ResponsesBody(InputBody):
    """The body of a request for a response."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    include: list[Include] | None = None
    metadata: dict[str, str] | None = None

    store: Ignored = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    service_tier: Ignored = None
    client_metadata: Ignored = None
    stream_options: Ignored = None
    max_tool_calls: Ignored = None  # of tools that run at the provider: there are none

    background: Annotated[Any, only(False)] = None
    background_options: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None
    context_management: Annotated[Any, only([])] = None
    access_programs: Annotated[Any, only()] = None
    image: Annotated[Any, only()] = None
