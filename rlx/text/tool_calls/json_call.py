"""A call as a JSON object: `{"name": "f", "arguments": {...}}`, read from a text in pieces.

Text stage, used by the parsers of formats that write calls as JSON. Llama calls the arguments `parameters`; models also
write them before the name, or as a string that holds JSON.
"""

from __future__ import annotations

import json
from collections.abc import Container

from rlx.text.tool_calls.json_reader import JsonReader

_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Reads one call.

    Attributes:
        name: of the function, when it is known.
        begun: it is certainly a call: it has a name, and arguments that are an object.
        done: it is complete.
        bad: it is no call, or unreadable from here on.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        """Args: names: a call has one of these; None allows any."""
        self.name: str | None = None
        self.done = self.bad = False
        self._names, self._expects = names, "{"
        self._reader, self._key = JsonReader(), ""
        self._is_object: bool | None = None  # whether the arguments are one; None before they begin
        self._started, self._read = False, ""  # of a value that is no object of arguments
        self._arguments: list[str] = []

    @property
    def begun(self) -> bool:
        return self.name is not None and (self._is_object is not None or self.done)

    def push(self, text: str) -> int:
        """More text; returns how many of its characters belong to the call."""
        at = 0
        while at < len(text) and not (self.done or self.bad):
            if self._expects == "value":
                at = self._value(text, at)
            elif self._expects == "string":
                at = self._string(text, at)
            else:
                at += self._mark(text[at])
        return at

    def take(self) -> str:
        """The arguments that were found since the last call."""
        if self.done and self._is_object is None:
            self._is_object = True
            return "{}"
        found = "".join(self._arguments)
        self._arguments = []
        return found

    def close(self) -> str:
        """What makes a JSON object of the arguments of a call that has begun and ended too early."""
        if self._expects == "value" and self._key in _ARGUMENTS and self._is_object:
            return self._reader.close()
        return ""

    def _mark(self, char: str) -> int:
        """A character of the object's structure; returns 1 if it belongs to it."""
        if char in _SPACE:
            return 1
        if char == self._expects or (char in '"}' and self._expects == "key"):
            if char == "{":
                self._expects = "key"
            elif char == "}":
                self.done = self.name is not None
                self.bad = not self.done
            elif char == '"':
                self._reader, self._expects = JsonReader(), "string"
                self._reader.push(char)
            else:
                self._expects, self._reader, self._read, self._started = "value", JsonReader(), "", False
            return 1
        if self._expects == "next" and char in ",}":
            self._expects = "key" if char == "," else "}"
            return int(char == ",")
        self.bad = True
        return 0

    def _string(self, text: str, at: int) -> int:
        """A key."""
        used = self._reader.push(text[at:])
        if self._reader.done:
            self._key, self._expects = json.loads('"' + self._reader.take()[1:]), ":"
        self.bad = self._reader.broken
        return at + used

    def _value(self, text: str, at: int) -> int:
        if not self._started and text[at] in _SPACE:
            return at + 1
        if not self._started and self._key in _ARGUMENTS:
            if text[at] not in '{"nN':
                self.bad = True
                return at
            self._is_object = True if text[at] == "{" else None
        self._started = True
        used = self._reader.push(text[at:])
        found = self._reader.take()
        if self._key in _ARGUMENTS and self._is_object:
            self._arguments.append(found)
        else:
            self._read += found
        self.bad = self._reader.broken
        if self._reader.done:
            self._expects = "next"
            self._complete()
        return at + used

    def _complete(self) -> None:
        """A value has ended."""
        if self._key == "name":
            name = json.loads(self._read)
            known = isinstance(name, str) and name and (self._names is None or name in self._names)
            self.name, self.bad = (name, False) if known else (None, True)
        elif self._key in _ARGUMENTS and not self._is_object:
            self._inside(json.loads(self._read))

    def _inside(self, value: object) -> None:
        """Arguments that are no object: null is an empty one, a string holds JSON."""
        try:
            found = {} if value is None else json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            self._is_object = True
            self._arguments.append(json.dumps(found, ensure_ascii=False))
        else:
            self.bad = True
