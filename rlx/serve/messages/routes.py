"""/v1/messages and /v1/messages/count_tokens. Server stage, Anthropic's API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.grammar import Grammar
from rlx.serve.builders import Built, changed_sample, check_continued, completed, given, request_fields, schema_grammar
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.fields import shown
from rlx.serve.generation import GenerationSpec
from rlx.serve.http import new_router
from rlx.serve.messages.blocks import choice_of, messages_of, tools_of
from rlx.serve.messages.bodies import CountBody, MessagesBody
from rlx.serve.messages.output import MessageBuilder, error_json
from rlx.serve.model import ServedModel, in_thread
from rlx.serve.pieces import stream_of
from rlx.serve.reasoning import effort_variables, switch_variables
from rlx.serve.streaming import Stream, event, json_bytes, while_connected
from rlx.serve.tool_grammar import answer_grammar

if TYPE_CHECKING:
    from rlx.serve.app import Server
    from rlx.serve.chat_prompt import ChatPrompt

SHAPES["/v1/messages"] = SHAPES["/messages"] = error_json


def router(server: Server) -> APIRouter:
    """`POST /messages` and `POST /messages/count_tokens`."""
    found = new_router(tags=["messages"])

    @found.post("/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        model = server.named(body.model)
        _refuse_thread(body.thread)
        prompt = await _prompt(model, body)
        answering = await model.generate(await _spec(model, body, prompt, request_fields(server, request)))
        builder = MessageBuilder(model.name, len(prompt.context))
        if body.stream:
            pieces = Built(builder, _written, _written({"type": "ping"}))
            return Stream(stream_of(answering, pieces, server.options.ping))
        await while_connected(request, completed(answering, builder))
        return Response(json_bytes(builder.message), media_type="application/json")

    @found.post("/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        """The number of tokens of a prompt."""
        prompt = await _prompt(server.named(body.model), body)
        return {"input_tokens": len(prompt.context)}

    return found


def _written(each: dict[str, Any]) -> bytes:
    return event(json_bytes(each), each["type"])


async def _prompt(model: ServedModel, body: CountBody) -> ChatPrompt:
    _check_edits(body.context_management)
    choice, tools = choice_of(body.tool_choice), await in_thread(lambda: tools_of(body.tools))
    disabled = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use is True
    messages = await in_thread(lambda: messages_of(body.messages, body.system))
    if continues := bool(messages) and messages[-1]["role"] == "assistant":
        check_continued(messages)
    variables = _variables(model, body)
    return await model.chat_prompt(messages, tools or None, choice, not disabled, variables, continues)


def _variables(model: ServedModel, body: CountBody) -> dict[str, Any]:
    """The template's variables for reasoning."""
    effort, thinking = body.output_config.effort if body.output_config is not None else None, body.thinking
    variables = effort_variables(model.tokenizer, effort, "output_config.effort")
    if thinking is not None and thinking.type in ("enabled", "disabled"):
        variables |= switch_variables(model.tokenizer, thinking.type == "enabled", "thinking.type", thinking.type)
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


async def _spec(model: ServedModel, body: MessagesBody, prompt: ChatPrompt, fields: dict[str, Any]) -> GenerationSpec:
    changes = given(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    return GenerationSpec(
        prompt.context,
        body.max_tokens,
        changed_sample(model.default_sample, changes),
        stop=_stops(body),
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        grammar=await answer_grammar(model, _text_grammar(body), prompt),
        **fields,
    )


def _stops(body: MessagesBody) -> tuple[str, ...]:
    stops = body.stop_sequences or []
    if "" in stops:
        raise invalid(f"stop_sequences[{stops.index('')}]", "it is empty, and would end every answer at once")
    return tuple(stops)


def _text_grammar(body: CountBody) -> Callable[[], Grammar] | None:
    """What makes the grammar of `output_config.format`, or of its older name."""
    config = body.output_config
    field, wanted = "output_config.format", config.format if config is not None else None
    if wanted is None:
        field, wanted = "output_format", body.output_format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise invalid(f"{field}.type", f"expected json_schema, found {shown(wanted.get('type'))}")
    if "schema" not in wanted:
        raise invalid(f"{field}.schema", "it is required")
    return partial(schema_grammar, wanted["schema"], f"{field}.schema")
