"""Reads the calls in an answer that comes in pieces: the text around them, and calls and values in JSON.

Text stage. A format's reader is one generator, which reads as a recursive parser does and waits (`yield`) where more
text decides. So an object that is open is a frame of the generator, and where the answer breaks off in the middle of
one, the exception that ends it closes what is open.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, TypeVar

from rlx.text.tokenizer import tail_of
from rlx.text.tool_calls.format import Part, ToolCallDelta
from rlx.text.tool_calls.tools import Tool
from rlx.text.tool_calls.values import child

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads something; it waits for more text at each `yield`."""

Give = Callable[[str], object]
"""Takes a piece of JSON that is certain."""

MAX_DEPTH = 64
BLANKS = re.compile(r"\s*")
_SPACE = re.compile(r"[ \t\n\r]*")
_ARGUMENTS = ("arguments", "parameters")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERAL = re.compile(r"[A-Za-z0-9+\-.]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGIN = re.compile(r"(?:u[0-9a-fA-F]{0,3})?")
_LONE = "\\ufffd"  # for a half of a surrogate pair without its other half


class Unreadable(Exception):
    """The text is no call, or none from here on."""


class CutOff(Unreadable):
    """The answer has ended in the middle of what is read."""


class CallReader(ABC):
    """Reads the texts and the calls of an answer: a `CallParser`. A subclass reads what follows a marker.

    Blanks around calls belong to neither text nor call.

    Args:
        markers: texts that begin a call.
        tools: what the model may call.
        new_id: makes the ids of calls.
    """

    space = _SPACE
    """What may stand between two tokens of a value."""

    quotes = '"'
    """What may begin a string."""

    _root: Mapping[str, Any] = {}
    """The schema of the arguments, where the type of a value follows from it."""

    def __init__(self, markers: Sequence[str], tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        self._markers, self._new_id = tuple(markers), new_id
        self._tools = {tool.name: tool for tool in tools}
        self._held = ""  # from the beginning of what may be a call
        self._at = 0  # characters of it that were read
        self._marked = 0  # characters of it that are text in any case if it is no call
        self._calls = False  # whether it is certainly a call
        self._after_call = self._final = False
        self._parts: list[Part] = []
        self._count = 0
        self._reading = self._answer()

    def push(self, text: str) -> list[Part]:
        self._held += text
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        self._final = True
        return self.push("")

    # ---------------------------------------------------------------------------------------------- the answer

    def _answer(self) -> Reading[None]:
        yield from self._attempt(self._begin_answer())
        while (marker := (yield from self._text())) is not None:
            yield from self._attempt(self._call(marker))

    def _attempt(self, call: Reading[None]) -> Reading[None]:
        """Reads what may be a call. If it is none its marker is text, and what follows is looked at again."""
        try:
            yield from call
        except Unreadable:
            self._say(self._held[: self._marked])
            self._at = self._marked
        self._drop()

    def _begin_answer(self) -> Reading[None]:
        """Reads calls that no marker begins."""
        yield from ()

    @abstractmethod
    def _call(self, marker: str) -> Reading[None]:
        """Reads what follows a marker; `Unreadable` if it is no call."""

    def _text(self) -> Reading[str | None]:
        """The text before a marker; returns the marker, or None at the end."""
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
                self._after_call = not self._held
            found = first_of(self._held, self._markers)
            if found is not None:
                at, marker = found
                said = self._held[:at].rstrip()
                self._say(said)
                self._held = self._held[len(said) :]
                self._at = self._marked = at - len(said) + len(marker)
                return marker
            waits = 0 if self._final else tail_of(self._held, self._markers)
            certain = self._held[: len(self._held) - waits]
            certain = certain if self._final else certain.rstrip()
            self._say(certain)
            self._held = self._held[len(certain) :]
            if self._final:
                return None
            yield

    def _say(self, text: str) -> None:
        if text and self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        elif text:
            self._parts.append(text)

    # ---------------------------------------------------------------------------------------------- a call

    def _begin(self, name: str) -> None:
        """It is a call."""
        self._drop()
        self._calls = True
        self._parts.append(ToolCallDelta(self._count, self._new_id(), name))

    def _argue(self, fragment: str) -> None:
        """More of the arguments of the call that has begun."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallDelta) and last.arguments and last.index == self._count:
            self._parts[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + fragment)
        elif fragment:
            self._parts.append(ToolCallDelta(self._count, arguments=fragment))

    def _end(self) -> None:
        """The call is complete."""
        self._drop()
        self._count += 1
        self._calls, self._after_call = False, True

    def _wait(self) -> Reading[None]:
        """Waits for more text; `CutOff` if there is none."""
        if self._final:
            raise CutOff
        yield

    def _peek(self, skipped: re.Pattern[str] | None = None) -> Reading[str]:
        """The next character, after those that are skipped."""
        while True:
            if skipped is not None and (found := skipped.match(self._held, self._at)):
                self._at = found.end()
            if self._at < len(self._held):
                return self._held[self._at]
            yield from self._wait()

    def _match(self, pattern: re.Pattern[str], begin: re.Pattern[str]) -> Reading[re.Match[str]]:
        """What a pattern finds here; `Unreadable` if the text is none that may become it, which `begin` describes."""
        while (found := pattern.match(self._held, self._at)) is None:
            if not begin.fullmatch(self._held, self._at):
                raise Unreadable
            yield from self._wait()
        self._at = found.end()
        return found

    def _close(self, end: str, skipped: str | None = None) -> Reading[None]:
        """Drops the text that ends a call, which may be missing, and the characters before it; None is blanks."""
        while end.startswith(rest := self._held.lstrip(skipped)) and rest != end and not self._final:
            yield
        if rest.startswith(end):
            self._held = rest.removeprefix(end)

    def _drop(self) -> None:
        """Forgets what was read."""
        self._held, self._at = self._held[self._at :], 0

    @property
    def _rest(self) -> str:
        """The text that is held and not read."""
        return self._held[self._at :] if self._at else self._held

    # ---------------------------------------------------------------------------------------------- JSON

    def _json_call(self, names: Container[str] | None = None) -> Reading[bool]:
        """Reads a call `{"name": "f", "arguments": {...}}`; returns whether all of it is there.

        Llama calls the arguments `parameters`; models also write them before the name, or as a string that holds JSON.

        Args:
            names: a call has one of these; None allows any.

        Raises:
            Unreadable: it is no call.
        """
        call = _JsonCall(self, names)
        try:
            yield from call.read()
        except Unreadable:
            if not self._calls:
                raise
            self._end()
            return False
        self._end()
        return True

    def _arguments(self, name: str, schema: Any = None) -> Reading[bool]:
        """Reads the arguments of a call whose name is known; returns whether they are readable to the end.

        Args:
            schema: of the arguments, see `json`.
        """
        self._begin(name)
        try:
            yield from self.json(self._argue, "", schema)
        except Unreadable as error:
            if isinstance(error, CutOff):
                self._at = len(self._held)
            self._end()
            return False
        self._end()
        return True

    def json(self, give: Give, lead: str = "", schema: Any = None, depth: int = 0) -> Reading[None]:
        """Reads one JSON value, and gives it out as valid JSON, in pieces.

        Models make small mistakes that other parsers refuse: line breaks in strings, `\\d`, a comma too many, `True`.
        Such values are given out as the JSON that they mean. What is given out is complete also after an exception.

        Args:
            lead: given out before the value, once it is certain that there is one.
            schema: of the value; None if its type shows.

        Raises:
            Unreadable: it is no JSON.
        """
        char = yield from self._peek(self.space)
        if char not in "{[" or depth >= MAX_DEPTH:
            yield from self._single(give, lead, schema, char)
            return
        self._at += 1
        give(lead + char)
        end = "}" if char == "{" else "]"
        lead, inner = "", schema
        try:
            while (char := (yield from self._peek(self.space))) != end:
                key = (yield from self._key()) if end == "}" else None
                if schema is not None:
                    inner = child(schema, None if key is None else json.loads(key), self._root)
                yield from self.json(give, lead if key is None else f"{lead}{key}: ", inner, depth + 1)
                char, lead = (yield from self._peek(self.space)), ", "
                if char not in ("," + end):
                    raise Unreadable
                self._at += char == ","
            self._at += 1
        finally:
            give(end)

    def _single(self, give: Give, lead: str, schema: Any, char: str) -> Reading[None]:
        """Reads a value that is no object and no array.

        Args:
            char: its first character.
        """
        if char == '"':
            self._at += 1
            give(lead + char)
            yield from self.json_string(give)
            return
        found = ""  # a number or a word, which is whole where another character follows
        while match := _LITERAL.match(self._held, self._at):
            found, self._at = found + match[0], match.end()
            if len(found) > 400:
                break
            yield from self._peek()
        word = _WORDS.get(found) or (found if _NUMBER.fullmatch(found) else None)
        if word is None:
            raise Unreadable
        give(lead + word)

    def _key(self) -> Reading[str]:
        """A key, as JSON, and its colon."""
        found = list[str]()
        if (yield from self._peek(self.space)) not in self.quotes:
            raise Unreadable
        yield from self.json(found.append)
        if (yield from self._peek(self.space)) != ":":
            raise Unreadable
        self._at += 1
        return "".join(found)

    def json_string(self, give: Give) -> Reading[None]:
        """A string after its first quote."""
        high = ""  # the first half of a surrogate pair
        try:
            while True:
                char = yield from self._peek()
                if char == "\\":
                    found = yield from self._json_escape()
                elif match := _PLAIN.match(self._held, self._at):
                    found, self._at = match[0], match.end()
                else:
                    found, self._at = json.dumps(char)[1:-1], self._at + 1
                code = int(found[2:], 16) if found[:2] == "\\u" and char == "\\" else 0
                if high and 0xDC00 <= code < 0xE000:
                    give(high + found)
                    high = ""
                    continue
                give(_LONE if high else "")
                high = found if 0xD800 <= code < 0xDC00 else ""
                if char == '"':
                    return
                give("" if high else _LONE if 0xDC00 <= code < 0xE000 else found)
        finally:
            give((_LONE if high else "") + '"')

    def _json_escape(self) -> Reading[str]:
        """An escape sequence; a backslash that was meant as such is one for itself."""
        while True:
            if match := _ESCAPE.match(self._held, self._at + 1):
                self._at = match.end()
                return f"\\{match[0]}"
            begin = _ESCAPE_BEGIN.match(self._held, self._at + 1)
            assert begin is not None
            if begin.end() < len(self._held):
                self._at = begin.end()
                return f"\\\\{begin[0]}"
            self._at = len(self._held) if self._final else self._at
            yield from self._wait()


class _JsonCall:
    """Reads one call in JSON: it begins when it has a name, and arguments that are an object."""

    def __init__(self, reader: CallReader, names: Container[str] | None) -> None:
        self._reader, self._names = reader, names
        self._name: str | None = None
        self._arguments: list[str] | None = None  # those that were read before the name
        self._begun = False

    def read(self) -> Reading[None]:
        """Reads it."""
        reader = self._reader
        reader._at += 1
        while (char := (yield from reader._peek(_SPACE))) != "}":
            key = json.loads((yield from reader._key()))
            yield from self._value(key)
            char = yield from reader._peek(_SPACE)
            if char not in ",}":
                raise Unreadable
            reader._at += char == ","
        if self._name is None:
            raise Unreadable
        reader._at += 1
        if not self._begun:
            self._give("{}")
            self._begin()

    def _value(self, key: str) -> Reading[None]:
        char, found = (yield from self._reader._peek(_SPACE)), list[str]()
        if key in _ARGUMENTS and self._arguments is None and char == "{":
            self._give("")
            yield from self._reader.json(self._give)
            return
        if key in _ARGUMENTS and char not in '{"nN':
            raise Unreadable
        yield from self._reader.json(found.append)
        value = json.loads("".join(found))
        if key == "name":
            if not isinstance(value, str) or not value or not (self._names is None or value in self._names):
                raise Unreadable
            self._name = value
        elif key in _ARGUMENTS and self._arguments is None:
            self._give(json.dumps(_inside(value), ensure_ascii=False))
        self._begin()

    def _give(self, text: str) -> None:
        """More of the arguments."""
        if self._arguments is None:
            self._arguments = []
            self._begin()
        if self._begun:
            self._reader._argue(text)
        else:
            self._arguments.append(text)

    def _begin(self) -> None:
        """Begins the call if there is all that it needs."""
        if not self._begun and self._name is not None and self._arguments is not None:
            self._begun = True
            self._reader._begin(self._name)
            self._reader._argue("".join(self._arguments))


def _inside(value: Any) -> dict[str, Any]:
    """Arguments that are no object: null is an empty one, a string holds JSON."""
    try:
        found = {} if value is None else json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreadable
    return found


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Place and text of the marker that comes first; the longest of those that begin there."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    return (min(found)[0], min(found)[2]) if found else None


def quoted(text: str) -> str:
    """A text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
