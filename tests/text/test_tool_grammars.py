"""Grammars of tool calls: whatever a model chooses under them is read by the parser, and valid by `jsonschema`."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from golden_folder import goldens
from tool_schemas import SCHEMAS
from tool_texts import FORMATS, joined

from rlx.errors import ToolError
from rlx.grammar import Grammar, GrammarCompiler
from rlx.grammar.answers import calls_grammar
from rlx.text import Tokenizer, load_tokenizer
from rlx.text.tool_calls import Tool, ToolFormat, checked_choice, checked_tools

FAMILIES = {"gemma4": "gemma4-e2b", "llama": "llama"}  # others have no control tokens of their own
CLOSING = frozenset(b'"]}\n<>')
OTHER = {"name": "other", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}


@pytest.fixture(scope="module")
def compilers() -> dict[str, tuple[Tokenizer, GrammarCompiler]]:
    found = {}
    for family in ("qwen3", *FAMILIES.values()):
        tokenizer = load_tokenizer(next((goldens() / family).glob("model*.gguf")))
        found[family] = tokenizer, GrammarCompiler(lambda tokenizer=tokenizer: tokenizer, tokenizer.vocab_size)
    return found


def written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 600, begin: str = ""
) -> str | None:
    """A text that the grammar allows, by chance; None if it has not ended after `most` tokens."""
    random, tokens, stop = np.random.default_rng(seed), list[int](), min(tokenizer.eog_ids)
    constraint = compiler.compile(grammar).constraint(frozenset({stop}))
    for token in tokenizer.encode(begin, False) if begin else ():
        constraint.accept(token)
    pieces = compiler.vocabulary.pieces
    while not constraint.is_over and len(tokens) < most:
        mask = constraint.mask()
        assert mask is not None
        flags = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(flags)
        assert len(allowed)
        if flags[stop] and random.random() < 0.5:
            break
        closing = [token for token in allowed if set(pieces[token]) & CLOSING or token in tokenizer.special_ids]
        token = int(random.choice(closing if closing and random.random() < 0.3 else allowed))
        if token == stop:
            break
        tokens.append(token)
        constraint.accept(token)
    return tokenizer.decode(tokens) if len(tokens) < most else None


def calls_in(text: str, tool_format: ToolFormat, tools: tuple[Tool, ...]) -> list[tuple[str, Any]]:
    parser = tool_format.parser(tools)
    found = joined(parser.push(text) + parser.finish())
    assert all(isinstance(part, tuple) for part in found), text
    return [(part[1], json.loads(part[2])) for part in found]


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_valid(name: str, kind: str, compilers: dict[str, tuple[Tokenizer, GrammarCompiler]]) -> None:
    tokenizer, compiler = compilers[FAMILIES.get(name, "qwen3")]
    tool_format, schema = FORMATS[name](tokenizer), SCHEMAS[kind]
    tools = checked_tools([{"name": "look_up", "parameters": schema}, OTHER])
    choice = checked_choice({"type": "function", "function": {"name": "look_up"}}, tools)
    grammar = calls_grammar(tool_format, tools, choice)
    assert grammar is not None
    ended = 0
    for seed in range(2):
        text = written(compiler, tokenizer, grammar, seed)
        if text is not None:
            ((called, arguments),) = calls_in(text, tool_format, tools)
            assert called == "look_up"
            jsonschema.validate(arguments, schema)
            ended += 1
    assert ended or kind in ("map", "reference"), "no text ended"


TWO = checked_tools([{"name": "one", "parameters": SCHEMAS["bounds"]}, {"name": "two", "parameters": SCHEMAS["words"]}])
Compilers = dict[str, tuple[Tokenizer, GrammarCompiler]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_one_of_any_tool_and_in_parallel_several(name: str, compilers: Compilers) -> None:
    tokenizer, compiler = compilers[FAMILIES.get(name, "qwen3")]
    tool_format, required = FORMATS[name](tokenizer), checked_choice("required", TWO)
    for parallel in (False, True):
        grammar = calls_grammar(tool_format, TWO, required, parallel)
        assert grammar is not None
        found = [
            calls_in(text, tool_format, TWO) for i in range(12) if (text := written(compiler, tokenizer, grammar, i))
        ]
        assert {called for calls in found for called, _ in calls} == {"one", "two"}
        assert (max(map(len, found)) > 1) == (parallel and name not in ("llama", "harmony"))
        for called, arguments in (call for calls in found for call in calls):
            jsonschema.validate(arguments, SCHEMAS["bounds" if called == "one" else "words"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_free_answer_follows_the_grammar_from_the_trigger_on(name: str, compilers: Compilers) -> None:
    tokenizer, compiler = compilers[FAMILIES.get(name, "qwen3")]
    tool_format = FORMATS[name](tokenizer)
    grammar = calls_grammar(tool_format, TWO, parallel=False)
    assert grammar is not None
    assert (grammar.trigger, grammar.repeats) == (tool_format.trigger, False)
    begin = tool_format.trigger + ('one"' if name in ("llama", "prompted") else "")
    text = next(text for i in range(9) if (text := written(compiler, tokenizer, grammar, i, begin=begin)) is not None)
    ((called, arguments),) = calls_in(begin + text, tool_format, TWO)
    jsonschema.validate(arguments, SCHEMAS["bounds" if called == "one" else "words"])


def test_an_answer_is_a_call_or_what_its_own_schema_says(compilers: Compilers) -> None:
    tokenizer, compiler = compilers["qwen3"]
    tool_format, kinds = FORMATS["hermes"](tokenizer), set()
    for form in (
        Grammar.json_schema(SCHEMAS["flag"]),
        Grammar.regex("(yes|no)/?"),
        Grammar.lark('start: "yes" | "no"'),
    ):
        grammar = calls_grammar(tool_format, TWO, text=form)
        assert grammar is not None
        for seed in range(6):
            text = written(compiler, tokenizer, grammar, seed)
            if text is None:
                continue
            kinds.add(text.startswith("<tool_call>"))
            if text.startswith("<tool_call>"):
                assert calls_in(text, tool_format, TWO)
            elif form.kind == "json_schema":
                jsonschema.validate(json.loads(text), SCHEMAS["flag"])
            else:
                assert text.rstrip("/") in ("yes", "no")
    assert kinds == {True, False}


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_enforced_is_an_error_if_it_must_be(name: str, compilers: Compilers) -> None:
    tokenizer, compiler = compilers[FAMILIES.get(name, "qwen3")]
    tool_format = FORMATS[name](tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    odd = checked_tools([{"name": "odd", "parameters": schema}])
    strict = checked_tools([{"name": "odd", "parameters": schema, "strict": True}])
    for tools, choice in ((odd, "required"), (strict, "auto")):
        with pytest.raises(ToolError, match=r"tool odd(?!.*line \d).*uniqueItems"):
            calls_grammar(tool_format, tools, checked_choice(choice, tools))
    loose = checked_tools([{"name": "odd", "parameters": schema, "strict": False}])
    for tools, choice in ((odd, "auto"), (loose, "required"), (loose, "auto")):
        grammar = calls_grammar(tool_format, tools, checked_choice(choice, tools))
        assert grammar is not None
        compiler.compile(grammar)
