"""/tokenize, /detokenize and /apply-template, as in llama-server and vLLM, and vLLM's /tokenizer_info. Server stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from rlx.serve.errors import invalid
from rlx.serve.http import MAX_MESSAGES, MAX_TEXT, Body, in_thread, json_response, new_router
from rlx.serve.openai.bodies import Tools
from rlx.serve.prompts import chat_prompt, checked_messages, checked_variables, merged_system
from rlx.text.chat import chat_text

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server
    from rlx.text.tokenizer import Tokenizer


class MessageFields(Body):
    """A conversation, where that may be tokenized or formatted."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(MessageFields):
    """The body of `/tokenize`: llama-server's has `content`, vLLM's `prompt` or `messages`."""

    model: str | None = None
    content: str | list[str | int] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class TemplateBody(MessageFields):
    """The body of `/apply-template`."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]


def router(server: Server) -> APIRouter:
    """The four paths."""
    found = new_router(tags=["tokens"])

    @found.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a text or of a conversation."""
        model = server.named(body.model)
        present = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
        if len(present) != 1:
            raise invalid(present[1] if present else "content", "expected content, prompt or messages, and one of them")
        if body.messages is not None:
            prompt = await in_thread(lambda: _chat_prompt(model, body))
            return json_response(_vllm(model, prompt, body))
        return await in_thread(lambda: json_response(_tokenized(model, body)), model.text_limiter)

    @found.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids, control tokens included."""
        model = server.named(body.model)

        def answer() -> Response:
            text = _decoded(model.tokenizer, body.tokens)
            return json_response({"content": text, "prompt": text})

        return await in_thread(answer, model.text_limiter)

    @found.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """The special tokens, which a client that has no tokenizer of its own asks for, and the chat template."""
        tokenizer = server.named(model).tokenizer
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokens = {name: None if token is None else tokenizer.id_to_token(token) for name, token in ids.items()}
        return json_response({**tokens, "chat_template": tokenizer.chat_template})

    @found.post("/apply-template")
    async def apply_template(body: TemplateBody) -> Response:
        """The text that the chat template makes of a conversation."""
        model = server.named(body.model)
        return await in_thread(lambda: json_response({"prompt": _formatted(model, body)}), model.text_limiter)

    return found


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    for i, token in enumerate(tokens):
        if token >= tokenizer.vocab_size:
            raise invalid(f"tokens[{i}]", f"there is no token {token} in a vocabulary of {tokenizer.vocab_size}")
    return tokenizer.decode(tokens)


def _chat_prompt(model: ServedModel, body: MessageFields) -> list[int]:
    variables = dict(body.chat_template_kwargs or {})
    continues = bool(body.continue_final_message)
    if body.add_generation_prompt is not None and not continues:
        variables["add_generation_prompt"] = body.add_generation_prompt
    prompt = chat_prompt(
        model, checked_messages(body.messages or []), body.tools, variables=variables, continues=continues
    )
    return prompt.context.ids


def _tokenized(model: ServedModel, body: TokenizeBody) -> dict[str, Any]:
    tokenizer = model.tokenizer
    _check_length(body)
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        return _vllm(model, tokenizer.encode(body.prompt, adds, parse_special=True), body)
    parses = body.parse_special is not False
    parts, ids = [body.content] if isinstance(body.content, str) else body.content or [], list[int]()
    for i, part in enumerate(parts):
        adds = bool(body.add_special) and not i
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, adds, parse_special=parses)
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]}


def _check_length(body: TokenizeBody) -> None:
    """Refuses texts whose tokens would take too much memory, which is many times theirs."""
    field, texts = ("content", body.content) if body.prompt is None else ("prompt", body.prompt)
    parts = [texts] if isinstance(texts, str) else texts or []
    if (count := sum(len(part) for part in parts if isinstance(part, str))) > MAX_TEXT:
        what = f"the text has {count} characters, and {MAX_TEXT} are allowed"
        raise invalid(field, what, "send it in several requests")


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The text of a token, or its bytes if they are a part of a character."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _vllm(model: ServedModel, ids: list[int], body: TokenizeBody) -> dict[str, Any]:
    found = {"count": len(ids), "max_model_len": model.runner.max_seq, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [model.tokenizer.id_to_token(token) for token in ids]
    return found


def _formatted(model: ServedModel, body: TemplateBody) -> str:
    messages = merged_system(checked_messages(body.messages))
    takes_images = model.runner.supports_multimodal
    variables = {"add_generation_prompt": body.add_generation_prompt is not False}
    variables |= checked_variables(body.chat_template_kwargs)
    return chat_text(model.tokenizer, messages, body.tools, takes_images=takes_images, **variables)
