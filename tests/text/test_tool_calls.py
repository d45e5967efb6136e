"""Parsers of tool calls: calls of every format, any split of a text, and texts that are broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_texts import FORMATS, TOOLS, WRITERS, parsed, split

from rlx.errors import ToolError
from rlx.text.tool_calls import ToolCallDelta, checked_choice

EVERY = list(FORMATS)
MARKERS = ("</parameter>", "</arg_value>", '<|"|>', "<escape>", "<tool_call|>", "```")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    [
        "42",
        "true",
        "null",
        "{",
        '"',
        "}",
        "[1, 2]",
        "a, b",
        "\\",
        "\\n",
        "é日本🙂",
        "</tool_call>",
        "<function=x>",
        " x ",
    ]
)
SAFE = TEXTS.filter(lambda text: not any(marker in text for marker in MARKERS) and text.strip("\n") == text)
NUMBERS = st.integers(-(10**9), 10**9)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": SAFE,
        "count": NUMBERS,
        "ratio": st.floats(-1e6, 1e6),
        "sure": st.booleans(),
        "maybe": st.none() | st.sampled_from(["x", "a b"]),
        "any": st.lists(NUMBERS, max_size=2) | st.booleans(),
        "place": st.fixed_dictionaries({}, optional={"name": SAFE, "floor": NUMBERS}),
        "words": st.lists(SAFE, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["look_up", "send-it"]), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)
FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool_", "<function=look_up>", "<function=", "<parameter=text>",
    "<parameter=count>",
    "</parameter>", "</function>", '{"name": "look_up", ', '"arguments": {', '"parameters": ', '"a": 1', "{", "}", "[",
    "]", ",", ":", '"', "\\", "\\u12", "tru", "-", "\n", " ", "text", "<|tool_call>", "<tool_call|>", "call:look_up{",
    "text:", '<|"|>', "<|", "```", "```json\n", "```tool_code\n", "print(look_up(", "text='x'", ")", "<|python_tag|>",
    ";", "<arg_key>text</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>look_up\n", "[TOOL_CALLS]",
    "look_up[ARGS]",
    "[CALL_ID]", "<TOOLCALL>[", "</TOOLCALL>", "<|tool_call|>", "<|tool_call_begin|>functions.", "look_up:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call_start|>[", "look_up(", "count=", "'", "\\'", ")]",
    "<function_calls>", "</function_calls>",
    "é🙂", "<escape>", "<start_function_call>", "<end_function_call>", "null", '{"name": "look_up"}',
])  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@given(calls=CALLS, cuts=CUTS, before=st.sampled_from(["", "I look it up.", "日本 < | {x}"]))
def test_calls_of_every_format_come_back_however_the_text_is_split(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int], before: str
) -> None:
    text = WRITERS[name](calls)
    if name != "llama":  # whose calls are the whole answer
        text = f"{before}\n\n{text}" if before else text
    found = parsed(name, split(text, cuts))
    if before and name != "llama":
        assert found.pop(0) == before
    assert [(call[1], json.loads(call[2])) for call in found] == calls
    assert [call[0] for call in found] == [f"call_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("name", EVERY)
@given(pieces=st.lists(FRAGMENTS, max_size=14), cuts=CUTS)
def test_any_text_in_any_split_gives_the_same_and_arguments_are_json(
    name: str, pieces: list[str], cuts: list[int]
) -> None:
    text = "".join(pieces)
    whole = parsed(name, [text])
    assert parsed(name, split(text, cuts)) == whole
    assert parsed(name, list(text)) == whole
    for part in whole:
        assert isinstance(part, str) or isinstance(json.loads(part[2]), dict)
    if not any(isinstance(part, tuple) for part in whole):
        assert "".join(map(str, whole)) == text


CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", 'A <tool_call>{"name": "new", "arguments": {"a": {"b": "}"}}}</tool_call> B',
     ["A", ("new", {"a": {"b": "}"}}), "B"]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}}\n</tool_call>', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True, "b": "\\d\n",}}</tool_call>',
     [("f", {"a": True, "b": "\\d\n"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d\\ude42 \\ud83d"}}</tool_call>',
     [("f", {"a": "🙂 �"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>']),
    ("hermes", "<tool_call> no", ["<tool_call> no"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "half', [("f", {"a": "half"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": 12', [("f", {"a": [1, {}]})]),
    ("hermes", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("xml", "<function=look_up><parameter=text>42</parameter><parameter=count>42</parameter></function>",
     [("look_up", {"text": "42", "count": 42})]),
    ("xml", "<tool_call><function=look_up><parameter=sure>True</parameter><parameter=any>{'a': None}</parameter>"
     "<parameter=maybe>null</parameter><parameter=count>many</parameter></function></tool_call>",
     [("look_up", {"sure": True, "any": {"a": None}, "maybe": None, "count": "many"})]),
    ("xml", "<tool_call><function=new><parameter=n>1</parameter></function></tool_call>", [("new", {"n": "1"})]),
    ("xml", "<tool_call>\n<function=look_up>\n<parameter=text>\n a\n\n</parameter>\n", [("look_up", {"text": " a\n"})]),
    ("llama", '<|python_tag|>{"name": "look_up", "parameters": {"text": "x"}}', [("look_up", {"text": "x"})]),
    ("llama", '<|python_tag|>look_up.call(text="x")', [("look_up", {"text": "x"})]),
    ("llama", '[look_up(text="x"), send-it()]', ['[look_up(text="x"), send-it()]']),
    ("llama", '[look_up("x", count=2)]', [("look_up", {"text": "x", "count": 2})]),
    ("llama", '{"name": "Mira", "age": 12}', ['{"name": "Mira", "age": 12}']),
    ("llama", 'It is {"name": "look_up", "parameters": {}}', ['It is {"name": "look_up", "parameters": {}}']),
    ("prompted", "So:\n```tool_code\nprint(look_up(text='x'))\n```", ["So:", ("look_up", {"text": "x"})]),
    ("prompted", "```tool_code\nlook_up(text=open('x'))\n```", ["```tool_code\nlook_up(text=open('x'))\n```"]),
    ("prompted", '```json\n{"name": "Mira"}\n```', ['```json\n{"name": "Mira"}\n```']),
    ("gemma4", '<|tool_call>call:look_up{text:42,count:<|"|>7<|"|>,words:[a b,3],place:{name:5,x:[{}]}}<tool_call|>',
     [("look_up", {"text": "42", "count": 7, "words": ["a b", "3"], "place": {"name": "5", "x": [{}]}})]),
    ("gemma4", '<|tool_call>call:look_up{"text":"a, b", sure: true,}', [("look_up", {"text": "a, b", "sure": True})]),
    ("gemma4", '<|tool_call>call:look_up{text:<|"|>ha', [("look_up", {"text": "ha"})]),
    ("gemma4", "<|tool_call>hello", ["<|tool_call>hello"]),
    ("glm", "<tool_call>look_up\n<arg_key>text</arg_key>\n<arg_value>42</arg_value>\n<arg_key>count</arg_key>"
     "<arg_value>42</arg_value></tool_call>", [("look_up", {"text": "42", "count": 42})]),
    ("glm", "<tool_call>new</tool_call> B", [("new", {}), "B"]),
    ("glm", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
    ("glm", "<tool_call> no, not here", ["<tool_call> no, not here"]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{"a": 1}', [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1, "ha', [("f", {"a": [1, "ha"]})]),
    ("mistral", "[TOOL_CALLS] is a token", ["[TOOL_CALLS] is a token"]),
    ("mistral-list", '[TOOL_CALLS] [{"name": "new", "arguments": {"a": "]"}}] B', [("new", {"a": "]"}), "B"]),
    ("mistral-list", "[TOOL_CALLS] hello", ["[TOOL_CALLS] hello"]),
    ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g"}]</TOOLCALL>B', [("f", {}), ("g", {}), "B"]),
    ("granite", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    ("kimi", '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": 1}', [("f", {"a": 1})]),
    ("lfm2", "A <|tool_call_start|>[new(a='it\\'s', b=[1, {\"c\": None}], d=true)]<|tool_call_end|> B",
     ["A", ("new", {"a": "it's", "b": [1, {"c": None}], "d": True}), "B"]),
    ("lfm2", '<|tool_call_start|>look_up("x", 2)', [("look_up", {"text": "x", "count": 2})]),
    ("lfm2", "<|tool_call_start|>[look_up(text='ha", [("look_up", {"text": "ha"})]),
    ("lfm2", "<|tool_call_start|>[look_up(text=open('x'))]", [("look_up", {}), "text=open('x'))]"]),
    ("lfm2", "<|tool_call_start|>nothing", ["<|tool_call_start|>nothing"]),
    ("olmo", "<function_calls>\nf(a=1)\ng()\n</function_calls>", [("f", {"a": 1}), ("g", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_as_models_also_write_them(name: str, text: str, expected: list[Any]) -> None:
    found = parsed(name, [text])
    assert [part if isinstance(part, str) else (part[1], json.loads(part[2])) for part in found] == expected


def test_arguments_stream_while_the_model_writes_them() -> None:
    parser = FORMATS["hermes"]().parser(TOOLS, lambda: "call_a")
    pieces = [
        '<tool_call>\n{"name": "look_up", "arguments": {',
        '"text": "Par',
        'is", "count": 1',
        "2}}",
        "\n</tool_call>",
    ]
    assert [parser.push(piece) for piece in pieces] == [
        [ToolCallDelta(0, "call_a", "look_up"), ToolCallDelta(0, arguments="{")],
        [ToolCallDelta(0, arguments='"text": "Par')],
        [ToolCallDelta(0, arguments='is"')],
        [ToolCallDelta(0, arguments=', "count": 12}')],
        [],
    ]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        ("sometimes", "found 'sometimes', expected auto, none, required"),
        ({"type": "function", "function": {"name": "nothing"}}, "there is no tool 'nothing'. The tools are look_up"),
        ({"type": "function"}, "expected a function's name"),
        (3, "found 3"),
    ],
)
def test_a_wrong_choice_is_named(choice: Any, what: str) -> None:
    with pytest.raises(ToolError, match=what) as caught:
        checked_choice(choice, TOOLS)
    assert caught.value.where == "tool_choice"
