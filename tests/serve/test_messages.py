"""/v1/messages: Anthropic's client, streams, blocks, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from rlx.serve.answers import Delta, End, Finished, Progress
from rlx.serve.errors import ApiError
from rlx.serve.media import ImageSource
from rlx.serve.messages import MessageWriter, messages_of
from rlx.text.tool_calls import ToolCallDelta

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TEXT = {"type": "text", "text": "Hi"}
HI = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    """The official client, which refuses answers that are not as Anthropic's documents say."""
    options: Any = {"max_retries": 0, "timeout": 120, "_strict_response_validation": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", **options) as found:
        yield found


def test_a_message_has_the_shapes_of_the_client(client: Any) -> None:
    found = client.messages.create(messages=HI, max_tokens=5, system="Be kind.", **GREEDY)
    assert found.id.startswith("msg_") and found.role == "assistant" and found.model == "demo"
    assert found.stop_reason == "max_tokens" and found.content[0].text and found.usage.output_tokens == 5
    whole = client.messages.create(messages=HI, max_tokens=500, system="Be kind.", **GREEDY)
    assert whole.stop_reason == "end_turn" and whole.stop_sequence is None
    usage = whole.usage
    assert usage.cache_read_input_tokens > 0
    count = client.messages.count_tokens(model="demo", messages=HI, system="Be kind.").input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count


def test_a_stream_is_the_message_in_order(client: Any) -> None:
    whole = client.messages.create(messages=HI, max_tokens=500, **GREEDY)
    kinds = [event.type for event in client.messages.create(messages=HI, max_tokens=500, stream=True, **GREEDY)]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    with client.messages.stream(messages=HI, max_tokens=500, **GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == whole.usage.output_tokens


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_a_call_that_is_asked_for_is_valid_and_its_result_goes_back(client: Any) -> None:
    tools = [{"name": name, "input_schema": WEATHER} for name in ("weather", "climate")]
    options = {"tools": tools, "max_tokens": 300, **GREEDY}
    found = client.messages.create(messages=HI, tool_choice={"type": "tool", "name": "climate"}, **options)
    (call,) = found.content
    assert (found.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "climate")
    jsonschema.validate(call.input, WEATHER)
    with client.messages.stream(messages=HI, tool_choice={"type": "tool", "name": "climate"}, **options) as stream:
        assert stream.get_final_message().content[0].input == call.input
    forced = client.messages.create(
        messages=HI, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **options
    )
    assert [block.type for block in forced.content] == ["tool_use"]
    assert client.messages.create(messages=HI, tool_choice={"type": "none"}, **options).stop_reason == "end_turn"

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun."}
    more = [*HI, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=more, **(options | {"max_tokens": 3})).usage.output_tokens > 0


def test_the_line_that_changes_in_each_request_does_not_cost_the_cache(client: Any) -> None:
    def asked(nonce: str) -> Any:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"},
            {"type": "text", "text": "You are a coding agent. " * 8, "cache_control": {"type": "ephemeral"}},
        ]
        return client.messages.create(messages=HI, max_tokens=1, system=system, **GREEDY).usage

    first, second = asked("1a2b"), asked("3c4d")
    assert second.cache_read_input_tokens >= first.input_tokens + first.cache_read_input_tokens - 1


def test_an_agents_request_is_answered(server: Any) -> None:
    """The form of Claude Code: a query, fields of the beta, reasoning asked of every model."""
    body = {
        "model": "demo", "max_tokens": 4, "stream": True, "temperature": 1, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Hello."}],
        "messages": [{"role": "user", "content": [{**TEXT, "cache_control": {"type": "ephemeral"}}]}],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}, "tools": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    found = server.http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "x"})
    assert found.status_code == 200 and "event: message_stop" in found.text, found.text
    enabled = body | {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 1025,
        "stop_sequences": ["e"],
    }
    assert server.http.post("/v1/messages", json=enabled).status_code == 200


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"messages": []}, "messages: expected at least one entry"),
        ({"messages": "Hi"}, "messages: expected an array"),
        ({"messages": [{"role": "cook", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "documents of",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"unknown": 1}, "unknown: there is no such field"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"top_k": 10**30}, "top_k: top_k is 1000"),
        ({"messages": [{"role": "assistant", "content": "Once"}]}, "messages: there is nothing before the message"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: the name is 'a b'"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"temperature": "hot"}, "temperature: expected a number"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(server: Any, change: dict[str, Any], sentence: str) -> None:
    found = server.post("/v1/messages", **({"model": "demo", "max_tokens": 5, "messages": HI} | change))
    body = found.json()
    assert (found.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), body
    assert sentence in body["error"]["message"]


def test_errors_have_the_classes_of_the_client(client: Any, server: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(
            max_tokens=1, messages=[{"role": "user", "content": "Hi " * 3000}], stream=True, **GREEDY
        )
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.data: the model takes no"
    ):
        client.messages.create(max_tokens=1, messages=[{"role": "user", "content": [image]}], **GREEDY)
    assert server.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert server.http.post("/v1/messages", content="{").json()["type"] == "error"


# ---------------------------------------------------------------------------------------------- without a server


def test_blocks_become_messages() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    messages = [
        {"role": "user", "content": [TEXT, {"type": "image", "source": source}, document]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "See: "},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, {"type": "image", "source": source}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "system", "content": "B"},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    first = ImageSource("data:;base64,eA==", "messages[0].content[1].source.data").part
    second = ImageSource("data:;base64,eA==", "messages[2].content[0].content[1].source.data").part
    assert messages_of(messages, "A") == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": [TEXT, first, {"type": "text", "text": "T"}, {"type": "text", "text": "D"}]},
        {"role": "assistant", "content": "See: ", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Hi"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": [second, {"type": "text", "text": "And?"}]},
    ]


@pytest.mark.parametrize(
    "system, text",
    [
        ("x-anthropic-billing-header: cch=1;", None),
        ("x-anthropic-billing-header: cch=1;\n\nHello", "Hello"),
        ("Say x-anthropic-billing-header: cch=1;", "Say x-anthropic-billing-header: cch=1;"),
        ([{"type": "text", "text": "x-anthropic-billing-header: a"}, TEXT, TEXT], "Hi\n\nHi"),
        (None, None),
    ],
)
def test_the_system_prompt_without_its_nonce(system: Any, text: str | None) -> None:
    found = messages_of(HI, system)
    assert found == ([{"role": "system", "content": text}] if text else []) + HI


def events_of(*events: Any, fail: ApiError | None = None) -> tuple[list[Any], Message]:
    """The events of a stream, each checked against the client's types, and the message."""
    builder = MessageWriter("demo", 7)
    found = [*builder.begin(), *(each for event in events for each in builder.push(event))]
    if fail is not None:
        found += builder.fail(fail)
    known = [each for each in json.loads(json.dumps(found)) if each["type"] not in ("ping", "error")]
    return [EVENTS.validate_python(each) for each in known], Message.model_validate(builder.message)


CALL = ToolCallDelta(0, "call_a", "look"), ToolCallDelta(0, arguments='{"at":'), ToolCallDelta(0, arguments=" 1}")


def test_reasoning_text_and_calls_are_blocks_of_their_own() -> None:
    second = ToolCallDelta(1, "call_b", "hear"), ToolCallDelta(1, arguments="{}")
    events, message = events_of(
        Progress(7, 3, 3, 1.0), Delta(0, thinking="H"), Delta(0, thinking="m."), Delta(0, text="Let me"),
        Delta(0, text=" see."), Delta(0, tool_calls=CALL[:2]), Delta(0, tool_calls=(CALL[2], *second)),
        End(0, "tool_calls"), Finished(7, 3, 5, 2),
    )  # fmt: skip
    thinking, text, look, hear = message.content
    assert thinking.thinking == "Hm." and text.text == "Let me see."  # type: ignore[union-attr]
    assert (look.id, look.name, look.input) == ("toolu_a", "look", {"at": 1})  # type: ignore[union-attr]
    assert (hear.name, hear.input) == ("hear", {})  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (4, 3, 5)
    begun = [event.index for event in events if event.type == "content_block_start"]
    ended = [event.index for event in events if event.type == "content_block_stop"]
    assert begun == ended == [0, 1, 2, 3]
    parts = [
        event.delta.partial_json for event in events if getattr(event, "index", None) == 2 and hasattr(event, "delta")
    ]
    assert "".join(parts) == '{"at": 1}'


def test_a_failure_after_the_beginning_is_an_error_event() -> None:
    builder = MessageWriter("demo", 7)
    assert list(builder.fail(ApiError(503, "gone"))) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    ]
