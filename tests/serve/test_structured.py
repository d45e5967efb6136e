"""Structured output over HTTP: every field that asks for it; `jsonschema` and the official client judge the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from exchanges import PATH, chunks_of, error_of, text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fox", "owl"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
BODY = {"messages": [{"role": "user", "content": "Tell me about a fox."}], "max_tokens": 80, "temperature": 0}


def said(server: Any, **fields: Any) -> str:
    answer = server.post(PATH, **{**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_schemas(server: Any, fields: dict[str, Any]) -> None:
    for sample in ({}, {"temperature": 1.5, "seed": 3}):
        jsonschema.validate(json.loads(said(server, **fields, **sample)), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"regex": "x{5}"}, "x{5}"),
        ({"structured_outputs": {"regex": "[xy]{4}"}}, "[xy]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"grammar": 'root ::= ("ab" | "cd") "!"'}, "(ab|cd)!"),
        ({"guided_grammar": 'start: "ab" | "cd"'}, "ab|cd"),
        ({"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}, "q[0-9]"),
    ],
)
def test_other_forms(server: Any, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, said(server, **fields, temperature=1.5, seed=1))


ASKED = "Extract the name and age as JSON: Mira is 12 years old and lives in Rome."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 60, "temperature": 0}
EVERYWHERE: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    name: (PATH, CHAT | fields, lambda found: found["choices"][0]["message"]["content"])
    for name, fields in {
        "json_object": {"response_format": {"type": "json_object"}},
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
        "llama.cpp": {"json_schema": PERSON},
        "vllm": {"structured_outputs": {"json": PERSON}},
        "vllm, any object": {"structured_outputs": {"json_object": True}},
    }.items()
} | {
    "responses": (
        "/v1/responses",
        {"input": ASKED, "temperature": 0, "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}},
        lambda found: found["output"][0]["content"][0]["text"],
    ),
    "anthropic": (
        "/v1/messages",
        CHAT | {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        lambda found: found["content"][0]["text"],
    ),
    "ollama": (
        "/api/chat",
        {"messages": CHAT["messages"], "stream": False, "format": "json", "options": {"temperature": 0}},
        lambda found: found["message"]["content"],
    ),
    "ollama, a schema": (
        "/api/chat",
        {"messages": CHAT["messages"], "stream": False, "format": PERSON, "options": {"temperature": 0}},
        lambda found: found["message"]["content"],
    ),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_api_gives_the_answer_of_a_free_run(server: Any, name: str) -> None:
    """A form that the model has not learned would make the answer wrong, though valid."""
    path, body, text = EVERYWHERE[name]
    found = server.post(path, model="demo", **body)
    assert found.status_code == 200, found.text
    assert text(found.json()) == said(server, **CHAT) == '{"name": "Mira", "age": 12}'


def test_a_stream_says_the_same(server: Any) -> None:
    body = {**BODY, "response_format": FORMAT, "temperature": 1.2, "seed": 11}
    assert text_of(chunks_of(server, **body)) == said(server, **body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "(?=x)y"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [f"x{i}" for i in range(20_000)]}, "guided_choice"),
        ({"grammar": "root = nothing"}, "grammar"),
        ({"grammar": "root ::= nowhere"}, "grammar"),
        ({"structured_outputs": {"json": {}, "yaml": 1}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_enforced_is_refused(server: Any, fields: dict[str, Any], param: str) -> None:
    assert error_of(server, **{**BODY, **fields})["param"] == param


SET = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": ["x"]}, "uniqueItems": True}},
    "required": ["a"],
}
FORM = {"type": "json_schema", "name": "p", "schema": SET}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, BODY | {"response_format": {"type": "json_schema", "json_schema": FORM}}),
        ("/v1/responses", {"input": ASKED, "text": {"format": FORM}}),
        (
            PATH,
            BODY
            | {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SET}}],
            },
        ),
    ],
)
def test_what_cannot_be_enforced_is_ignored_if_the_request_says_so(
    server: Any, path: str, body: dict[str, Any]
) -> None:
    said = error_of(server, path=path, **body)["message"]
    assert said.endswith('"strict": false.') and "uniqueItems" in said and "lenient" not in said
    loose = json.loads(json.dumps(body).replace('"name"', '"strict": false, "name"'))
    assert server.post(path, **loose).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, BODY | {"guided_json": SET}),
        ("/api/chat", {"model": "demo", "messages": BODY["messages"], "format": SET}),
    ],
)
def test_an_api_without_a_word_for_it_names_none(server: Any, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, **body).text.count('Unimplemented keys: [\\"uniqueItems\\"]. Leave it out."') == 1
