"""The interface of formats of tool calls: a parser, grammars, and the tokens that it is made of.

Text stage. A format is a way in which models write calls into their answers. The parser turns an answer's text, in
pieces of any size, into texts and calls. A grammar makes the model write calls that the parser understands.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls.lark import ErrorOf, Lark, arguments, control_tokens, either, json_value, literal, tools_of
from rlx.text.tool_calls.tools import Tool, ToolChoice

AUTO = ToolChoice()
Message = Mapping[str, Any]


def new_call_id() -> str:
    """An id for a call, such as `call_5f0c7a9be2d1430a`."""
    return f"call_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: which call of the answer it belongs to, from 0.
        id: the id of the call; only in its first piece.
        name: the name of the function; only in its first piece.
        arguments: a fragment of the arguments; all of a call together are the text of a JSON object.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Part = str | ToolCallDelta
"""What a parser finds: text outside of calls, or a piece of a call."""


class CallParser(Protocol):
    """Finds the calls in the text of one answer. Any split of a text into pieces gives the same text and calls.

    Nothing is lost: what looks like a call and is none becomes text. Where an answer ends, or becomes unreadable, in
    the middle of the arguments, they are closed, so that they are JSON in any case.
    """

    def push(self, text: str) -> list[Part]:
        """More text: what is now certain, in order. What may be the beginning of a call waits."""
        ...

    def finish(self) -> list[Part]:
        """No more text: the rest."""
        ...


def _json_arguments(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """Arguments that are written as JSON."""
    return json_value(schema)


@dataclass(frozen=True)
class ToolFormat:
    """A way in which a family of models writes tool calls.

    Attributes:
        name: a word for it, such as `hermes`.
        trigger: the text that begins a call.
        markers: the texts around and in calls that may be control tokens.
        reader: makes the parser of an answer from the tools and what makes ids.
        call: `(lark, tool, arguments)`: the body of the rule for the call of a tool, from the trigger on.
        arguments: `(lark, tool, schema)`: the body of the rule for the arguments of a tool under a schema.
        others: `(lark, tools)`: bodies of rules for texts that may follow the trigger and are no call.
        separator: the text between two calls; None if an answer has only one.
        enclosed: the texts before the first and after the last call, where one trigger begins all calls of an answer;
            None where each call has its own.
        tokens: the ids of those markers that are control tokens.
    """

    name: str
    trigger: str
    markers: tuple[str, ...]
    reader: Callable[[Sequence[Tool], Callable[[], str]], CallParser]
    call: Callable[[Lark, Tool, str], str]
    arguments: Callable[[Lark, Tool, Mapping[str, Any]], str] = _json_arguments
    others: Callable[[Lark, Sequence[Tool]], list[str]] = lambda lark, tools: []
    separator: str | None = "\n"
    enclosed: tuple[str, str] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    def of(self, tokenizer: Tokenizer | None = None) -> ToolFormat:
        """The format for a vocabulary, which says which texts are control tokens; without one none is."""
        return replace(self, tokens=control_tokens(tokenizer, self.markers))

    def parser(self, tools: Sequence[Tool], new_id: Callable[[], str] = new_call_id) -> CallParser:
        """A parser for one answer.

        Args:
            tools: what the model may call; their schemas say what the type of an untyped value is.
            new_id: makes the ids of calls.
        """
        return self.reader(tools, new_id)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice = AUTO,
        parallel: bool = True,
        otherwise: str | None = None,
        error_of: ErrorOf = lambda text: "",
    ) -> str:
        """The grammar of an answer, as Lark text for llguidance.

        Args:
            tools: at least one.
            choice: where it is forced, the grammar is that of the whole answer: one call, or several with `parallel`
                unless a tool is named, and nothing else. With `auto` it is that of one call, from right after
                `trigger` on, which may follow any text.
            parallel: whether the answer may have several calls.
            otherwise: with `auto`, the body of a rule for answers without calls. Then the grammar is that of the whole
                answer: calls, or this.
            error_of: compiles a grammar and returns what is wrong with it. It finds schemas that cannot be enforced.

        Raises:
            ToolError: the schema of a tool cannot be enforced in this format. With `auto` this is an error only for
                tools that are `strict`; the arguments of others may be any object then.
        """
        lark = Lark(self.tokens)
        chosen = tools_of(tools, choice)
        bodies = [self.call(lark, tool, arguments(lark, tool, choice, self.arguments, error_of)) for tool in chosen]
        several = parallel and choice.name is None and self.separator is not None
        if self.enclosed is not None:
            begin, end = map(lark.mark, self.enclosed)
            bodies = [f"{begin} {self._calls(lark.rule('call', either(bodies)), several)} {end}"]
        if not choice.forced and otherwise is None:
            lark.define("start", either([*bodies, *self.others(lark, tools)]))
            return str(lark)
        call = lark.rule("calls", f"{lark.mark(self.trigger)} {either(bodies)}")
        calls = self._calls(call, several and self.enclosed is None)
        lark.define("start", calls if choice.forced else f"{calls} | {otherwise}")
        return str(lark)

    def _calls(self, call: str, several: bool) -> str:
        """One call, or several with what stands between them."""
        return f"{call} ({literal(self.separator or '')} {call})*" if several else call


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, which the model asks for.

        for call in answer.tool_calls:
            messages.append(call.result(FUNCTIONS[call.name](**call.arguments)))

    Attributes:
        id: of the call; its result refers to it.
        name: of the function. It may be one that is not there.
        arguments: by name. The model chose them: check them before they do harm. If the answer ended at `max_tokens`,
            those of the last call may be incomplete.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def result(self, value: Any) -> dict[str, Any]:
        """The message that tells the model what the call returned.

        Args:
            value: a text as it stands; anything else becomes JSON.
        """
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a message."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


def whole_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of an answer."""
    heads: dict[int, ToolCallDelta] = {}
    texts: dict[int, str] = {}
    for delta in deltas:
        heads.setdefault(delta.index, delta)
        texts[delta.index] = texts.get(delta.index, "") + delta.arguments
    return tuple(ToolCall(head.id, head.name, json.loads(texts[index])) for index, head in heads.items())
