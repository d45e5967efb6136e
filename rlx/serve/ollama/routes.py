"""Ollama's `/api/chat` and `/api/generate`, and the paths of a registry, which a server of one model has not.

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
from rlx.serve.builders import Built, check_continued, completed, request_fields, schema_grammar
from rlx.serve.chat_prompt import ChatPrompt
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.fitting import fitting_prompt
from rlx.serve.generation import GenerationSpec
from rlx.serve.http import OpenRoute
from rlx.serve.model import ServedModel, in_thread
from rlx.serve.ollama.bodies import AnswerBody, ChatBody, GenerateBody, ModelBody
from rlx.serve.ollama.messages import messages_of, user_content
from rlx.serve.ollama.options import Options, options_of
from rlx.serve.ollama.output import AnswerBuilder, Kind, error_json, joined
from rlx.serve.openai.prompts import filled_in
from rlx.serve.pieces import stream_of
from rlx.serve.reasoning import effort_variables, switch_variables
from rlx.serve.streaming import LINES, Stream, json_bytes, while_connected
from rlx.serve.tool_grammar import answer_grammar

if TYPE_CHECKING:
    from rlx.serve.app import Server

SHAPES["/api/"] = error_json

_REGISTRY = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")


def router(server: Server) -> APIRouter:
    """`POST /api/chat` and `POST /api/generate`."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.post("/api/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        answer = _Answer(server, "chat", body, request)
        if not body.messages:
            return answer.loaded()
        return await answer.response(await answer.chat_spec(body))

    @found.post("/api/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """The model's answer to a prompt."""
        answer = _Answer(server, "generate", body, request)
        if not body.prompt and not body.images and not body.suffix:
            return answer.loaded()
        return await answer.response(await answer.generate_spec(body))

    for path in _REGISTRY:
        found.add_api_route(f"/api/{path}", _registry, methods=["POST", "DELETE", "HEAD"], include_in_schema=False)
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
    return server.named(bare if server.registry.find(bare) else name)


def _refuse_beside(body: GenerateBody, field: str, others: Sequence[str]) -> None:
    """Refuses what only a chat template has a place for, beside a field that leaves it out."""
    for name in others:
        if getattr(body, name):
            raise invalid(name, f"it cannot be together with {field}", "leave one of them out")


def _grammar(wanted: Any) -> Callable[[], Grammar] | None:
    """What makes the grammar of the field `format`."""
    if not wanted:
        return None
    return Grammar.json_object if wanted == "json" else partial(schema_grammar, wanted, "format")


def _written(each: dict[str, Any]) -> bytes:
    return json_bytes(each) + b"\n"


class _Answer:
    """One request for an answer."""

    def __init__(self, server: Server, kind: Kind, body: AnswerBody, request: Request) -> None:
        self._started, self._kind, self._body = time.perf_counter(), kind, body
        self._request, self._fields = request, request_fields(server, request)
        self._ping = server.options.ping
        self._model = named(server, body)
        self._builder = AnswerBuilder(kind, body.model or body.name or "", self._started)

    def loaded(self) -> Response:
        """The answer to a request without a prompt, by which Ollama's clients load a model, or unload it."""
        reason = "unload" if self._body.keep_alive in (0, "0", "0s") else "load"
        return Response(json_bytes(self._builder.done(reason)), media_type="application/json")

    async def chat_spec(self, body: ChatBody) -> GenerationSpec:
        """What is to be generated for a conversation."""
        messages = await in_thread(lambda: messages_of(body.messages or ()))
        if continues := messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            check_continued(messages)
        options, variables = self._options(), self._variables()

        async def make(kept: list[dict[str, Any]]) -> ChatPrompt:
            return await self._model.chat_prompt(kept, body.tools or None, None, True, variables, continues)

        context, cuts = self._model.runner.max_seq, body.truncate is not False
        return await self._spec(await fitting_prompt(messages, make, context, options.max_tokens, cuts=cuts))

    def _raw(self, prompt: str) -> ChatPrompt:
        """A prompt without a template."""
        self._model.check_length([prompt], "prompt")
        return ChatPrompt(self._model.checked(self._model.tokenizer.encode(prompt, parse_special=True)))

    def _filled_in(self, prompt: str, suffix: str) -> ChatPrompt:
        """A prompt for what stands between two texts."""
        return ChatPrompt(self._model.checked(filled_in(self._model, prompt, suffix)))

    async def generate_spec(self, body: GenerateBody) -> GenerationSpec:
        """What is to be generated after a prompt."""
        if body.template and body.template != self._model.tokenizer.chat_template:
            hint = "send the formatted text with raw, or start the server with --chat-template"
            raise invalid("template", "a request cannot change the chat template", hint, code="unsupported_parameter")
        if body.suffix:
            _refuse_beside(body, "suffix", ("raw", "system", "images", "context", "think"))
            return await self._spec(await in_thread(lambda: self._filled_in(body.prompt or "", body.suffix or "")))
        if body.raw:
            _refuse_beside(body, "raw", ("system", "images", "context", "think"))
            return await self._spec(await in_thread(lambda: self._raw(body.prompt or "")))
        content = user_content(body.prompt, body.images, field="prompt")
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": content}]
        prompt = await self._model.chat_prompt(messages, variables=self._variables())
        if body.context:
            prompt = await in_thread(lambda: self._continued(prompt, body.context or []))
        if prompt.context.images is None:
            self._builder.context = list(prompt.context.ids)
        return await self._spec(prompt)

    def _continued(self, prompt: ChatPrompt, context: list[int]) -> ChatPrompt:
        """A prompt after the tokens of an earlier answer, as `context` has them."""
        if prompt.context.images is not None:
            raise invalid("context", "it cannot be together with images", "send the conversation to /api/chat")
        ids, bos = prompt.context.ids, self._model.tokenizer.bos_id
        more = ids[1:] if bos is not None and ids[:1] == [bos] else ids
        return replace(prompt, context=self._model.checked([*context, *more], "context"))

    def _options(self) -> Options:
        return options_of(self._body.options, self._model.default_sample, self._model.runner.max_seq)

    def _variables(self) -> dict[str, Any]:
        think = self._body.think
        if isinstance(think, str):
            return effort_variables(self._model.tokenizer, think, "think")
        return switch_variables(self._model.tokenizer, think, "think")

    async def _spec(self, prompt: ChatPrompt) -> GenerationSpec:
        model, body = self._model, self._body
        options = self._options()
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "it needs logprobs", "set logprobs to true")
        return GenerationSpec(
            prompt.context,
            options.max_tokens,
            options.sample,
            stop=options.stop,
            parser=prompt.parser,
            keep_ids=prompt.keep_ids,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=await answer_grammar(model, _grammar(body.format), prompt),
            **self._fields,
        )

    async def response(self, spec: GenerationSpec) -> Response:
        """The answer, as a stream unless the request says otherwise."""
        answering = await self._model.generate(spec)
        if self._body.stream is not False:
            pieces = Built(self._builder, _written, _written(self._builder.piece()))
            return Stream(stream_of(answering, pieces, self._ping), LINES)
        objects = await while_connected(self._request, completed(answering, self._builder))
        return Response(json_bytes(joined(self._kind, objects)), media_type="application/json")
