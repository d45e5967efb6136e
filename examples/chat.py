#!/usr/bin/env python3
"""A chat in the terminal: streams the answer, keeps the conversation, stops where the model says so.

python examples/chat.py [MODEL]          (the embedded demo model by default; Ctrl-D ends)
"""

from __future__ import annotations

import sys

import rlx
from rlx import demo
from rlx.runners import CachedRunner

LONGEST = 256  # tokens of an answer


def recent(runner: CachedRunner, messages: list[dict[str, str]]) -> list[int]:
    """The ids of the conversation; its oldest turns are dropped where they leave no room for an answer."""
    while len(ids := runner.chat_ids(messages)) + LONGEST > runner.max_seq and len(messages) > 1:
        del messages[:2]
    return ids


def answer(runner: CachedRunner, ids: list[int]) -> str:
    """Prints the answer while it is made, and returns it."""
    text = rlx.StreamDetokenizer(runner.tokenizer, skip_special_tokens=True, continues=True)
    parts: list[str] = []

    def show(token: int) -> bool:
        parts.append(text.push(token))
        print(parts[-1], end="", flush=True)
        return True  # False would stop the generation

    runner.generate(ids, LONGEST, on_token=show)
    parts.append(text.finish())
    print(parts[-1])
    return "".join(parts)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo.path()
    messages: list[dict[str, str]] = []
    with rlx.auto_runner(path) as runner:
        try:
            while True:
                messages.append({"role": "user", "content": input("> ")})
                messages.append({"role": "assistant", "content": answer(runner, recent(runner, messages))})
        except (EOFError, KeyboardInterrupt):
            print()


if __name__ == "__main__":
    main()
