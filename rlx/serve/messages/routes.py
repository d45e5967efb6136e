"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. Server stage.

The fields of bodies are those of `anthropic.types.MessageCreateParams`, and the sampling options that older clients
send. Content blocks are checked where they are read, in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rlx.arguments import without_none
from rlx.grammar import Grammar
from rlx.serve.answers import answered
from rlx.serve.body import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    Anyway,
    Body,
    Ignored,
    changed_sample,
    form_grammar,
    hint,
    only,
    shown,
)
from rlx.serve.conversation import check_continued
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.http import in_thread, new_router
from rlx.serve.messages.blocks import choice_of, messages_of, tools_of
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
    wanted = body.output_config.format if body.output_config is not None else None
    field = "output_format" if wanted is None else "output_config.format"
    return form_grammar(body.output_format if wanted is None else wanted, field, ("json_schema",))
