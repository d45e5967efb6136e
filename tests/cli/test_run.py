"""`rlx run` over an engine that answers from a script, with the demo model's tokenizer and chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine, Opened, install
from terminal import Terminal

from rlx import demo
from rlx.cli import output
from rlx.cli.answering import Answer, speeds
from rlx.cli.main import cli
from rlx.cli.output import Bars
from rlx.runners import CachedRunner
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


def test_text_is_not_broken_by_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a terminal for stderr: rich would send what is written beside its bars there, a line a token."""
    terminal = Terminal()
    monkeypatch.setattr("rlx.cli.run.Bars", lambda first: Bars(first, file=terminal))
    assert rlx("Tell me a story.").stdout == STORY + "\n"
    assert "reading the prompt" in terminal.getvalue()
    assert "fox" not in terminal.getvalue()


def test_a_first_run_says_that_it_compiled(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(path: Path) -> FakeEngine:
        engine = scripted.make(path)
        engine.compiles = 3
        return engine

    assert "compiled" not in rlx("Hi").stderr
    install(monkeypatch, make)
    assert rlx("Hi").stderr.endswith("; compiled 3 pieces of code in 0.75 s\n")
    found = json.loads(rlx("Hi", "--json").stdout)
    assert (found["compiles"], found["compile_seconds"]) == (3, 0.75)


def test_the_prompt_goes_through_the_chat_template(opened: Opened, tokenizer: Tokenizer) -> None:
    rlx("Hi there", "--system", "Be brief.")
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(opened, tokenizer) == turns


def test_raw_leaves_the_template_out_and_reads_control_tokens(opened: Opened, tokenizer: Tokenizer) -> None:
    rlx("--raw", "<|im_start|>user\nHi")
    engine = opened.engines[0]
    assert engine.prompts[0] == tokenizer.encode("<|im_start|>user\nHi", parse_special=True)
    assert engine.prompts[0][0] == tokenizer.token_to_id("<|im_start|>")


def test_a_model_without_a_template_gets_the_plain_prompt(scripted: Scripted, opened: Opened) -> None:
    from dataclasses import replace

    scripted.tokenizer = replace(scripted.tokenizer, chat_templates={})
    assert rlx("Hi <|im_end|>").exit_code == 0
    assert opened.engines[0].prompts[0] == scripted.tokenizer.encode("Hi <|im_end|>")
    result = rlx("Hi", "--system", "Be brief.")
    assert (result.exit_code, "no chat template for a system message" in result.stderr) == (2, True)


def test_thinking_is_for_the_template_to_know(scripted: Scripted, opened: Opened) -> None:
    from dataclasses import replace

    template = "{% if enable_thinking is not defined %}as ever{% elif enable_thinking %}think{% else %}quick{% endif %}"
    scripted.tokenizer = replace(scripted.tokenizer, chat_templates={"default": template})
    for options, prompt in (([], "as ever"), (["--thinking"], "think"), (["--no-thinking"], "quick")):
        assert rlx("Hi", *options).exit_code == 0
        assert prompt_of(opened, scripted.tokenizer) == prompt


def test_bytes_that_are_not_utf8_are_replaced(opened: Opened, tokenizer: Tokenizer) -> None:
    replaced = "user\nHi \N{REPLACEMENT CHARACTER}<|im_end|>"
    assert rlx("-", input=b"Hi \xff").exit_code == 0
    assert replaced in prompt_of(opened, tokenizer)
    assert rlx(os.fsdecode(b"Hi \xff"), "--system", os.fsdecode(b"\xfe")).exit_code == 0
    assert replaced in prompt_of(opened, tokenizer)
    assert "system\n\N{REPLACEMENT CHARACTER}<|im_end|>" in prompt_of(opened, tokenizer)


def test_the_answer_ends_with_max_tokens_or_with_the_context(scripted: Scripted) -> None:
    result = rlx("Hi", "--max-tokens", "3")
    assert result.stdout.rstrip() and STORY.startswith(result.stdout.rstrip())
    assert "stopped by --max-tokens" in result.stderr
    scripted.options["max_seq"] = 12
    result = rlx("--raw", "Hi")
    assert result.exit_code == 0
    assert "stopped by the end of the context" in result.stderr


def test_an_answer_of_nothing_is_an_empty_line(scripted: Scripted, tokenizer: Tokenizer) -> None:
    scripted.script = scripted.story(tokenizer, "")
    result = rlx("Hi")
    assert (result.exit_code, result.stdout) == (0, "\n")


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


def test_speeds_count_without_the_time_of_compiling(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 tokens in 0.1 s behind 4.9 s of compiling; then 3 steps of 0.1 s, the first behind 0.2 s more."""
    now, waited = [100.0], [3.0]
    monkeypatch.setattr(output.time, "perf_counter", lambda: now[0])
    answer = Answer(tokenizer, None, lambda: None, waited=lambda: waited[0])
    for seconds, compiling in ((0.1, 4.9), (0.1, 0.2), (0.1, 0.0), (0.1, 0.0)):
        now[0] += seconds + compiling
        waited[0] += compiling
        answer.push(5)
    answer.finish()
    assert answer.first_seconds == pytest.approx(5.0) and answer.first_wait == pytest.approx(4.9)
    assert answer.prompt_rate(17) == pytest.approx(170)
    assert answer.rate == pytest.approx(10)
    waited[0] += 0.15  # of what follows the last token, or began before the first
    answer.finish()
    assert answer.rate is None, "mostly compiling"


def test_the_last_line_shows_compiling_by_itself(scripted: Scripted) -> None:
    report = json.loads(rlx("Hi", "--json").stdout)
    cold = {**report, "compiles": 3, "compile_seconds": 5.2, "first_token_seconds": 5.0}
    said = speeds({**cold, "first_token_compile_seconds": 4.9})
    assert "first token after 5.000 s, 4.90 s of it compiling; " in said
    assert said.endswith("; compiled 3 pieces of code in 5.20 s")
    assert "compil" not in speeds({**report, "first_token_compile_seconds": 0.02}), "programs were read from the cache"


# ---------------------------------------------------------------------------------------------------- json


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
    rlx("x" * 400, "--max-tokens", "1")
    assert opened.options["compile_ahead"] == [70]
    rlx("Tell me a story.")  # the programs for 2 to 16 and for 17 to 512 tokens are both possible
    assert opened.options["compile_ahead"] == [1]


@pytest.mark.parametrize("policy", ["on", "off", "redo", "readonly"])
def test_the_cache_policy_is_that_of_the_option(opened: Opened, policy: str) -> None:
    assert rlx("Hi", "--cache", policy).exit_code == 0
    assert opened.options["cache"] == policy


def test_guesses_change_no_answer(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    generate = CachedRunner.generate
    monkeypatch.setattr(CachedRunner, "generate", lambda *a, **k: seen.append(k["speculative"]) or generate(*a, **k))
    assert rlx("Hi", "--speculative", "prompt-lookup").stdout == rlx("Hi").stdout == STORY + "\n"
    assert seen == ["prompt-lookup", None]
    for wrong in ("guess", "model:"):
        assert rlx("Hi", "--speculative", wrong).exit_code == 2


def test_greedy_is_the_default_and_a_temperature_changes_the_text(scripted: Scripted) -> None:
    scripted.script = []  # the net itself answers
    greedy = [rlx("--raw", "Hi", "--json", "--max-tokens", "8") for _ in range(2)]
    assert json.loads(greedy[0].stdout)["ids"] == json.loads(greedy[1].stdout)["ids"]
    ids = [
        json.loads(rlx("--raw", "Hi", "--json", "--max-tokens", "8", "--temperature", "3", "--seed", seed).stdout)[
            "ids"
        ]
        for seed in ("1", "1", "2")
    ]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0] != json.loads(greedy[0].stdout)["ids"]


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
        (["Hi", "--max-tokens", "0"], "0 is not in the range x>=1"),
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


def test_an_interrupt_while_loading_is_quiet(monkeypatch: pytest.MonkeyPatch, scripted: Scripted) -> None:
    def make(path: Path) -> FakeEngine:
        raise KeyboardInterrupt

    install(monkeypatch, make)
    result = rlx("Hi")
    assert (result.exit_code, result.output) == (130, "")
