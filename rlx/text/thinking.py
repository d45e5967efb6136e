"""Reasoning in an answer: where a model's thinking ends and what it says begins.

Text stage, used by the runners' text methods and by `rlx chat`. Models that reason write it between two tags in front
of the answer; the chat template may have written the first tag already, as the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.text.tokenizer import Tokenizer

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
    """The tags around a model's reasoning, such as `<think>` and `</think>`."""

    begin: str
    end: str

    @staticmethod
    def of(tokenizer: Tokenizer) -> ThinkingTags | None:
        """Those that the model's chat template or vocabulary knows; None if there are none."""
        template = tokenizer.chat_template or ""
        for begin, end in _TAGS:
            if end in template or (tokenizer.token_to_id(begin) is not None and tokenizer.token_to_id(end) is not None):
                return ThinkingTags(begin, end)
        return None

    def ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The control tokens that are a tag or a part of one: texts of answers must not leave them out."""
        texts = {token: tokenizer.vocabulary.tokens[token] for token in tokenizer.special_ids}
        return frozenset(token for token, text in texts.items() if text and (text in self.begin or text in self.end))

    def is_open(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside the reasoning."""
        return tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(self.begin)

    def is_closed(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends behind the reasoning, so that the answer has none."""
        return tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(self.end)


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
        waits = next((n for n in range(min(len(end) - 1, len(thought)), 0, -1) if thought.endswith(end[:n])), 0)
        certain = thought[: len(thought) - waits].rstrip()
        self._held = thought[len(certain) :]
        return self._stripped(certain), ""

    def _stripped(self, text: str) -> str:
        """The text, without leading space where nothing came before it."""
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        return text
