"""`rlx run` over an engine that answers from a script, with the demo model's tokenizer and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine, Opened, install
from terminal import Terminal

from rlx import demo
from rlx.cli.answering import Answer
from rlx.cli.main import cli
from rlx.text import Tokenizer, load_tokenizer

STORY = "Once upon a time,\nthere was a fox. 🦊 Ça va?"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.path())


class Scripted:
    """What the next engine will be like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.script = tokenizer, self.story(tokenizer, STORY)
        self.options: dict[str, Any] = {"max_seq": 128}

    @staticmethod
    def story(tokenizer: Tokenizer, text: str) -> list[int]:
        """The ids of a text and the end of the turn."""
        assert tokenizer.eos_id is not None
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id]

    def make(self, path: Path) -> FakeEngine:
        return FakeEngine(self.tokenizer.vocab_size, tokenizer=self.tokenizer, script=self.script, **self.options)


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Scripted:
    return Scripted(tokenizer)


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, scripted: Scripted) -> Iterator[Opened]:
    opened = install(monkeypatch, scripted.make)
    yield opened
    assert all(engine.closed for engine in opened.engines), "every engine is given back, whatever happened"


def rlx(*args: str, **more: Any) -> Result:
    return CliRunner().invoke(cli, ["run", *args], **more)


def prompt_of(opened: Opened, tokenizer: Tokenizer) -> str:
    """The prompt as the engine saw it."""
    engine = opened.engines[-1]
    return tokenizer.decode(engine.prompts[-1])


# ---------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_text_goes_to_stdout_and_speeds_to_stderr(opened: Opened, options: list[str]) -> None:
    result = rlx("Tell me a story.", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == STORY + "\n"
    assert result.stderr.count("\n") == 1
    for part in ("loaded in ", "prompt: ", "tokens/s", "first token after ", "end of the answer"):
        assert part in result.stderr
    assert opened.calls[0][0] == demo.path()


def test_a_first_run_says_that_it_compiled(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(path: Path) -> FakeEngine:
        engine = scripted.make(path)
        engine.compiles = 3
        return engine

    assert "compiled" not in rlx("Hi").stderr
    install(monkeypatch, make)
    assert rlx("Hi").stderr.endswith("; compiled 3 pieces of code\n")
    found = json.loads(rlx("Hi", "--json").stdout)
    assert (found["compiles"], found["compile_seconds"]) == (3, 0.75)


def test_a_prompt_that_waited_for_compiles_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = iter([10.0, 13.5, 13.6]), iter([0.0, 3.0, 3.0])
    monkeypatch.setattr("rlx.cli.answering.time.perf_counter", lambda: next(clock))
    words: Any = SimpleNamespace(special_ids=frozenset(), drop_space=False, token_bytes=lambda token: b"x")
    answer = Answer(words, None, lambda: None, waited=lambda: next(waited))
    answer.push(1)
    assert (answer.first_seconds, answer.first_wait, answer.prompt_rate(20)) == (3.5, 3.0, None)


def test_the_prompt_goes_through_the_chat_template(opened: Opened, tokenizer: Tokenizer) -> None:
    rlx("Hi there", "--system", "Be brief.")
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(opened, tokenizer) == turns


def test_the_answer_ends_with_max_tokens_or_with_the_context(scripted: Scripted) -> None:
    result = rlx("Hi", "--max-tokens", "3")
    assert result.stdout.rstrip() and STORY.startswith(result.stdout.rstrip())
    assert "stopped by --max-tokens" in result.stderr
    scripted.options["max_seq"] = 12
    result = rlx("--raw", "Hi")
    assert result.exit_code == 0
    assert "stopped by the end of the context" in result.stderr


def test_text_is_streamed_whole_characters_at_a_time(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """Each piece as it is written; the fox has four bytes and may be several tokens."""

    class Terminal:
        def __init__(self) -> None:
            self.written: list[str] = []

        def write(self, text: str) -> None:
            self.written.append(text)

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return True

    terminal, before = Terminal(), list[int]()
    answer = Answer(tokenizer, terminal, lambda: before.append(len(terminal.written)))  # type: ignore[arg-type]
    for token in Scripted.story(tokenizer, "a🦊\x1b[2J"):
        answer.push(token)
    answer.finish()
    assert "".join(terminal.written) == "a🦊\\x1b[2J\n", "control characters are written out in a terminal"
    assert all("�" not in piece for piece in terminal.written)
    assert before[0] == 0
    assert answer.text == "a🦊\x1b[2J"


# ---------------------------------------------------------------------------------------------------- json


def rows_of(sent: str) -> list[str]:
    """The rows of a terminal after what was sent to it: moves to the left, and clears the rest of the row."""
    rows = [""]
    for text, left in re.findall(r"([^\x1b\n]+)|\x1b\[(\d+)D\x1b\[K|\n", sent):
        if left:
            rows[-1] = rows[-1][: -int(left)].rstrip()
        elif text:
            rows[-1] += text
        else:
            rows.append("")
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize("options", [(), ("--no-stream",)])
def test_rows_of_a_terminal_break_between_words_and_code_stays_whole(
    scripted: Scripted, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    text = "One fox runs over a hill.\n```\nfor fox in foxes: run(fox)\n```\nIt was a brave fox."
    scripted.script = Scripted.story(tokenizer, text)
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    monkeypatch.setattr("rlx.cli.run.stdout", lambda: out)
    assert rlx("Hello", *options).exit_code == 0
    rows = rows_of(out.getvalue())
    code = ["```", "for fox in foxes: run(fox)", "```"]
    assert rows == ["One fox runs", "over a hill.", *code, "It was a", "brave fox.", ""], "two rows are full"


def test_rows_of_a_given_form_do_not_break(
    scripted: Scripted, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON can be copied, and a terminal without escape sequences gets none."""
    scripted.script = Scripted.story(tokenizer, "A fox ran over the hill.")
    monkeypatch.setenv("COLUMNS", "12")
    for terminal, options in (("xterm", ("--regex", ".*")), ("dumb", ())):
        out = Terminal()
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.setattr("rlx.cli.run.stdout", lambda out=out: out)
        assert rlx("Hello", *options).exit_code == 0
        assert out.getvalue() == "A fox ran over the hill.\n"


def test_json_is_one_object(tokenizer: Tokenizer, scripted: Scripted) -> None:
    result = rlx("Hi", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["text"] == STORY
    assert found["ids"] == scripted.script
    assert (found["tokens"], found["end"], found["family"]) == (len(scripted.script), "stop", "qwen3")
    assert found["prompt_tokens"] == len(
        tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", parse_special=True)
    )
    for figure in ("load_seconds", "first_token_seconds", "prompt_tokens_per_second", "tokens_per_second"):
        assert found[figure] > 0


# ---------------------------------------------------------------------------------------------------- options


def test_engine_options_reach_the_engine(opened: Opened, demo_model: Path) -> None:
    rlx("Hi")
    assert opened.options["progress"] is not None
    assert opened.options.keys() == {"progress", "compile_ahead"}
    assert opened.options["compile_ahead"] is False, "as the variable says in tests"
    given = "--threads 3 --max-seq 99 --kv-dtype bf16 --precision exact --profile p.toml --dump-ir ir --keep-packed"
    rlx(str(demo_model), "Hi", *given.split())
    expected = {
        "threads": 3,
        "max_seq": 99,
        "kv_dtype": "bf16",
        "precision": "exact",
        "profile": "p.toml",
        "dump_ir": "ir",
        "keep_packed": True,
    }
    assert {k: opened.options[k] for k in expected} == expected


def test_what_the_prompt_needs_is_compiled_ahead(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as its length says which program it needs; each further token is a call of its own."""
    monkeypatch.delenv("RLX_COMPILE_AHEAD")
    rlx("x" * 400)
    assert opened.options["compile_ahead"] == [70, 1]
    for most, calls in (("1", [70]), ("2", [70, 1])):
        rlx("x" * 400, "--max-tokens", most)
        assert opened.options["compile_ahead"] == calls
    rlx("Tell me a story.")  # the programs for 2 to 16 and for 17 to 512 tokens are both possible
    assert opened.options["compile_ahead"] == [1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Missing PROMPT"),
        (["model.gguf", "a", "prompt"], "expected [MODEL] PROMPT, found model.gguf a prompt: put the prompt in quotes"),
        (["model.gguf"], "'model.gguf' is a model, and there is no prompt"),
        ([""], "prompt: it is empty. Give the text"),
        (
            ["Hi", "--raw", "--system", "x"],
            "--system, --thinking and --image need the chat template, and --raw leaves it out",
        ),
        (
            ["Hi", "--raw", "--no-thinking"],
            "--system, --thinking and --image need the chat template, and --raw leaves it out",
        ),
        (["Hi", "--no-thinking"], "--thinking: the model's chat template has no enable_thinking. Leave it out."),
        (["Hi", "--temperature", "-1"], "Error: --temperature is -1.0, expected a finite number of at least 0"),
        (["Hi", "--temperature", "1", "--top-p", "2"], "Error: --top-p is 2.0, expected 0 to 1"),
        (["Hi", "--max-tokens", "0"], "'0' is neither a number of tokens nor -1"),
        (["Hi", "--precision", "low"], "'low' is not one of 'auto', 'exact'"),
        (["gone.gguf", "Hi"], "gone.gguf: there is no such file or directory"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(args: list[str], said: str) -> None:
    result = rlx(*args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


# ---------------------------------------------------------------------------------------------------- trouble


def after(count: int, error: BaseException) -> Any:
    """A rule that raises in the step after `count` tokens in the cache."""

    def rule(ids: list[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if len(ids) > count:
            raise error
        return logits

    return rule


def test_an_interrupt_keeps_the_text_so_far(scripted: Scripted, tokenizer: Tokenizer) -> None:
    prompt = len(tokenizer.encode("Hi"))
    scripted.options["rule"] = after(prompt + 3, KeyboardInterrupt())
    result = rlx("--raw", "Hi")
    expected = tokenizer.decode(scripted.script[:4])
    assert (result.exit_code, result.stdout) == (130, expected + "\n")
    assert "interrupted" in result.stderr
    result = rlx("--raw", "Hi", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["end"], found["text"]) == (130, "interrupted", expected)
