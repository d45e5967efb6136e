"""`rlx chat` in a terminal: keys, what is typed ahead, and Ctrl-C at every place where it could be lost."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from prompt_toolkit.input import create_pipe_input
from talker import SLOW, WAITS, Talker, Terminal, turns

from rlx.cli.answering import Answer
from rlx.cli.chat import editor, session
from rlx.cli.interrupts import Interrupts
from rlx.cli.output import Bars
from rlx.runners import Model

pytestmark = pytest.mark.usefixtures("opened")

PASTE = "\x1b[200~{}\x1b[201~"


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


# ---------------------------------------------------------------------------------------------------- Ctrl-C


def before(owner: Any, name: str, act: Callable[..., object], patch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Calls `act` before the first calls of a function."""
    function, left = getattr(owner, name), [times]

    def calling(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            act()
        return function(*args, **options)

    patch.setattr(owner, name, calling)


PLACES: dict[str, tuple[Any, str]] = {
    "after Enter": (editor.Editor, "_typed_ahead"),
    "before the prompt is made": (session.Session, "answer"),
    "in the template": (Model, "chat_ids"),
    "before the engine": (Model, "generate"),
    "in the progress bar": (Bars, "waiting"),
    "as the bar goes away": (Bars, "pause"),
    "as a token is drawn": (Answer, "push"),
    "as the answer ends": (Answer, "finish"),
    "as the answer is stored": (session, "said"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_between_prompt_and_answer_is_acted_on_once(
    place: str, desk: Desk, talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either it stops the answer, or it is a Ctrl-C at the next prompt; the conversation goes on."""
    owner, name = PLACES[place]
    if owner is Bars:  # not while the model is opened
        before(session.Session, "answer", lambda: before(owner, name, interrupt, monkeypatch), monkeypatch)
    else:
        before(owner, name, interrupt, monkeypatch)
    result = desk.chat("Hi\r", "Bye\r")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("You said: Bye\n")
    assert result.stderr.count("(interrupted)") + desk.cleared == 1


@pytest.mark.parametrize("token", range(6))
def test_an_interrupt_in_the_engine_keeps_what_was_said(token: int, desk: Desk, talker: Talker) -> None:
    script = talker.script("You said: Hi")
    assert token < len(script)
    talker.trouble["Hi"] = token, interrupt
    result = desk.chat("Hi\r", "Bye\r")
    assert (result.exit_code, result.stderr, desk.cleared) == (0, "(interrupted)\n", 0)
    assert result.stdout.endswith("You said: Bye\n")
    said = [talker.tokenizer.decode(script[:count]).strip() for count in range(1, token + 1)]  # what had come
    assert desk.prompts[1] in [turns("Bye"), *(turns("Hi", each, "Bye") for each in said)]


def elsewhere(number: int) -> None:
    """Sends SIGINT to another thread: no system call of the main thread is interrupted by it."""
    if number != 1:
        return

    def send() -> None:
        time.sleep(0.3)  # likely in `select` by then; the test holds either way
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=send).start()


def test_an_interrupt_that_breaks_no_system_call_reaches_a_waiting_prompt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What readline's prompt lost: a signal between drawing the prompt and waiting for a key."""
    desk.shown = elsewhere
    with create_pipe_input() as source:
        interrupted = editor.Editor._interrupted

        def then_end(edit: editor.Editor, event: Any) -> None:
            interrupted(edit, event)
            source.send_text("\x04")

        monkeypatch.setattr(editor.Editor, "_interrupted", then_end)
        watchdog = threading.Timer(30, lambda: source.send_text("not woken\r\x04"))
        watchdog.start()
        result = desk.chat("Hi\r", "", source=source)
        watchdog.cancel()
    assert (result.exit_code, result.stdout, desk.cleared) == (0, "You said: Hi\n", 1)


def test_clean_up_after_an_interrupt_is_not_interrupted() -> None:
    done = []

    def work() -> None:
        try:
            interrupt()
        finally:
            interrupt()
            done.append("clean")

    with Interrupts() as interrupts:
        assert interrupts.run(work) and done == ["clean"]
        assert not interrupts.pending
        interrupt()
        assert interrupts.run(lambda: done.append("too late")) and done == ["clean"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        time.sleep(1)


def test_an_ignored_sigint_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            assert not interrupts.run(interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------------------------------------------- keys


def test_ctrl_c_clears_a_line_and_twice_at_an_empty_prompt_ends(desk: Desk) -> None:
    assert desk.chat("half\x03Hi\r", "\x03\x04").stdout == "You said: Hi\n"
    result = desk.chat("Hi\r", "half\x03\x03x\x7f\x03\x03")
    assert (result.exit_code, result.stdout) == (130, "You said: Hi\n")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (PASTE.format("one\ntwo\r\nthree") + "\r", "one\ntwo\nthree"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ('"""one\r\rtwo"""\r', "one\n\ntwo"),
        ('"""\rone\r"""\r', "one"),
        ("//help me\r", "/help me"),
    ],
)
def test_a_message_of_several_lines_is_one_message(keys: str, said: str, desk: Desk) -> None:
    assert desk.chat(keys).exit_code == 0
    assert desk.prompts == [turns(said)]


def test_ctrl_c_behind_enter_stops_the_answer(desk: Desk, talker: Talker) -> None:
    """Between Enter and the end of raw mode it is a byte of the input: it must not wait for the next prompt."""
    result = desk.chat("Hi\r\x03", "Bye\r")
    assert (result.stdout, result.stderr, desk.cleared) == ("You said: Bye\n", "(interrupted)\n", 0)
    assert desk.prompts == [turns("Bye")]


# ---------------------------------------------------------------------------------------------------- a real terminal


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_keys_in_a_terminal(term: str, tmp_path: Path) -> None:
    terminal = Terminal(term, tmp_path)
    terminal.prompt()
    terminal.keys(f"{SLOW}\r")
    terminal.until(WAITS)
    terminal.keys("\x03")
    terminal.until("(interrupted)")
    terminal.prompt()
    terminal.keys("Hii\x7f\r")  # a line that was edited
    terminal.until("You said: Hi\r\n")
    terminal.prompt()
    if term == "dumb":
        terminal.keys("\x04")
        assert terminal.ended() == 0
    else:
        terminal.keys("half a line")
        terminal.until("line")
        terminal.keys("\x03")  # this one clears it
        terminal.keys("\x03")
        terminal.until("Ctrl-C again or Ctrl-D ends the chat")
        terminal.keys("\x03")
        assert terminal.ended() == 130
    assert terminal.modes_after == terminal.modes


@pytest.mark.system("quiet terminal")
def test_what_is_typed_during_an_answer_is_not_shown_there_and_not_lost(tmp_path: Path) -> None:
    terminal = Terminal("xterm", tmp_path)
    terminal.prompt()
    terminal.keys(f"{SLOW}\r")
    terminal.until(WAITS)
    terminal.keys("typed ahead\r" + PASTE.format("pasted\nahead"))
    terminal.keys("\x03")
    assert "typed" not in terminal.until("(interrupted)")
    shown = terminal.until("You said: typed ahead")
    assert "> " in shown or ">\x08" in shown
    terminal.keys("\r")
    terminal.until("You said: pasted")
    terminal.until("ahead")
    terminal.keys("\x04")
    assert terminal.ended() == 0


def test_the_history_is_private_and_lasts(tmp_path: Path) -> None:
    file = tmp_path / "rlx" / "chat_history"
    file.parent.mkdir()
    file.touch(0o644)
    for keys in ("Hello there\r", "\x1b[A\r"):  # typed, and then found again with Up
        terminal = Terminal("xterm", tmp_path)
        terminal.prompt()
        terminal.keys(keys)
        terminal.until("You said: Hello there")
        terminal.prompt()
        terminal.keys("\x04")
        assert terminal.ended() == 0
    assert "+Hello there" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_terminal_dies_as_it_was(tmp_path: Path) -> None:
    terminal = Terminal("xterm", tmp_path)
    terminal.prompt()
    terminal.keys(f"{SLOW}\r")
    terminal.until(WAITS)
    terminal.send(signal.SIGTERM)
    assert terminal.ended() == -signal.SIGTERM
    assert terminal.modes_after == terminal.modes
