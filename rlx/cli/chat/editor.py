"""The line editor of `rlx chat`, over prompt_toolkit: keys, completion, history, and what is typed ahead."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus, is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from rlx import platform
from rlx.cli.chat.commands import COMMANDS
from rlx.cli.chat.conversation import AGAIN, PROMPT, is_unfinished, message
from rlx.cli.chat.session import DEFAULT, Settings
from rlx.cli.interrupts import Interrupts

_MOST_BYTES = 1 << 20  # of the file; the older half goes when it has grown beyond


def history_path() -> Path:
    """`$XDG_STATE_HOME/rlx/chat_history`, by default under `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    return folder / "rlx" / "chat_history"


class PrivateHistory(FileHistory):
    """`FileHistory` with mode 0600 and a bound on its size; where the file cannot be used, a warning and no file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path: Path | None = path

    def load_history_strings(self) -> Iterable[str]:
        """Earlier entries, the newest first."""
        try:
            self._prepare()
            return list(super().load_history_strings())
        except (OSError, RuntimeError) as error:
            self._give_up(error)
            return []

    def store_string(self, string: str) -> None:
        """Appends an entry."""
        if self._path is None:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._give_up(error)

    def _prepare(self) -> None:
        """Makes the file, closes it to others, and keeps it small."""
        assert self._path is not None
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        more = platform.flags("O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_BINARY")
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | more, 0o600)
        with os.fdopen(handle, "r+b") as file:
            if sys.platform != "win32" and os.fstat(handle).st_mode & 0o177:
                os.fchmod(handle, 0o600)
            if (length := os.fstat(handle).st_size) > _MOST_BYTES:
                file.seek(length - _MOST_BYTES // 2)
                kept = file.read().partition(b"\n\n")[2]  # from the beginning of an entry
                file.seek(0)
                file.write(kept)
                file.truncate()

    def _give_up(self, error: Exception) -> None:
        warnings.warn(f"the history of chat cannot be kept in {self._path}: {error}", stacklevel=2)
        self._path = None


_GREETING = "a message, or /help"


class Editor:
    """Asks for messages in a terminal.

    Args:
        source, output: where keys come from, and the terminal.
        interrupts: Ctrl-C that came as a signal, between two prompts or while one is shown.
        history: earlier lines.
    """

    def __init__(self, source: Input, output: Output, interrupts: Interrupts, history: History) -> None:
        self._input, self._output, self._interrupts = source, output, interrupts
        self._hint, self._warned = _GREETING, False
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            input=source,
            output=output,
            history=history,
            multiline=True,  # with keys of our own for Enter
            prompt_continuation="  ",
            placeholder=lambda: [] if self._session.app.is_done else [("ansibrightblack", self._hint)],
            key_bindings=self._keys(),
            completer=Completions(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            enable_suspend=True,
            enable_open_in_editor=True,
        )
        self._session.default_buffer.on_text_changed += lambda _: self._calm()

    def messages(self) -> Iterator[str]:
        """Messages until Ctrl-D; `KeyboardInterrupt` after Ctrl-C twice at an empty prompt."""
        while True:
            try:
                text = self._ask()
            except EOFError:
                return
            yield message(text)

    def _ask(self) -> str:
        """One message. What was typed behind it is kept for the next one, but for a Ctrl-C, which is for the answer."""
        with self._nudges() as pre_run:
            text = self._session.prompt(pre_run=pre_run, handle_sigint=False)
        self._output.enable_bracketed_paste()  # for what is pasted during the answer
        self._output.flush()
        if self._typed_ahead():
            self._interrupts.note()
        self._hint = ""
        return text

    @contextmanager
    def _nudges(self) -> Iterator[Callable[[], None]]:
        """While the prompt is shown, a SIGINT is a key like Ctrl-C. Yields what to call just before it is shown."""
        with ExitStack() as stack:
            app = self._session.app

            def send() -> None:
                if app.loop is not None:
                    app.loop.call_soon_threadsafe(app.key_processor.send_sigint)

            def pre_run() -> None:
                stack.enter_context(self._interrupts.nudging(send))

            yield pre_run

    def _typed_ahead(self) -> bool:
        """Collects what was typed since Enter, and keeps it for the next prompt; whether a Ctrl-C was among it.

        Between Enter and the end of raw mode Ctrl-C is a byte of the input, not a signal.
        """
        presses = get_typeahead(self._input)
        while more := self._input.read_keys():
            presses += more
        last = max((i for i, press in enumerate(presses) if press.key is Keys.ControlC), default=-1)
        store_typeahead(self._input, [press for press in presses[last + 1 :] if press.key is not Keys.SIGINT])
        return last >= 0

    def _calm(self) -> None:
        self._warned, self._hint = False, ""

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        editing = has_focus(DEFAULT_BUFFER) & ~is_searching

        @keys.add("enter", filter=editing)
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if is_unfinished(buffer.text):
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=editing)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c", filter=editing)
        @keys.add("<sigint>", filter=editing)
        def _(event: KeyPressEvent) -> None:
            self._interrupted(event)

        return keys

    def _interrupted(self, event: KeyPressEvent) -> None:
        """Ctrl-C, as a key or as a signal: clears the line; at an empty prompt the second one in a row ends."""
        self._interrupts.take()
        if event.current_buffer.text:
            event.current_buffer.reset()
            self._calm()
        elif self._warned:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
        else:
            self._warned, self._hint = True, AGAIN


class Completions(Completer):
    """Completes commands at the start, settings behind /set, and file names behind /save, /load and /image."""

    _paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: Any) -> Iterator[Completion]:
        text = document.text_before_cursor
        command, space, argument = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            yield from _matching(command, [f"/{name}" for name in COMMANDS])
        elif command == "/set" and " " not in argument:
            yield from _matching(argument, Settings.names())
        elif command == "/set":
            yield from _matching(argument.rpartition(" ")[2], [DEFAULT, "on", "off"])
        elif command in ("/save", "/load", "/image"):
            yield from self._paths.get_completions(Document(argument), event)


def _matching(begun: str, words: Iterable[str]) -> Iterator[Completion]:
    return (Completion(word, -len(begun)) for word in words if word.startswith(begun))


@contextmanager
def terminal_messages(interrupts: Interrupts, keep_history: bool) -> Iterator[Iterator[str]]:
    """Messages from the terminal that stdin is."""
    output = create_output(sys.stdout if sys.stdout and sys.stdout.isatty() else sys.stderr)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # no questions about the cursor: answers would come between what is typed ahead
    history = PrivateHistory(history_path()) if keep_history else InMemoryHistory()
    with platform.current().quiet_terminal(sys.stdin.fileno()):
        try:
            yield Editor(create_input(sys.stdin), output, interrupts, history).messages()
        finally:
            output.disable_bracketed_paste()
            output.flush()
