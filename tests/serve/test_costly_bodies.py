"""Bodies that would cost far more than their length says: they are refused, or read beside the event loop."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from rlx import arguments
from rlx.serve import http
from rlx.serve.errors import ApiError
from rlx.serve.http import MAX_BIASES, MAX_BREAKERS, MAX_STOP_IDS, MAX_TOOLS, MAX_VALUES, Body, parsed, validated
from rlx.serve.messages import MessagesBody
from rlx.serve.model import TEXTS_AT_ONCE
from rlx.serve.ollama import GenerateBody
from rlx.serve.openai.bodies import ChatBody, CompletionBody
from rlx.serve.responses import ResponsesBody

MANY = 50_000
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


# ------------------------------------------------------------------------------------------------ before it is parsed


@pytest.mark.parametrize("part", ["[]", "{}", "1", '""', '{"a":1}', '"\\\\"', '"\\""', "[[[]]]"])
def test_the_number_of_values_is_bounded(part: str) -> None:
    few, many = (f'{{"x":[{",".join([part] * count)}]}}'.encode() for count in (1000, MAX_VALUES + 1))
    assert len(parsed(few)["x"]) == 1000
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values") as caught:
        parsed(many)
    assert caught.value.status == 413


@pytest.mark.parametrize("end", ["", '"', "\\", '\\"', ']"'])
def test_malformed_bodies_hide_nothing(end: str) -> None:
    """What stands before an error is counted, whatever comes behind it."""
    values = b'{"x": [' + b"[]," * (MAX_VALUES + 1)
    for body in (values + end.encode(), b'{"a": "\\\\", "b": "\\"", ' + values[1:] + end.encode() + b"\x00"):
        with pytest.raises(ApiError, match="more than"):
            parsed(body)


# ------------------------------------------------------------------------------------------------ while it is checked


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [[{}] * MANY] * 2}),
        (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * MANY}),
        (CompletionBody, {"prompt": "x", "logit_bias": [["x", []]] * MANY}),
        (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
        (CompletionBody, {"prompt": "x", "stream_options": dict.fromkeys(map(str, range(MANY)))}),
        (CompletionBody, {"prompt": "x"} | dict.fromkeys(map(str, range(MANY)))),
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": MESSAGES, "tools": ["x"] * MANY}),
        (MessagesBody, {"max_tokens": 1, "messages": MESSAGES, "stop_sequences": [1] * MANY}),
        (GenerateBody, {"context": ["x"] * MANY, "images": [1] * MANY}),
        (ResponsesBody, {"input": [1] * MANY, "include": ["x"] * MANY}),
        (ResponsesBody, {"metadata": dict.fromkeys(map(str, range(MANY)), 1)}),
    ],
)
def test_a_body_with_many_errors_has_few(kind: type[Body], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 8
    with pytest.raises(ApiError) as named:
        validated(kind, body)
    assert named.value.status == 400 and len(str(named.value)) < 400


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("logit_bias", {str(i): 1 for i in range(MAX_BIASES + 1)}, MAX_BIASES),
        ("logit_bias", [["a text", 1]] * (MAX_BIASES + 1), MAX_BIASES),
        ("stop_token_ids", [1] * (MAX_STOP_IDS + 1), MAX_STOP_IDS),
        ("dry_sequence_breakers", ["x"] * (MAX_BREAKERS + 1), MAX_BREAKERS),
        ("tools", [{}] * (MAX_TOOLS + 1), MAX_TOOLS),
    ],
)
def test_lists_have_limits(server: Any, field: str, value: Any, most: int) -> None:
    found = server.post("/v1/chat/completions", messages=MESSAGES, **{field: value})
    assert found.status_code == 400 and found.json()["error"]["param"] == field
    assert f"expected at most {most} entries" in found.json()["error"]["message"]


@pytest.mark.parametrize("field", ["stream_options", None])
def test_a_long_name_is_neither_compared_nor_repeated_whole(
    server: Any, monkeypatch: pytest.MonkeyPatch, field: str | None
) -> None:
    """To look for a name like one of 60 MB took 15 s, and the answer had 60 MB."""
    compared, close = list[str](), arguments.get_close_matches
    monkeypatch.setattr(arguments, "get_close_matches", lambda name, *rest: compared.append(name) or close(name, *rest))
    unknown = {"max_tokens_" * 100_000: 1}
    found = server.post("/v1/chat/completions", messages=MESSAGES, **({field: unknown} if field else unknown))
    error = found.json()["error"]
    assert found.status_code == 400 and len(found.content) < 1000 and "there is no such field" in error["message"]
    assert error["param"].startswith(f"{field}.max_tokens_" if field else "max_tokens_")
    assert len(compared) == 1 and len(compared[0]) < 1000


def test_the_id_of_a_request_is_bounded(server: Any) -> None:
    """Each event of a stream has it."""
    found = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, request_id="x" * 129)
    assert found.status_code == 400 and found.json()["error"]["param"] == "request_id"
    assert "expected a string of at most 128 characters" in found.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------ where it is read


def test_large_bodies_are_read_beside_the_event_loop(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, str] = {}
    read = http._read

    def noted(kind: type[Body], body: bytes) -> Any:
        threads[len(body) // http.LARGE] = threading.current_thread().name
        return read(kind, body)

    monkeypatch.setattr(http, "_read", noted)
    for text in ("x", "x" * http.LARGE):
        server.post("/v1/completions", prompt=text, max_tokens=1)
    assert threads[1].startswith("AnyIO") and not threads[0].startswith("AnyIO")


# ------------------------------------------------------------------------------------------------ before it is encoded


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_bodies_are_in_utf_8(encoding: str) -> None:
    """In other encodings a letter may have the byte of a quote, which would hide values from the count."""
    hidden = '{"x":"\u0122","messages":[' + "[]," * 1000 + "[]]}"
    with pytest.raises(ApiError, match="the body is in utf-"):
        parsed(hidden.encode(encoding))
    assert parsed(hidden.encode("utf-8-sig"))["x"] == "\u0122"


LONG = "word " * 600_000
CALL = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": LONG})}}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG[:8000]}] * 400}),
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}),
        ("/v1/completions", {"prompt": [LONG[:8000]] * 400 + [1]}),
        ("/tokenize", {"content": LONG}),
        ("/tokenize", {"content": [LONG[:8000], 1] * 400}),
        ("/tokenize", {"prompt": LONG}),
    ],
)
def test_long_texts_are_refused_before_they_are_encoded(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    encoded = _counting(server, monkeypatch)
    assert server.post(path, **body).status_code == 400
    assert sum(encoded) <= 1 << 18


def _counting(server: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that the tokenizer encodes from now on."""
    encoded, encode = list[int](), server.model.tokenizer.encode_parts

    def counted(text: str, parses: bool) -> list[int]:
        encoded.append(len(text))
        return list(encode(text, parses))

    monkeypatch.setitem(server.model.tokenizer.__dict__, "encode_parts", counted)
    return encoded


def test_texts_of_biases_have_a_limit(server: Any) -> None:
    for biases in ([["x" * 100_000, 1]], [["x", 1]] * 1025):
        found = server.post("/v1/chat/completions", messages=MESSAGES, logit_bias=biases)
        assert found.status_code == 400 and found.json()["error"]["param"] == "logit_bias"
    many = {str(i): 1 for i in range(1500)}
    assert server.post("/v1/chat/completions", messages=MESSAGES, logit_bias=many, max_tokens=1).status_code == 200


def test_texts_whose_tokens_are_asked_for_have_turns_of_their_own(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many are encoded and written at once, however many clients ask: others keep their threads and memory."""
    now, most, lock, encode = [0], [0], threading.Lock(), server.model.tokenizer.encode_parts

    def counted(text: str, parses: bool) -> list[int]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return list(encode(text, parses))

    monkeypatch.setitem(server.model.tokenizer.__dict__, "encode_parts", counted)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/tokenize", content="a text").status_code, range(16)))
    assert answers == [200] * 16 and most[0] <= TEXTS_AT_ONCE


def test_a_text_that_is_cut_is_not_encoded_as_a_whole(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = _counting(server, monkeypatch)
    assert server.post("/api/embed", model="demo", input=LONG, truncate=True).status_code == 200
    assert sum(encoded) <= 1 << 18
