"""Custom tools of OpenAI's APIs, whose input is a text, as functions with one argument.

Server stage, below the APIs. Models write calls of functions; a custom tool is one whose argument `input` is a string,
which a grammar may bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx.errors import GrammarError
from rlx.grammar import Grammar
from rlx.serve.body import shown
from rlx.serve.errors import invalid
from rlx.serve.lark_regex import regex_of
from rlx.text.answer import AnswerPart
from rlx.text.tool_calls import ToolCallDelta

if TYPE_CHECKING:
    from rlx.serve.events import Parser
    from rlx.serve.prompts import ChatPrompt

INPUT = "input"


def as_function(custom: Any, where: str) -> dict[str, Any]:
    """A custom tool as the function that a model calls.

    Args:
        custom: its name, description and format, as the Responses API has them.

    Raises:
        ApiError: it is malformed, or its grammar cannot be enforced.
    """
    if not isinstance(custom, Mapping):
        raise invalid(where, f"expected an object, found {shown(custom)}")
    about, schema = custom.get("description") or "", {"type": "string"}
    grammar = _grammar(custom.get("format"), f"{where}.format")
    if grammar is not None:
        syntax, definition = grammar
        schema["pattern"] = f"^({_pattern(syntax, definition, f'{where}.format')})$"
        about = f"{about}\n\nThe input follows this grammar ({syntax}):\n{definition}".lstrip("\n")
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return {
        "name": custom.get("name"), "description": about, "parameters": parameters, "strict": grammar is not None,
    }  # fmt: skip


def _grammar(form: Any, where: str) -> tuple[str, str] | None:
    """Syntax and text of the grammar that a format asks for; None for any text."""
    if form is None or form == {"type": "text"}:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        raise invalid(where, f"expected the type text or grammar, found {shown(form)}")
    found = form.get("grammar", form)  # chat has an object inside
    syntax, text = (found.get(name) if isinstance(found, Mapping) else None for name in ("syntax", "definition"))
    if syntax not in ("lark", "regex"):
        raise invalid(f"{where}.syntax", f"expected lark or regex, found {shown(syntax)}")
    if not isinstance(text, str):
        raise invalid(f"{where}.definition", f"expected a string, found {shown(text)}")
    return syntax, text


def _pattern(syntax: str, text: str, where: str) -> str:
    """A grammar as a regular expression."""
    try:
        if syntax == "regex":
            Grammar.regex(text)
            return text
        Grammar.lark(text)
        return regex_of(text)
    except GrammarError as error:
        raise invalid(f"{where}.definition", error.what, error.hint, code="invalid_grammar") from error


def call_of(name: Any, text: str) -> dict[str, Any]:
    """An earlier call of a custom tool as that of a function."""
    return {"name": name, "arguments": {INPUT: text}}


def reading_inputs(prompt: ChatPrompt, names: frozenset[str]) -> ChatPrompt:
    """A prompt in whose answers calls of some tools have their input in place of arguments."""
    make = prompt.parser
    if not names or make is None:
        return prompt
    return replace(prompt, parser=lambda: _Inputs(make(), names))


class _Inputs:
    """Splits an answer as another parser does. The input of a custom tool comes in one piece, at the end of its call.

    Args:
        parser: the other one.
        names: of the custom tools.
    """

    def __init__(self, parser: Parser, names: frozenset[str]) -> None:
        self._parser, self._names = parser, names
        self._index, self._arguments = -1, ""  # of the call that is being read; -1 for none

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._parser.called

    def push(self, text: str) -> list[AnswerPart]:
        """More text: what is now certain."""
        return [each for part in self._parser.push(text) for each in self._part(part)]

    def finish(self) -> list[AnswerPart]:
        """No more text: the rest."""
        return [*(each for part in self._parser.finish() for each in self._part(part)), *self._complete()]

    def _part(self, part: AnswerPart) -> Iterator[AnswerPart]:
        call = part.tool_call
        if call is not None and call.index == self._index:
            self._arguments += call.arguments
            return
        yield from self._complete()
        if call is not None and call.name in self._names:
            self._index, self._arguments = call.index, call.arguments
            yield AnswerPart(tool_call=replace(call, arguments=""))
        else:
            yield part

    def _complete(self) -> Sequence[AnswerPart]:
        """The input of the call that was being read."""
        index, self._index = self._index, -1
        if index < 0:
            return ()
        found = json.loads(self._arguments or "{}").get(INPUT, "")
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        return (AnswerPart(tool_call=ToolCallDelta(index, arguments=text)),)
