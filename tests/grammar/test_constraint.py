"""Constraints: masks and forced tokens of an answer, with tokens drawn at random from the mask."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import jsonschema
import numpy as np
import pytest
from schemas import SCHEMAS

from rlx import demo
from rlx.errors import GrammarError
from rlx.grammar import Constraint, Grammar, GrammarCompiler, after_thinking
from rlx.text import Tokenizer, load_tokenizer
from rlx.text.tokenizer import Spelling, TokenType, Vocabulary

TOKENIZER = load_tokenizer(demo.path())
WIDTH = TOKENIZER.vocab_size + 7  # more logits than tokens
COMPILER = GrammarCompiler(lambda: TOKENIZER, WIDTH)
STOP = min(TOKENIZER.eog_ids)


def allowed(constraint: Constraint, width: int = WIDTH) -> list[int]:
    """The ids that may come next."""
    words = constraint.mask()
    if words is None:
        return list(range(width))
    assert words.dtype == np.int32 and len(words) == -(-width // 32)
    flags = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not flags[width:].any()
    return [int(token) for token in np.flatnonzero(flags)]


def text_of(tokens: Sequence[int], tokenizer: Tokenizer = TOKENIZER) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens if token != STOP).decode("utf-8", "replace")


def draw(constraint: Constraint, seed: int, most: int = 120) -> list[int]:
    """Tokens drawn from the masks, forced ones included, until nothing may follow."""
    random, tokens = np.random.default_rng(seed), list[int]()
    while not constraint.is_over and len(tokens) < most:
        forced = constraint.forced()
        assert not forced or forced[0] in allowed(constraint)
        for token in forced:
            tokens.append(token)
            constraint.accept(token)
        if not forced:
            tokens.append(int(random.choice(allowed(constraint))))
            constraint.accept(tokens[-1])
    return tokens


def spell(constraint: Constraint, text: str) -> None:
    """Accepts the tokens of a text, which must be allowed."""
    for token in TOKENIZER.encode(text, add_special_tokens=False, parse_special=True):
        assert token in allowed(constraint), (text, TOKENIZER.token_bytes(token))
        constraint.accept(token)


@pytest.mark.parametrize("name", [name for i, name in enumerate(SCHEMAS) if i % 3 == 0])
def test_whatever_is_drawn_follows_the_schema(name: str) -> None:
    compiled = COMPILER.compile(Grammar.json_schema(SCHEMAS[name]))
    for seed in range(4):
        constraint = compiled.constraint({STOP})
        text = text_of(draw(constraint, seed))
        if constraint.is_over:
            jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize("expression", ["a{3}b?", "(foo|bar)-[0-9]{2,4}", "[^a]x", "(äö|日本){2}", r"\s{2}x{1,3}"])
def test_whatever_is_drawn_matches_the_expression(expression: str) -> None:
    compiled = COMPILER.compile(Grammar.regex(expression))
    for seed in range(8):
        constraint = compiled.constraint({STOP})
        assert re.fullmatch(expression, text_of(draw(constraint, seed)))


RULES = {
    "schema": (Grammar.json_schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3},
                                   compact=True),
               r"\[[12],[12],[12]\]"),
    "expression": (Grammar.regex(r"a/b\d|[/]x"), r"a/b\d|[/]x"),
    "choice": (Grammar.choice(["yes/no", "\"maybe\""]), r'yes/no|"maybe"'),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_grammar_as_a_part_of_another_one(name: str) -> None:
    grammar, expression = RULES[name]
    compiled = COMPILER.compile(Grammar.lark(f'start: "<" inner ">"\ninner: {grammar.rule}'))
    for seed in range(6):
        assert re.fullmatch(f"<({expression})>", text_of(draw(compiled.constraint(), seed)))
    with pytest.raises(GrammarError, match="cannot be a part"):
        _ = Grammar.gbnf('root ::= "a"').rule


@pytest.mark.parametrize("repeated", ['(("a"*)*)*', '("a"+)?', '("a"?){0,3}', '("a"{2})*'])
def test_a_repetition_of_a_repetition(repeated: str) -> None:
    compiled = COMPILER.compile(Grammar.gbnf(f'root ::= "<" {repeated} ">"'))
    for seed in range(6):
        assert re.fullmatch("<a*>", text_of(draw(compiled.constraint(), seed)))


def test_stop_ids_only_where_the_grammar_is_satisfied() -> None:
    constraint = COMPILER.compile(Grammar.regex("ab+")).constraint({STOP})
    spell(constraint, "a")
    assert STOP not in allowed(constraint) and not constraint.is_over
    with pytest.raises(GrammarError, match="not complete"):
        constraint.accept(STOP)
    constraint = COMPILER.compile(Grammar.regex("ab+")).constraint({STOP})
    spell(constraint, "ab")
    assert STOP in allowed(constraint) and not constraint.is_over
    bare = COMPILER.compile(Grammar.regex("ab+")).constraint()
    spell(bare, "ab")
    assert STOP not in allowed(bare)
    constraint.accept(STOP)
    assert constraint.is_over and constraint.forced() == []


def test_forced_tokens_spell_the_only_continuation() -> None:
    constraint = COMPILER.compile(Grammar.regex("(yes|no), said the brave fox")).constraint()
    assert constraint.forced() == []
    spell(constraint, "no")
    text = text_of(constraint.forced())
    assert text and ", said the brave fox".startswith(text)


def test_a_token_beyond_the_logits_is_not_forced() -> None:
    """A grammar can name the id behind the last logit, which stands for the end of an answer there."""
    constraint = COMPILER.compile(Grammar.lark(f'start: "a" <[{WIDTH}]> "b"')).constraint()
    assert text_of(constraint.forced()) == "a"
    spell(constraint, "a")
    assert constraint.forced() == []
    with pytest.raises(GrammarError, match="no token of the model continues"):
        constraint.mask()


def test_thinking_comes_before() -> None:
    grammar = Grammar.choice(["yes", "no"])
    constraint = COMPILER.compile(grammar.after("</think>")).constraint({STOP})
    assert STOP not in allowed(constraint), "while it thinks, it does not end"
    spell(constraint, "yes or no? yes")
    for token in TOKENIZER.encode("</think>", add_special_tokens=False):
        constraint.accept(token)
    assert constraint.forced() == [] and not constraint.is_over
    spell(constraint, "\n\n")
    spell(constraint, "\n")
    assert {text_of([token])[0] for token in allowed(constraint)} == {"y", "n"}
    spell(constraint, "no")
    assert constraint.is_over


def test_thinking_is_optional_where_the_prompt_has_not_begun_it() -> None:
    compiled = COMPILER.compile(Grammar.choice(["<yes>", "no"]).after("</think>", "<think>"))
    for said in ("<yes>", "no", "<think>no idea</think>no", "<think></think>\n<yes>"):
        constraint = compiled.constraint({STOP})
        for token in TOKENIZER.encode(said, add_special_tokens=False):
            constraint.accept(token)
        assert constraint.is_over, said
    constraint = compiled.constraint({STOP})
    assert {text_of([token])[0] for token in allowed(constraint)} == {"<", "n"}
    with pytest.raises(GrammarError):
        constraint.accept(TOKENIZER.encode("maybe")[0])


def test_a_token_cannot_reach_from_the_thinking_into_the_answer() -> None:
    """Otherwise the grammar would not see a part of the answer."""
    pieces = ["a", "b", "</t", ">", ">b", ">\n", "</t>b", "</t>", "x</t>b", "\n", "END"]
    vocabulary = Vocabulary(pieces, bytes([TokenType.NORMAL] * 10 + [TokenType.CONTROL]), Spelling.SENTENCEPIECE)
    tokenizer = Tokenizer(vocabulary=vocabulary, encode_parts=lambda text, special: [], bos_id=None, eos_id=None)
    compiler = GrammarCompiler(lambda: tokenizer, len(pieces))

    def shown(constraint: Constraint) -> set[str]:
        return {pieces[token] for token in allowed(constraint, len(pieces))}

    thinking = compiler.compile(Grammar.regex("a").after("</t>")).constraint({10})
    assert shown(thinking) == {"a", "b", "</t", ">", ">b", ">\n", "</t>", "\n"}
    thinking.accept(2)
    assert shown(thinking) == {"a", "b", "</t", ">", ">\n", "</t>", "\n"}
    thinking.accept(5)
    assert shown(thinking) == {"a", "\n"}
    lazy = compiler.compile(Grammar.regex("a").lazy("</t>")).constraint({10})
    lazy.accept(2)
    assert shown(lazy) == {"a", "b", "</t", ">", "</t>", "\n", "END"}
    lazy.accept(3)
    assert shown(lazy) == {"a"}


def test_a_lazy_grammar_begins_at_its_trigger_and_may_begin_again() -> None:
    grammar = Grammar.regex("[0-9]{2}!")
    constraint = COMPILER.compile(grammar.lazy("costs")).constraint({STOP})
    for _ in range(2):
        assert STOP in allowed(constraint)
        spell(constraint, "The house ")
        spell(constraint, "costs")
        assert {text_of([token])[0] for token in allowed(constraint)} <= set("0123456789")
        spell(constraint, "17!")
        assert not constraint.is_over
    once = COMPILER.compile(grammar.lazy("costs", repeats=False)).constraint({STOP})
    spell(once, "It costs")
    spell(once, "23!")
    assert once.is_over


@pytest.mark.parametrize(("tail", "begin", "end"), [("", "<think>", "</think>"), ("<think>\n", None, "</think>")])
def test_the_prompt_says_whether_the_answer_begins_with_thinking(tail: str, begin: str | None, end: str) -> None:
    from dataclasses import replace

    thinker = replace(TOKENIZER, chat_templates={"default": "{{ '<think>' }}{{ '</think>' }}"})
    grammar = Grammar.json_object()
    prompt = thinker.encode("assistant\n" + tail)
    assert after_thinking(grammar, thinker, prompt) == grammar.after(end, begin)
    assert after_thinking(grammar, thinker, thinker.encode("<think>\n\n</think>\n\n")) == grammar
    assert after_thinking(grammar, TOKENIZER, prompt) == grammar


HARD: list[Callable[[], Grammar]] = [
    lambda: Grammar.regex("(((a{10}){10}){10}){10}b"),
    lambda: Grammar.regex("(.*a){20}.*b.{20}"),
    lambda: Grammar.lark('start: start "a" | start start | "a"'),
    lambda: Grammar.lark('start: x{100000}\nx: "a" | "b" x'),
    lambda: Grammar.json_schema({"type": "string", "maxLength": 10**9}),
    lambda: Grammar.json_schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
    lambda: Grammar.json_schema({"$ref": "#"}),
    lambda: Grammar.json_schema({"anyOf": [{"type": "string", "pattern": f".*{i}.{{{i}}}x"} for i in range(40)]}),
]


@pytest.mark.parametrize("make", HARD)
def test_a_grammar_that_explodes_is_an_error_or_bounded(make: Callable[[], Grammar]) -> None:
    """It ends: with tokens, or with an error that says the reason. Nothing hangs, nothing is drawn outside of it."""
    try:
        draw(COMPILER.compile(make()).constraint({STOP}), 1, 60)
    except GrammarError as error:
        assert error.what
