"""`rlx chat` over an engine that answers by a rule, with the demo model's tokenizer and chat template."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine, Opened, install

from rlx import demo
from rlx.cli.main import cli, main
from rlx.runners import CachedRunner
from rlx.text import Tokenizer, load_tokenizer

USER, HEAD, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
SLOW = "Take your time."
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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.path())


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, talker: Talker) -> Iterator[Opened]:
    opened = install(monkeypatch, talker.make)
    yield opened
    assert all(engine.closed for engine in opened.engines), "every engine is given back, whatever happened"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, talker: Talker) -> list[str]:
    """The prompts of all turns, as text."""
    seen: list[str] = []
    generate = CachedRunner.generate

    def watched(self: CachedRunner, ids: Any, *args: Any, **options: Any) -> Any:
        seen.append(talker.tokenizer.decode(ids))
        return generate(self, ids, *args, **options)

    monkeypatch.setattr(CachedRunner, "generate", watched)
    return seen


def chat(said: str | bytes, *args: str) -> Result:
    return CliRunner().invoke(cli, ["chat", *args], input=said)


def turns(*messages: str) -> str:
    """The prompt of a conversation, from a question to the head of the answer to the last one."""
    heads = (USER, HEAD)
    return "".join(f"{heads[i % 2]}{message}{END}\n" for i, message in enumerate(messages)) + HEAD


# ---------------------------------------------------------------------------------------------------- a pipe


def test_a_pipe_gets_an_answer_a_line(opened: Opened, prompts: list[str]) -> None:
    result = chat("Hi\n\n  \nIs it a fox? 🦊\r\nBye")
    assert result.exit_code == 0, result.output
    assert result.stdout == "You said: Hi\nYou said: Is it a fox? 🦊\nYou said: Bye\n"
    assert result.stderr == ""
    assert prompts[-1] == turns("Hi", "You said: Hi", "Is it a fox? 🦊", "You said: Is it a fox? 🦊", "Bye")
    assert opened.calls[0][0] == demo.path()


def test_a_turn_computes_its_new_tokens_only(opened: Opened, talker: Talker) -> None:
    chat("Hi\nBye\n")
    encode = talker.tokenizer.encode
    first, answer = encode(turns("Hi"), parse_special=True), talker.script("You said: Hi")
    second = encode(turns("Hi", "You said: Hi", "Bye"), parse_special=True)
    calls = opened.engines[0].calls
    steps = len(answer) - 1  # the end of the answer is not in the session yet
    assert calls[: 1 + steps] == [len(first), *[1] * steps]
    assert calls[1 + steps] == len(second) - len(first) - steps


def test_no_lines_and_a_closed_stdin_are_a_short_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    result = chat("")
    assert (result.exit_code, result.output) == (0, "")
    monkeypatch.setattr("rlx.cli.chat.sys", SimpleNamespace(stdin=None))
    result = chat("Hi\n")
    assert (result.exit_code, result.output) == (0, "")


def test_bytes_that_are_not_utf8_are_replaced(prompts: list[str]) -> None:
    assert chat(b"Hi \xff\n", "--system", os.fsdecode(b"\xfe")).exit_code == 0
    assert prompts == [f"<|im_start|>system\n\N{REPLACEMENT CHARACTER}{END}\n{turns('Hi ' + chr(0xFFFD))}"]


def test_control_tokens_of_an_answer_stay_in_the_conversation_only(talker: Talker, prompts: list[str]) -> None:
    talker.script = lambda text: [  # type: ignore[method-assign]
        *talker.tokenizer.encode(f"{USER.strip()} {text}", parse_special=True), talker.tokenizer.eos_id or 0
    ]  # fmt: skip
    assert chat("Hi\nBye\n").stdout.splitlines()[0] == "user You said: Hi"
    assert prompts[1] == turns("Hi", "<|im_start|>user You said: Hi", "Bye")


# ---------------------------------------------------------------------------------------------------- options


def test_the_options_reach_the_turns(talker: Talker, opened: Opened, prompts: list[str]) -> None:
    template = "{{ enable_thinking }}{% for m in messages %}|{{ m.role }}:{{ m.content }}{% endfor %}"
    talker.tokenizer = replace(talker.tokenizer, chat_templates={"default": template})
    given = "--no-thinking --system Brief. --max-tokens 1 --max-seq 99 --threads 2 --speculative prompt-lookup"
    result = chat("Hi\n", *given.split(), "--temperature", "1", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert prompts == ["False|system:Brief.|user:Hi"]
    assert (opened.options["max_seq"], opened.options["threads"]) == (99, 2)


def test_guesses_and_samples_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    generate = CachedRunner.generate

    def watched(self: CachedRunner, ids: Any, most: int, on_token: Any, sample: Any, **more: Any) -> Any:
        seen.append((most, sample.temperature, more["speculative"], more["min_tokens"], more["stop"]))
        return generate(self, ids, most, on_token, sample, **more)

    monkeypatch.setattr(CachedRunner, "generate", watched)
    options = "--max-tokens 9 --min-tokens 2 --stop x --temperature 0.5 --speculative prompt-lookup".split()
    assert chat("Hi\n", *options).exit_code == 0
    assert seen == [(9, 0.5, "prompt-lookup", 2, ("x",))]


def test_the_model_is_the_argument(opened: Opened, goldens: Path) -> None:
    path = goldens / "qwen3" / "model-f16.gguf"
    assert chat("", str(path)).exit_code == 0
    assert opened.calls[0][0] == path


def test_an_answer_that_was_cut_says_so_and_stays(prompts: list[str], talker: Talker) -> None:
    result = chat("Hi\nBye\n", "--max-tokens", "2")
    cut = talker.tokenizer.decode(talker.script("You said: Hi")[:2])
    assert result.stdout.splitlines()[0] == cut
    assert result.stderr == "(stopped by --max-tokens)\n" * 2
    assert prompts[1] == turns("Hi", cut.strip(), "Bye")


def test_a_stop_string_ends_what_is_kept(prompts: list[str]) -> None:
    result = chat("Hi\nBye\n", "--stop", " said")
    assert (result.stdout, result.stderr) == ("You\nYou\n", "")
    assert prompts[1] == turns("Hi", "You", "Bye")


# ---------------------------------------------------------------------------------------------------- a full context


def test_the_oldest_turns_are_left_out_but_never_the_system_message(talker: Talker, prompts: list[str]) -> None:
    questions = [f"Question {i} about a fox." for i in range(12)]
    result = chat("\n".join(questions), "--system", "Be brief.", "--max-tokens", "40")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"You said: {question}" for question in questions]
    notes = result.stderr.splitlines()
    assert notes and all(note.startswith("(the context is full: ") for note in notes)
    assert all("3 old turns left out" in note for note in notes), "so that the next turns find room"
    left_out = sum(int(note.split(": ")[1].split()[0]) for note in notes)
    rest = [text for question in questions[left_out:] for text in (question, f"You said: {question}")][:-1]
    assert prompts[-1] == f"<|im_start|>system\nBe brief.{END}\n{turns(*rest)}"
    assert all(len(talker.tokenizer.encode(prompt, parse_special=True)) <= 256 - 40 for prompt in prompts)


def test_an_answer_of_any_length_leaves_half_of_the_context_to_the_turns(prompts: list[str]) -> None:
    assert chat("Hi\nBye\n", "--max-tokens", "100000").stderr == ""
    assert prompts[1] == turns("Hi", "You said: Hi", "Bye")


def test_a_message_longer_than_the_context_is_refused_and_removed(prompts: list[str]) -> None:
    result = chat(f"Hi\n{'much too long ' * 100}\nBye\n")
    assert result.exit_code == 0
    assert result.stdout == "You said: Hi\nYou said: Bye\n"
    assert "Error: prompt: it has " in result.stderr
    assert "and the context holds 256. Shorten it, or open the model with a --max-seq" in result.stderr
    assert "left out" not in result.stderr
    assert prompts[-1] == turns("Hi", "You said: Hi", "Bye")


# ---------------------------------------------------------------------------------------------------- errors


def test_a_model_without_a_template_is_refused(talker: Talker, goldens: Path) -> None:
    talker.tokenizer = replace(talker.tokenizer, chat_templates={})
    path = goldens / "qwen3" / "model-f16.gguf"
    result = chat("Hi\n", str(path))
    said = "the model has no chat template. It may be a base model: `rlx run MODEL PROMPT` continues a text."
    assert (result.exit_code, result.output) == (2, f"Error: {path}: {said}\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["a.gguf", "Hi"], "unexpected extra argument"),
        (["gone.gguf"], "gone.gguf: there is no such file or directory"),
        (["--thinking"], "--thinking: the model's chat template has no enable_thinking. Leave it out."),
        (["--top-k", "4"], "--top-k does nothing at temperature 0"),
        (["--speculative", "guess"], "'guess' is not one of 'prompt-lookup', 'mtp'"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(args: list[str], said: str) -> None:
    result = chat("Hi\n", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_turn_that_the_template_refuses_is_taken_back(talker: Talker) -> None:
    template = talker.tokenizer.chat_template
    refusing = f"{{% if 'no' in messages[-1].content %}}{{{{ raise_exception('not that') }}}}{{% endif %}}{template}"
    talker.tokenizer = replace(talker.tokenizer, chat_templates={"default": refusing})
    result = chat("Hi\nno\nBye\n")
    assert (result.exit_code, result.stdout) == (0, "You said: Hi\nYou said: Bye\n")
    assert "Error: chat template: the template refuses the conversation: not that" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in chat("no\n", "--debug").stderr


def test_broken_logits_take_the_turn_back(talker: Talker, prompts: list[str]) -> None:
    rule = talker.rule
    talker.rule = lambda ids, logits: (
        rule(ids, logits)
        * (  # type: ignore[method-assign]
            np.nan if "break" in talker.tokenizer.decode(ids) else 1
        )
    )
    result = chat("Hi\nbreak it\nBye\n")
    assert (result.exit_code, result.stdout) == (0, "You said: Hi\nYou said: Bye\n")
    assert "logit 0 is nan" in result.stderr
    assert prompts[-1] == turns("Hi", "You said: Hi", "Bye")


def test_any_other_error_ends_it(talker: Talker) -> None:
    talker.trouble["Hi"] = 1, raising(ZeroDivisionError("not ours"))
    result = chat("Hi\nBye\n")
    assert result.exit_code == 1
    assert "unexpected ZeroDivisionError: not ours. --debug shows" in result.stderr
    assert "Bye" not in result.stdout


# ---------------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_keeps_what_was_said(talker: Talker, prompts: list[str]) -> None:
    talker.trouble["Hi"] = 2, raising(KeyboardInterrupt())
    said = talker.tokenizer.decode(talker.script("You said: Hi")[:2])
    result = chat("Hi\nBye\n")
    assert (result.exit_code, result.stdout) == (0, f"{said}\nYou said: Bye\n")
    assert result.stderr == "(interrupted)\n"
    assert prompts[1] == turns("Hi", said.strip(), "Bye")


@pytest.mark.parametrize("where", ["engine", "template"])
def test_an_interrupt_before_the_answer_takes_the_turn_back(
    talker: Talker, prompts: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    talker.trouble["Hi"] = 0, raising(KeyboardInterrupt())
    if where == "template":
        chat_ids = CachedRunner.chat_ids

        def interrupted(self: CachedRunner, messages: Any, **more: Any) -> list[int]:
            return raising(KeyboardInterrupt())() if messages[-1]["content"] == "Hi" else chat_ids(self, messages)

        monkeypatch.setattr(CachedRunner, "chat_ids", interrupted)
    result = chat("Hi\nBye\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "You said: Bye\n", "(interrupted)\n")
    assert prompts[-1] == turns("Bye")


class Terminal:
    """`rlx chat` in a terminal of its own."""

    def __init__(self) -> None:
        self._fd, slave = pty.openpty()
        folders = list(map(str, TEST_FOLDERS))
        code = f"import sys; sys.path[:0] = {folders}; import test_chat_cli; test_chat_cli.in_a_terminal()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "dumb", "INPUTRC": os.devnull},
        )  # fmt: skip
        os.close(slave)

    def keys(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """What is on the terminal from here to `text`."""
        shown = ""
        while not shown.endswith(text):
            assert select.select([self._fd], [], [], 60)[0], f"{text!r} is not in {shown!r}"
            shown += os.read(self._fd, 1).decode("latin-1")
        return shown

    def ended(self) -> int:
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            os.close(self._fd)


def in_a_terminal() -> None:
    """The other side of `Terminal`: an engine that waits in the middle of an answer."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ^C is a signal
    talker = Talker()
    talker.trouble[SLOW] = 2, lambda: time.sleep(60)
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, talker.make)
        sys.argv = ["rlx", "chat"]
        main()


@pytest.mark.parametrize(("key", "status"), [("\x04", 0), ("\x03", 130)])
def test_keys_in_a_terminal(talker: Talker, key: str, status: int) -> None:
    """Ctrl-C stops an answer; at the prompt it ends the chat, and so does Ctrl-D."""
    terminal = Terminal()
    terminal.until("> ")
    terminal.keys(f"{SLOW}\n")
    terminal.until(talker.tokenizer.decode(talker.script(f"You said: {SLOW}")[:2]))
    terminal.keys("\x03")
    assert "(interrupted)" in terminal.until("> ")
    terminal.keys("Hii\x7f\n")  # a line that was edited
    terminal.until("You said: Hi\r\n")
    terminal.until("> ")
    terminal.keys(key)
    assert terminal.ended() == status
