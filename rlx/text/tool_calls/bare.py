"""Calls without tokens of their own: bare JSON, JSON or Python in a fence, a list of Python calls.

Text stage. Llama 3 writes `{"name": "f", "parameters": {...}}` as its whole answer, maybe after `<|python_tag|>`.
Models whose template knows no tools, such as Gemma 3, write the JSON that the prompt asks for, or a fence of `json` or
`tool_code`: `print(f(city="Paris", days=3))`, which is read, never run. Nothing but the name says that such a text is a
call: it must be the name of a tool.

Source: the model cards of Llama 3.1 to 3.3 (Meta) and the guide to function calling with Gemma 3 (Google).
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
    """Reads calls at the start of an answer, and those that a marker begins."""

    def __init__(self, markers: Sequence[str], tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        super().__init__(markers, new_id)
        self._tools = {tool.name: tool for tool in tools}
        self._fence = False  # whether the calls stand in one

    def _begin_answer(self) -> Reading[None]:
        while not self._held.strip():
            if self._final:
                return
            yield
        blanks = len(self._held) - len(self._held.lstrip())
        if self._held[blanks] in "{[":
            self._at, self._marked = blanks, blanks + 1
            yield from self._body()

    def _call(self, marker: str) -> Reading[None]:
        self._fence = marker.startswith(FENCE)
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
            while (yield from self._json_call(self._tools)) and (yield from self._has_next(is_list)):
                pass
            return
        while (found := _FUNCTION.match(self._held, self._at)) is None:
            if not _FUNCTION_BEGIN.fullmatch(self._held, self._at):
                raise Unreadable
            yield from self._wait()
        if tool_name(found[1], self._tools) is None:
            raise Unreadable
        yield from self._code()

    def _has_next(self, is_list: bool) -> Reading[bool]:
        """After a call: whether there is a further one, or the end of the list or the fence.

        Separators that separate nothing are text.
        """
        while True:
            try:
                char = yield from self._peek(BLANKS)
                while self._fence and FENCE.startswith(self._rest) and self._rest != FENCE:
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
                is_fence = self._fence and self._rest.startswith(FENCE)
                self._at = self._at + len(FENCE) if is_fence else 0
                return False

    def _code(self) -> Reading[None]:
        """Python, up to the end of its fence or of the answer."""
        while (end := self._held.find(FENCE, self._at) if self._fence else -1) < 0 and not self._final:
            if len(self._rest) > _MAX_CODE:
                raise Unreadable
            yield
        calls = called(self._rest if end < 0 else self._held[self._at : end], self._tools)
        if not calls:
            raise Unreadable
        self._at = len(self._held) if end < 0 else end + len(FENCE)
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
    "llama", '{"name": "', (PYTHON_TAG,), partial(BareReader, (PYTHON_TAG,)), _written, others=_others, separator=None,
)  # fmt: skip
"""Bare JSON, maybe after `<|python_tag|>`."""

PROMPTED = replace(LLAMA, name="prompted", markers=FENCES, reader=partial(BareReader, FENCES), separator="\n")
"""The JSON that the prompt asks for, where the chat template knows nothing of tools: see `messages.py`."""
