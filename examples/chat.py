#!/usr/bin/env python3
"""A chat in the terminal: streams the answer, keeps the conversation, stops where the model says so.

python examples/chat.py [MODEL]          (the embedded demo model by default; Ctrl-D ends)
"""

from __future__ import annotations

import sys

import rlx
from rlx import demo


def answer(runner: rlx.LmRunner, messages: list[dict[str, str]]) -> str:
    """Prints the answer while it is made, and returns it."""
    text = rlx.StreamDetokenizer(runner.tokenizer, skip_special_tokens=True, continues=True)
    parts: list[str] = []

    def show(token: int) -> bool:
        parts.append(text.push(token))
        print(parts[-1], end="", flush=True)
        return True  # False would stop the generation

    runner.generate(runner.chat_ids(messages), 256, on_token=show)
    parts.append(text.finish())
    print(parts[-1])
    return "".join(parts)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo.path()
    messages: list[dict[str, str]] = []
    with rlx.auto_runner(path) as runner:
        while True:
            try:
                question = input("> ")
            except EOFError:
                return
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer(runner, messages)})


if __name__ == "__main__":
    main()
