#!/usr/bin/env python3
"""A chat in the terminal: streams the answer, keeps the conversation, stops where the model says so.

python examples/chat.py [MODEL]          (the demo model by default; Ctrl-D ends)
"""

from __future__ import annotations

import sys

import rlx
from rlx.runners import Model

LONGEST = 256  # tokens of an answer


def drop_old(runner: Model, messages: list[dict[str, str]]) -> None:
    """Drops the oldest turns of a conversation where they leave no room for an answer."""
    while len(runner.chat_ids(messages)) + LONGEST > runner.max_seq and len(messages) > 1:
        del messages[:2]


def answer(runner: Model, messages: list[dict[str, str]]) -> str:
    """Prints the answer while it is made, and returns it."""
    parts: list[str] = []
    for step in runner.chat_stream(messages, max_tokens=LONGEST, sample="recommended"):
        parts.append(step.text)
        print(step.text, end="", flush=True)
    print()
    return "".join(parts)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else None  # the demo model
    messages: list[dict[str, str]] = []
    with rlx.auto_runner(path) as runner:
        try:
            while True:
                messages.append({"role": "user", "content": input("> ")})
                drop_old(runner, messages)
                messages.append({"role": "assistant", "content": answer(runner, messages)})
        except (EOFError, KeyboardInterrupt):
            print()


if __name__ == "__main__":
    main()
