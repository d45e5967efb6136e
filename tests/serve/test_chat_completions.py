"""/v1/chat/completions: fields, streams and errors, over real HTTP; the official client judges the shapes."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from exchanges import PATH, QUESTION, STORY, chunks_of, error_of, text_of

from rlx.text.answer import ThinkingTags


def test_an_answer(server: Any) -> None:
    for name in ("demo", "gpt-4o"):
        found = server.openai.chat.completions.create(model=name, messages=QUESTION, temperature=0)
        assert found.model == "demo" and found.object == "chat.completion" and found.id.startswith("chatcmpl-")
        (choice,) = found.choices
        assert choice.message.content == "27 + 45 = 72." and choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        usage = found.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens == len(server.model.runner.chat_ids(QUESTION))


def test_the_form_of_a_stream(server: Any) -> None:
    body = {"messages": STORY, "temperature": 0, "max_tokens": 40}
    found = chunks_of(server, **body)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk"
    first, *middle, last = [chunk["choices"][0] for chunk in found]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert all(set(each["delta"]) == {"content"} and each["finish_reason"] is None for each in middle)
    assert last["delta"] == {} and last["finish_reason"] == "length"
    assert "usage" not in found[0]
    assert len(middle) == 40, "an event for each token"
    assert text_of(found) == server.post(PATH, **body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("sample", [{"temperature": 0}, {"temperature": 1.2, "seed": 7, "top_p": 0.9, "n": 3}])
def test_streams_say_what_single_answers_say(server: Any, sample: dict[str, Any]) -> None:
    body = {"messages": STORY, "max_tokens": 30, "stop": ["\n\n", "forest"], **sample}
    whole = server.post(PATH, **body).json()
    streamed = chunks_of(server, **body, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        assert text_of(streamed, choice["index"]) == choice["message"]["content"]
    ends = [choice for chunk in streamed for choice in chunk["choices"] if choice["finish_reason"]]
    assert {end["index"]: end["finish_reason"] for end in ends} == {
        choice["index"]: choice["finish_reason"] for choice in whole["choices"]
    }
    assert len(ends) == len(whole["choices"]) == sample.get("n", 1)
    assert streamed[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in streamed[:-1])
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [streamed[-1]["usage"][name] for name in counted] == [whole["usage"][name] for name in counted]


def test_choices_have_seeds_of_their_own(server: Any) -> None:
    body = {"messages": STORY, "max_tokens": 12, "temperature": 1.5}
    several = server.post(PATH, **body, n=3, seed=5).json()
    texts = [choice["message"]["content"] for choice in several["choices"]]
    for i, text in enumerate(texts):
        assert server.post(PATH, **body, seed=5 + i).json()["choices"][0]["message"]["content"] == text
    assert len(set(texts)) == 3
    assert several["usage"]["completion_tokens"] == 36
    assert several["usage"]["prompt_tokens"] == len(server.model.runner.chat_ids(STORY))


def test_log_probabilities(server: Any) -> None:
    body = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = server.openai.chat.completions.create(model="demo", **body).choices[0]
    entries = whole.logprobs.content
    said = b"".join(bytes(entry.bytes) for entry in entries if entry.token != "<|im_end|>")
    assert said.decode() == whole.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy: the likeliest one was taken"
        assert bytes(entry.bytes).decode() == entry.token
    streamed = chunks_of(server, **body)
    logs = [choice["logprobs"] for chunk in streamed for choice in chunk["choices"] if choice["logprobs"]]
    found = [part["logprob"] for log in logs for part in log["content"]]
    near = partial(pytest.approx, abs=1e-5)  # with tiles, a known prompt's last row is rounded in another order
    assert found == near([entry.logprob for entry in entries])
    ids = server.model.runner.chat_ids(QUESTION)
    answer = server.model.runner.generate(ids, 5, top_logprobs=3)
    assert [step.logprob for step in answer.steps] == near([entry.logprob for entry in entries[:5]])
    assert (
        server.post(PATH, **body, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"][0][
            "token"
        ]
        == f"token_id:{answer[0]}"
    )


@pytest.mark.parametrize("ban", [{}, []])
def test_four_forms_of_logit_bias(server: Any, ban: Any) -> None:
    runner = server.model.runner
    first = runner.generate(runner.chat_ids(STORY), 1)[0]
    piece = runner.tokenizer.decode([first])
    assert runner.tokenizer.encode(piece, add_special_tokens=False) == [first]
    forms = [{str(first): -100}, {piece: False}] if ban == {} else [[[first, -100]], [[first, False]], [[piece, -1e2]]]
    body = {"messages": STORY, "temperature": 0, "max_tokens": 1, "return_token_ids": True}
    assert server.post(PATH, **body).json()["choices"][0]["token_ids"] == [first]
    for form in forms:
        assert server.post(PATH, **body, logit_bias=form).json()["choices"][0]["token_ids"] != [first], form
    other = runner.tokenizer.encode("Q", add_special_tokens=False)[0]
    assert server.post(PATH, **body, logit_bias={str(other): 100}).json()["choices"][0]["token_ids"] == [other]


def test_stops(server: Any) -> None:
    body = {"messages": QUESTION, "temperature": 0}
    choice = server.post(PATH, **body, stop=" =").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("27 + 45", "stop", " =")
    kept = server.post(PATH, **body, stop=[" =", "x"], include_stop_str_in_output=True).json()["choices"][0]
    assert kept["message"]["content"] == "27 + 45 ="
    runner = server.model.runner
    token = runner.tokenizer.encode(" =", add_special_tokens=False)[0]
    by_id = server.post(PATH, **body, stop_token_ids=[token]).json()["choices"][0]
    assert (by_id["message"]["content"], by_id["stop_reason"]) == ("27 + 45", token)
    longer = server.post(PATH, **body, ignore_eos=True, max_tokens=30).json()
    assert longer["usage"]["completion_tokens"] == 30 and longer["choices"][0]["finish_reason"] == "length"
    assert server.post(PATH, **body, min_tokens=20, max_tokens=25).json()["usage"]["completion_tokens"] >= 20


def test_progress_of_the_prompt_and_timings(server: Any) -> None:
    text = "The fox and the owl went into the forest. " * 20
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    found = chunks_of(server, **body, return_progress=True, timings_per_token=True)
    shown = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert shown and shown[-1]["processed"] == shown[-1]["total"] > 0
    assert [each["processed"] for each in shown] == sorted(each["processed"] for each in shown)
    for said in (chunk["timings"] for chunk in found):  # the prompt's last row gives the first token
        steps = max(0, said["predicted_n"] - 1)
        assert said["predicted_per_second"] * said["predicted_ms"] == pytest.approx(1000 * steps, rel=0.01)
    again = server.post(PATH, **body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the prompt is known"
    timings = again["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == again["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == 4 and timings["predicted_ms"] > 0
    rate = 3000 / timings["predicted_ms"]  # three steps
    assert timings["predicted_per_second"] == pytest.approx(rate, rel=0.01)


def test_an_answer_that_continues_a_message(server: Any) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "27 + 45 ="}]
    found = server.post(PATH, messages=begun, temperature=0, continue_final_message=True).json()
    assert found["choices"][0]["message"]["content"] == " 72."
    assert error_of(server, messages=QUESTION, continue_final_message=True)["param"] == "continue_final_message"


def test_reasoning_is_told_from_the_answer(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model does not reason: here "27" and "45" are the tags around its reasoning."""
    monkeypatch.setattr(ThinkingTags, "of", staticmethod(lambda tokenizer: ThinkingTags("27", "45")))
    monkeypatch.setattr(server.model, "tags", ThinkingTags("27", "45"))
    body = {"messages": QUESTION, "temperature": 0}
    found = server.openai.chat.completions.create(model="demo", **body)
    said = found.choices[0].message
    assert (said.reasoning_content, said.content) == ("+", "= 72.")
    assert 0 < found.usage.completion_tokens_details.reasoning_tokens < found.usage.completion_tokens
    streamed = chunks_of(server, **body)
    deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "+"
    assert text_of(streamed) == "= 72."
    hidden = server.post(PATH, **body, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning_content" not in hidden and hidden["content"] == "= 72."
    whole = server.post(PATH, **body, reasoning_format="none").json()["choices"][0]["message"]
    assert whole["content"] == "27 + 45 = 72." and "reasoning_content" not in whole
    form = server.post(PATH, **body, guided_choice=["left", "right"]).json()["choices"][0]["message"]
    assert form["reasoning_content"] == "+" and form["content"] in ("left", "right")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias.99999999"),
        ({"logit_bias": [[1, True]]}, "logit_bias[0]"),
        ({"logit_bias": [[1, 10**400]]}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids[0]"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"whatever": 1}}, "stream_options.whatever"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"mirostat": 1}, "mirostat"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"lora": [{"id": 0}]}, "lora"),
        ({"temprature": 1}, "temprature"),
        ({"timeout": 0}, "timeout"),
        ({"chat_template_kwargs": {"trust_content": True}}, "chat_template_kwargs.trust_content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": 3}}, "add_generation_prompt"),
    ],
)
def test_wrong_fields_are_named(server: Any, fields: dict[str, Any], param: str) -> None:
    found = error_of(server, **{"messages": QUESTION, **fields})
    assert found["param"] == param, found
    assert found["type"] == "invalid_request_error"
    if param != "stream_options":
        assert error_of(server, **{"messages": QUESTION, "stream": True, **fields}) == found


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_context_does_not_hold(server: Any, stream: bool) -> None:
    context = server.model.runner.max_seq
    found = error_of(server, messages=[{"role": "user", "content": "fox " * 2 * context}], stream=stream)
    assert (found["type"], found["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert found["n_ctx"] == context < found["n_prompt_tokens"]


def test_a_text_of_megabytes_is_refused_in_a_moment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, read = "fox tells a story " * 300_000, list[int]()
    usual = server.model.tokenizer.encode_parts

    def encode_parts(part: str, parse_special: bool) -> list[int]:
        read.append(len(part))
        return usual(part, parse_special)

    tokenizer = replace(server.model.tokenizer, encode_parts=encode_parts)
    monkeypatch.setitem(vars(server.model.runner), "tokenizer", tokenizer)
    context = server.model.runner.max_seq
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        "/v1/completions": {"prompt": text},
        "/v1/embeddings": {"input": [text]},
        "/api/generate": {"model": "demo", "prompt": text, "raw": True},
    }
    for path, body in bodies.items():
        read.clear()
        found = server.post(path, **body)
        assert found.status_code == 400 and "context holds" in found.text, found.text[:300]
        assert sum(read) < len(text) // 10, "it is not encoded as a whole"
        if path.startswith("/v1"):
            error = found.json()["error"]
            assert error["code"] == "context_length_exceeded" and error["n_ctx"] == context
            assert 0.8 < error["n_prompt_tokens"] / len(usual(text[:90_000], False)) * 90_000 / len(text) < 1.25


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b'"x"', {}, 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', {}, 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', {}, 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
        (b'{"messages": [{"role": "\\ud800", "content": "x"}]}', {}, 400),
        (b'{"messages": "\xff\xfe"}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", {}, 400),
        (b'{"tools":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", {}, 400),
        (b'{"messages": []}', {"content-type": "text/plain"}, 415),
        (b'{"messages": []}', {"content-type": ""}, 415),
        (gzip.compress(b'{"messages": []}', mtime=0), {"content-encoding": "gzip"}, 415),
    ],
)
def test_bodies_that_are_none(server: Any, body: bytes, headers: dict[str, str], status: int) -> None:
    answer = server.http.post(PATH, content=body, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            PATH,
            {"messages": [{"role": "user", "content": "a\ud83d"}]},
            "messages[0].content: it has half of a surrogate",
        ),
        (
            PATH,
            {"messages": [{"role": "user", "content": "\ud83d\ude00", "\ud83d": 1}]},
            "messages[0]: it has half of a",
        ),
        ("/v1/messages", {"system": "\ude00", "messages": []}, "system: it has half of a surrogate pair"),
        ("/v1/responses", {"input": ["x", {"a": "\ude00"}]}, "input[1].a: it has half of a surrogate pair"),
        ("/api/generate", {"prompt": "\ude00\ud83d"}, "prompt: it has half of a surrogate pair"),
        (PATH, {"repeat_last_n": 10**30}, "repeat_last_n: repeat_last_n is 1000000000000000000000000000000, expected"),
        (PATH, {"functions": [{"a": 1}]}, "functions[0].name: it is required"),
        (PATH, {"tools": [{"type": "function"}]}, "tools[0].name: it is required"),
        (
            PATH,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
            "response_format: expected a JSON schema, found 5. Give an object.",
        ),
    ],
)
def test_errors_name_the_field_in_the_words_of_the_request(
    server: Any, path: str, body: dict[str, Any], message: str
) -> None:
    answer = server.http.post(
        path,
        content=json.dumps({"messages": [{"role": "user", "content": "x"}], **body} if path == PATH else body),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]
    assert (found if isinstance(found, str) else found["message"]).startswith(message)
