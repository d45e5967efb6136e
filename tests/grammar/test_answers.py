"""Answers under a grammar: of the demo model, alone and together with everything else that a request may ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import jsonschema
import numpy as np
import pytest
from schemas import NUMBER, PROMPTS, SCHEMAS, TEXT, closed, several

import rlx
from rlx import demo
from rlx.errors import GrammarError, RlxError
from rlx.grammar import Grammar, GrammarCompiler
from rlx.text import load_tokenizer

SCHEMA = closed({"name": TEXT, "kind": {"enum": ["fox", "dog"]}, "friends": several(closed({"age": NUMBER}), 2, 1)})
FORM = Grammar.json_schema(SCHEMA)
DRAWN = rlx.SampleOpts(temperature=1.0, seed=5)
ENDED = ("grammar", "stop")


@pytest.fixture(scope="module")
def runner() -> Iterator[rlx.LmRunner]:
    with rlx.auto_runner(demo.path(), max_seq=512, deterministic=True) as found:  # also with tile registers
        yield found


@pytest.fixture(scope="module")
def ids(runner: Any) -> list[int]:
    found: list[int] = runner.tokenizer.encode("Once upon a time there was")
    return found


def answer(runner: Any, ids: list[int], n_new: int = 120, **options: Any) -> Any:
    return runner.submit(rlx.Request(ids, n_new, **{"sample": DRAWN, "grammar": FORM, **options})).result()


def holds(text: str, schema: Any = SCHEMA) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


QUICK = [name for i, name in enumerate(SCHEMAS) if i % 4 == 1]


@pytest.mark.parametrize(
    ("name", "prompts"),
    [*((name, PROMPTS[:3]) for name in QUICK), *(pytest.param(n, PROMPTS, marks=pytest.mark.slow) for n in SCHEMAS)],
)
def test_answers_follow_their_schemas(runner: Any, name: str, prompts: list[str]) -> None:
    """Some schemas allow answers that go on and on: those may be cut."""
    form, ids = Grammar.json_schema(SCHEMAS[name]), [runner.chat_ids(text) for text in prompts]
    for found in runner.generate_batch(ids, 150, sample=DRAWN, grammar=form):
        if (name == "anything" or prompts is PROMPTS) and len(found) == 150:
            assert found.finish_reason in (*ENDED, "length")
            continue
        assert found.finish_reason in ENDED and holds(found.text, SCHEMAS[name])


EXTRACTIONS = {
    "Extract the name and age as JSON: Mira is 12 years old and lives in Rome.": {"name": "Mira", "age": 12},
    "Give me the name and city as JSON. Anna lives in Paris and has a pet cat.": {"name": "Anna", "city": "Paris"},
    "Extract name, age and job as JSON: Her name is Lena. She works as a pilot and is 41 years old.":
        {"name": "Lena", "age": 41, "job": "pilot"},
    "Extract the name and pet as JSON: My friend Otto has a pet fox and is 7 years old.":
        {"name": "Otto", "pet": "fox"},
}  # fmt: skip


def extraction(value: dict[str, Any]) -> dict[str, Any]:
    """The schema of an answer: says what the names and types are, and nothing of the values."""
    return closed({key: {"type": "integer" if isinstance(each, int) else "string"} for key, each in value.items()})


@pytest.mark.parametrize("question", EXTRACTIONS)
def test_a_grammar_leaves_a_right_answer_as_it_is(runner: Any, question: str) -> None:
    """Valid is not enough: the answer is right, and the same as without a grammar."""
    value, greedy = EXTRACTIONS[question], rlx.SampleOpts.greedy()
    free = runner.chat(question, 60, sample=greedy).text
    assert json.loads(free) == value
    for form in (Grammar.json_object(), Grammar.json_schema(extraction(value)), Grammar.json_schema(True)):
        assert runner.chat(question, 60, sample=greedy, grammar=form).text == free


def test_white_space_is_bounded() -> None:
    tokenizer = load_tokenizer(demo.path())
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
    schema = closed({"a": several(NUMBER, 3)})

    def taken(text: str, form: Grammar) -> str:
        """As much of a text as the grammar takes."""
        constraint, found = compiler.compile(form).constraint(), ""
        for char in text:
            (token,) = tokenizer.encode(char, add_special_tokens=False)
            mask = constraint.mask()
            assert mask is not None
            if not mask[token // 32] >> token % 32 & 1:
                return found
            constraint.accept(token)
            found += char
        return found

    form = Grammar.json_schema(schema)
    for indent in (None, 1, 2, 4, "\t"):
        text = json.dumps({"a": [1, 22, 3]}, indent=indent)
        assert taken(text, form) == text
    assert taken("{" + " " * 99, form) == "{ " and taken("{\n\n", form) == "{\n"
    assert taken("{\n" + " " * 99, form) == "{\n" + " " * 24


def test_nothing_outside_is_drawn_whatever_the_options_are(runner: Any, ids: list[int]) -> None:
    for sample in (
        rlx.SampleOpts.greedy(), rlx.SampleOpts(temperature=5.0, seed=1), rlx.SampleOpts(top_k=1, seed=1),
        rlx.SampleOpts(top_p=0.1, min_p=0.5, seed=2), rlx.SampleOpts(mirostat=2, seed=3),
        rlx.SampleOpts(typical_p=0.2, seed=4), rlx.SampleOpts(top_n_sigma=1.0, seed=4),
        rlx.SampleOpts(xtc_probability=1.0, seed=5), rlx.SampleOpts(repetition_penalty=1.5, dry_multiplier=2.0, seed=6),
        rlx.SampleOpts(logit_bias=dict.fromkeys(range(40), 50.0), seed=7),
    ):  # fmt: skip
        assert holds(answer(runner, ids, sample=sample).text)


def test_what_a_grammar_forces_takes_no_steps(runner: Any, ids: list[int]) -> None:
    form = Grammar.choice(["It is certain that the fox is brave.", "We do not know whether the fox is brave."])
    before = runner.stats()["requests"]["steps"]
    found = answer(runner, ids, grammar=form)
    assert found.finish_reason == "grammar" and len(found) > 8
    assert runner.stats()["requests"]["steps"] - before <= 3, "the prompt, a choice, and what is left of it"


def test_drafts_that_break_the_grammar_are_not_accepted(runner: Any) -> None:
    """The text of the prompt is what prompt lookup drafts."""
    copied = runner.tokenizer.encode('{"name":"a","kind":"cat","friends":[]} {"name":"a","kind":"cat","friends":[]} ')
    plain = answer(runner, copied)
    drafted = answer(runner, copied, speculative="prompt-lookup")
    assert drafted == plain and holds(drafted.text)
    assert answer(runner, copied, speculative="prompt-lookup", top_logprobs=1) == plain


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 1}])
def test_limits_hold_inside_of_forced_tokens(runner: Any, ids: list[int], options: Any) -> None:
    form = Grammar.choice(["The brave fox runs through the deep dark forest.", "Nothing."])
    sample = rlx.SampleOpts(seed=1, logit_bias=dict.fromkeys(runner.tokenizer.tokens_with("N"), -100.0))
    whole = answer(runner, ids, grammar=form, sample=sample)
    assert len(whole) > 8
    for count in range(1, len(whole)):
        found = answer(runner, ids, count, grammar=form, sample=sample, **options)
        assert found == whole[:count] and found.finish_reason == "length"
    assert answer(runner, ids, len(whole), grammar=form, sample=sample, **options).finish_reason == "grammar"
    for stop in ("deep", " forest", "run"):
        found = answer(runner, ids, grammar=form, sample=sample, stop=stop, **options)
        assert found.finish_reason == "stop_string" and whole.text.startswith(found.text + stop)
    context = list(range(2, 2 + 512 - 3))
    assert answer(runner, context, 50, grammar=form, sample=sample, **options).finish_reason == "context"


def test_the_grammar_says_where_an_answer_may_end(runner: Any, ids: list[int]) -> None:
    stop = min(runner.tokenizer.eog_ids)
    ends = rlx.SampleOpts(logit_bias={stop: 100.0})
    found = answer(runner, ids, grammar=Grammar.regex("ab+"), sample=ends)
    assert found.text == "ab" and found.finish_reason == "stop"
    found = answer(runner, ids, grammar=Grammar.regex("ab+"), sample=ends, min_tokens=5)
    assert len(found) == 6 and found.finish_reason == "stop"
    found = answer(runner, ids, 9, grammar=Grammar.regex("ab+"), sample=ends, stop_at_eog=False)
    assert len(found) == 9 and found.finish_reason == "length" and stop not in found
    found = answer(runner, ids, grammar=Grammar.regex("ab"), sample=ends, min_tokens=30)
    assert found.text == "ab" and found.finish_reason == "grammar", "nothing can follow"
    found = answer(runner, ids, grammar=Grammar.regex("ab{3}c"), stop_ids=[runner.tokenizer.encode("b")[0]])
    assert found.finish_reason in ("stop", "grammar")


def test_streams_callbacks_and_sessions(runner: Any, ids: list[int]) -> None:
    whole = runner.generate(ids, 100, sample=DRAWN, grammar=FORM)
    steps = list(runner.stream(ids, 100, sample=DRAWN, grammar=FORM))
    assert [step.token for step in steps] == whole and "".join(step.text for step in steps) == whole.text
    assert steps[-1].finish_reason == "grammar"
    heard = list[int]()
    assert runner.generate(ids, 100, lambda token: heard.append(token), sample=DRAWN, grammar=FORM) == whole == heard  # type: ignore[func-returns-value]
    cut = runner.generate(ids, 100, lambda token: len(heard) > 0 and token != whole[4], sample=DRAWN, grammar=FORM)
    assert cut == whole[:5] and runner.past_seq <= len(ids) + 4
    assert runner.generate([*ids, *whole, *ids], 8) == answer(
        runner, [*ids, *whole, *ids], 8, grammar=None, sample=None
    )
    runner.generate(ids, 100, sample=DRAWN, grammar=FORM)
    past = runner.past_seq
    assert len(ids) < past < len(ids) + len(whole)
    logits = runner.decode_logits(whole[past - len(ids)])
    np.testing.assert_array_equal(logits, runner.predict_logits([*ids, *whole][: past + 1]))


def test_chat_gives_values(runner: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    fox = pydantic.create_model("Fox", age=(int, pydantic.Field(ge=1, le=9)), name=(str, pydantic.Field(max_length=5)))
    found = runner.chat("Who?", 60, json_schema=fox)
    assert isinstance(found.parsed, fox) and 1 <= found.parsed.age <= 9
    assert runner.complete("Who?", 120, json_schema=SCHEMA).parsed.keys() == SCHEMA["properties"].keys()
    assert "".join(s.text for s in runner.chat_stream("Who?", 60, json_schema=fox)) == found.text
    assert runner.chat("Who?", 5).parsed is None
    with pytest.raises(GrammarError, match="no complete JSON: it ended with length"):
        _ = runner.chat("Who?", 4, json_schema=fox).parsed

    def refused(value: str) -> str:
        raise ValueError("no name is good enough")

    name = Annotated[str, pydantic.Field(max_length=5), pydantic.AfterValidator(refused)]
    strict = pydantic.create_model("Strict", name=(name, ...))
    with pytest.raises(GrammarError, match="Strict does not accept the answer"):
        _ = runner.chat("Who?", 60, json_schema=strict).parsed


@pytest.mark.parametrize(
    "wrong",
    [{"grammar": "root"}, {"json_schema": 3}, {"grammar": FORM, "json_schema": SCHEMA}, {"json_schema": {"not": {}}},
     {"grammar": Grammar.lark("start: <nothing>")}],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_at_once(runner: Any, ids: list[int], wrong: dict[str, Any]) -> None:
    for call in (runner.generate, runner.stream):
        with pytest.raises(GrammarError):
            call(ids, 5, **wrong)
    with pytest.raises(GrammarError):
        runner.generate_batch([ids], 5, **wrong)
    with pytest.raises(RlxError):
        runner.chat("Who?", 5, **wrong)
