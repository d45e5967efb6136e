"""`rlx chat` over an engine that answers by a rule, with the demo model's tokenizer and chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_engine import Opened
from talker import END, USER, Talker, raising, turns

from rlx import demo
from rlx.cli.main import cli
from rlx.runners import Model
from rlx.text import Tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("opened")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.path())


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, talker: Talker) -> list[str]:
    """The prompts of all turns, as text."""
    seen: list[str] = []
    generate = Model.generate

    def watched(self: Model, ids: Any, *args: Any, **options: Any) -> Any:
        seen.append(talker.tokenizer.decode(self.checked_prompt(ids).ids))
        return generate(self, ids, *args, **options)

    monkeypatch.setattr(Model, "generate", watched)
    return seen


def chat(said: str | bytes, *args: str) -> Result:
    return CliRunner().invoke(cli, ["chat", *args], input=said)


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


def test_an_answer_that_was_cut_says_so_and_stays(prompts: list[str], talker: Talker) -> None:
    result = chat("Hi\nBye\n", "--max-tokens", "2")
    cut = talker.tokenizer.decode(talker.script("You said: Hi")[:2])
    assert result.stdout.splitlines()[0] == cut
    assert result.stderr == "(stopped by --max-tokens)\n" * 2
    assert prompts[1] == turns("Hi", cut.strip(), "Bye")


# ---------------------------------------------------------------------------------------------------- a full context


def test_the_oldest_exchanges_are_left_out_if_asked_for(talker: Talker, prompts: list[str]) -> None:
    questions = [f"Question {i} about a fox." for i in range(12)]
    result = chat("\n".join(questions), "--system", "Be brief.", "--max-tokens", "40", "--drop-oldest")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"You said: {question}" for question in questions]
    notes = result.stderr.splitlines()
    assert notes and all(note.startswith("(the context is full: ") for note in notes)
    assert all("3 old exchanges left out" in note for note in notes), "so that the next turns find room"
    left_out = sum(int(note.split(": ")[1].split()[0]) for note in notes)
    rest = [text for question in questions[left_out:] for text in (question, f"You said: {question}")][:-1]
    assert prompts[-1] == f"<|im_start|>system\nBe brief.{END}\n{turns(*rest)}"
    assert all(len(talker.tokenizer.encode(prompt, parse_special=True)) <= 256 - 40 for prompt in prompts)


def test_a_full_context_ends_a_pipe_and_forgets_nothing(talker: Talker, prompts: list[str]) -> None:
    questions = [f"Question {i} about a fox." for i in range(12)]
    result = chat("\n".join(questions), "--max-tokens", "40")
    assert result.exit_code == 2
    answered = len(prompts)
    assert result.stdout.splitlines() == [f"You said: {question}" for question in questions[:answered]]
    assert 0 < answered < 12
    texts = [text for question in questions[:answered] for text in (question, f"You said: {question}")]
    tokens = len(talker.tokenizer.encode(turns(*texts, questions[answered]), parse_special=True))
    assert tokens > 256 >= len(talker.tokenizer.encode(prompts[-1], parse_special=True))
    said = f"the conversation with this message has {tokens} tokens, and the context holds 256. --drop-oldest forgets"
    assert said in result.stderr and "--drop-oldest makes room)" in result.stderr
    assert "/undo" not in result.stderr, "on a pipe there are no commands"
    assert "--drop-oldest" in result.stderr and "--max-seq" in result.stderr


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["a.gguf", "Hi"], "unexpected extra argument"),
        (["gone.gguf"], "gone.gguf: there is no such file or directory"),
        (["--thinking"], "--thinking: the model's chat template has no enable_thinking. Leave it out."),
        (["--top-k", "4"], "--top-k does nothing at temperature 0"),
        (["--speculative", "guess"], "'guess' is not one of 'prompt-lookup', 'mtp', 'model:PATH'"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(args: list[str], said: str) -> None:
    result = chat("Hi\n", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


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
        chat_ids = Model.chat_ids

        def interrupted(self: Model, messages: Any, **more: Any) -> Any:
            return raising(KeyboardInterrupt())() if messages[-1]["content"] == "Hi" else chat_ids(self, messages)

        monkeypatch.setattr(Model, "chat_ids", interrupted)
    result = chat("Hi\nBye\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "You said: Bye\n", "(interrupted)\n")
    assert prompts[-1] == turns("Bye")
