"""An answer's text in pieces: the model's reasoning, what it says, and the tools that it calls.

Text stage, used by the runners' chat methods and the server, over `thinking.py` and `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlx.text.thinking import ThinkingSplitter, ThinkingTags
from rlx.text.tokenizer import Tokenizer
from rlx.text.tool_calls import Part, Tool, ToolCallDelta, ToolFormat, new_call_id


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer: one of the three.

    Attributes:
        text: what the model says.
        thinking: its reasoning.
        tool_call: a piece of a call.
    """

    text: str = ""
    thinking: str = ""
    tool_call: ToolCallDelta | None = None


class AnswerParser:
    """Splits an answer into reasoning, text and tool calls, in the order of the answer.

    The pieces that it is given may end anywhere: joined, the parts are the same for any split.

        parser = AnswerParser(tags, is_open, ToolFormat.of(tokenizer), checked_tools(tools))
        parts = [part for text in texts for part in parser.push(text)] + parser.finish()

    Args:
        tags: around the model's reasoning; None takes nothing for reasoning.
        is_open: whether the prompt has opened the reasoning.
        tool_format: how the model writes calls; None takes nothing for a call.
        tools: what the model may call; without any, nothing is taken for a call.
        new_id: makes the ids of calls.
    """

    def __init__(
        self,
        tags: ThinkingTags | None = None,
        is_open: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._thinking = ThinkingSplitter(tags, is_open)
        self._calls = tool_format.parser(tools, new_id) if tool_format is not None and tools else None
        self.called = False
        """Whether a call has begun."""

    def push(self, text: str) -> list[AnswerPart]:
        """More text: what is now certain."""
        return self._parts(*self._thinking.push(text))

    def finish(self) -> list[AnswerPart]:
        """No more text: the rest."""
        parts = self._parts(*self._thinking.finish())
        return parts + self._answer(self._calls.finish()) if self._calls else parts

    def _parts(self, thinking: str, text: str) -> list[AnswerPart]:
        parts = [AnswerPart(thinking=thinking)] if thinking else []
        if not text:
            return parts
        return parts + (self._answer(self._calls.push(text)) if self._calls else [AnswerPart(text)])

    def _answer(self, parts: Iterable[Part]) -> list[AnswerPart]:
        found = [AnswerPart(part) if isinstance(part, str) else AnswerPart(tool_call=part) for part in parts]
        self.called = self.called or any(part.tool_call is not None for part in found)
        return found


def kept_ids(tokenizer: Tokenizer, tags: ThinkingTags | None, tool_format: ToolFormat | None) -> frozenset[int]:
    """The control tokens that an `AnswerParser` has to see in the text of an answer."""
    kept = tags.ids(tokenizer) if tags is not None else frozenset()
    return kept | tool_format.keep_ids(tokenizer) if tool_format is not None else kept
