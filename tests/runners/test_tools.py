"""Tool calls of the runners: forced ones are valid on every demo model, and conversations go on with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rlx
from rlx.runners import Model

sys.path.append(str(Path(__file__).parent.parent / "text"))
from tool_schemas import SCHEMAS

QUESTION = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def demo() -> Model:
    runner = rlx.auto_runner("demo")
    assert isinstance(runner, Model)
    return runner


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


TOOLS = [tool("get_weather", SCHEMAS["a text"]), tool("get_time", SCHEMAS["optional"])]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("kind", ["a text", "mixed values", "objects in a list", "pattern", "nothing", "date"])
def test_a_named_call_follows_its_schema(demo: Model, kind: str) -> None:
    tools = [tool("first", SCHEMAS["flag"]), tool("chosen", SCHEMAS[kind])]
    choice = {"type": "function", "function": {"name": "chosen"}}
    for seed in range(3):
        answer = demo.chat(QUESTION, 300, tools=tools, tool_choice=choice, temperature=1.0, seed=seed)
        assert answer.text == ""
        assert answer.finish_reason == "grammar"
        assert [call.name for call in answer.tool_calls] == ["chosen"]
        jsonschema.validate(answer.tool_calls[0].arguments, SCHEMAS[kind])


def test_a_stream_gives_the_same_call_in_pieces(demo: Model) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED}
    (whole,) = demo.chat(QUESTION, 200, **options).tool_calls
    steps = list(demo.chat_stream(QUESTION, 200, **options))
    pieces = [piece for step in steps for piece in step.tool_calls]
    assert (pieces[0].index, pieces[0].name, pieces[0].arguments) == (0, "get_time", "")
    assert pieces[0].id.startswith("call_")
    assert len(pieces) > 3
    assert not any(piece.id or piece.name for piece in pieces[1:])
    assert json.loads("".join(piece.arguments for piece in pieces)) == whole.arguments
    assert "".join(step.text for step in steps) == ""


def test_the_conversation_goes_on_with_the_result(demo: Model) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    answer = demo.chat(messages, 200, tools=TOOLS, tool_choice=NAMED)
    (call,) = answer.tool_calls
    assert answer.message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call.id, "type": "function",
             "function": {"name": "get_time", "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
        ],
    }  # fmt: skip
    messages += [answer.message, call.result({"time": "12:30"})]
    assert messages[-1] == {
        "role": "tool", "tool_call_id": call.id, "name": "get_time", "content": '{"time": "12:30"}',
    }  # fmt: skip
    prompt = demo.tokenizer.decode(demo.chat_ids(messages, TOOLS))
    assert 'Result of get_time:\n{"time": "12:30"}' in prompt
    assert demo.chat(messages, 30, tools=TOOLS).generation


def test_the_model_decides_and_may_be_forbidden_to_call(demo: Model) -> None:
    free = demo.chat("What is 27 + 45?", 40, tools=TOOLS)
    assert free.tool_calls == ()
    assert free.message == {"role": "assistant", "content": free.text}
    none = demo.chat("What is 27 + 45?", 40, tools=TOOLS, tool_choice="none")
    assert none.prompt_tokens == demo.chat("What is 27 + 45?", 40).prompt_tokens
    assert none.text == "27 + 45 = 72."


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice: found 'maybe'"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: it is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "there is no tool 'x'"),
        (
            {"tools": TOOLS, "tool_choice": "required", "json_schema": SCHEMAS["flag"]},
            "a call is required, and the text has a form of its own",
        ),
    ],
)
def test_wrong_options_are_named(demo: Model, options: dict[str, Any], what: str) -> None:
    with pytest.raises(rlx.ToolError, match=what):
        demo.chat(QUESTION, 10, **options)
