"""From the fields of a body to what the engine takes: sampling options, what ends an answer, grammars, tools.

Server stage, under the APIs. What cannot be compiled is an error: no answer comes without the form that was asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from rlx.arguments import as_float
from rlx.errors import GrammarError, SamplingError, ToolError
from rlx.grammar import Grammar
from rlx.grammar.package import LENIENT
from rlx.sampling import SampleOpts
from rlx.sampling.options import meant
from rlx.serve.errors import ApiError, invalid
from rlx.serve.http import MAX_BIAS_TEXT, MAX_BIAS_TEXTS, Body, shown
from rlx.text.tool_calls import checked_tools

if TYPE_CHECKING:
    from rlx.serve.openai.bodies import CommonFields
    from rlx.text.tokenizer import Tokenizer

#: Options that llama-server and Ollama call otherwise.
RENAMED = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "repetition_window"}
_SAMPLING = [*(each.name for each in fields(SampleOpts) if each.name != "logit_bias"), *RENAMED]


def sampling_changes(body: Body) -> dict[str, Any]:
    """The sampling options that a body has, by their names here."""
    found: dict[str, Any] = {}
    for name in _SAMPLING:
        if (value := getattr(body, name, None)) is not None:
            own = RENAMED.get(name, name)
            found[own] = meant(own, value)
    if found.get("seed") is not None:
        found["seed"] %= 2**64
    return found


def changed_sample(
    default: SampleOpts, changes: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> SampleOpts:
    """Sampling options with some changed.

    Args:
        names: what the request calls an option, where it has another name.

    Raises:
        ApiError: a value is out of its range.
    """
    try:
        return replace(default, **changes)
    except SamplingError as error:
        name = error.what.split()[0]
        given = (names or {}).get(name, name)
        raise invalid(given, error.what.replace(name, given, 1), error.hint) from error


def check_tool(function: Mapping[str, Any], where: str, schema: str) -> None:
    """Checks a function in the form of chat.

    Args:
        where: its place in the request.
        schema: what the request calls its parameters.

    Raises:
        ApiError: it has no usable name, or its parameters are no schema of an object.
    """
    try:
        checked_tools([function], where)
    except ToolError as error:
        field = f"{where}{str(error.where).partition('.function')[2]}".replace(".parameters", f".{schema}")
        raise invalid(field, error.what, error.hint) from error


def schema_grammar(schema: Any, field: str, *, lenient: bool | None = None) -> Grammar:
    """The grammar of a JSON schema.

    Args:
        field: what it is called in the request.
        lenient: as for `Grammar.json_schema`; None where a request has no word for it.

    Raises:
        ApiError: it is no schema, or has a keyword that cannot be enforced.
    """
    if not isinstance(schema, dict | bool | str):
        raise invalid(field, f"expected a JSON schema, found {shown(schema)}", "give an object", code="invalid_grammar")
    try:
        return Grammar.json_schema(schema, lenient=bool(lenient))
    except GrammarError as error:
        raise _grammar_error(
            field, error, "" if lenient is None else ', or enforce the rest: "strict": false'
        ) from error


def _grammar_error(field: str, error: GrammarError, lenient: str = "") -> ApiError:
    """The 400 of a grammar.

    Args:
        lenient: how a request says that what cannot be enforced is ignored.
    """
    return invalid(field, error.what, error.hint and error.hint.replace(LENIENT, lenient), code="invalid_grammar")


def form_grammar(
    form: Mapping[str, Any] | None, field: str, kinds: Sequence[str] = ("text", "json_object", "json_schema")
) -> Callable[[], Grammar] | None:
    """The maker of the grammar of a form such as `{"type": "json_schema", "schema": {...}}`; None for free text.

    Args:
        field: what the form is called in the request.
        kinds: the types that the API has.

    Raises:
        ApiError: the form is malformed.
    """
    if form is None:
        return None
    if (kind := form.get("type")) not in kinds:
        expected = " or ".join(", ".join(kinds).rsplit(", ", 1))
        raise invalid(f"{field}.type", f"expected {expected}, found {shown(kind)}")
    if kind != "json_schema":
        return Grammar.json_object if kind == "json_object" else None
    if "schema" not in form:
        raise invalid(f"{field}.schema", "it is required")
    return partial(schema_grammar, form["schema"], f"{field}.schema", lenient=form.get("strict") is False)


def sample_opts(body: CommonFields, default: SampleOpts, tokenizer: Tokenizer, vocab_size: int) -> SampleOpts:
    """The sampling options of a body.

    Args:
        default: what fields that are missing stand for.
        vocab_size: number of logits.

    Raises:
        ApiError: a value is out of its range.
    """
    changes = sampling_changes(body)
    if body.repetition_penalty is not None and body.repeat_penalty is None:
        changes.setdefault("repetition_window", None)  # vLLM's counts the whole context
    if body.logit_bias is not None:
        changes["logit_bias"] = dict(biases(body.logit_bias, tokenizer, vocab_size))
    names = {own: name for name, own in RENAMED.items() if getattr(body, name, None) is not None}
    return changed_sample(default, changes, names)


def biases(found: Any, tokenizer: Tokenizer, vocab_size: int) -> Iterator[tuple[int, float]]:
    """The pairs of id and bias of the four forms of `logit_bias`.

    They are `{"15": -100}`, `[[15, -100]]`, `[[15, false]]`, which bans the token, and texts in place of ids, which
    mean each of their tokens. A text of digits as the key of an object is an id.

    Raises:
        ApiError: an id is outside the vocabulary, a bias is no number, or the texts are too long.
    """
    pairs = found.items() if isinstance(found, Mapping) else found
    texts = [key for key, _ in found if isinstance(key, str)] if isinstance(found, list) else []
    if len(texts) > MAX_BIAS_TEXTS or sum(map(len, texts)) > MAX_BIAS_TEXT:
        what = f"it has more than {MAX_BIAS_TEXTS} texts, or more than {MAX_BIAS_TEXT} characters in them"
        raise invalid("logit_bias", what, "give ids")
    for i, (key, bias) in enumerate(pairs):
        where = f"logit_bias[{i}]" if isinstance(found, list) else f"logit_bias.{key}"
        if bias is False:
            bias = -inf
        if isinstance(bias, bool | str):
            raise invalid(where, f"the bias is {shown(bias)}, expected a number, or false to ban the token")
        for token in _tokens(key, tokenizer, where, is_text=isinstance(found, list)):
            if not 0 <= token < vocab_size:
                what = f"there is no token {token} in a vocabulary of {vocab_size}"
                raise invalid(where, what)
            yield token, as_float(bias)


def _tokens(key: Any, tokenizer: Tokenizer, where: str, is_text: bool) -> list[int]:
    if isinstance(key, bool | float):
        raise invalid(where, f"the token is {shown(key)}, expected an id or a text")
    if isinstance(key, int):
        return [key]
    if not is_text and key.isdecimal() and len(key) < 19:
        return [int(key)]
    return tokenizer.encode(key, add_special_tokens=False, parse_special=True)


def ending(body: CommonFields, vocab_size: int) -> dict[str, Any]:
    """The arguments of `ServedModel.asked` about what ends an answer.

    Raises:
        ApiError: an id is outside the vocabulary.
    """
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for i, token in enumerate(body.stop_token_ids or ()):
        if token >= vocab_size:
            raise invalid(f"stop_token_ids[{i}]", f"there is no token {token} in a vocabulary of {vocab_size}")
    return {
        "stop": tuple(stops),
        "stop_ids": tuple(body.stop_token_ids or ()),
        "min_tokens": body.min_tokens or 0,
        "stop_at_eog": not body.ignore_eos,
        "include_stop": bool(body.include_stop_str_in_output),
    }


def most_tokens(*limits: tuple[str, int | None], at_least: int | None, least: int = 1) -> int | None:
    """The first limit that is given; None for no limit, which -1 means too.

    Args:
        limits: names and values of fields, the one that wins first.
        at_least: the field `min_tokens`.
        least: the smallest limit.

    Raises:
        ApiError: it is smaller, or smaller than `min_tokens`.
    """
    for name, value in limits:
        if value is not None:
            if 0 <= value < least:
                raise invalid(name, f"expected at least {least}, or -1 for no limit, found {value}")
            if 0 <= value < (at_least or 0):
                raise invalid("min_tokens", f"it is {at_least}, more than the {value} of {name}")
            return None if value < 0 else value
    return None


Found = tuple[str, Callable[[], Grammar]]
"""The field that asks for a grammar, and what makes it."""


def text_grammar(body: CommonFields) -> Callable[[], Grammar] | None:
    """The maker of the grammar of a body; None if the answer is free.

    Raises:
        ApiError: there are several.
    """
    asked = _asked(body)
    if len(asked) > 1:
        what = f"it cannot be together with {asked[1][0]}"
        raise invalid(asked[0][0], what, "an answer follows one grammar")
    return asked[0][1] if asked else None


@contextmanager
def named_grammar(body: CommonFields) -> Iterator[None]:
    """Errors of the grammar, which shows some only with the vocabulary, name the field that asks for it."""
    try:
        yield
    except GrammarError as error:
        field = next((field for field, _ in _asked(body)), "tools")
        raise _grammar_error(field, error) from error


def _of_text(text: str) -> Grammar:
    """A grammar in llama.cpp's syntax, whose rules have `::=`, or in Lark's."""
    return Grammar.gbnf(text) if "::=" in text else Grammar.lark(text)


#: Fields whose value says what the text follows -> what makes the grammar of a value.
_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    **dict.fromkeys(("guided_json", "json_schema"), Grammar.json_schema), "guided_choice": Grammar.choice,
    **dict.fromkeys(("guided_regex", "regex"), Grammar.regex),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), _of_text),
}  # fmt: skip
_TEXTS = ("guided_grammar", "grammar", "ebnf")  # an empty one asks for nothing
#: Those of `structured_outputs`, which also says whether JSON has no white space.
_OUTPUTS: dict[str, Callable[[Any, bool], Grammar]] = {
    "json": lambda schema, compact: Grammar.json_schema(schema, compact=compact),
    "json_object": lambda form, compact: Grammar.json_object(compact=compact),
    "regex": lambda expression, compact: Grammar.regex(expression),
    "choice": lambda choices, compact: Grammar.choice(choices),
    "grammar": lambda text, compact: _of_text(text),
}


def _asked(body: CommonFields) -> list[Found]:
    """The fields that ask for a grammar, with what makes it."""
    form, outputs = _of_format(body.response_format), body.structured_outputs
    found: list[Found] = [] if form is None else [("response_format", form)]
    for name, write in _OUTPUTS.items() if outputs is not None else ():
        value = getattr(outputs, "json_" if name == "json" else name)
        if value is not None and value is not False:
            compact = outputs is not None and outputs.disable_any_whitespace is True
            found.append((f"structured_outputs.{name}", partial(write, value, compact)))
    for name, make in _MAKERS.items():
        value = getattr(body, name)
        if value is not None and not (name in _TEXTS and not value):
            found.append((name, partial(make, value)))
    return found


def _of_format(form: dict[str, Any] | None) -> Callable[[], Grammar] | None:
    """The maker of the grammar that `response_format` asks for; None for free text.

    Raises:
        ApiError: it is malformed.
    """
    if form is None or (kind := form.get("type")) == "text":
        return None
    if kind == "grammar":
        if not isinstance(form.get("grammar"), str):
            raise invalid("response_format.grammar", "it is required")
        return partial(_of_text, form["grammar"])
    if kind == "json_object":  # llama-server's may have a schema
        schema = form.get("schema")
        return Grammar.json_object if schema is None else partial(schema_grammar, schema, "response_format")
    if kind != "json_schema":
        raise invalid("response_format.type", f"expected text, json_object or json_schema, found {shown(kind)}")
    given = form.get("json_schema", form)
    if not isinstance(given, dict) or given.get("schema") is None:
        raise invalid("response_format.json_schema.schema", "it is required")
    return partial(schema_grammar, given["schema"], "response_format", lenient=given.get("strict") is False)
