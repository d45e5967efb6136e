"""/v1/completions, /v1/embeddings and the paths about tokens, over real HTTP."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from exchanges import chunks_of, error_of

PATH = "/v1/completions"
TEXT = "Once upon a time, there was a fox who"


def texts(server: Any, **body: Any) -> list[str]:
    answer = server.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_all_forms_of_a_prompt(server: Any) -> None:
    tokenizer = server.model.tokenizer
    ids = tokenizer.encode(TEXT)
    one = texts(server, prompt=TEXT, temperature=0)
    assert one == [server.model.runner.complete(TEXT, max_tokens=16).text]
    assert texts(server, prompt=ids, temperature=0) == one
    assert texts(server, prompt=[TEXT], temperature=0) == one
    assert texts(server, prompt=[ids], temperature=0) == one
    assert texts(server, prompt=[*ids[:3], tokenizer.decode(ids[3:])], temperature=0) == one
    other = texts(server, prompt="The owl", temperature=0)
    assert texts(server, prompt=[TEXT, "The owl", ids], temperature=0) == [*one, *other, *one]


def test_choices_of_several_prompts(server: Any) -> None:
    body = {"temperature": 1.5, "seed": 4, "max_tokens": 8}
    alone = [texts(server, prompt=each, n=2, **body) for each in (TEXT, "The owl")]
    both = server.post(PATH, prompt=[TEXT, "The owl"], n=2, **body).json()
    assert [choice["text"] for choice in both["choices"]] == [*alone[0], *alone[1]]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["completion_tokens"] == 32
    streamed = chunks_of(server, PATH, prompt=[TEXT, "The owl"], n=2, **body)
    for i, text in enumerate([*alone[0], *alone[1]]):
        assert "".join(c["text"] for chunk in streamed for c in chunk["choices"] if c["index"] == i) == text


def test_the_form_of_a_stream(server: Any) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 12}
    found = chunks_of(server, PATH, **body, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in found} == {"text_completion"}
    *pieces, last, counted = found
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == texts(server, **body)[0]
    assert last["choices"][0]["finish_reason"] == "length" and last["choices"][0]["text"] == ""
    assert counted["choices"] == [] and counted["usage"]["completion_tokens"] == 12
    whole = server.openai.completions.create(model="demo", **body)
    assert whole.choices[0].text == texts(server, **body)[0] and whole.usage.completion_tokens == 12
    assert "".join(
        part.choices[0].text for part in server.lenient.completions.create(model="demo", stream=True, **body)
    )


def test_offsets_behind_characters_of_several_tokens(server: Any) -> None:
    """The tokens of a character begin where it does."""
    text = "aé \u200b💩 b c"
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
    logs = server.post(PATH, **body).json()["choices"][0]["logprobs"]
    begins = dict(zip(logs["text_offset"], logs["tokens"], strict=True))
    assert {at: token for at, token in begins.items() if "\ufffd" not in token}.keys() >= {0, 5, 7}
    for at, token in begins.items():
        assert token == text[at : at + len(token)] or (token == "\ufffd" and text[at] in "é\u200b💩")


def test_echo_with_log_probabilities(server: Any) -> None:
    runner = server.model.runner
    ids = runner.tokenizer.encode(TEXT)
    body = {"prompt": TEXT, "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 4}
    choice = server.lenient.completions.create(model="demo", **body).choices[0]
    logs = choice.logprobs
    assert choice.text.startswith(TEXT) and "".join(logs.tokens) == choice.text
    assert logs.token_logprobs[0] is None and logs.top_logprobs[0] is None
    assert np.allclose(logs.token_logprobs[1 : len(ids)], runner.score(ids), atol=1e-6)
    assert all(len(top) == 2 for top in logs.top_logprobs[1:])
    assert [
        choice.text[at : at + len(token)] for at, token in zip(logs.text_offset, logs.tokens, strict=True)
    ] == logs.tokens
    scored = server.post(PATH, **{**body, "max_tokens": 0}).json()["choices"][0]
    assert scored["text"] == TEXT and scored["logprobs"]["token_logprobs"] == logs.token_logprobs[: len(ids)]
    streamed = chunks_of(server, PATH, **body)
    joined = [
        value
        for chunk in streamed
        for c in chunk["choices"]
        if c["logprobs"]
        for value in c["logprobs"]["token_logprobs"]
    ]
    assert joined == logs.token_logprobs


def test_log_likelihoods_as_an_evaluation_harness_reads_them(server: Any) -> None:
    """lm-evaluation-harness (`local-completions`) sends ids of a context with a continuation, and asks for one token
    more: it sums the log-probabilities of the continuation, without that of the last token, and calls it greedy if
    each is the highest one.
    """
    runner, tokenizer = server.model.runner, server.model.tokenizer
    turn = [*runner.chat_ids("Once upon a time"), *tokenizer.encode("All right.")]
    prompts = [(tokenizer.encode(TEXT), tokenizer.encode(" lived")), (turn[:-4], turn[-4:])]
    fields = {"prompt": [[*a, *b] for a, b in prompts], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    choices = server.post(PATH, **fields, echo=True).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"], "one answer ends at once"
    for (context, continuation), choice in zip(prompts, choices, strict=True):
        logs, scored = choice["logprobs"], slice(len(context), -1)
        assert len(logs["token_logprobs"]) == len(context) + len(continuation) + 1
        values = np.array(logs["token_logprobs"][scored])
        assert np.allclose(values, runner.score([*context, *continuation])[len(context) - 1 :], atol=1e-6)
        logits = runner.predict_logits([*context, *continuation], all_positions=True)[len(context) - 1 : -1]
        best = np.array([max(top.values()) for top in logs["top_logprobs"][scored]])
        assert (values == best).tolist() == (logits.argmax(1) == continuation).tolist()


def test_the_best_of_several(server: Any) -> None:
    body = {"prompt": TEXT, "temperature": 1.5, "seed": 1, "max_tokens": 6, "logprobs": 0}
    every = server.post(PATH, **body, n=4).json()["choices"]
    best = max(every, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"]))
    (found,) = server.post(PATH, **body, n=1, best_of=4).json()["choices"]
    assert found["text"] == best["text"]


def test_the_path_of_llama_server(server: Any) -> None:
    body = {"prompt": TEXT, "temperature": 0, "n_predict": 12}
    whole = server.post("/completion", **body, n_probs=2, return_tokens=True).json()
    assert whole["content"] == texts(server, prompt=TEXT, temperature=0, max_tokens=12)[0]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 12)
    assert whole["tokens_evaluated"] == len(server.model.tokenizer.encode(TEXT)) and whole["prompt"] == TEXT
    assert len(whole["tokens"]) == len(whole["completion_probabilities"]) == 12
    assert b"".join(bytes(each["bytes"]) for each in whole["completion_probabilities"]).decode() == whole["content"]
    raw = server.post("/completion", **body, stream=True).text
    pieces = [json.loads(event[6:]) for event in raw.split("\n\n") if event]
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["timings"]["predicted_n"] == 12
    word = server.post("/completion", prompt=TEXT, temperature=0, stop=["."]).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", ".") and "." not in word["content"]
    assert [each["content"] for each in server.post("/completion", **{**body, "prompt": [TEXT, TEXT]}).json()] == [
        whole["content"]
    ] * 2
    assert error_of(server, path="/completion", prompt="a", echo=True)["param"] == "echo"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [99999999]}, "prompt[0]"),
        ({"prompt": ["a", [99999999]]}, "prompt[1][0]"),
        ({"prompt": {"a": 1}}, "prompt.a"),
        ({"prompt": {"prompt_string": 1}}, "prompt.prompt_string"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_wrong_fields_are_named(server: Any, fields: dict[str, Any], param: str) -> None:
    assert error_of(server, path=PATH, **fields)["param"] == param


# ---------------------------------------------------------------------------------------------------- embeddings


def test_embeddings(server: Any) -> None:
    inputs = ["What is 27 + 45?", "The fox", "What is 27 + 45?"]
    runner = server.model.runner
    found = server.lenient.embeddings.create(model="demo", input=inputs)  # the client asks for base64
    vectors = [each.embedding for each in found.data]
    assert [each.index for each in found.data] == [0, 1, 2] and vectors[0] == vectors[2]
    assert np.allclose(vectors[1], runner.embed(runner.tokenizer.encode("The fox")), atol=1e-6)
    assert found.usage.prompt_tokens == sum(len(runner.tokenizer.encode(text)) for text in inputs)
    raw = server.post("/v1/embeddings", input=inputs).json()["data"]
    assert raw[1]["embedding"] == vectors[1]
    (packed,) = server.post("/v1/embeddings", input="The fox", encoding_format="base64").json()["data"]
    assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4").tolist() == vectors[1]
    short = server.lenient.embeddings.create(model="demo", input="The fox", dimensions=8).data[0].embedding
    assert len(short) == 8 and abs(np.linalg.norm(short) - 1) < 1e-6
    assert np.allclose(short, np.array(vectors[1][:8]) / np.linalg.norm(vectors[1][:8]), atol=1e-6)
    ids = runner.tokenizer.encode("The fox")
    assert [each["embedding"] for each in server.post("/embeddings", input=[ids, "The fox"]).json()["data"]] == [
        vectors[1]
    ] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({}, "input"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": ["a", "fox " * 5000]}, "input[1]"),
    ],
)
def test_wrong_inputs_are_named(server: Any, fields: dict[str, Any], param: str) -> None:
    assert error_of(server, path="/v1/embeddings", **fields)["param"] == param


# ---------------------------------------------------------------------------------------------------- tokens


def test_tokens_of_a_text(server: Any) -> None:
    tokenizer = server.model.tokenizer
    text = "Foxes 🦊 and owls<|im_end|>"
    ids = server.post("/tokenize", content=text).json()["tokens"]
    assert ids == tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert server.post("/detokenize", tokens=ids).json() == {"content": text, "prompt": text}
    plain = server.post("/v1/tokenize", content=text, parse_special=False).json()["tokens"]
    assert plain == tokenizer.encode(text, add_special_tokens=False) != ids
    pieces = server.post("/tokenize", content=text, with_pieces=True).json()["tokens"]
    joined = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces)
    assert joined.decode() == text and [piece["id"] for piece in pieces] == ids
    found = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["tokens"] == tokenizer.encode(text, parse_special=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == server.model.runner.max_seq
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (None, tokenizer.id_to_token(tokenizer.eos_id))
    assert info["chat_template"] == tokenizer.chat_template


def test_tokens_of_a_conversation(server: Any) -> None:
    messages = [{"role": "user", "content": "Hello <|im_end|>"}]
    found = server.post("/tokenize", messages=messages).json()
    assert found["tokens"] == server.model.runner.chat_ids(messages)
    formatted = server.post("/apply-template", messages=messages).json()["prompt"]
    assert formatted == "<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    ended = server.post("/apply-template", messages=messages, add_generation_prompt=False).json()["prompt"]
    assert formatted.startswith(ended) and formatted != ended


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": [99999999]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_wrong_tokens_are_named(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(server, path=path, **fields)["param"] == param
