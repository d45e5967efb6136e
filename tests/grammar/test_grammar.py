"""Grammars: what is accepted, what is refused and why, and that nothing takes long."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
from schemas import SCHEMAS

import rlx
from rlx.errors import GrammarError
from rlx.grammar import Grammar

DEEP: Any = {"type": "integer"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
WIDE: Any = {"allOf": [{"anyOf": [{"properties": {f"{i} {j}": True}} for j in range(4)]} for i in range(12)]}


def test_equal_grammars_are_equal() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": True}}
    one, other = (
        Grammar.json_schema(schema),
        Grammar.json_schema('{"type": "object", "properties": {"b": {"type":"integer"}, "a": true}}'),
    )
    assert one == other and hash(one) == hash(other) and len({one, other, one.after("</think>"), one.lazy("x")}) == 3
    assert Grammar.json_schema(schema, lenient=True) != one


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_many_kinds_compile(name: str) -> None:
    assert Grammar.json_schema(SCHEMAS[name]).warnings == ()


REFUSED = [
    (lambda: Grammar.json_schema({"type": "hiccup"}), "json_schema: Invalid type: hiccup"),
    (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), '["uniqueItems"]. Leave it out, or'),
    (lambda: Grammar.json_schema({"not": {}}), "Unimplemented keys"),
    (lambda: Grammar.json_schema({"type": "string", "format": "word"}), "Unknown format: word. Leave it out"),
    (lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (lambda: Grammar.json_schema({"$ref": "http://example.com/schema"}), "http://example.com/schema"),
    (lambda: Grammar.json_schema({"$ref": "#/nothing"}), "/nothing"),
    (lambda: Grammar.json_schema({"oneOf": [{"type": "object"}, {"type": "object"}]}),
     "more than one of its schemas may match. Use anyOf"),
    (lambda: Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
    (lambda: Grammar.json_schema("{"), "it is no JSON"),
    (lambda: Grammar.json_schema("[1]"), "expected a JSON schema, found a list"),
    (lambda: Grammar.json_schema(False), "allows no value"),
    (lambda: Grammar.json_schema({"enum": [{1, 2}]}), "cannot be written as JSON"),
    (lambda: Grammar.json_schema(DEEP), "recursion limit"),
    (lambda: Grammar.json_schema(WIDE), "too large. Make it smaller"),
    (lambda: Grammar.json_schema({"enum": [f"value {i}" for i in range(40_000)]}), "262144 are allowed"),
    (lambda: Grammar.regex("[a-z"), "unclosed character class"),
    (lambda: Grammar.regex(""), "expected a text that is not empty"),
    (lambda: Grammar.regex(b"a"), "found b'a'"),
    (lambda: Grammar.regex("\ud800"), "character 0 is half a surrogate pair"),
    (lambda: Grammar.choice([]), "expected a list of texts, found []"),
    (lambda: Grammar.choice("yes"), "found 'yes'"),
    (lambda: Grammar.choice(["a", ""]), "choice[1]"),
    (lambda: Grammar.lark("start: foo"), 'unknown name: "foo"'),
    (lambda: Grammar.lark("start " * 1000), "Expected token"),
    (lambda: Grammar.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    (lambda: Grammar.gbnf("root ::= foo"), "Rule 'foo' not found"),
    (lambda: Grammar.gbnf('root ::= "abc'), "it is no GBNF grammar"),
    (lambda: Grammar.gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "it is no GBNF grammar"),
    (lambda: Grammar.gbnf("".join(f"r{i} ::= r{i + 1}\n" for i in range(2000))), "more than 1000 rules"),
    (lambda: Grammar.json_object().after(""), "after: expected a text"),
    (lambda: Grammar.json_object().lazy(""), "lazy: expected a text"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_used_is_refused_with_the_reason(make: Any, message: str) -> None:
    with pytest.raises(GrammarError) as error:
        make()
    assert message in str(error.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(GrammarError, match=r"pip install 'rlx\[structured\]'"):
        rlx.Grammar.json_object()
