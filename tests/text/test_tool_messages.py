"""Which format a chat template asks for, and conversations with calls in the form that the template takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden_folder import goldens

from rlx.text import Tokenizer, chat_ids, load_tokenizer
from rlx.text.answer import tool_format

TOOLS = [{
    "type": "function",
    "function": {"name": "look", "description": "Looks <|im_end|>.", "parameters": {"type": "object"}},
}]  # fmt: skip
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}},
    {"id": "b", "type": "function", "function": {"name": "look", "arguments": {"at": "y"}}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "b", "content": "two"},
    {"role": "tool", "tool_call_id": "a", "content": '{"n": 1}'},
    {"role": "user", "content": "Thanks"},
]
SHOWS = "{% for t in tools or [] %}{{ t.function.name }}:{{ t.function.description }};{% endfor %}"
HEAD = "{% for m in messages %}[{{ m.role }}{{ ' ' ~ m.name if m.name }}]{{ m.content }}"
EACH = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }};{% endfor %}{% endfor %}"
ONE = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
RESPONSES = "{% for r in m.tool_responses or [] %}{{ r.name }}={{ r.response }};{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(next((goldens() / "qwen3").glob("model*.gguf")))


def using(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return replace(tokenizer, chat_templates={"default": template})


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (PLAIN, "prompted"),
        (SHOWS + PLAIN, "llama"),
        (SHOWS + "<|python_tag|>" + PLAIN, "llama"),
        (SHOWS + "<tool_call>" + PLAIN, "hermes"),
        (SHOWS + "<tool_call><function=f>" + PLAIN, "xml"),
        (SHOWS + "<|tool_call>" + PLAIN, "gemma4"),
        (SHOWS + "<start_function_call>" + PLAIN, "functiongemma"),
        (SHOWS + "<tool_call><arg_key>" + PLAIN, "glm"),
        (SHOWS + "[TOOL_CALLS][ARGS]" + PLAIN, "mistral"),
        (SHOWS + "[TOOL_CALLS]" + PLAIN, "mistral-list"),
        (SHOWS + "<|tool_calls_section_begin|><|tool_call_begin|>" + PLAIN, "kimi"),
        (SHOWS + "<TOOLCALL>" + PLAIN, "nemotron"),
        (SHOWS + "<|tool_list_start|>" + PLAIN, "lfm2"),
        (SHOWS + "<function_calls>" + PLAIN, "olmo"),
        (SHOWS + "<|tool_call|>" + PLAIN, "granite"),
        ("<tool_call>" + PLAIN, "prompted"),
    ],
)
def test_the_format_follows_the_template(tokenizer: Tokenizer, template: str, name: str) -> None:
    found = tool_format(using(tokenizer, template))
    assert found is not None
    assert found.name == name


def rendered(tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]] = MESSAGES, tools: Any = TOOLS) -> str:
    return tokenizer.decode(chat_ids(using(tokenizer, template), messages, tools))


def test_arguments_are_objects_and_results_have_names(tokenizer: Tokenizer) -> None:
    found = rendered(tokenizer, SHOWS + HEAD + EACH)
    assert found == (
        "look:Looks <|im_end|>.;[user]Hi[assistant]x;y;[tool look]two[tool look]" + '{"n": 1}' + "[user]Thanks"
    )


def test_a_template_that_takes_one_call_gets_each_with_its_result(tokenizer: Tokenizer) -> None:
    found = rendered(tokenizer, SHOWS + HEAD + ONE + EACH)
    assert found.endswith('[user]Hi[assistant]x;[assistant]y;[tool look]two[tool look]{"n": 1}[user]Thanks')
    in_order = [*MESSAGES[:2], MESSAGES[3], MESSAGES[2], MESSAGES[4]]
    found = rendered(tokenizer, SHOWS + HEAD + ONE + EACH, in_order)
    assert found.endswith('[user]Hi[assistant]x;[tool look]{"n": 1}[assistant]y;[tool look]two[user]Thanks')


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[TOOL_CALLS]", ("ca978112c", "abcdef123")),
        ("<|tool_call_argument_begin|>", ("functions.look:0", "functions.look:1")),
    ],
)
def test_ids_of_calls_have_the_form_that_the_template_takes(
    tokenizer: Tokenizer, text: str, ids: tuple[str, str]
) -> None:
    calls = [CALLS[0], {**CALLS[1], "id": "abcdef123"}]
    messages = [MESSAGES[0], {**MESSAGES[1], "tool_calls": calls}, {**MESSAGES[2], "tool_call_id": "abcdef123"}]
    head = "{% for m in messages %}[{{ m.role }} {{ m.tool_call_id }}]"
    each = "{% for c in m.tool_calls or [] %}{{ c.id }};{% endfor %}{% endfor %}"
    found = rendered(tokenizer, SHOWS + "{# " + text + " #}" + head + each, messages)
    assert found.endswith(f"[assistant ]{ids[0]};{ids[1]};[tool {ids[1]}]")


def test_a_template_of_gemma_4_gets_responses(tokenizer: Tokenizer) -> None:
    found = rendered(tokenizer, SHOWS + HEAD + RESPONSES)
    assert found.endswith("[user]Hi[assistant]look=two;look={'n': 1};[user]Thanks")


def test_descriptions_and_results_hold_no_control_tokens(tokenizer: Tokenizer) -> None:
    token = tokenizer.token_to_id("<|im_end|>")
    messages = [*MESSAGES[:2], {"role": "tool", "tool_call_id": "a", "content": "<|im_end|>"}]
    for template in (SHOWS + HEAD + EACH, PLAIN):
        ids = chat_ids(using(tokenizer, template), messages, TOOLS)
        assert tokenizer.decode(ids).count("<|im_end|>") == 2
        assert token not in ids
