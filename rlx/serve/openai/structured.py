"""The grammar that an answer must follow, from the fields that ask for one. Server stage, under OpenAI's paths.

What cannot be compiled is an error: no answer comes without the form that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlx.errors import GrammarError
from rlx.grammar import Grammar
from rlx.serve.body import shown
from rlx.serve.errors import ApiError, invalid

if TYPE_CHECKING:
    from rlx.serve.openai.bodies import CommonFields, StructuredOutputs, StructureFields

Found = tuple[str, Callable[[], Grammar]]
"""The field that asks for a grammar, and what makes it."""


def text_grammar(body: CommonFields) -> Callable[[], Grammar] | None:
    """What makes the grammar of a body; None if the answer is free.

    Raises:
        ApiError: there are several.
    """
    asked = _asked(body)
    if len(asked) > 1:
        what = f"it cannot be together with {asked[1][0]}"
        raise invalid(asked[0][0], what, "an answer follows one grammar")
    return asked[0][1] if asked else None


@contextmanager
def named_grammar(body: StructureFields) -> Iterator[None]:
    """Errors of the grammar, which shows some only with the vocabulary, name the field that asks for it."""
    try:
        yield
    except GrammarError as error:
        field = next((field for field, _ in _asked(body)), "tools")
        raise invalid(field, error.what, error.hint, code="invalid_grammar") from error


def _asked(body: StructureFields) -> list[Found]:
    """What asks for a grammar."""
    found = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs)]
    if body.guided_json is not None:
        found.append(("guided_json", lambda: Grammar.json_schema(body.guided_json)))
    if body.json_schema is not None:
        found.append(("json_schema", lambda: Grammar.json_schema(body.json_schema)))
    if body.guided_choice is not None:
        found.append(("guided_choice", lambda: Grammar.choice(body.guided_choice)))
    for field in ("guided_regex", "regex"):
        if (expression := getattr(body, field)) is not None:
            found.append((field, lambda expression=expression: Grammar.regex(expression)))  # type: ignore[misc]
    for field in ("guided_grammar", "grammar", "ebnf"):
        if text := getattr(body, field):
            found.append((field, lambda text=text: of_text(text)))  # type: ignore[misc]
    return found


def of_text(text: str) -> Grammar:
    """A grammar in llama.cpp's syntax, whose rules have `::=`, or in Lark's."""
    return Grammar.gbnf(text) if "::=" in text else Grammar.lark(text)


def _of_format(form: dict[str, Any] | None) -> list[Found]:
    """What `response_format` asks for.

    Raises:
        ApiError: it is malformed.
    """
    if form is None or form == {"type": "text"}:
        return []
    match form.get("type"):
        case "json_object":
            schema = form.get("schema")  # llama-server's
            return [
                ("response_format", lambda: Grammar.json_object() if schema is None else Grammar.json_schema(schema))
            ]
        case "json_schema":
            given = form.get("json_schema", form)
            if not isinstance(given, dict) or given.get("schema") is None:
                raise invalid("response_format.json_schema.schema", "it is required")
            lenient = given.get("strict") is False
            return [("response_format", lambda: Grammar.json_schema(given["schema"], lenient=lenient))]
        case "grammar":
            text = form.get("grammar")
            if not isinstance(text, str):
                raise invalid("response_format.grammar", "it is required")
            return [("response_format", lambda: of_text(text))]
        case kind:
            raise _unknown_format(kind)


def _unknown_format(kind: Any) -> ApiError:
    what = f"expected text, json_object or json_schema, found {shown(kind)}"
    return invalid("response_format.type", what)


def _of_outputs(outputs: StructuredOutputs | None) -> list[Found]:
    """What vLLM's `structured_outputs` asks for."""
    if outputs is None:
        return []
    compact, found = outputs.disable_any_whitespace is True, list[Found]()
    if outputs.json_ is not None:
        found.append(("structured_outputs.json", lambda: Grammar.json_schema(outputs.json_, compact=compact)))
    if outputs.json_object:
        found.append(("structured_outputs.json_object", lambda: Grammar.json_object(compact=compact)))
    if outputs.regex is not None:
        found.append(("structured_outputs.regex", lambda: Grammar.regex(outputs.regex or "")))
    if outputs.choice is not None:
        found.append(("structured_outputs.choice", lambda: Grammar.choice(outputs.choice)))
    if outputs.grammar is not None:
        found.append(("structured_outputs.grammar", lambda: of_text(outputs.grammar or "")))
    return found
