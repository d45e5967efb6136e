"""The fields that the APIs publish: each is done, ignored with a header that says so, or refused by a clear error."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Annotated, Any, Literal, Union

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params
from exchanges import PATH, QUESTION
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import TypeAdapter, ValidationError

from rlx.serve.http import Body
from rlx.serve.messages import CountBody, MessagesBody
from rlx.serve.openai.bodies import ChatBody, CompletionBody, EmbeddingBody
from rlx.serve.responses import InputBody, ResponsesBody

HEADER = "x-rlx-ignored"
CHAT = {"messages": QUESTION, "max_tokens": 1}
MESSAGES = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
RESPONSES = {"input": "Hi", "max_output_tokens": 1}


@pytest.mark.parametrize(
    "params, body",
    [
        (chat_params.CompletionCreateParamsBase, ChatBody),
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingBody),
        (response_create_params.ResponseCreateParamsBase, ResponsesBody),
        (input_token_count_params.InputTokenCountParams, InputBody),
        (message_create_params.MessageCreateParamsBase, MessagesBody),
        (message_count_tokens_params.MessageCountTokensParams, CountBody),
        (beta_params.MessageCreateParamsBase, MessagesBody),
        (beta_count_params.MessageCountTokensParams, CountBody),
    ],
)
def test_every_field_of_the_clients_is_known(params: Any, body: type[Body]) -> None:
    """A new version of a client may have new ones: decide about each."""
    hints = typing.get_type_hints(params)
    assert not set(hints) - set(body.model_fields)
    unknown = {
        (name, word)
        for name, hint in hints.items()
        for word in words_of(hint)
        if refusal_of(body.model_fields[name].rebuild_annotation(), word) not in (None, "unsupported")
    }
    assert not unknown


def words_of(hint: Any) -> set[str]:
    """The words that a field may have, not those of its parts."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return {word for word in parts if isinstance(word, str)}
    return set().union(*map(words_of, parts)) if typing.get_origin(hint) in (Union, UnionType, Annotated) else set()


def refusal_of(kind: Any, word: str) -> str | None:
    """The type of the error of a word in a field; None if it is accepted."""
    try:
        TypeAdapter(kind).validate_python(word)
    except ValidationError as error:
        return error.errors()[0]["type"]
    return None


@pytest.mark.parametrize(
    "path, body, ignored",
    [
        (PATH, CHAT | {"verbosity": "low", "web_search_options": {}}, "verbosity, web_search_options"),
        (PATH, CHAT | {"verbosity": "medium", "service_tier": "auto", "store": False, "prediction": None}, None),
        (PATH, CHAT | {"reasoning_effort": "high"}, "reasoning_effort"),
        (PATH, CHAT | {"reasoning_effort": "none", "enable_thinking": False, "tools": []}, None),
        (PATH, CHAT | {"enable_thinking": True}, "enable_thinking"),
        (PATH, CHAT | {"response_format": {"type": "text", "json_schema": None}, "top_logprobs": 0}, None),
        (PATH, CHAT | {"messages": [*QUESTION, {"role": "assistant", "reasoning_content": "Hm."}, *QUESTION]}, None),
        (
            PATH,
            CHAT | {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "user": "u"}, "user"),
        ("/v1/responses", RESPONSES | {"text": {"verbosity": "low"}, "store": True}, "text.verbosity, store"),
        (
            "/v1/responses",
            RESPONSES | {"reasoning": {"effort": "high", "summary": "auto"}},
            "reasoning.summary, reasoning.effort",
        ),
        ("/v1/messages", MESSAGES | {"speed": "fast", "diagnostics": {}}, "speed, diagnostics"),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "disabled"}, "fallbacks": "default"}, None),
        ("/api/chat", {"model": "demo", "messages": QUESTION, "think": True, "options": {"num_predict": 1}}, "think"),
    ],
)
def test_a_header_names_what_is_ignored(server: Any, path: str, body: dict[str, Any], ignored: str | None) -> None:
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER) == ignored


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_ollama_bodies_of_any_content_type(server: Any, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"model": "demo", "prompt": "Hi", "stream": false, "options": {"num_predict": 1}}'
    answer = server.http.post("/api/generate", content=body, headers=headers)
    assert (answer.status_code, answer.json().get("done")) == (200, True), answer.text
