"""Answers in channels (gpt-oss): reasoning, text and calls, however the text is split."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rlx.text.answer import CHANNELS, AnswerParser
from rlx.text.tool_calls import Tool
from rlx.text.tool_calls.headed import HARMONY

THINKS = "<|channel|>analysis<|message|>The user greets me.<|end|>"
SAYS = "<|start|>assistant<|channel|>final<|message|>Hello!"
ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
HEADERS = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.weather<|message|>",
)
CASES = [
    (THINKS + SAYS, "The user greets me.", "Hello!", []),
    (THINKS + SAYS + "<|return|>", "The user greets me.", "Hello!", []),
    ("<|channel|>final<|message|>Hello!", "", "Hello!", []),
    ("Hello! 1 < 2 <b>", "", "Hello! 1 < 2 <b>", []),
    (THINKS, "The user greets me.", "", []),
    ("<|channel|>analysis<|message|>The user", "The user", "", []),
    (THINKS + "<|start|>assistant<|channel|>fin", "The user greets me.", "", []),
    (THINKS + "<|start|>assistant" + THINKS.replace("The user greets me.", "Well.") + SAYS,
     "The user greets me.\nWell.", "Hello!", []),
    (THINKS + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + SAYS,
     "The user greets me.", "I look.\nHello!", []),
    *((THINKS + header + ARGUMENTS + end, "The user greets me.", "", [("weather", ARGUMENTS)])
      for header in HEADERS for end in ("", "<|call|>")),
    (" to=functions.weather<|channel|>commentary json<|message|>" + ARGUMENTS, "", "", [("weather", ARGUMENTS)]),
    ("<|channel|>commentary to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("answer", "thinking", "text", "calls"), CASES)
def test_channels(answer: str, thinking: str, text: str, calls: list[tuple[str, str]], size: int) -> None:
    parser = AnswerParser(CHANNELS, False, HARMONY.of(), [Tool("weather")], lambda: "id")
    cuts = [*range(0, len(answer), size), len(answer)]
    parts = [part for a, b in pairwise(cuts) for part in parser.push(answer[a:b])] + parser.finish()
    assert "".join(part.thinking for part in parts) == thinking
    assert "".join(part.text for part in parts).strip() == text
    deltas = [part.tool_call for part in parts if part.tool_call]
    assert [delta.name for delta in deltas if delta.name] == [name for name, _ in calls]
    assert "".join(delta.arguments for delta in deltas) == "".join(arguments for _, arguments in calls)
