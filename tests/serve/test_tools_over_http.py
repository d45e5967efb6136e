"""Tools over HTTP: forced calls follow their schemas, streams say what single answers say, conversations go on."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from exchanges import PATH, chunks_of, error_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "switch_light": LIGHT}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A function.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
BODY = {
    "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
    "tools": TOOLS,
    "max_tokens": 120,
    "temperature": 1.0,
    "seed": 5,
}


def calls_of(server: Any, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, **{**BODY, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    calls: list[dict[str, Any]] = choice["message"]["tool_calls"]
    for call in calls:
        assert call["type"] == "function" and call["id"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return calls


@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_follow_their_schemas(server: Any, seed: int) -> None:
    assert calls_of(server, tool_choice="required", seed=seed)
    named = {"type": "function", "function": {"name": "switch_light"}}
    (call,) = calls_of(server, tool_choice=named, seed=seed)
    assert call["function"]["name"] == "switch_light"
    assert len(calls_of(server, tool_choice="required", parallel_tool_calls=False, seed=seed)) == 1


def test_a_stream_says_the_same(server: Any) -> None:
    whole = [call["function"] for call in calls_of(server, tool_choice="required")]
    found = chunks_of(server, **{**BODY, "tool_choice": "required"})
    pieces = [
        piece for chunk in found for choice in chunk["choices"] for piece in choice["delta"].get("tool_calls", ())
    ]
    streamed: list[dict[str, Any]] = []
    for piece in pieces:
        if piece["index"] == len(streamed):
            assert piece["id"] and piece["type"] == "function" and piece["function"]["name"]
            streamed.append({"name": piece["function"]["name"], "arguments": ""})
        else:
            assert "id" not in piece and "name" not in piece["function"]
        streamed[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert streamed == whole
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_conversations_with_results_go_on(server: Any) -> None:
    (call, *_) = calls_of(server, tool_choice="required", parallel_tool_calls=False)
    said = [
        *BODY["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"},
    ]
    answer = server.post(PATH, **{**BODY, "messages": said, "max_tokens": 8})
    assert answer.status_code == 200, answer.text
    formatted = server.post("/apply-template", messages=said, tools=TOOLS).json()["prompt"]
    assert "18 degrees" in formatted and "get_weather" in formatted


def test_choices_about_tools(server: Any) -> None:
    plain = server.post(PATH, messages=BODY["messages"], max_tokens=8, temperature=0).json()
    none = server.post(PATH, messages=BODY["messages"], tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0)
    assert none.json()["choices"][0]["message"] == plain["choices"][0]["message"]
    auto = server.post(PATH, **{**BODY, "tool_choice": "auto"})
    assert auto.status_code == 200, auto.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "has space"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_named(server: Any, fields: dict[str, Any], param: str) -> None:
    assert error_of(server, **{**BODY, **fields})["param"] == param
