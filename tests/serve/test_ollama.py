"""Ollama's API: its client, streams, options, errors."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import ollama
import pytest

from rlx.sampling import SampleOpts
from rlx.serve.answers import Delta, End, Finished
from rlx.serve.errors import ApiError
from rlx.serve.http import validated
from rlx.serve.media import ImageSource
from rlx.serve.model import fill_in_ids
from rlx.serve.ollama import (
    ChatBody,
    OllamaWriter,
    joined,
    messages_of,
    options_of,
)
from rlx.serve.prompts import filled_in
from rlx.text.tool_calls import ToolCallDelta

HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: Any) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=120)


def test_a_chat_has_the_shapes_of_the_client(client: Any, server: Any) -> None:
    found = client.chat("demo", messages=HI, options=GREEDY)
    said = server.openai.chat.completions.create(model="demo", messages=HI, temperature=0).choices[0].message.content
    assert found.message.role == "assistant" and found.message.content == said
    assert found.done and found.done_reason == "stop" and found.model == "demo"
    assert found.eval_count > 0 and found.prompt_eval_count > 0
    assert found.total_duration >= found.prompt_eval_duration > 0
    assert client.chat("demo:latest", messages=HI, options={**GREEDY, "num_predict": 2}).done_reason == "length"


def test_a_stream_is_the_answer_in_lines(client: Any, server: Any) -> None:
    whole = client.chat("demo", messages=HI, options=GREEDY)
    pieces = list(client.chat("demo", messages=HI, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == whole.eval_count and pieces[0].eval_count is None
    found = server.post("/api/chat", model="demo", messages=HI, options=GREEDY)  # a stream unless it says otherwise
    assert found.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line)["done"] for line in found.text.splitlines()] == [piece.done for piece in pieces]


def test_generate_with_a_template_and_raw(client: Any, server: Any) -> None:
    found = client.generate("demo", prompt="Hi", system="Be kind.", options=GREEDY)
    messages = [{"role": "system", "content": "Be kind."}, *HI]
    assert found.response == client.chat("demo", messages=messages, options=GREEDY).message.content
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    raw = client.generate("demo", prompt=prompt, raw=True, options=GREEDY)
    assert raw.response == client.generate("demo", prompt="Hi", options=GREEDY).response
    pieces = list(client.generate("demo", prompt=prompt, raw=True, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == raw.response
    assert raw.prompt_eval_count == len(server.model.tokenizer.encode(prompt, parse_special=True))


def test_an_empty_request_loads_the_model(client: Any) -> None:
    assert client.generate("demo").done_reason == "load"
    assert client.chat("demo", messages=[], keep_alive=0).done_reason == "unload"
    assert client.chat("demo", messages=HI, options={"num_predict": 1}, keep_alive="5m").done


def test_vectors(client: Any, server: Any) -> None:
    found = client.embed("demo", ["Once", "upon a time"])
    expected = server.model.runner.embed(server.model.tokenizer.encode("upon a time"))
    np.testing.assert_allclose(found.embeddings[1], expected, rtol=1e-6)
    assert found.prompt_eval_count > 1 and len(found.embeddings) == 2
    np.testing.assert_allclose(client.embeddings("demo", "upon a time").embedding, expected, rtol=1e-6)
    short = client.embed("demo", "upon a time", dimensions=16).embeddings[0]
    np.testing.assert_allclose(short, expected[:16] / np.linalg.norm(expected[:16]), rtol=1e-5)
    with pytest.raises(ollama.ResponseError, match="the context holds 1024"):
        client.embed("demo", "Hi " * 3000)
    assert len(client.embed("demo", "Hi " * 3000, truncate=True).embeddings) == 1


def test_the_model_is_described(client: Any, server: Any) -> None:
    assert {each.model for each in client.list().models} == {"demo", "gpt-4o"}
    listed = client.list().models[0]
    assert listed.size > 5_000_000 and listed.details.quantization_level == "Q8_0" and len(listed.digest) == 64
    shown = client.show("demo")
    assert {"completion", "tools"} <= set(shown.capabilities) and "vision" not in shown.capabilities
    assert shown.modelinfo["general.architecture"] == "qwen3" and shown.modelinfo["qwen3.context_length"] == 1024
    assert "<|im_start|>" in shown.template
    assert client.ps().models[0].context_length == 1024
    assert int(server.http.get("/api/version").json()["version"].split(".")[1]) >= 6
    assert server.http.head("/").status_code == 200
    assert server.post("/api/show", name="demo").status_code == 200  # older clients


def test_a_model_that_sees_says_so(server_that_sees: Any) -> None:
    client = ollama.Client(host=server_that_sees.url, timeout=120)
    assert "vision" in client.show("demo-vision").capabilities


CHAT = {"model": "demo", "messages": HI, "stream": False}


@pytest.mark.parametrize(
    "path, body, sentence",
    [
        ("chat", {"messages": HI}, "model: it is required"),
        ("chat", CHAT | {"unknown": 1}, "unknown: there is no such field"),
        ("chat", CHAT | {"messages": [{"role": "cook"}]}, "messages[0].role"),
        ("chat", CHAT | {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            "chat",
            CHAT | {"messages": [{"role": "user", "images": ["aaaa"]}]},
            "messages[0].images[0]: the model takes no",
        ),
        (
            "chat",
            CHAT | {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ("chat", CHAT | {"format": "xml"}, "format"),
        ("chat", CHAT | {"format": {"type": "strange"}}, "format"),
        ("chat", CHAT | {"think": "huge"}, "think: "),
        ("chat", CHAT | {"top_logprobs": 3}, "top_logprobs: it needs logprobs"),
        ("chat", CHAT | {"messages": [{"role": "user", "content": "Hi " * 3000}]}, "the context holds 1024"),
        ("generate", {"model": "demo", "prompt": "a", "template": "{{ .Prompt }}"}, "template: "),
        ("generate", {"model": "demo", "prompt": "a", "suffix": "b"}, "suffix: "),
        ("generate", {"model": "demo", "prompt": "a", "raw": True, "system": "b"}, "system: it cannot be together"),
        ("generate", {"model": "demo", "prompt": "a", "context": [10**9]}, "context"),
        ("generate", {"model": "demo", "prompt": "a", "images": ["aaaa"]}, "images[0]: the model takes no images"),
        ("embed", {"model": "demo", "input": 3}, "input"),
        ("embed", {"model": "demo", "input": "a", "dimensions": 9999}, "dimensions"),
        ("embed", {"model": "demo", "input": ["a", ""]}, "input[1]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(
    server: Any, path: str, body: dict[str, Any], sentence: str
) -> None:
    found = server.post(f"/api/{path}", **body)
    assert found.status_code == 400 and sentence in found.json()["error"], found.text


# ---------------------------------------------------------------------------------------------- without a server


def asked(options: dict[str, Any], default: SampleOpts, context: int) -> dict[str, Any]:
    """What a request with these options asks for."""
    return options_of(validated(ChatBody, {"options": options}).options, default, context)


def test_options_become_sampling_options() -> None:
    found = asked(
        {"temperature": 0.5, "top_k": 3, "repeat_penalty": 1.1, "repeat_last_n": -1, "seed": 7, "num_predict": -1,
         "stop": ["a", "b"], "num_ctx": 100, "min_p": 0.1, "mirostat": 2, "num_gpu": 0, "top_p": None},
        SampleOpts(top_p=0.9), 128,
    )  # fmt: skip
    sample = SampleOpts(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        repetition_window=None,
        seed=7,
        mirostat=2,
    )
    assert found == {"sample": sample, "max_tokens": None, "stop": ("a", "b")}
    assert asked({"num_predict": 0, "stop": "x"}, SampleOpts(), 1)["max_tokens"] == 0


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"num_treads": 3}, "options.num_treads: there is no such field. Did you mean options.num_thread"),
        ({"num_ctx": "all"}, "options.num_ctx: expected an integer"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"stop": [""]}, "options.stop"),
        ({"temperature": "hot"}, "options.temperature: expected a number"),
        ({"temperature": -1}, "options.temperature"),
        ({"top_k": 1.5}, "options.top_k: expected an integer"),
        ({"repeat_penalty": -1}, "options.repeat_penalty"),
        ({"mirostat": 1}, "options.mirostat"),
        ({"tfs_z": 0.5}, "options.tfs_z"),
        ({"logit_bias": {}}, "options.logit_bias: there is no such field"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApiError) as found:
        asked(options, SampleOpts(), 128)
    assert found.value.status == 400 and str(found.value).startswith(sentence)


def long_talk(turns: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly."}]
    for i in range(turns):
        found += [{"role": "user", "content": f"This is number {i}. " * 8}, {"role": "assistant", "content": "Yes."}]
    return [*found, {"role": "user", "content": "What is 27 + 45?"}]


def test_the_oldest_turns_of_a_conversation_that_is_too_long_go(client: Any, server: Any) -> None:
    talk, options = long_talk(40), {"num_predict": 8, "temperature": 0}
    found = server.post("/api/chat", model="demo", messages=talk, stream=False, options=options)
    assert found.status_code == 200, found.text
    named = re.fullmatch(r"messages\[1\.\.(\d+)\]", found.headers["x-rlx-ignored"])
    assert named is not None
    kept = [talk[0], *talk[int(named[1]) + 1 :]]
    assert kept[1]["role"] == "user"
    same = server.post("/api/chat", model="demo", messages=kept, stream=False, options=options)
    assert same.json()["message"] == found.json()["message"] and "x-rlx-ignored" not in same.headers
    count, most = found.json()["prompt_eval_count"], server.model.runner.max_seq
    assert count <= most - 8, "room for the answer is left"
    more = [talk[0], *talk[int(named[1]) - 1 :]]
    whole = server.post("/api/chat", model="demo", messages=more, truncate=False, options=options)
    assert whole.status_code == 400, "no more went than had to"
    streamed = "".join(
        each.message.content for each in client.chat("demo", messages=talk, options=options, stream=True)
    )
    assert streamed == found.json()["message"]["content"]


class Filler:
    """A tokenizer with tokens for filling in."""

    prefix = (1,)
    names: ClassVar[dict[str, int]] = {"<|fim_prefix|>": 5, "<|fim_suffix|>": 6, "<|fim_middle|>": 7, "<|file_sep|>": 9}

    def token_to_id(self, name: str) -> int | None:
        return self.names.get(name)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*text.encode()]


def test_a_suffix_asks_for_what_stands_between(server: Any) -> None:
    model: Any = SimpleNamespace(tokenizer=Filler(), check_length=lambda texts, field: None)
    assert filled_in(model, "a", "b") == [1, 5, 97, 6, 98, 7]
    assert filled_in(model, "a", "", [("c", "d")]) == [1, 9, *b"c\nd\n", 5, 97, 6, 7]
    assert fill_in_ids(server.model.tokenizer) is None
    assert "insert" not in server.post("/api/show", model="demo").json()["capabilities"]
    for more in ({"raw": True}, {"system": "x"}):
        found = server.post("/api/generate", model="demo", prompt="a", suffix="b", **more)
        assert found.status_code == 400 and "cannot be together with suffix" in found.json()["error"]


def test_messages_become_those_of_chat() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": i}}} for i, name in enumerate(("look", "hear"))]
    messages = [
        {"role": "user", "content": "Weather?", "images": ["eA=="]},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "birds", "tool_name": "hear"},
        {"role": "tool", "content": "sun", "tool_name": "look"},
    ]
    found = messages_of(messages)
    image = ImageSource("data:;base64,eA==", "messages[0].images[0]").part
    assert found[0]["content"] == [image, {"type": "text", "text": "Weather?"}]
    assert found[1]["reasoning_content"] == "Hm."
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert [call["function"] for call in found[1]["tool_calls"]] == [call["function"] for call in calls]
    assert [found[2]["tool_call_id"], found[3]["tool_call_id"]] == ids[::-1] and len(set(ids)) == 2


def test_tool_calls_come_whole_with_their_arguments_as_an_object() -> None:
    builder = OllamaWriter("chat", "demo", 0.0)
    events = [
        Delta(0, thinking="Hm."), Delta(0, text="See:"),
        Delta(0, tool_calls=(ToolCallDelta(0, "a", "look"), ToolCallDelta(0, arguments='{"at":'))),
        Delta(0, tool_calls=(ToolCallDelta(0, arguments=" 1}"), ToolCallDelta(1, "b", "hear"))),
        End(0, "tool_calls"), Finished(7, 3, 5, 2, prompt_ms=2.0, decode_ms=3.0),
    ]  # fmt: skip
    pieces = [ollama.ChatResponse(**each) for event in events for each in builder.push(event)]
    called = [call.function for piece in pieces for call in piece.message.tool_calls or ()]
    assert [(each.name, each.arguments) for each in called] == [("look", {"at": 1}), ("hear", {})]
    assert pieces[0].message.thinking == "Hm." and pieces[-1].eval_duration == 3_000_000

    again = OllamaWriter("chat", "demo", 0.0)
    whole = ollama.ChatResponse(**joined("chat", [each for event in events for each in again.push(event)]))
    assert (whole.message.content, whole.message.thinking, whole.done_reason) == ("See:", "Hm.", "stop")
    assert [call.function.name for call in whole.message.tool_calls or ()] == ["look", "hear"]
