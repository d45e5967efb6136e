"""/v1/responses, without a store. Server stage, OpenAI's newer API for conversations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.grammar import Grammar
from rlx.sampling import SampleOpts
from rlx.serve.builders import Built, changed_sample, completed, given, request_fields, schema_grammar
from rlx.serve.custom_tools import reading_inputs
from rlx.serve.errors import ApiError, invalid
from rlx.serve.fields import shown
from rlx.serve.fitting import fitting_prompt
from rlx.serve.generation import GenerationSpec
from rlx.serve.http import new_router
from rlx.serve.model import ServedModel, in_thread
from rlx.serve.pieces import stream_of
from rlx.serve.reasoning import effort_variables
from rlx.serve.responses.bodies import InputBody, ResponsesBody
from rlx.serve.responses.items import (
    choice_of,
    custom_of,
    functions_of,
    messages_of,
    refuse_stored,
    tools_json,
)
from rlx.serve.responses.output import ResponseBuilder
from rlx.serve.streaming import Stream, comment, event, json_bytes, while_connected
from rlx.serve.tool_grammar import answer_grammar

if TYPE_CHECKING:
    from rlx.serve.app import Server
    from rlx.serve.chat_prompt import ChatPrompt


def router(server: Server) -> APIRouter:
    """`POST /responses` and `POST /responses/input_tokens`."""
    found = new_router(tags=["responses"])

    @found.post("/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The model's answer to a conversation of items."""
        model = server.named(body.model)
        spec, fields = await _spec(model, body, request_fields(server, request))
        answering = await model.generate(spec)
        builder = ResponseBuilder(fields, custom_of(body.tools))
        if body.stream:
            pieces = Built(builder, _written, comment("the prompt is computed"))
            return Stream(stream_of(answering, pieces, server.options.ping))
        await while_connected(request, completed(answering, builder))
        return Response(json_bytes(builder.response), media_type="application/json")

    @found.post("/responses/input_tokens")
    async def input_tokens(body: InputBody) -> dict[str, Any]:
        """The number of tokens of a prompt."""
        model = server.named(body.model)
        prompt, _ = await _prompt(model, body)
        return {"object": "response.input_tokens", "input_tokens": len(prompt.context)}

    @found.get("/responses/{response_id}")
    @found.delete("/responses/{response_id}", include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Always an error: responses are not stored."""
        hint = "keep the response that `POST /v1/responses` has returned"
        raise ApiError(404, f"the server stores no responses, and has no {response_id!r}", hint=hint)

    return found


def _written(each: dict[str, Any]) -> bytes:
    return event(json_bytes(each), each["type"])


async def _prompt(model: ServedModel, body: InputBody, most: int | None = None) -> tuple[ChatPrompt, list[Any]]:
    """The prompt of a body, and the functions in it.

    Args:
        most: tokens of the answer.
    """
    refuse_stored(body)
    functions = await in_thread(lambda: functions_of(body.tools))
    choice, functions = choice_of(body.tool_choice, functions)
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = effort_variables(model.tokenizer, effort, "reasoning.effort")
    parallel, cuts = body.parallel_tool_calls is not False, body.truncation == "auto"

    async def make(messages: list[dict[str, Any]]) -> ChatPrompt:
        return await model.chat_prompt(messages, functions or None, choice, parallel, variables)

    messages = await in_thread(lambda: messages_of(body.input, body.instructions))
    prompt = await fitting_prompt(messages, make, model.runner.max_seq, most, cuts=cuts)
    return reading_inputs(prompt, frozenset(custom_of(body.tools))), functions


async def _spec(
    model: ServedModel, body: ResponsesBody, fields: dict[str, Any]
) -> tuple[GenerationSpec, dict[str, Any]]:
    """What is to be generated, and the fields of the response that repeat the request."""
    prompt, functions = await _prompt(model, body, body.max_output_tokens)
    sample = changed_sample(model.default_sample, given(temperature=body.temperature, top_p=body.top_p))
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    spec = GenerationSpec(
        prompt.context,
        body.max_output_tokens,
        sample,
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        grammar=await answer_grammar(model, _text_grammar(body), prompt),
        **fields,
    )
    return spec, _echo(model, body, sample, functions)


def _text_grammar(body: InputBody) -> Callable[[], Grammar] | None:
    """What makes the grammar of `text.format`."""
    wanted = body.text.format if body.text is not None else None
    kind = wanted.get("type") if wanted is not None else "text"
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object
    if kind != "json_schema":
        raise invalid("text.format.type", f"expected text, json_object or json_schema, found {shown(kind)}")
    if "schema" not in wanted:
        raise invalid("text.format.schema", "it is required")
    return partial(schema_grammar, wanted["schema"], "text.format.schema", lenient=wanted.get("strict") is False)


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
