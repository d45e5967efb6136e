"""Answers in channels ("harmony", gpt-oss): several messages, each with a header that says what it is.

    <|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>

Text stage, used by `answer.py`. What is in the channel `analysis`, or sent to a tool of the model's own, is reasoning;
what is in `final` or `commentary` is text. A call of a function is a message to `functions.NAME`: it becomes a text
with one form of header, which `tool_calls/headed.py` reads. Source: the format's description by OpenAI (Apache-2.0).
"""

from __future__ import annotations

import re

from rlx.text.tool_calls.reader import tail_of

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
FUNCTIONS = "functions."
CALL_HEADER = f"{CHANNEL}commentary to={FUNCTIONS}"

_MARKERS = (END, CALL, RETURN, START, CHANNEL)  # where a message ends
_ENDS = re.compile("|".join(map(re.escape, _MARKERS)))
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_MAX_HEADER = 1000


class ChannelSplitter:
    """Splits the text of an answer, piece by piece, into reasoning and the rest. A text without a header is the rest.

    Several messages of one kind have a line break between them.
    """

    def __init__(self) -> None:
        self._held, self._kind = "", "header"
        self._begun = ""  # the header of a call, to be given out
        self._last = ""  # the kind of the message before that was reasoning or text
        self._given = {"thinking": False, "text": False}

    def push(self, text: str) -> tuple[str, str]:
        """More text: what is certainly reasoning, and what is certainly not."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> tuple[str, str]:
        """No more text: the rest."""
        return self._read(final=True)

    def _read(self, final: bool) -> tuple[str, str]:
        found = {"thinking": "", "text": ""}
        while self._kind != "header" or self._has_header(final):
            end = _ENDS.search(self._held)
            waits = 0 if final or end else tail_of(self._held, _MARKERS)
            said = self._held[: end.start()] if end else self._held[: len(self._held) - waits]
            found["thinking" if self._kind == "thinking" else "text"] += self._separated(said)
            self._held = self._held[len(said) :]
            if end is None:
                break
            self._after(end[0], found)
        return found["thinking"], found["text"]

    def _separated(self, said: str) -> str:
        """A piece of a message, after a line break if another message of its kind came before."""
        if self._kind == "call":
            header, self._begun = self._begun, ""
            return header + said
        if not said:
            return said
        breaks = "\n" if self._last != self._kind and self._given[self._kind] else ""
        self._last, self._given[self._kind] = self._kind, True
        return breaks + said

    def _after(self, marker: str, found: dict[str, str]) -> None:
        """The end of a message."""
        if self._kind == "call":
            found["text"] += CALL
        if marker in (END, CALL, RETURN):
            self._held = self._held[len(marker) :]
        self._kind, self._last = "header", ""

    def _has_header(self, final: bool) -> bool:
        """Reads a header, if all of it is there; what cannot be one is text."""
        head, found, rest = self._held.partition(MESSAGE)
        if not found:
            begins = (START, CHANNEL, " to=", "assistant")
            is_header = any(head.startswith(begin) or begin.startswith(head) for begin in begins)
            if not head or (is_header and not final and len(head) < _MAX_HEADER):
                return False
            if is_header and head.startswith((START, CHANNEL)):  # cut off
                self._held = ""
                return False
            self._kind = "text"
            return True
        recipient = _RECIPIENT.search(head)
        if recipient and recipient[1].startswith(FUNCTIONS):
            self._kind, self._held = "call", rest
            self._begun = CALL_HEADER + recipient[1].removeprefix(FUNCTIONS) + MESSAGE
            return True
        self._kind = "thinking" if recipient or f"{CHANNEL}analysis" in head else "text"
        self._held = rest
        return True
