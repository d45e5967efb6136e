"""An engine that answers by a rule, with the demo model's tokenizer and chat template, and a terminal to run it in."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, install

from rlx import demo
from rlx.cli.main import main
from rlx.text import load_tokenizer

USER, HEAD, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
PATIENCE = float(os.environ.get("RLX_TEST_PATIENCE", "60"))  # seconds without a sign of life
SLOW, WAITS = "Take your time.", "(it waits)"  # a question, and what the terminal shows in the middle of the answer
TEST_FOLDERS = Path(__file__).parents[1], Path(__file__).parent


class Talker:
    """What the next engine will say: by default 'You said: ' and the question.

    Attributes:
        trouble: by question: after how many tokens of the answer something is done, once, before the next one.
        answers: by question: another answer.
    """

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(demo.path())
        self.trouble: dict[str, tuple[int, Any]] = {}
        self.answers: dict[str, str] = {}
        self.options: dict[str, Any] = {"max_seq": 256}

    def rule(self, ids: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Logits that choose the next token of the answer to the last question in `ids`."""
        before, head, answer = self.tokenizer.decode(ids).rpartition(HEAD)
        if not head or END in answer:  # within a prompt
            return logits
        question = before.rpartition(USER)[2].partition(END)[0]
        script = self.script(self.answers.get(question, f"You said: {question}"))
        at = len(ids) - len(self.tokenizer.encode(before + head, parse_special=True))
        if question in self.trouble and at == self.trouble[question][0]:
            self.trouble.pop(question)[1]()
        return np.where(np.arange(len(logits)) == script[min(at, len(script) - 1)], 9.0, 0.0)

    def script(self, text: str) -> list[int]:
        assert self.tokenizer.eos_id is not None
        return [*self.tokenizer.encode(text), self.tokenizer.eos_id]

    def make(self, path: Path) -> FakeEngine:
        return FakeEngine(self.tokenizer.vocab_size, tokenizer=self.tokenizer, rule=self.rule, **self.options)


def raising(error: BaseException) -> Any:
    def trouble() -> None:
        raise error

    return trouble


def turns(*messages: str) -> str:
    """The prompt of a conversation, from a question to the head of the answer to the last one."""
    heads = (USER, HEAD)
    return "".join(f"{heads[i % 2]}{message}{END}\n" for i, message in enumerate(messages)) + HEAD


class Terminal:
    """`rlx chat` in a terminal of its own.

    Args:
        term: which terminal it says it is.
        columns: how wide it is.
    """

    def __init__(self, term: str, folder: Path, columns: int = 80) -> None:
        self._term = term
        self._fd, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (24, columns))
        self.modes = termios.tcgetattr(self._slave)
        slave = self._slave
        folders = list(map(str, TEST_FOLDERS))
        code = f"import sys; sys.path[:0] = {folders}; import talker; talker.in_a_terminal()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": term, "XDG_STATE_HOME": str(folder)},
        )  # fmt: skip

    def keys(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def prompt(self) -> None:
        """Waits for a prompt: in front of it the editor hides the cursor, and shows it again."""
        self.until("> " if self._term == "dumb" else "\x1b[?25h")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def until(self, text: str) -> str:
        """What is on the terminal from here to `text`."""
        shown = ""
        while not shown.endswith(text):
            assert select.select([self._fd], [], [], PATIENCE)[0], f"{text!r} is not in {shown!r}"
            shown += os.read(self._fd, 1).decode("latin-1")
        return shown

    def ended(self) -> int:
        try:
            return self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self.modes_after = termios.tcgetattr(self._slave)
            os.close(self._slave)
            os.close(self._fd)


def in_a_terminal() -> None:
    """The other side of `Terminal`: an engine that waits in the middle of an answer."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ^C is a signal
    talker = Talker()

    def wait() -> None:
        os.write(1, WAITS.encode())
        end = time.monotonic() + 60
        while time.monotonic() < end and not any(loop.executor.inbox for loop in loops):
            time.sleep(0.01)  # a step that lasts until its answer is not wanted any more

    from rlx.engine.loop.loop import _loops as loops

    talker.trouble[SLOW] = 2, wait
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Turns may be long here, so the loop's own thread computes all of them: Ctrl-C waits for those of a caller.
        monkeypatch.setattr("rlx.engine.loop.executor.BRIEF", 0.0)
        install(monkeypatch, talker.make)
        sys.argv = ["rlx", "chat"]
        main()
