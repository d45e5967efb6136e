"""An answer's text in pieces: the model's reasoning, what it says, and the tools that it calls.

Text stage, used by the runners' chat methods and the server, over `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlx.errors import ChatTemplateError
from rlx.text.chat import template_of
from rlx.text.tokenizer import Tokenizer, tail_of
from rlx.text.tool_calls import Part, Tool, ToolCallDelta, ToolFormat, headed, new_call_id
from rlx.text.tool_calls.bare import GRANITE, LLAMA, MISTRAL_LIST, NEMOTRON, PROMPTED
from rlx.text.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4
from rlx.text.tool_calls.headed import DEEPSEEK, HARMONY, KIMI, MISTRAL
from rlx.text.tool_calls.python import LFM2, OLMO
from rlx.text.tool_calls.tagged import GLM, HERMES, XML

_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<|channel>thought", "<channel|>"),
)
_TAIL = 16  # tokens at the end of a prompt that are looked at for an open tag


@dataclass(frozen=True)
class ThinkingTags:
    """The tags around a model's reasoning, such as `<think>` and `</think>`.

    Attributes:
        tokens: further control tokens of the format, which texts of answers must not leave out.
    """

    begin: str
    end: str
    tokens: tuple[str, ...] = ()

    @staticmethod
    def of(tokenizer: Tokenizer) -> ThinkingTags | None:
        """Those that the model's chat template or vocabulary knows; None if there are none."""
        template = tokenizer.chat_template or ""
        if CHANNELS.begin in template:
            return CHANNELS
        for begin, end in _TAGS:
            if end in template or (tokenizer.token_to_id(begin) is not None and tokenizer.token_to_id(end) is not None):
                return ThinkingTags(begin, end)
        return None

    def ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The control tokens that are a tag or a part of one: texts of answers must not leave them out."""
        texts = {token: tokenizer.vocabulary.tokens[token] for token in tokenizer.special_ids}
        parts = (self.begin, self.end, *self.tokens)
        return frozenset(token for token, text in texts.items() if text and any(text in part for part in parts))

    def is_open(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside the reasoning."""
        return tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(self.begin)

    def is_closed(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends behind the reasoning, so that the answer has none."""
        return tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(self.end)


#: Of answers in channels: around reasoning that the answer follows.
CHANNELS = ThinkingTags(
    f"{headed.CHANNEL}analysis{headed.MESSAGE}",
    f"{headed.END}{headed.START}assistant{headed.CHANNEL}final{headed.MESSAGE}",
    headed.TOKENS,
)


class Splitter(Protocol):
    """Splits the text of an answer, piece by piece, into reasoning and the rest."""

    def push(self, text: str) -> tuple[str, str]:
        """More text: what is certainly reasoning, and what is certainly not."""
        ...

    def finish(self) -> tuple[str, str]:
        """No more text: the rest."""
        ...


def splitter(tags: ThinkingTags | None, is_open: bool = False) -> Splitter:
    """The splitter of an answer; arguments as for `ThinkingSplitter`."""
    return headed.ChannelSplitter() if tags == CHANNELS else ThinkingSplitter(tags, is_open)


class ThinkingSplitter:
    """Splits the text of an answer, piece by piece, into reasoning and answer.

    Only a tag at the start of an answer begins reasoning: an answer may speak of tags later. Line breaks and spaces
    around the tags belong to neither. What may be a part of a tag waits for the next piece.

    Args:
        tags: of the model; None takes everything for the answer.
        is_open: the prompt has opened the reasoning.
    """

    def __init__(self, tags: ThinkingTags | None, is_open: bool = False) -> None:
        self._tags, self._held = tags, ""
        self._state = "answer" if tags is None else "thinking" if is_open else "start"
        self._blank = tags is not None  # nothing of this state has been given out: leading space is dropped

    def push(self, text: str) -> tuple[str, str]:
        """More text: what is certainly reasoning, and what is certainly answer."""
        if self._state == "answer" and not self._held:
            return "", self._stripped(text)
        self._held += text
        return self._start() if self._state == "start" else self._thinking()

    def finish(self) -> tuple[str, str]:
        """No more text: the rest."""
        rest, self._held = self._held, ""
        return (rest.rstrip(), "") if self._state == "thinking" else ("", rest)

    def _start(self) -> tuple[str, str]:
        assert self._tags is not None
        begin, text = self._tags.begin, self._held.lstrip()
        if text.startswith(begin):
            self._state, self._held = "thinking", text[len(begin) :]
            return self._thinking()
        if begin.startswith(text):  # a part of the tag, or nothing but space
            return "", ""
        text, self._held, self._state, self._blank = self._held, "", "answer", False
        return "", text

    def _thinking(self) -> tuple[str, str]:
        assert self._tags is not None
        end = self._tags.end
        thought, found, rest = self._held.partition(end)
        if found:
            self._state, self._held = "answer", ""
            thought = self._stripped(thought).rstrip()
            self._blank = True
            return thought, self._stripped(rest)
        certain = thought[: len(thought) - tail_of(thought, (end,))].rstrip()
        self._held = thought[len(certain) :]
        return self._stripped(certain), ""

    def _stripped(self, text: str) -> str:
        """The text, without leading space where nothing came before it."""
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        return text


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


def joined(parts: Sequence[AnswerPart]) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
    """Text, reasoning and pieces of tool calls."""
    if len(parts) == 1 and parts[0].tool_call is None:
        return parts[0].text, parts[0].thinking, ()
    text, thinking = "".join(part.text for part in parts), "".join(part.thinking for part in parts)
    return text, thinking, tuple(part.tool_call for part in parts if part.tool_call is not None)


class AnswerParser:
    """Splits an answer into reasoning, text and tool calls, in the order of the answer.

    The pieces that it is given may end anywhere: joined, the parts are the same for any split.

        parser = AnswerParser(tags, is_open, tool_format(tokenizer), checked_tools(tools))
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
        self._thinking = splitter(tags, is_open)
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
    return kept | frozenset(tool_format.tokens.values()) if tool_format is not None else kept


#: What the chat template of a model has in it -> how the model writes calls. The first that fits counts.
_FORMATS = (
    (GEMMA4.trigger, GEMMA4), (FUNCTION_GEMMA.trigger, FUNCTION_GEMMA), ("<function=", XML), ("<arg_key>", GLM),
    ("<tool_call>", HERMES), (CHANNELS.begin, HARMONY), (DEEPSEEK.trigger, DEEPSEEK), ("[ARGS]", MISTRAL),
    (MISTRAL_LIST.trigger, MISTRAL_LIST), (KIMI.trigger, KIMI), (NEMOTRON.trigger, NEMOTRON), (LFM2.trigger, LFM2),
    ("<|tool_list_start|>", LFM2), (OLMO.trigger, OLMO), (GRANITE.trigger, GRANITE),
    ("", LLAMA),
)  # fmt: skip


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """How a model writes tool calls; None without a chat template, or if that cannot be rendered.

    A template that does not show tools to the model gets the prompted form, whatever the vocabulary has.
    """
    if tokenizer.chat_template is None and "tool_use" not in tokenizer.chat_templates:
        return None
    try:
        template = template_of(tokenizer, tools=True)
    except ChatTemplateError:
        return None
    if not template.takes_tools:
        return PROMPTED.of(tokenizer)
    return next(form.of(tokenizer) for text, form in _FORMATS if text in template.source)
