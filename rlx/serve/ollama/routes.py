"""Ollama's `/api/chat` and `/api/generate`, and the paths of a registry, which a server of chosen models has not.

Server stage. What a model is, `/api/tags` and the like, is in `describe.py`; vectors are in `embed.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.grammar import Grammar
from rlx.serve.answers import answered
from rlx.serve.body import schema_grammar
from rlx.serve.conversation import Given, check_continued
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.http import OpenRoute, json_response
from rlx.serve.ollama.output import OllamaWriter, error_json
from rlx.serve.ollama.requests import (
    AnswerBody,
    ChatBody,
    GenerateBody,
    ModelBody,
    messages_of,
    options_of,
    user_content,
)
from rlx.serve.openai.prompts import filled_in
from rlx.serve.prompts import (
    ChatPrompt,
    chat_prompt,
    effort_variables,
    fitting_prompt,
    grammar_maker,
    switch_variables,
)

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server

SHAPES["/api/"] = error_json

_REGISTRY = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")


def router(server: Server) -> APIRouter:
    """`POST /api/chat` and `POST /api/generate`."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.post("/api/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        started, model = time.perf_counter(), named(server, body)
        writer = OllamaWriter("chat", body.model or body.name or "", started)
        if not body.messages:
            return _loaded(writer, body)
        prepare = partial(_chat, model, body, writer)
        return await answered(server, request, model, prepare, body.stream is not False)

    @found.post("/api/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """The model's answer to a prompt."""
        started, model = time.perf_counter(), named(server, body)
        writer = OllamaWriter("generate", body.model or body.name or "", started)
        if not body.prompt and not body.images and not body.suffix:
            return _loaded(writer, body)
        prepare = partial(_generate, model, body, writer)
        return await answered(server, request, model, prepare, body.stream is not False)

    for path in _REGISTRY:
        found.add_api_route(f"/api/{path}", _registry, methods=["POST", "DELETE", "GET"], include_in_schema=False)
    return found


async def _registry() -> Response:
    """Models come and go with the server."""
    hint = "stop it, and start `rlx serve MODEL` with others; `rlx pull` downloads models"
    raise ApiError(501, "the server has the models that were chosen when it started", hint=hint)


def named(server: Server, body: ModelBody) -> ServedModel:
    """The model that a request names, also with Ollama's default tag.

    Raises:
        ApiError: there is no such model.
    """
    name = body.model if body.model is not None else body.name
    if not name:
        raise invalid("model", "it is required")
    bare = name.removesuffix(":latest")
    return server.named(bare if server.find(bare) else name)


def _refuse_beside(body: GenerateBody, field: str, others: Sequence[str]) -> None:
    """Refuses what only a chat template has a place for, beside a field that leaves it out."""
    for name in others:
        if getattr(body, name):
            raise invalid(name, f"it cannot be together with {field}", "leave one of them out")


def _grammar(wanted: Any) -> Callable[[], Grammar] | None:
    """The maker of the grammar of the field `format`."""
    if not wanted:
        return None
    return Grammar.json_object if wanted == "json" else partial(schema_grammar, wanted, "format")


def _loaded(writer: OllamaWriter, body: AnswerBody) -> Response:
    """The answer to a request without a prompt, by which Ollama's clients load a model, or unload it."""
    return json_response(writer.done("unload" if body.keep_alive in (0, "0", "0s") else "load"))


def _chat(model: ServedModel, body: ChatBody, writer: OllamaWriter) -> OllamaWriter:
    """The writer, which asks for the answer to a conversation."""
    messages = messages_of(body.messages or ())
    if continues := messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        check_continued(messages)
    options = _options(model, body)
    prompt = fitting_prompt(
        model,
        messages,
        options.get("max_tokens"),
        cuts=body.truncate is not False,
        tools=body.tools or None,
        variables=_variables(model, body),
        continues=continues,
    )
    return _asking(model, body, prompt, options, writer)


def _generate(model: ServedModel, body: GenerateBody, writer: OllamaWriter) -> OllamaWriter:
    """The writer, which asks for what comes after a prompt."""
    if body.template and body.template != model.tokenizer.chat_template:
        hint = "send the formatted text with raw, or start the server with --chat-template"
        raise invalid("template", "a request cannot change the chat template", hint, code="unsupported_parameter")
    if body.suffix:
        _refuse_beside(body, "suffix", ("raw", "system", "images", "context", "think"))
        prompt = ChatPrompt(model.checked(filled_in(model, body.prompt or "", body.suffix)))
    elif body.raw:
        _refuse_beside(body, "raw", ("system", "images", "context", "think"))
        model.check_length([body.prompt or ""], "prompt")
        prompt = ChatPrompt(model.checked(model.tokenizer.encode(body.prompt or "", parse_special=True)))
    else:
        content = user_content(Given({"prompt": body.prompt, "images": body.images}, ""), "prompt")
        system = [{"role": "system", "content": body.system}] if body.system else []
        prompt = chat_prompt(model, [*system, {"role": "user", "content": content}], variables=_variables(model, body))
        if body.context:
            prompt = _continued(model, prompt, body.context)
        if prompt.context.images is None:
            writer.context = list(prompt.context.ids)
    return _asking(model, body, prompt, _options(model, body), writer)


def _continued(model: ServedModel, prompt: ChatPrompt, context: list[int]) -> ChatPrompt:
    """A prompt after the tokens of an earlier answer, as `context` has them."""
    if prompt.context.images is not None:
        raise invalid("context", "it cannot be together with images", "send the conversation to /api/chat")
    ids, bos = prompt.context.ids, model.tokenizer.bos_id
    more = ids[1:] if bos is not None and ids[:1] == [bos] else ids
    return replace(prompt, context=model.checked([*context, *more], "context"))


def _options(model: ServedModel, body: AnswerBody) -> dict[str, Any]:
    return options_of(body.options, model.default_sample, model.runner.max_seq)


def _variables(model: ServedModel, body: AnswerBody) -> dict[str, Any]:
    if isinstance(body.think, str):
        return effort_variables(model, body.think, "think")
    return switch_variables(model, body.think, "think")


def _asking(
    model: ServedModel, body: AnswerBody, prompt: ChatPrompt, options: dict[str, Any], writer: OllamaWriter
) -> OllamaWriter:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "it needs logprobs", "set logprobs to true")
    asked = model.asked(
        prompt.context,
        parser=prompt.parser,
        keep_ids=prompt.keep_ids,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar_maker(model, _grammar(body.format), prompt),
        **options,
    )
    writer.asked = [asked]
    return writer
