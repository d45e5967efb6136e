"""Hostile grammars: each is an error of one request, and neither ends nor stalls the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx import demo
from rlx.errors import GrammarError
from rlx.grammar import Grammar, GrammarCompiler, trial
from rlx.text import load_tokenizer
from rlx.text.confined import NOT_STARTED, ConfinedError

pytestmark = pytest.mark.usefixtures("small_budget")

TOKENIZER = load_tokenizer(demo.path())
COMPILER = GrammarCompiler(lambda: TOKENIZER, TOKENIZER.vocab_size)
BUDGET = "CPU time|memory|nested too deep|too large|Unable to determine"


def chain(names: str, count: int) -> str:
    rules = [f"{names}{i}: {names}{i + 1}" for i in range(count)]
    return "\n".join([f"start: {names}0", *rules, f'{names}{count}: "a"'])


def references(count: int, wrap: Callable[[Any], Any] = lambda each: each) -> dict[str, Any]:
    inner = {f"r{i}": wrap({"$ref": f"#/$defs/r{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": {**inner, f"r{count}": {"type": "integer"}}}


def either(each: Any) -> Any:
    return {"anyOf": [each, {"type": "null"}]}


PATTERNS = [f".*x{i}.*" for i in range(30)]
HOSTILE: dict[str, tuple[Callable[[], Grammar], str]] = {
    "a chain of rules": (lambda: Grammar.lark(chain("r", 2_700)), BUDGET),
    "a chain of references": (lambda: Grammar.json_schema(references(3_000)), BUDGET),
    "a chain of choices": (lambda: Grammar.json_schema(references(3_000, either)), BUDGET),
    "references inside of a grammar": (
        lambda: Grammar.lark("start: %json " + json.dumps(references(3_000))), BUDGET,
    ),
    "an intersection of patterns": (
        lambda: Grammar.json_schema({"allOf": [{"type": "string", "pattern": each} for each in PATTERNS]}), BUDGET,
    ),
    "an intersection of terminals": (
        lambda: Grammar.lark("start: T\nT: " + " & ".join(f"/{each}/" for each in PATTERNS)), BUDGET,
    ),
    "repetitions of repetitions": (lambda: Grammar.regex("((a{1000}){1000}){1000}"), BUDGET),
    "a costly expression that comes late": (
        lambda: Grammar.json_schema({"properties": {"a": {"type": "string"}, "b": {
            "patternProperties": {"((z{1000}){1000}){1000}": {"type": "string"}}}}}), BUDGET,
    ),
    "a costly expression in a grammar": (
        lambda: Grammar.lark('start: /[^x]*/ "x" b\nb: /((y{1000}){1000}){1000}/'), BUDGET,
    ),
    "a costly expression of a tool": (  # deeper than the others: a quick processor has these in a second
        lambda: Grammar.lark(
            'start: /[^x]*/ %json {"type": "string", "pattern": "(((w{1000}){1000}){1000}){1000}"}'
        ), BUDGET,
    ),
    "many choices": (lambda: Grammar.choice([f"text {i}" for i in range(1_000_000)]), "10000 are allowed"),
    "long choices": (lambda: Grammar.choice(["x" * 1000] * 1_000), "262144 are allowed"),
    "brackets": (lambda: Grammar.gbnf("root ::= " + "(" * 20_000), "no GBNF grammar"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_it_takes_is_bounded(name: str) -> None:
    make, message = HOSTILE[name]
    with pytest.raises(GrammarError, match=message):
        make()
    assert Grammar.regex(name.replace(" ", "_")).kind == "regex", "the next grammar is none the wiser"


@pytest.mark.parametrize("rules", [
    "a: b\nb: a", "a: b | a\nb: a b", 'a: "x"? a?', "a: A\nA: /x/ & ~/x/",
])  # fmt: skip
def test_cycles_end(rules: str) -> None:
    """The package knows of some only that they allow nothing."""
    with pytest.raises(GrammarError):
        constraint = COMPILER.compile(Grammar.lark(f'start: a "!"\n{rules}')).constraint()
        while not constraint.is_over:
            allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))  # type: ignore[union-attr]
            constraint.accept(int(allowed[-1]))
        raise GrammarError("the answer has ended")


def test_without_a_process_a_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(request: object) -> None:
        raise ConfinedError("no process can be started for it", NOT_STARTED)

    monkeypatch.setattr(trial._CHILD, "call", call)
    with pytest.raises(GrammarError, match="it cannot be checked: no process can be started"):
        Grammar.regex("never tried")
    monkeypatch.undo()
    Grammar.regex("never tried")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Grammar.regex("ab[c"), "regex: character 2: unclosed character class"),
    (lambda: Grammar.regex("a\nb("), "regex: character 3: unclosed group"),
    (lambda: Grammar.regex("a^b"), "regex: anchors and word boundaries are not supported"),
    (lambda: Grammar.json_schema({"properties": {"a": {"pattern": "x(y", "type": "string"}}}),
     "json_schema: properties.a.pattern: character 1: unclosed group"),
    (lambda: Grammar.lark("start: a\na: /[/"), "grammar: line 2, column 4: the expression '[': character 0: unclosed"),
    (lambda: Grammar.lark("start: foo"), 'grammar: line 1, column 8: unknown name: "foo"'),
    (lambda: Grammar.gbnf("root ::= foo"), "grammar: it is no GBNF grammar: Rule 'foo' not found"),
])  # fmt: skip
def test_errors_speak_of_the_text_that_was_given(make: Callable[[], Grammar], message: str) -> None:
    with pytest.raises(GrammarError) as error:
        make()
    assert str(error.value).startswith(message)
    assert "start:" not in str(error.value) and "|" not in str(error.value) and "(in regex)" not in str(error.value)
