"""/v1/responses: OpenAI's client, streams, items, errors."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rlx.serve.answers import Delta, End, Finished, Progress
from rlx.serve.errors import ApiError
from rlx.serve.media import ImageSource
from rlx.serve.responses import ResponseWriter, messages_of
from rlx.text.tool_calls import ToolCallDelta

GREEDY = {"model": "demo", "temperature": 0}
EVENTS = TypeAdapter(ResponseStreamEvent)
FIELDS = {"model": "demo", "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def test_a_response_has_the_shapes_of_the_client(server: Any) -> None:
    found = server.openai.responses.create(input="Hi", instructions="Be kind.", max_output_tokens=6, **GREEDY)
    assert found.id.startswith("resp_") and found.status == "incomplete" and found.output[0].id.startswith("msg_")
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output_text and found.usage.output_tokens == 6
    assert found.usage.total_tokens == found.usage.input_tokens + 6
    whole = server.openai.responses.create(input="Hi", **GREEDY)
    assert whole.status == "completed" and whole.error is None and whole.completed_at is not None


def test_a_stream_is_the_response_in_order(server: Any) -> None:
    whole = server.openai.responses.create(input="Hi", **GREEDY)
    with server.openai.responses.stream(input="Hi", **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_the_conversation_goes_on_with_the_output(server: Any) -> None:
    conversation: list[Any] = [{"role": "user", "content": "Hi"}]
    found = server.openai.responses.create(input=conversation, **GREEDY)
    conversation += [each.model_dump(exclude_none=True) for each in found.output]
    conversation.append({"role": "user", "content": "And now?"})
    more = server.openai.responses.create(input=conversation, max_output_tokens=4, **GREEDY)
    assert more.output_text and more.usage.input_tokens > found.usage.input_tokens


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_a_call_that_is_asked_for_is_valid_and_its_result_goes_back(server: Any) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    choices: Any = ("required", {"type": "function", "name": "weather"})
    for choice in choices:
        options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, **GREEDY}
        found = server.openai.responses.create(input="Hi", **options)
        (call,) = found.output
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        jsonschema.validate(json.loads(call.arguments), WEATHER)
        with server.openai.responses.stream(input="Hi", **options) as stream:
            assert stream.get_final_response().output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    items: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    assert server.openai.responses.create(input=items, tools=tools, max_output_tokens=3, **GREEDY).output_text


@pytest.mark.parametrize(
    "body, sentence",
    [
        ({}, "input: there is no message"),
        ({"input": []}, "input: there is no message"),
        ({"input": 3}, "input: expected a string or an array"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, 'previous_response_id: "resp_1" is not supported'),
        ({"input": "Hi", "conversation": "conv_1"}, 'conversation: "conv_1" is not supported'),
        ({"input": "Hi", "unknown": 1}, "unknown: there is no such field"),
        ({"input": "Hi", "background": True}, "background: true is not supported"),
        ({"input": "Hi", "truncation": "some"}, "truncation: expected"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens: expected at least 1"),
        ({"input": "Hi", "temperature": -1}, "temperature"),
        ({"input": "Hi", "reasoning": {"effort": "huge"}}, "reasoning.effort: expected"),
        ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "Hi", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "Hi", "tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name: it is required"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type: items of type 'web_search_call'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: the server stores no responses"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "cook", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "content[0].file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "takes no images"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(server: Any, body: dict[str, Any], sentence: str) -> None:
    for path in ("/v1/responses", "/responses"):
        found = server.post(path, **body)
        assert found.status_code == 400 and sentence in found.json()["error"]["message"], found.text


def test_an_agents_request_is_answered(server: Any) -> None:
    """The form of Codex CLI: unknown types of tools, instructions and a developer's message, fields of its own."""
    body = {
        "model": "demo",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use the sandbox."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        "tools": [
            {
                "type": "custom", "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /(.+)/ "\\n"+'},
            },
            {"type": "namespace", "name": "mcp", "tools": []},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
        ],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "client_metadata": {"b": "c"},
        "max_output_tokens": 5,
    }  # fmt: skip
    found = server.post("/v1/responses", **body)
    assert found.status_code == 200 and "response.output_text.delta" in found.text
    last = json.loads(found.text.strip().rpartition("data: ")[2])
    assert [tool["name"] for tool in last["response"]["tools"]] == ["apply_patch"]
    assert found.headers["x-rlx-ignored"] == "client_metadata, tools[1], tools[2], tools[3]"


def test_truncation_leaves_out_the_oldest_turns(server: Any) -> None:
    said = [{"role": role, "content": f"{i} " * 60} for i in range(20) for role in ("user", "assistant")]
    body = {"instructions": "Be brief.", "input": [*said, {"role": "user", "content": "Hi"}], "max_output_tokens": 8}
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        server.openai.responses.create(**body, **GREEDY)
    raw = server.openai.responses.with_raw_response.create(**body, truncation="auto", **GREEDY)
    found, context = raw.parse(), server.model.runner.max_seq
    assert found.truncation == "auto" and context // 2 < found.usage.input_tokens <= context - 8
    assert raw.headers["x-rlx-ignored"].startswith("messages[1..")
    with pytest.raises(openai.BadRequestError, match="the context holds") as caught:
        server.openai.responses.create(input="Hi " * 3000, truncation="auto", **GREEDY)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


# ---------------------------------------------------------------------------------------------- without a server


def test_items_become_messages_with_one_system_message() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "hear", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "birds"}, {"type": "input_image", "image_url": "data:x"}],
        },
        {"role": "system", "content": "C"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "hear", "arguments": {}}},
    ]
    assert messages_of(items, "A") == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "birds"},
        {"role": "user", "content": [ImageSource("data:x", "input[7].output[1].image_url").part]},
    ]
    encrypted = [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "Hi"}]
    assert messages_of(encrypted, None) == [{"role": "user", "content": "Hi"}]


def events_of(*events: Any, fail: ApiError | None = None) -> tuple[list[Any], Response]:
    """The events of a stream, each checked against the client's types, and the response."""
    builder = ResponseWriter(FIELDS)
    found = [*builder.begin(), *(each for event in events for each in builder.push(event))]
    if fail is not None:
        found += builder.fail(fail)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    checked = [EVENTS.validate_python(json.loads(json.dumps(each))) for each in found]
    return checked, Response.model_validate(json.loads(json.dumps(builder.response)))


CALL = ToolCallDelta(0, "call_a", "look"), ToolCallDelta(0, arguments='{"at":'), ToolCallDelta(0, arguments=" 1}")
DONE = Finished(7, 3, 5, 2)


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    second = ToolCallDelta(1, "call_b", "hear"), ToolCallDelta(1, arguments="{}")
    deltas = [
        Progress(7, 3, 3, 1.0), Delta(0, thinking="H"), Delta(0, thinking="m."), Delta(0, text="Let me"),
        Delta(0, text=" see."), Delta(0, tool_calls=CALL[:2]), Delta(0, tool_calls=(CALL[2], *second)),
    ]  # fmt: skip
    events, response = events_of(*deltas, End(0, "tool_calls"), DONE)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, look, hear = response.output
    assert reasoning.content[0].text == "Hm." and response.output_text == "Let me see."  # type: ignore[union-attr,index]
    assert (look.name, look.call_id, look.arguments) == ("look", "call_a", '{"at": 1}')  # type: ignore[union-attr]
    assert (hear.name, hear.arguments, hear.status) == ("hear", "{}", "completed")  # type: ignore[union-attr]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in response.output]
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.input_tokens_details.cached_tokens == 3 and response.usage.total_tokens == 12


def test_a_cut_call_is_incomplete() -> None:
    events, response = events_of(Delta(0, tool_calls=CALL[:2]), End(0, "length"), DONE)
    assert response.status == "incomplete" and events[-1].type == "response.incomplete"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize("status, code", [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (408, "server_error")])
def test_a_failure_after_the_beginning_is_the_last_event(status: int, code: str) -> None:
    events, response = events_of(Delta(0, text="Once"), fail=ApiError(status, "it broke"))
    assert events[-1].type == "response.failed" and response.status == "failed"
    assert response.error is not None and (response.error.code, response.error.message) == (code, "it broke")
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
