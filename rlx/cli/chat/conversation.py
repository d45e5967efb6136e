"""A conversation: questions with their images, answers, the prompt that they make, and the file that keeps them."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from rlx.cli.answering import Message, user_message
from rlx.cli.interrupts import Interrupts
from rlx.errors import ChatError, ImageError, file_error
from rlx.json_file import read_bytes
from rlx.partial_file import into_place
from rlx.vision.image import Image

_DATA = "data:"  # begins the URI of an image that stands in a conversation's file itself


@dataclass(frozen=True)
class AttachedImage:
    """An image, and where it comes from: an absolute path or a data URI."""

    source: str
    image: Image

    @staticmethod
    def of(name: str) -> AttachedImage:
        """The image in a file, as a user types its name: also in quotes or with backslashes, as terminals paste it.

        Raises:
            ImageError: the file is missing, or no image that can be used.
        """
        if name.startswith(_DATA):
            return AttachedImage(name, Image.of(name))
        path = Path(name).expanduser()
        if not path.exists():
            try:
                path = Path(" ".join(shlex.split(name))).expanduser()
            except ValueError:  # a quote without its end
                path = Path(name)
        return AttachedImage(os.path.abspath(path), Image.of(path))

    def __str__(self) -> str:
        return "an image" if self.source.startswith(_DATA) else os.path.basename(self.source)


@dataclass(frozen=True)
class Question:
    """A message of the user: a text, behind images if there are any."""

    text: str
    images: tuple[AttachedImage, ...] = ()

    def message(self) -> Message:
        """The message for the chat template."""
        return user_message(self.text, [{"type": "image", "image": each.image} for each in self.images])

    def saved(self) -> Message:
        """The message for a file, which has the paths of images."""
        return user_message(self.text, [_part(each.source) for each in self.images])

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.images))}] {self.text}" if self.images else self.text


def _part(source: str) -> dict[str, Any]:
    if source.startswith(_DATA):
        return {"type": "image_url", "image_url": {"url": source}}
    return {"type": "image", "path": source}


def question_of(content: Any, where: str) -> Question:
    """The question in a saved message.

    Raises:
        ChatError: the content is neither a text nor parts of text and images, or an image cannot be used.
    """
    if isinstance(content, str):
        return Question(content)
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise ChatError("the content is no text", where=where)
    texts, images = [], []
    for part in content:
        source = _source(part)
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(source, str):
            images.append(_loaded(source, where))
        else:
            raise ChatError(f"a part has type {str(part.get('type'))!r}, expected text or an image", where=where)
    return Question("".join(texts), tuple(images))


def _source(part: Mapping[str, Any]) -> Any:
    """Path or data URI of an image in a saved message."""
    if part.get("type") == "image":
        return part.get("path")
    url = part.get("image_url") if part.get("type") == "image_url" else None
    url = url.get("url") if isinstance(url, Mapping) else url
    return url if isinstance(url, str) and url.startswith(_DATA) else None


def _loaded(source: str, where: str) -> AttachedImage:
    try:
        return AttachedImage.of(source)
    except ImageError as error:
        place = f": {error.where}" if error.where else ""
        raise ChatError(f"an image cannot be used{place}: {error.what}", where=where, hint=error.hint) from error


FORMAT = "rlx-chat-1"  # of a saved conversation
_MAX_BYTES = 64 << 20
_ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """The messages so far.

    Attributes:
        system: the system message, which stands in front.
        exchanges: questions and their answers, in order.
    """

    system: str | None = None
    exchanges: list[tuple[Question, str]] = field(default_factory=list)

    def messages(self, question: Question | None = None, skipped: int = 0) -> list[Message]:
        """Messages in OpenAI's form, perhaps with one more question, without the first `skipped` exchanges."""
        said = self._said(Question.message, skipped)
        return said if question is None else [*said, question.message()]

    def saved(self) -> list[Message]:
        """Messages for a file: of images their paths."""
        return self._said(Question.saved)

    def _said(self, message: Callable[[Question], Message], skipped: int = 0) -> list[Message]:
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in self.exchanges[skipped:]:
            said += [message(asked), {"role": "assistant", "content": answered}]
        return said

    def without_oldest(self, question: Question, fits: Callable[[list[Message], bool], bool]) -> int:
        """Forgets the oldest exchanges until a prompt fits; how many went.

        What follows them must be computed again, so that more go than must: the next questions find room.

        Args:
            fits: whether messages fit into the context; with True also with room to spare.
        """
        skipped = 0
        while skipped < len(self.exchanges) and not fits(self.messages(question, skipped), skipped > 0):
            skipped += 1
        del self.exchanges[:skipped]
        return skipped


def save(path: str, conversation: Conversation, model: str | None, settings: Mapping[str, Any]) -> bool:
    """Writes a conversation to a file that only its owner may read, as a whole or not at all.

    Returns:
        Whether it took the place of another saved conversation.

    Raises:
        ChatError: the file is there and is no saved conversation, or it cannot be written.
    """
    file = _found(path)
    replaces = os.path.lexists(file)
    if replaces and not _is_saved(file):
        hint = "it stays as it is: choose another name"
        raise ChatError("the file is there and is no saved conversation", where=path, hint=hint)
    saved = {"format": FORMAT, "model": model, "messages": conversation.saved(), "settings": dict(settings)}
    text = json.dumps(saved, ensure_ascii=False, indent=2) + "\n"
    try:
        with into_place(file, 0o600) as partial, partial.open("wb") as out:
            out.write(text.encode("utf-8", "surrogatepass"))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise file_error(ChatError, "it cannot be written", error, path) from error
    return replaces


def _found(path: str) -> Path:
    """The file that a user names, behind links."""
    if "\0" in path:
        raise ChatError(f"{path!r} is no file name")
    return Path(os.path.realpath(os.path.expanduser(path)))


def _is_saved(path: Path) -> bool:
    try:
        return _read(path, str(path)).get("format") == FORMAT
    except ChatError:
        return False


def load(path: str) -> tuple[Conversation, dict[str, Any]]:
    """A conversation from a file: a saved one, or a plain list of messages in OpenAI's form.

    Returns:
        The conversation, and the settings that were saved with it.

    Raises:
        ChatError: the file cannot be read, is no conversation, or has messages that do not alternate.
    """
    saved = _read(_found(path), path)
    messages, settings = saved.get("messages"), saved.get("settings", {})
    if not isinstance(messages, list):
        raise ChatError("it has no list 'messages'", where=path, hint=f"`/save` writes the form '{FORMAT}'")
    if not isinstance(settings, dict):
        raise ChatError("'settings' is no object of names and values", where=path)
    found = [_message(message, f"{path}, message {i}") for i, message in enumerate(messages)]
    system = [said.text for role, said in found if role == "system"]
    rest = [(role, said) for role, said in found if role != "system"]
    if len(system) > 1 or (system and found[0][0] != "system"):
        raise ChatError("a system message stands behind the first message", where=path)
    if [role for role, _ in rest] != ["user", "assistant"] * (len(rest) // 2):
        hint = "after the system message, 'user' and 'assistant' take turns, and the last message is an answer"
        raise ChatError("the roles do not alternate", where=path, hint=hint)
    exchanges = [(rest[i][1], rest[i + 1][1].text) for i in range(0, len(rest), 2)]
    return Conversation(system[0] if system else None, exchanges), settings


def _read(file: Path, path: str) -> dict[str, Any]:
    """The JSON object in a file; a list of messages as the object that has it."""
    if not file.exists():
        raise ChatError("there is no such file", where=path)
    data = read_bytes(file, ChatError, _MAX_BYTES)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ChatError("it is not JSON", where=path) from error
    found = {"messages": found} if isinstance(found, list) else found
    if not isinstance(found, dict):
        raise ChatError("it is no saved conversation", where=path)
    return found


def _message(message: Any, where: str) -> tuple[str, Question]:
    """Role and content of a message."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise ChatError(f"the role is {role!r}, expected one of {', '.join(_ROLES)}", where=where)
    said = question_of(message.get("content"), where)
    if said.images and role != "user":
        raise ChatError(f"there is an image in a message of role {role!r}", where=where, hint="only users show images")
    return role, said


PROMPT = "> "
AGAIN = "Ctrl-C again or Ctrl-D ends the chat"
_QUOTES = '"""'


def is_unfinished(text: str) -> bool:
    r"""Whether a message goes on in the next line: behind `\` at its end, and inside of `\"\"\"`."""
    if text.lstrip().startswith(_QUOTES):
        return _QUOTES not in text.lstrip().removeprefix(_QUOTES)
    return text.endswith("\\")


def message(text: str) -> str:
    r"""A typed message without what joined its lines: `\` in front of line breaks, or `\"\"\"` around it."""
    inner = text.strip()
    if inner.startswith(_QUOTES):
        return inner.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


def piped(interrupts: Interrupts) -> Iterator[str]:
    """The lines of stdin; `KeyboardInterrupt` for Ctrl-C while it waits for one."""
    for line in _read_lines(interrupts):
        if line is None:
            raise KeyboardInterrupt
        yield line


def asked(interrupts: Interrupts) -> Iterator[str]:
    """Messages from a terminal without line editing. Twice Ctrl-C raises `KeyboardInterrupt`."""
    lines, held, warned = _read_lines(interrupts), "", False
    _ask("")
    for line in lines:
        if line is None and warned and not held:
            click.echo(err=True)
            raise KeyboardInterrupt
        warned = line is None and not held
        held = "" if line is None else held + line
        if line is None:
            click.echo(f"\n({AGAIN})" if warned else "", err=True)
        elif is_unfinished(held):
            held += "\n"
        else:
            yield message(held)
            held = ""
        _ask(held)
    click.echo(err=True)  # the shell goes on in a line of its own


def _ask(held: str) -> None:
    """Writes the prompt, to whichever of stdout and stderr is a terminal."""
    for stream in (sys.stdout, sys.stderr):
        if stream and stream.isatty():
            stream.write("  " if held else PROMPT)
            stream.flush()
            return


def _read_lines(interrupts: Interrupts) -> Iterator[str | None]:
    """Lines without their ends; None for a Ctrl-C. A line may end with the input."""
    try:
        fd = sys.stdin.fileno()
    except (io.UnsupportedOperation, ValueError, AttributeError):  # no file: what a program put there
        yield from map(_text, getattr(sys.stdin, "buffer", sys.stdin))
        return
    data = b""
    while True:
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            yield _text(line)
        if not interrupts.wait_readable(fd):
            data = b""
            yield None
        elif more := os.read(fd, 1 << 16):
            data += more
        else:
            break
    if data:
        yield _text(data)


def _text(line: bytes | str) -> str:
    return (line if isinstance(line, str) else line.decode("utf-8", "replace")).rstrip("\r\n")
