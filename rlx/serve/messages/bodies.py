"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`.

Server stage. The fields are those of `anthropic.types.MessageCreateParams`, and the sampling options that older clients
send. Content blocks are checked where they are read, in `blocks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.serve.fields import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Anyway, Body, Ignored, hint, only

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
