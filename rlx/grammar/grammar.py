"""The form that the text of an answer must have: a JSON schema, a regular expression, a choice or a grammar.

Grammar stage. A `Grammar` knows no model; `compiler.py` makes it ready for a vocabulary. `parsed` gives the value of an
answer; it imports no pydantic, because a class of pydantic models reads the text itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from rlx.errors import GrammarError
from rlx.grammar.package import grammar_error, llguidance
from rlx.grammar.trial import Trial, tried
from rlx.text.tool_calls.lark import JSON_SPACE, closed, escaped

Kind = Literal["json_schema", "regex", "lark"]

MOST_CHARACTERS = 1 << 18  # of a grammar: the time to compile a schema grows with the square of its properties
MOST_RULES = 1_000  # of a GBNF grammar: the time to translate it grows with their square
MOST_CHOICES = 10_000


@dataclass(frozen=True)
class Grammar:
    """The form that the text of an answer must have. Make one with a method of the class.

        grammar = Grammar.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}})
        print(runner.chat("How old is Bob, who was born in 1990, in 2020?", grammar=grammar).text)

    Equal grammars are equal and have equal hashes.

    Attributes:
        kind: the language of `text`.
        text: a JSON schema, a regular expression, or a grammar in Lark's syntax.
        name: what the grammar is called in messages.
        options: options of JSON schemas, as (name, value).
        thinking_end: text after which it begins, if the model thinks before it answers.
        thinking_begin: text that begins such thinking; None if the answer begins inside it.
        trigger: text after which it begins, in free text; None for an answer that follows it from the beginning.
        repeats: with `trigger`: whether free text may follow it, and the trigger again.
        translated: `text` was made from another form, so that places in it say nothing to a user.
    """

    kind: Kind
    text: str
    name: str = "grammar"
    options: tuple[tuple[str, bool | str], ...] = ()
    thinking_end: str | None = None
    thinking_begin: str | None = None
    trigger: str | None = None
    repeats: bool = True
    translated: bool = False

    # ---------------------------------------------------------------------------------------------- kinds

    @classmethod
    def json_object(cls, *, compact: bool = False) -> Grammar:
        """Any JSON object.

        Args:
            compact: as for `json_schema`.
        """
        return cls.json_schema({"type": "object"}, compact=compact)

    @classmethod
    def json_schema(cls, schema: Any, *, lenient: bool = False, compact: bool = False) -> Grammar:
        """JSON that a schema (JSON Schema, 2020-12 and before) allows.

        Properties come in the order in which the schema has them.

        Args:
            schema: a mapping, its JSON text, True for any JSON value, or a class of pydantic models, whose fields are
                then all properties that there are (unless it says `extra="allow"`).
            lenient: ignore keywords and formats that cannot be enforced, such as `uniqueItems`, and take `oneOf` as
                `anyOf` where several schemas may match; `warnings` names what is ignored. Otherwise it is an error.
            compact: no white space between the values. It makes shorter answers, but worse ones: models have learned to
                write some. Without it there may be blanks or a line break with an indentation, of a bounded length.

        Raises:
            GrammarError: it is no JSON schema, too large, or has a keyword that cannot be enforced.
        """
        text = schema_text(schema)
        space = ("whitespace_flexible", False) if compact else ("whitespace_pattern", JSON_SPACE)
        options = (("lenient", bool(lenient)), ("coerce_one_of", bool(lenient)), space)
        return cls("json_schema", text, "json_schema", options)._checked()

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Text that matches a regular expression from its beginning to its end.

        The syntax is that of Rust's crate `regex`: Perl's without look-around and back-references.

        Raises:
            GrammarError: it is no such expression.
        """
        return cls("regex", _checked_text(expression, "regex"), "regex")._checked()

    @classmethod
    def choice(cls, texts: Any) -> Grammar:
        """One of several texts, which are in a list or tuple.

        Raises:
            GrammarError: there is none, there are too many, or one is empty or no string.
        """
        if not isinstance(texts, list | tuple) or not texts:
            found = repr(texts) if len(repr(texts)) < 80 else f"a {type(texts).__name__}"
            raise GrammarError(f"expected a list of texts, found {found}", where="choice", hint='give ["yes", "no"]')
        if len(texts) > MOST_CHOICES:
            what = f"there are {len(texts)} texts, and {MOST_CHOICES} are allowed"
            raise GrammarError(what, where="choice", hint="give fewer, or a regular expression")
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise GrammarError(f"expected a text that is not empty, found {text!r}", where=f"choice[{i}]")
        expression = _checked_text("|".join(map(escaped, texts)), "choice")
        return cls("regex", expression, "choice", translated=True)._checked()

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in Lark's syntax, as llguidance extends it; it begins with the rule `start`.

        `%json {...}` is a JSON schema, `<|name|>` a control token of the model.

        Raises:
            GrammarError: it is no such grammar, or too large.
        """
        return cls("lark", _checked_text(text, "grammar"))._checked()

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """A context-free grammar in the syntax of llama.cpp (GBNF); it begins with the rule `root`.

        Raises:
            GrammarError: it is no such grammar, or too large.
        """
        _checked_text(text, "grammar")
        if text.count("::=") > MOST_RULES:
            hint = "use fewer, longer rules, or Lark's syntax"
            raise GrammarError(f"it has more than {MOST_RULES} rules", where="grammar", hint=hint)
        found = tried("gbnf", text)
        if found.error:
            hint = found.hint or "the syntax is that of llama.cpp's grammars; Grammar.lark takes Lark's"
            raise GrammarError(f"it is no GBNF grammar: {found.error}", where="grammar", hint=hint)
        return generated(found.text)

    # ---------------------------------------------------------------------------------------------- where it begins

    def after(self, end: str, begin: str | None = None) -> Grammar:
        """The same, beginning after a text such as `</think>`, before which the answer is free.

        White space may stand between the two.

        Args:
            begin: the text that begins the free part; without it the answer begins at once. None: the answer begins in
                the free part.
        """
        return replace(self, thinking_end=_checked_text(end, "after"), thinking_begin=begin)

    def lazy(self, trigger: str, *, repeats: bool = True) -> Grammar:
        """Free text, in which the grammar describes what follows each `trigger`: tool calls, for example.

        Args:
            repeats: whether free text, and the trigger again, may follow. If not, the answer ends with the first one.
        """
        return replace(self, trigger=_checked_text(trigger, "lazy"), repeats=repeats)

    # ---------------------------------------------------------------------------------------------- for the compiler

    @cached_property
    def source(self) -> str:
        """The grammar in the form that llguidance reads."""
        matcher = llguidance().LLMatcher
        if self.kind == "json_schema":
            found: str = matcher.grammar_from_json_schema(self.text, overrides=dict(self.options))
        elif self.kind == "regex":
            found = matcher.grammar_from_regex(self.text)
        else:
            found = matcher.grammar_from_lark(self.text)
        return found

    @property
    def rule(self) -> str:
        """The right side of a rule in Lark's syntax that stands for it, for grammars that contain it.

        Raises:
            GrammarError: it is a grammar of rules itself.
        """
        if self.kind == "json_schema":
            schema = json.loads(self.text)
            own = schema.get("x-guidance", {})
            return "%json " + json.dumps({**schema, "x-guidance": {**own, **dict(self.options)}})
        if self.kind == "regex":
            return f"/{llguidance().regex_to_lark(self.text, '')}/"
        raise GrammarError("a grammar cannot be a part of another one", where=self.name, hint="use a JSON schema")

    @property
    def warnings(self) -> tuple[str, ...]:
        """The keywords that are not enforced: ignored ones of a JSON schema."""
        return self._trial.warnings

    @property
    def seconds(self) -> float:
        """CPU time that it takes to compile."""
        return self._trial.seconds

    @property
    def written(self) -> str:
        """The text as the user gave it; "" if it was translated."""
        return "" if self.translated else self.text

    @cached_property
    def _trial(self) -> Trial:
        return tried(self.kind, self.text, self.options)

    def _checked(self) -> Grammar:
        found = self._trial
        if found.error:
            raise grammar_error(found.error, self.name, self.kind, self.written, found.hint)
        return self


def generated(text: str) -> Grammar:
    """A grammar in Lark's syntax that rlx wrote itself, so that messages name no places in it.

    Raises:
        GrammarError: llguidance cannot compile it.
    """
    return Grammar("lark", _checked_text(text, "grammar"), translated=True)._checked()


def chosen_grammar(grammar: Any, json_schema: Any) -> Grammar | None:
    """The grammar that a call's arguments name; None if they name none.

    Raises:
        GrammarError: both are given, or one cannot be used.
    """
    if json_schema is not None:
        if grammar is not None:
            raise GrammarError("grammar and json_schema are both given", where="grammar", hint="give one of them")
        return Grammar.json_schema(json_schema)
    return None if grammar is None else checked(grammar)


def checked(grammar: Any) -> Grammar:
    """`grammar`; `GrammarError` if it is something else."""
    if isinstance(grammar, Grammar):
        return grammar
    hint = "make one with Grammar.json_schema, regex, choice, lark or gbnf"
    raise GrammarError(f"expected a Grammar, found a {type(grammar).__name__}", where="grammar", hint=hint)


def schema_text(schema: Any) -> str:
    """The JSON text of a schema, see `Grammar.json_schema`; `GrammarError` if it is none."""
    where = "json_schema"
    if isinstance(schema, str):
        _checked_text(schema, where)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"it is no JSON: {error}", where=where) from None
    elif is_pydantic(schema):
        try:
            schema = closed(schema.model_json_schema())
        except Exception as error:  # pydantic's own classes: a type without a schema
            raise GrammarError(f"{schema.__name__} has no JSON schema: {error}", where=where) from error
    if not isinstance(schema, Mapping | bool):
        hint = "give a dict, a text of JSON or a class of pydantic models"
        raise GrammarError(f"expected a JSON schema, found a {type(schema).__name__}", where=where, hint=hint)
    try:
        text = json.dumps(dict(schema) if isinstance(schema, Mapping) else {}, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"it cannot be written as JSON: {error}", where=where) from None
    if schema is False:
        raise GrammarError("the schema false allows no value", where=where)
    return _checked_text(text, where)


def is_pydantic(value: Any) -> bool:
    """Whether it is a class of pydantic models. Does not import pydantic."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


_HALF = re.compile("[\ud800-\udfff]")


def _checked_text(text: Any, where: str) -> str:
    """`text`; `GrammarError` unless it is a string that is neither empty nor too long."""
    if not isinstance(text, str) or not text:
        raise GrammarError(f"expected a text that is not empty, found {text!r}", where=where)
    if len(text) > MOST_CHARACTERS:
        what = f"it has {len(text)} characters, and {MOST_CHARACTERS} are allowed"
        raise GrammarError(what, where=where, hint="make it smaller")
    if half := _HALF.search(text):
        raise GrammarError(f"character {half.start()} is half a surrogate pair", where=where)
    return text


def parsed(text: str, schema: Any, reason: str | None) -> Any:
    """The value of a text of JSON: an instance of `schema` if this is a class of pydantic models.

    Args:
        reason: why the text ended, for the message.

    Raises:
        GrammarError: it is no JSON, because it was cut; or the class does not accept the value.
    """
    try:
        value = json.loads(text)
    except ValueError:
        what = f"the answer is no complete JSON: it ended with {reason or 'an error'} after {len(text)} characters"
        raise GrammarError(what, where="parsed", hint="allow more tokens, or use no stop strings") from None
    if not is_pydantic(schema):
        return value
    try:
        return schema.model_validate_json(text)
    except ValueError as error:  # of pydantic: what its class asks for beyond the schema
        raise GrammarError(f"{schema.__name__} does not accept the answer: {error}", where="parsed") from error
