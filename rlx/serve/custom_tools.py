"""Custom tools of OpenAI's APIs, whose input is a text, as functions with one argument.

Server stage, below the APIs. Models write calls of functions; a custom tool is one whose argument `input` is a string,
which a grammar may bound. A grammar in Lark becomes a regular expression, as `pattern` of a schema needs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlx.errors import GrammarError
from rlx.grammar import Grammar
from rlx.serve.errors import invalid
from rlx.serve.http import shown
from rlx.text.answer import AnswerParser, AnswerPart
from rlx.text.tool_calls import Part, ToolCallDelta

MOST = 1 << 16  # characters of the expression: rules that are used often grow fast
DEEPEST = 100  # rules inside of each other

_COMMON = {
    "DIGIT": "[0-9]", "INT": "[0-9]+", "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", "LETTER": "[A-Za-z]",
    "SIGNED_INT": "[+-]?[0-9]+", "SIGNED_NUMBER": r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+", "NEWLINE": r"(\r?\n)+",
    "LF": r"\n", "CR": r"\r", "HEXDIGIT": "[0-9a-fA-F]", "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]",
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"i?) | /(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)
    | (?P<name>[!?]?_?[A-Za-z][A-Za-z0-9_]*) | ->\s*\w+ | ~\s*(?P<count>\d+(?:\s*\.\.\s*\d+)?) | (?P<op>[|()\[\]*+?])
    | \.\.  | \s+ | //[^\n]*""",
    re.VERBOSE,
)
_RULE = re.compile(r"^\s*[!?]?(_?[A-Za-z][A-Za-z0-9_]*)(?:\.-?\d+)?\s*:", re.MULTILINE)
_IMPORT = re.compile(r"^\s*%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+))?|\(([^)]*)\))\s*$", re.MULTILINE)
_IGNORE = re.compile(r"^\s*%ignore\s+(.*)$", re.MULTILINE)


def regex_of(text: str) -> str:
    """The regular expression, for a whole text.

    Raises:
        GrammarError: a rule refers to itself, or the grammar has something else that no expression can say.
    """
    found = _Rules(text)
    if "start" not in found.bodies:
        raise GrammarError("there is no rule `start`", where="grammar", hint="call the first rule start")
    return found.rule("start", ())


class _Rules:
    """The rules of a grammar by name.

    Args:
        text: of the grammar.
    """

    def __init__(self, text: str) -> None:
        self._imported = dict(_imports(text))
        ignored = _IGNORE.findall(text)
        bare = re.sub(r"^\s*%(import|ignore)\b.*$", "", text, flags=re.MULTILINE)
        if directive := re.search(r"^\s*(%\w+)", bare, re.MULTILINE):
            raise _unsayable(directive[1])
        heads = list(_RULE.finditer(bare))
        ends = [*(head.start() for head in heads[1:]), len(bare)]
        self.bodies = {head[1]: bare[head.end() : end].strip() for head, end in zip(heads, ends, strict=True)}
        self._between = ""
        self._between = f"({'|'.join(self._alternatives(each, ()) for each in ignored)})*" if ignored else ""

    def rule(self, name: str, inside: tuple[str, ...]) -> str:
        """The expression of a rule, which is used in the rules `inside`."""
        if name in inside:
            what = f"the rule `{name}` refers to itself"
            hint = "repeat with * or +: the input of a tool follows grammars without recursion"
            raise GrammarError(what, where="grammar", hint=hint)
        if len(inside) > DEEPEST:
            raise _too_large()
        if name not in self.bodies:
            if name not in self._imported:
                raise GrammarError(f"there is no rule `{name}`", where="grammar")
            return f"({self._imported[name]})"
        return f"({self._alternatives(self.bodies[name], (*inside, name))})"

    def _alternatives(self, body: str, inside: tuple[str, ...]) -> str:
        """The expression of the right side of a rule."""
        found: list[str] = []
        size = 0
        for token in _tokens(body):
            if name := token["name"]:
                is_terminal = name.lstrip("!?_")[0].isupper()
                part = self.rule(name.lstrip("!?"), inside)
                found.append(f"({part}{self._between})" if is_terminal and not _in_terminal(inside) else part)
            elif token["text"] or token["regex"]:
                part = _literal(token["text"]) if token["text"] else _expression(token["regex"], token["flags"])
                found.append(part if _in_terminal(inside) else f"({part}{self._between})")
            elif token["count"]:
                found.append("{" + re.sub(r"\s*\.\.\s*", ",", token["count"]) + "}")
            elif token["op"]:
                found.append({"[": "(", "]": ")?"}.get(token["op"], token["op"]))
            size += len(found[-1]) if found else 0
            if size > MOST:
                raise _too_large()
        return "".join(found)


def _in_terminal(inside: tuple[str, ...]) -> bool:
    """Whether a rule stands in a terminal, in whose middle nothing is ignored."""
    return any(name.lstrip("_")[:1].isupper() for name in inside)


def _tokens(body: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None or token[0] == "..":
            raise _unsayable(body[at : at + 20])
        yield token
        at = token.end()


def _imports(text: str) -> Iterator[tuple[str, str]]:
    for name, alias, several in _IMPORT.findall(text):
        for each in [name] if name else re.findall(r"\w+", several):
            if each not in _COMMON:
                raise _unsayable(f"common.{each}")
            yield alias or each, _COMMON[each]


def _literal(token: str) -> str:
    """A text as an expression."""
    ignores_case = token.endswith("i")
    controls = {"n": "\n", "t": "\t", "r": "\r"}
    body = re.sub(r"\\(.)", lambda found: controls.get(found[1], found[1]), token[1 : -2 if ignores_case else -1])
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$/#&~-])", r"\\\1", body)
    escaped = escaped.replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")
    return f"((?i:{escaped}))" if ignores_case else f"({escaped})"


def _expression(body: str, flags: str) -> str:
    plain = body.replace(r"\/", "/")
    if set(flags) - set("ims"):
        raise _unsayable(f"the flags {flags}")
    return f"((?{flags}:{plain}))" if flags else f"({plain})"


def _too_large() -> GrammarError:
    return GrammarError("its rules together are too large", where="grammar", hint="use fewer, shorter rules")


def _unsayable(what: str) -> GrammarError:
    hint = "use rules, terminals, texts, expressions, |, (), [], *, +, ? and ~"
    return GrammarError(f"{what.strip()!r} cannot be enforced in the input of a tool", where="grammar", hint=hint)


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


class InputParser(AnswerParser):
    """Splits an answer. The input of a custom tool comes in one piece, at the end of its call.

    Args:
        names: of the custom tools.
        more: as for `AnswerParser`.
    """

    def __init__(self, names: frozenset[str], *more: Any) -> None:
        super().__init__(*more)
        self._names = names
        self._index, self._arguments = -1, ""  # of the call that is being read; -1 for none

    def finish(self) -> list[AnswerPart]:
        """No more text: the rest."""
        return [*super().finish(), *self._complete()]

    def _answer(self, parts: Iterable[Part]) -> list[AnswerPart]:
        return [each for part in super()._answer(parts) for each in self._read(part)]

    def _read(self, part: AnswerPart) -> Iterator[AnswerPart]:
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
