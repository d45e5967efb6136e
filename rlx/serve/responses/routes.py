"""/v1/responses, without a store: OpenAI's newer API for conversations. Server stage.

The fields of bodies are those of `openai.types.responses.ResponseCreateParams`. Items of `input` are checked where they
are read, in `items.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rlx.arguments import without_none
from rlx.sampling import SampleOpts
from rlx.serve.answers import answered
from rlx.serve.body import (
    MAX_MESSAGES,
    MAX_PAIRS,
    MAX_TOOLS,
    Anyway,
    AtMost,
    Body,
    Ignored,
    changed_sample,
    form_grammar,
    hint,
    only,
)
from rlx.serve.errors import ApiError
from rlx.serve.http import in_thread, new_router
from rlx.serve.prompts import ChatPrompt, effort_variables, fitting_prompt, grammar_maker
from rlx.serve.responses.items import (
    choice_of,
    custom_of,
    functions_of,
    messages_of,
    refuse_stored,
    tools_json,
)
from rlx.serve.responses.output import ResponseWriter

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

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
    """The fields that make the prompt of a response."""

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


# ---------------------------------------------------------------------------------------------- paths


def router(server: Server) -> APIRouter:
    """`POST /responses` and `POST /responses/input_tokens`."""
    found = new_router(tags=["responses"])

    @found.post("/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The model's answer to a conversation of items."""
        model = server.named(body.model)
        return await answered(server, request, model, lambda: _writer(model, body), body.stream)

    @found.post("/responses/input_tokens")
    async def input_tokens(body: InputBody) -> dict[str, Any]:
        """The number of tokens of a prompt."""
        model = server.named(body.model)
        prompt, _ = await in_thread(lambda: _prompt(model, body))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.context)}

    @found.get("/responses/{response_id}")
    @found.delete("/responses/{response_id}", include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Always an error: responses are not stored."""
        hint = "keep the response that `POST /v1/responses` has returned"
        raise ApiError(404, f"the server stores no responses, and has no {response_id!r}", hint=hint)

    return found


def _prompt(model: ServedModel, body: InputBody, most: int | None = None) -> tuple[ChatPrompt, list[Any]]:
    """The prompt of a body, and the functions in it.

    Args:
        most: tokens of the answer.
    """
    refuse_stored(body)
    functions = functions_of(body.tools)
    choice, functions = choice_of(body.tool_choice, functions)
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = effort_variables(model, effort, "reasoning.effort")
    prompt = fitting_prompt(
        model,
        messages_of(body.input, body.instructions),
        most,
        cuts=body.truncation == "auto",
        tools=functions or None,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
        variables=variables,
        custom=frozenset(custom_of(body.tools)),
    )
    return prompt, functions


def _writer(model: ServedModel, body: ResponsesBody) -> ResponseWriter:
    """The writer of the answer."""
    prompt, functions = _prompt(model, body, body.max_output_tokens)
    sample = changed_sample(model.default_sample, without_none(temperature=body.temperature, top_p=body.top_p))
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    text_format = body.text.format if body.text is not None else None
    asked = model.asked(
        prompt.context,
        body.max_output_tokens,
        sample,
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        grammar=grammar_maker(model, form_grammar(text_format, "text.format"), prompt),
    )
    return ResponseWriter(_echo(model, body, sample, functions), custom_of(body.tools), [asked])


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
