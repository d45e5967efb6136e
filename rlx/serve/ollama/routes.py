"""Ollama's paths: answers, vectors, what the models are, and the registry, which a server of chosen models has not.

Server stage. Clients choose by what is listed here: a model that is said to call tools is given some.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

import rlx
from rlx.engine.request.context import Context
from rlx.grammar import Grammar
from rlx.serve.answers import answered
from rlx.serve.conversation import Given, check_continued
from rlx.serve.errors import SHAPES, ApiError, invalid
from rlx.serve.fields import schema_grammar
from rlx.serve.http import OpenRoute, in_thread, json_response, json_rows, while_connected
from rlx.serve.model import ServedModel
from rlx.serve.ollama.output import OllamaWriter, error_json
from rlx.serve.ollama.requests import (
    AnswerBody,
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ModelBody,
    ShowBody,
    messages_of,
    options_of,
    user_content,
)
from rlx.serve.openai.embeddings import vectors_of
from rlx.serve.prompts import (
    ChatPrompt,
    chat_prompt,
    effort_variables,
    filled_in,
    fitting_prompt,
    grammar_maker,
    switch_variables,
)

if TYPE_CHECKING:
    from rlx.engine.request.output import Logits
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


def _grammar(form: Any) -> Callable[[], Grammar] | None:
    """The maker of the grammar of the field `format`."""
    if not form:
        return None
    return Grammar.json_object if form == "json" else partial(schema_grammar, form, "format")


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


LONGEST = 16  # characters of a token at most, where a text is cut to what the context holds


def embed_router(server: Server) -> APIRouter:
    """`POST /api/embed` and `POST /api/embeddings`."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.post("/api/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        """A vector of length 1 for each text."""
        started, model = time.perf_counter(), named(server, body)
        options_of(body.options, model.default_sample, model.runner.max_seq)
        texts = [body.input] if isinstance(body.input, str) else body.input
        size = _size(model, body.dimensions)
        vectors, tokens = await while_connected(request, _answered(model, texts, body.truncate is True, size))
        fields = {
            "model": body.model or body.name,
            "total_duration": int((time.perf_counter() - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }
        rows = (vector.tolist() for vector in vectors)
        written = await in_thread(lambda: json_rows(fields, "embeddings", rows))
        return Response(written, media_type="application/json")

    @found.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> dict[str, list[float]]:
        """The vector of one text, of length 1."""
        model = named(server, body)
        options_of(body.options, model.default_sample, model.runner.max_seq)
        if not body.prompt:
            return {"embedding": []}
        vectors, _ = await while_connected(request, _answered(model, [body.prompt], False, None, "prompt"))
        return {"embedding": vectors[0].tolist()}

    return found


def _size(model: ServedModel, dimensions: int | None) -> int | None:
    """The number of leading elements that a vector keeps; None for all."""
    hidden = model.width
    if dimensions and dimensions > hidden:
        raise invalid("dimensions", f"found {dimensions}, and vectors of the model have {hidden} elements")
    return dimensions or None


async def _answered(
    model: ServedModel, texts: list[str], cut: bool, size: int | None, field: str = "input"
) -> tuple[list[Logits], int]:
    """The vectors of texts, and how many tokens these have.

    Args:
        cut: cut texts to what the context holds, as the request asks for.
    """
    contexts = await in_thread(lambda: [_context(model, text, cut, field, i) for i, text in enumerate(texts)])
    vectors = await vectors_of(model, contexts, size)
    return vectors, sum(len(each) for each in contexts)


def _context(model: ServedModel, text: str, cut: bool, field: str, number: int) -> Context:
    if not cut:
        model.check_length([text], field)
    ids = model.tokenizer.encode(text[: LONGEST * model.runner.max_seq] if cut else text)
    if not ids:
        raise invalid(f"{field}[{number}]" if field == "input" else field, "the text has no tokens")
    return model.checked(ids[: model.runner.max_seq] if cut else ids, field)


JsonObject = dict[str, Any]

VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients ask for it, and some refuse older ones."""
_NEVER = "9999-12-31T23:59:59Z"


def describe_router(server: Server) -> APIRouter:
    """The paths that describe the server and its models."""
    found = APIRouter(route_class=OpenRoute, tags=["ollama"])

    @found.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def alive() -> Response:
        """That there is a server, where it has no page."""
        return Response("rlx is running", media_type="text/plain")

    @found.get("/api/version")
    async def version() -> JsonObject:
        """The version of Ollama's API."""
        return {"version": VERSION, "rlx": rlx.__version__}

    @found.get("/api/tags")
    async def tags() -> JsonObject:
        """The models that are served, each under all of its names."""
        return {"models": [tag(model, name) for model in server.models for name in model.names]}

    @found.get("/api/ps")
    async def running() -> JsonObject:
        """The models that are served: they stay in memory."""
        return {"models": [_running(model) for model in server.models]}

    @found.post("/api/show")
    async def show(body: ShowBody) -> JsonObject:
        """The facts and abilities of the model."""
        return shown(named(server, body))

    return found


def shown(model: ServedModel) -> JsonObject:
    """The description of a model: what it is and can do."""
    sample = model.default_sample
    parameters = {name: getattr(sample, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "license": "",
        "modelfile": f"# {model.name}, served by rlx {rlx.__version__}",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": model.tokenizer.chat_template or "",
        "details": details(model),
        "model_info": _info(model),
        "capabilities": list(model.capabilities),
        "modified_at": _time(model),
    }


def details(model: ServedModel) -> JsonObject:
    """The kind of a model's weights."""
    return {
        "parent_model": "",
        "format": model.file.format,
        "family": model.runner.config.arch,
        "families": [model.runner.config.arch],
        "parameter_size": _count(model.sizes[0]),
        "quantization_level": model.quantization,
    }


def tag(model: ServedModel, name: str) -> JsonObject:
    """A model in a list, under one of its names."""
    return {
        "name": name,
        "model": name,
        "modified_at": _time(model),
        "size": model.file_bytes,
        "digest": hashlib.sha256(f"{model.file.path}:{model.file_bytes}".encode()).hexdigest(),
        "details": details(model),
    }


def _running(model: ServedModel) -> JsonObject:
    """A model in memory."""
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": model.runner.max_seq}
    return {**tag(model, model.name), **more}


def _info(model: ServedModel) -> JsonObject:
    """Sizes, under the keys of GGUF files."""
    config, arch = model.runner.config, model.runner.config.arch
    return {
        "general.architecture": arch,
        "general.basename": model.name,
        "general.parameter_count": model.sizes[0],
        f"{arch}.block_count": config.layers,
        f"{arch}.context_length": model.runner.max_seq,
        f"{arch}.embedding_length": config.hidden,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.vocab_size": config.vocab_size,
    }


def _time(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")


def _count(parameters: int) -> str:
    """A number of parameters as names of models have it, such as 4.3B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)


ROUTERS = (router, describe_router, embed_router)
