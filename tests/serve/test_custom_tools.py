"""Tools of OpenAI's APIs beside functions: custom tools with grammars, allowed tools, the older function calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from exchanges import chunks_of, error_of

from rlx.serve.custom_tools import InputParser, regex_of
from rlx.text.answer import AnswerPart
from rlx.text.tool_calls import Tool, ToolCallDelta

SUM = """
start: term (" + " term)* -> sum
term: NUMBER | "(" NUMBER ")"
NUMBER: DIGIT~1..2
%import common.DIGIT
"""
SUMS = re.compile(r"(\d{1,2}|\(\d{1,2}\))( \+ (\d{1,2}|\(\d{1,2}\)))*")
NAMES = {"type": "grammar", "syntax": "regex", "definition": "(Ann|Bob)\\n?"}
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
FUNCTION = {"name": "switch_light", "description": "Switches.", "parameters": LIGHT}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Add it."}], "max_tokens": 200, "seed": 1}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "custom",
        "custom": {
            "name": "add", "description": "Adds.",
            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": SUM}},
        },
    },
    {"type": "custom", "custom": {"name": "say"}},
    {"type": "function", "function": FUNCTION},
]  # fmt: skip
ADD = {"type": "custom", "custom": {"name": "add"}}


def test_input_follows_its_grammar(server: Any) -> None:
    for seed in range(4):
        found = server.openai.chat.completions.create(
            model="demo", tools=TOOLS, tool_choice=ADD, **{**ASKED, "seed": seed}
        )
        choice = found.choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.type, call.custom.name) == ("tool_calls", "custom", "add")
        assert SUMS.fullmatch(call.custom.input), call.custom.input


def test_the_responses_api(server: Any) -> None:
    tools = [{"type": "custom", "name": "who", "format": NAMES}, {"type": "web_search"}]
    fields = {"model": "demo", "input": "Who?", "tools": tools, "tool_choice": {"type": "custom", "name": "who"}}
    raw = server.lenient.responses.with_raw_response.create(**fields, max_output_tokens=200, temperature=0)
    assert raw.headers["x-rlx-ignored"] == "tools[1]"
    whole = raw.parse()
    (item,) = whole.output
    assert (item.type, item.name) == ("custom_tool_call", "who") and re.fullmatch(NAMES["definition"], item.input)
    assert [tool.type for tool in whole.tools] == ["custom"]
    events = list(server.lenient.responses.create(**fields, max_output_tokens=200, temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds.count("response.custom_tool_call_input.delta") == 1
    done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == item.input == events[-1].response.output[0].input
    said = [
        {"role": "user", "content": "Who?"},
        item.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "She is here."},
    ]
    more = {**fields, "input": said, "tool_choice": "none"}
    assert server.lenient.responses.create(**more, max_output_tokens=4).output[0].type == "message"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server: Any, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "switch_light"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = server.openai.chat.completions.create(model="demo", tools=TOOLS, tool_choice=choice, **ASKED).choices[0]
    calls = found.message.tool_calls or []
    assert all(call.function.name == "switch_light" for call in calls) and (calls or mode == "auto")


def test_functions_of_older_clients(server: Any) -> None:
    fields = {**ASKED, "functions": [FUNCTION], "function_call": {"name": "switch_light"}}
    choice = server.openai.chat.completions.create(model="demo", **fields).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    call = choice.message.function_call
    assert call.name == "switch_light" and set(json.loads(call.arguments)) == {"on"}
    chunks = chunks_of(server, **fields)
    pieces = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert "".join(piece.get("arguments", "") for piece in pieces) == call.arguments
    assert [piece["name"] for piece in pieces if "name" in piece] == ["switch_light"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    said = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "function_call": call.model_dump()},
        {"role": "function", "name": "switch_light", "content": "It is on."},
    ]
    fields = {**fields, "messages": said, "function_call": "none", "max_tokens": 3}
    assert server.openai.chat.completions.create(model="demo", **fields).choices[0].message.function_call is None
    assert "It is on." in server.post("/apply-template", messages=said).json()["prompt"]


def custom(definition: Any, syntax: str = "lark") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"tools": [{"type": "custom", "custom": {"name": "f", "format": form}}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"functions": [FUNCTION], "tools": TOOLS}, "functions", "together with tools"),
        ({"function_call": {"name": "f"}}, "function_call", "no functions"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "expected an object"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].function.name", "the name is"),
        (custom('start: a\na: "x" a |'), "tools[0].custom.format.definition", "refers to itself"),
        (custom("start: ("), "tools[0].custom.format.definition", ""),
        (custom("(", "regex"), "tools[0].custom.format.definition", ""),
        (custom(3), "tools[0].custom.format.definition", "expected a string"),
        (custom("", "ebnf"), "tools[0].custom.format.syntax", "expected lark or regex"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "no", "tools": []}}},
            "tool_choice.allowed_tools.mode",
            "expected auto or required",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice.allowed_tools.tools[0]",
            "there is no tool",
        ),
    ],
)
def test_mistakes_are_named(server: Any, fields: dict[str, Any], param: str, words: str) -> None:
    found = error_of(server, **ASKED, **fields)
    assert found["param"] == param and words in found["message"], found


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (SUM, ["1 + (22)", "3"], ["1+2", "", "333"]),
        ('start: ["a"i | /[b\\/]+/i] "." x?\nx: "\\n" // the end\n', ["A.", "B/b.", ".\n"], ["aa.", "a"]),
        ('start: A B\nA: "a"+\nB: "(" | "*"\n%import common.WS\n%ignore WS\n', ["aa (", "a*\n"], ["a a(", "a"]),
        ('start: "a" ~ 2 | b\n!b: "c" -> d\n  | "e"\n', ["aa", "c", "e"], ["a", "ce"]),
    ],
)
def test_grammars_as_expressions(grammar: str, yes: list[str], no: list[str]) -> None:
    found = re.compile(regex_of(grammar))
    assert all(found.fullmatch(text) for text in yes) and not any(found.fullmatch(text) for text in no), found


class Scripted:
    """A format of calls, and its parser, which finds parts of a script, one a text."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def parser(self, tools: Any, new_id: Any) -> Scripted:
        return self

    def push(self, text: str) -> list[Any]:
        return [self._parts.pop(0)]

    def finish(self) -> list[Any]:
        return self._parts


def test_inputs_come_whole_between_other_parts() -> None:
    def call(*fields: Any, **named: Any) -> AnswerPart:
        return AnswerPart(tool_call=ToolCallDelta(*fields, **named))

    piece = ToolCallDelta
    parts = [
        "Well: ", piece(0, "i", "say", '{"inp'), piece(0, arguments='ut": "a\\n'), piece(0, arguments='b"}'),
        piece(1, "j", "f", "{}"), piece(2, "k", "say", '{"input": 3}'), "Done.", piece(3, "l", "say", "{}"),
    ]  # fmt: skip
    scripted: Any = Scripted(parts)
    found = InputParser(frozenset({"say"}), None, False, scripted, (Tool("say"), Tool("f")))
    read = [each for _ in range(4) for each in found.push("x")] + found.finish()
    assert read == [
        AnswerPart("Well: "), call(0, "i", "say"), call(0, arguments="a\nb"), call(1, "j", "f", "{}"),
        call(2, "k", "say"), call(2, arguments="3"), AnswerPart("Done."), call(3, "l", "say"), call(3),
    ]  # fmt: skip
