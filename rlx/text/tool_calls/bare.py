"""Calls as JSON objects that name the function: bare, in a fence, or in a list after a token.

Text stage. Llama 3 writes `{"name": "f", "parameters": {...}}` as its whole answer, maybe after `<|python_tag|>`.
Models whose template knows no tools, such as Gemma 3, write the JSON that the prompt asks for, or a fence of `json` or
`tool_code`: `print(f(city="Paris", days=3))`, which is read, never run. Nothing but the name says that such a text is a
call: it must be the name of a tool.

Others write one list after a token:

    [TOOL_CALLS][{"name": "f", "arguments": {"city": "Paris"}}]               Mistral until 2025
    <TOOLCALL>[{"name": "f", "arguments": {"city": "Paris"}}]</TOOLCALL>      Nemotron Nano 2
    <|tool_call|>[{"name": "f", "arguments": {"city": "Paris"}}]              Granite 3

Source: the model cards of Llama 3.1 to 3.3 (Meta), the guide to function calling with Gemma 3 (Google), and the chat
templates of Mistral-Nemo, NVIDIA-Nemotron-Nano-9B-v2 and granite-3.1 on the Hugging Face hub.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlx.text.tool_calls.format import ToolFormat
from rlx.text.tool_calls.lark import ANY_TEXT, Lark, escaped, literal
from rlx.text.tool_calls.reader import BLANKS, CallReader, CutOff, Reading, Unreadable
from rlx.text.tool_calls.tools import Tool

PYTHON_TAG = "<|python_tag|>"
FENCE = "```"
FENCES = tuple(FENCE + word for word in ("json", "tool_code", "tool_call", "python"))
_FUNCTION = re.compile(r"\[?\s*(?:print\s*\(\s*)?((?!print\b)[A-Za-z_][\w.]*)\s*\(")
_FUNCTION_BEGIN = re.compile(r"\[?\s*(?:print\s*\(\s*)?([A-Za-z_][\w.]{0,200})?\s*")
_MAX_CODE = 100_000


class BareReader(CallReader):
    """Reads calls at the start of an answer, and those that a marker begins.

    Args:
        ends: the texts that begin calls, each with the text that ends them, which may be empty.
        listed: only a marker begins calls, and their functions may have any name.
    """

    def __init__(self, ends: Mapping[str, str], listed: bool, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__(tuple(ends), tools, new_id)
        self._ends, self._listed, self._end_mark = ends, listed, ""

    def _begin_answer(self) -> Reading[None]:
        while not self._listed and not self._held.strip():
            if self._final:
                return
            yield
        blanks = len(self._held) - len(self._held.lstrip())
        if not self._listed and self._held[blanks] in "{[":
            self._at, self._marked = blanks, blanks + 1
            yield from self._body()

    def _call(self, marker: str) -> Reading[None]:
        self._end_mark = self._ends[marker]
        yield from self._body()

    def _body(self) -> Reading[None]:
        """Reads what follows a marker: JSON, a list of it, or Python."""
        char = yield from self._peek(BLANKS)
        while char == "[" and not self._held[self._at + 1 :].strip():
            yield from self._wait()
        inner = self._held[self._at + 1 :].lstrip()
        if is_list := char == "[" and inner[0] == "{":
            self._at = len(self._held) - len(inner)
        if is_list or char == "{":
            names = None if self._listed else self._tools
            while (yield from self._json_call(names)) and (yield from self._has_next(is_list)):
                pass
            return
        begin = self._at
        found = yield from self._match(_FUNCTION, _FUNCTION_BEGIN)
        self._at = begin
        if tool_name(found[1], self._tools) is None:
            raise Unreadable
        yield from self._code()

    def _has_next(self, is_list: bool) -> Reading[bool]:
        """After a call: whether there is a further one, or the end of the list and the text that ends all calls.

        Separators that separate nothing are text.
        """
        end = self._end_mark
        while True:
            try:
                char = yield from self._peek(BLANKS)
                while end.startswith(self._rest) and self._rest != end:
                    yield from self._wait()
            except CutOff:
                self._held, self._at = self._held[: self._at].strip() + self._rest, 0
                return False
            if char in ";,":
                self._at += 1
            elif char == "]" and is_list:
                self._at += 1
                self._drop()
                is_list = False
            elif char == "{":
                self._marked = self._at + 1
                return True
            else:
                self._at = self._at + len(end) if end and self._rest.startswith(end) else 0
                return False

    def _code(self) -> Reading[None]:
        """Python, up to the end of its fence or of the answer."""
        mark = self._end_mark
        while (end := self._held.find(mark, self._at) if mark else -1) < 0 and not self._final:
            if len(self._rest) > _MAX_CODE:
                raise Unreadable
            yield
        calls = called(self._rest if end < 0 else self._held[self._at : end], self._tools)
        if not calls:
            raise Unreadable
        self._at = len(self._held) if end < 0 else end + len(mark)
        for name, arguments in calls:
            self._begin(name)
            self._argue(json.dumps(arguments, ensure_ascii=False))
            self._end()


Calls = list[tuple[str, dict[str, Any]]]


def called(code: str, tools: Mapping[str, Tool]) -> Calls:
    """Names and arguments of the calls that a text consists of; empty if there is anything else in it."""
    try:
        found = [_call(node, tools) for node in _nodes(ast.parse(code.strip()))]
        return json.loads(json.dumps(found, allow_nan=False)) and found
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def tool_name(dotted: str, tools: Mapping[str, Tool]) -> str | None:
    """The tool that a function's name means: `f`, `f.call` as Llama writes it, or `module.f`; None if there is none."""
    names = (dotted, dotted.removesuffix(".call"), dotted.rpartition(".")[2])
    return next((name for name in names if name in tools), None)


def _nodes(tree: ast.Module) -> Iterator[ast.expr]:
    for statement in tree.body:
        if not isinstance(statement, ast.Expr | ast.Assign):
            raise ValueError("not a call")
        value = statement.value
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _call(node: ast.expr, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    dotted = ast.unparse(node.func)
    if dotted == "print" and dotted not in tools and len(node.args) == 1 and not node.keywords:
        return _call(node.args[0], tools)
    name = tool_name(dotted, tools)
    if name is None:
        raise ValueError("not a tool")
    keys = list(tools[name].properties)
    if len(node.args) > len(keys):
        raise ValueError("more arguments than parameters")
    found = {key: ast.literal_eval(value) for key, value in zip(keys, node.args, strict=False)}
    for keyword in node.keywords:
        value = ast.literal_eval(keyword.value)
        found |= value if keyword.arg is None else {keyword.arg: value}
    return name, found


def _written(lark: Lark, tool: Tool, arguments: str) -> str:
    return literal(f'{tool.name}", "parameters": ') + f' {arguments} "}}"'


def _others(lark: Lark, tools: Sequence[Tool]) -> list[str]:
    """JSON that begins with the name of something else."""
    names = "|".join(escaped(tool.name) for tool in tools)
    return [lark.rule("OTHER", f'{ANY_TEXT} & ~/({names})"(?s:.*)/')]


LLAMA = ToolFormat(
    "llama", '{"name": "', (PYTHON_TAG,), partial(BareReader, {PYTHON_TAG: ""}, False), _written, others=_others,
    separator=None,
)  # fmt: skip
"""Bare JSON, maybe after `<|python_tag|>`."""

PROMPTED = replace(
    LLAMA, name="prompted", markers=FENCES, reader=partial(BareReader, dict.fromkeys(FENCES, FENCE), False),
    separator="\n",
)  # fmt: skip
"""The JSON that the prompt asks for, where the chat template knows nothing of tools: see `tools.py`."""


def _list_entry(lark: Lark, tool: Tool, arguments: str) -> str:
    head = literal(f'{{"name": "{tool.name}", "arguments": ')
    return f'{head} {arguments} "}}"'


def _listed(name: str, begin: str, end: str = "") -> ToolFormat:
    """The format of a family that writes one list of calls between two texts."""
    markers, reader = tuple(filter(None, (begin, end))), partial(BareReader, {begin: end}, True)
    return ToolFormat(name, begin, markers, reader, _list_entry, separator=", ", enclosed=("[", "]" + end))


MISTRAL_LIST = _listed("mistral-list", "[TOOL_CALLS]")
NEMOTRON = _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>")
GRANITE = _listed("granite", "<|tool_call|>")
