"""The commands, settings and saved conversations of `rlx chat`."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from talker import END, Talker, turns

from rlx.cli.chat.conversation import FORMAT, Conversation, Question, load, save
from rlx.cli.chat.session import Settings
from rlx.errors import ChatError
from rlx.sampling import SampleOpts

pytestmark = pytest.mark.usefixtures("opened")


# ---------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hepl", "Error: there is no command /hepl. Did you mean /help? //hepl sends it as a message."),
        ("/zzz", "Error: there is no command /zzz. /help lists the commands."),
        ("/clear all", "Error: /clear takes no argument, found 'all'"),
        ("/undo", "Error: nothing was said yet"),
        ("/regenerate", "Error: nothing was said yet"),
        ("/save", "Error: /save: a file name is missing"),
        ("/load gone.json", "Error: gone.json: there is no such file"),
        ("/set top-kk 3", "Error: /set: there is no setting 'top-kk'. Did you mean top-k?"),
        ("/set temperature hot", "Error: /set temperature: 'hot' is not a valid float"),
        ("/set temperature -1", "Error: /set: --temperature is -1.0, expected"),
        ("/set top-k 4", "Error: /set: --top-k does nothing at temperature 0"),
        ("/set markdown maybe", "Error: /set: --markdown is 'maybe', expected on or off"),
        ("/set thinking on", "the model's chat template has no enable_thinking"),
    ],
)
def test_a_wrong_command_is_one_line_and_goes_on(line: str, said: str, desk: Desk, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    result = desk.chat(f"{line}\r", "/set thinking default\r", "Hi\r")
    assert result.exit_code == 0, result.output
    assert said in result.stderr and "Traceback" not in result.stderr
    assert desk.prompts == [turns("Hi")]


def test_undo_and_clear(desk: Desk) -> None:
    result = desk.chat("Hi\r", "Well\r", "/undo\r", "Bye\r", "/clear\r", "Again\r", args=("--system", "Brief."))
    system = f"<|im_start|>system\nBrief.{END}\n"
    assert desk.prompts[2] == system + turns("Hi", "You said: Hi", "Bye")
    assert desk.prompts[3] == system + turns("Again")
    assert "(1 exchange left; taken back: Well)" in result.stderr


def test_regenerate_answers_again(desk: Desk, talker: Talker) -> None:
    result = desk.chat("Hi\r", "/regenerate\r", "Bye\r")
    assert result.stdout == "You said: Hi\nYou said: Hi\nYou said: Bye\n"
    assert desk.prompts == [turns("Hi"), turns("Hi"), turns("Hi", "You said: Hi", "Bye")]


# ---------------------------------------------------------------------------------------------------- settings


def test_settings_are_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    from rlx.runners import Model

    seen: list[tuple[Any, ...]] = []
    generate = Model.generate

    def watched(self: Model, ids: Any, most: int, on_token: Any, sample: Any, **more: Any) -> Any:
        seen.append((most, sample.temperature, sample.top_k, more["stop"]))
        return generate(self, ids, most, on_token, sample, **more)

    monkeypatch.setattr(Model, "generate", watched)
    pieces = (
        "Hi",
        "/set --top_k 3",
        "/set stop x y",
        "/set parameter temp 0.25",
        "Hi",
        "/set top-k default",
        "Hi",
    )
    args = ("--temperature", "0.5", "--top-k", "40", "--seed", "1", "--max-tokens", "9")
    result = desk.chat(*[f"{piece}\r" for piece in pieces], args=args)
    assert seen == [(9, 0.5, 40, ()), (9, 0.25, 3, ("x", "y")), (9, 0.25, 0, ("x", "y"))], result.output


def test_a_refused_setting_changes_nothing() -> None:
    settings = Settings(SampleOpts(temperature=0.6))
    settings.set("seed", ["4"])
    for name, words in (("top-p", ["2"]), ("min-tokens", ["999"]), ("markdown", ["x"]), ("mirostat", ["1"])):
        with pytest.raises(ChatError, match="/set"):
            settings.set(name, words)
    assert settings.saved() == {"seed": 4}


def test_a_length_without_limit_is_shown_as_it_was_set() -> None:
    settings = Settings(SampleOpts())
    settings.set("max-tokens", ["-1"])
    assert settings.saved() == {"max-tokens": -1} and ("max-tokens", "-1", "set") in settings.shown()


# ---------------------------------------------------------------------------------------------------- files

EXAMPLE = Conversation(
    "Be brief.", [(Question("Hi"), "You said: Hi"), (Question("Füchse 🦊\nand \x1b"), "<think>x</think>ok")]
)


def test_a_saved_conversation_comes_back(tmp_path: Path) -> None:
    settings = Settings(SampleOpts(temperature=0.6))
    for name, words in (
        ("temperature", ["0.7"]),
        ("stop", ["END", "7"]),
        ("logit-bias", ["42=-inf"]),
        ("markdown", ["off"]),
    ):
        settings.set(name, words)
    path = tmp_path / "talk.json"
    assert not save(str(path), EXAMPLE, "m.gguf", settings.saved())
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["format"] == FORMAT == "rlx-chat-1" and saved["model"] == "m.gguf"
    assert saved["messages"][:2] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert saved["settings"] == {"temperature": 0.7, "stop": ["END", 7], "logit-bias": ["42=-inf"], "markdown": "off"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found, values = load(str(path))
    again = Settings(SampleOpts(temperature=0.6))
    again.replace(values)
    assert found == EXAMPLE and again.saved() == settings.saved() and again.values == settings.values
    assert save(str(path), Conversation(), None, {}), "an earlier one is replaced"
    assert load(str(path)) == (Conversation(), {})
    assert os.listdir(tmp_path) == ["talk.json"]


@pytest.mark.parametrize("there", [b"my notes", b'{"format": "other"}', b"[1]", b""])
def test_what_is_no_saved_conversation_is_not_overwritten(there: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(there)
    with pytest.raises(ChatError, match="is there and is no saved conversation"):
        save(str(path), EXAMPLE, None, {})
    assert path.read_bytes() == there and os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("3", "it is no saved conversation"),
        ("{}", "it has no list 'messages'"),
        ('{"messages": [], "settings": 3}', "'settings' is no object"),
        (
            '[{"role": "robot", "content": "x"}]',
            "message 0: the role is 'robot', expected one of system, user, assistant",
        ),
        ('[{"role": "user", "content": 3}]', "message 0: the content is no text"),
        (
            '[{"role": "user", "content": [{"type": "image"}]}]',
            "message 0: a part has type 'image', expected text",
        ),
        ('[{"role": "user", "content": "x"}]', "the roles do not alternate"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "a system message stands behind"),
    ],
)
def test_broken_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(ChatError, match=said):
        load(str(path))
