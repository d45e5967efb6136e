"""A user of `rlx chat` in a terminal that exists in memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from talker import Talker

from rlx.cli.chat import commands, editor
from rlx.cli.interrupts import Interrupts
from rlx.cli.main import cli
from rlx.runners import Model


class Desk:
    """A user who types the next keys when the prompt is shown.

    Attributes:
        pieces: keys, a prompt each; at the end Ctrl-D.
        prompts: what the model was asked, as text.
        cleared: how often Ctrl-C reached a prompt.
        shown: called with every prompt's number just before it is shown.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, talker: Talker) -> None:
        self.pieces: list[str] = []
        self.prompts: list[str] = []
        self.cleared, self.count = 0, 0
        self.shown: Callable[[int], object] = lambda number: None
        self._patch, self._talker = monkeypatch, talker
        generate, interrupted = Model.generate, editor.Editor._interrupted

        def watched(runner: Model, ids: Any, *args: Any, **options: Any) -> Any:
            self.prompts.append(talker.tokenizer.decode(runner.checked_prompt(ids).ids))
            return generate(runner, ids, *args, **options)

        def cleared(edit: editor.Editor, event: Any) -> None:
            self.cleared += 1
            interrupted(edit, event)

        monkeypatch.setattr(Model, "generate", watched)
        monkeypatch.setattr(editor.Editor, "_interrupted", cleared)

    def chat(self, *pieces: str, args: tuple[str, ...] = (), source: Any = None) -> Result:
        self.pieces = [*pieces]
        with ExitStack() as stack:
            keys = source or stack.enter_context(create_pipe_input())

            @contextmanager
            def messages(interrupts: Interrupts, keep: bool) -> Iterator[Iterator[str]]:
                edit = editor.Editor(keys, DummyOutput(), interrupts, InMemoryHistory())
                prompt = edit._session.prompt

                def typing(**options: Any) -> str:
                    self.shown(self.count)
                    self.count += 1
                    keys.send_text(self.pieces.pop(0) if self.pieces else "\x04")
                    return prompt(**options)

                self._patch.setattr(edit._session, "prompt", typing)
                yield edit.messages()

            self._patch.setattr(commands, "_messages", messages)
            self._patch.setattr(commands, "is_terminal", lambda stream: True)
            return CliRunner().invoke(cli, ["chat", *args])
