"""One JSON value, read from a text in pieces and given out as valid JSON.

Text stage, used by the parsers of tool calls. Models make small mistakes in JSON that other parsers refuse: line breaks
in strings, `\\d`, a comma too many, `True`. Such values are given out as the JSON that they mean.
"""

from __future__ import annotations

import json
import re

_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_ESCAPES = frozenset('"\\/bfnrt')
_SPACE = frozenset(" \t\n\r")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_LITERAL = re.compile(r"[A-Za-z0-9+\-.]+")
MAX_DEPTH = 64


class JsonReader:
    """Reads one value.

        reader = JsonReader()
        used = reader.push('{"a": [1, tr')      # characters that belong to the value
        reader.take()                           # '{"a": [1'
        reader.close()                          # ']}'

    What is given out so far is always the beginning of valid JSON, and `close()` is what it lacks. So a comma, a key, a
    number or a word is given out when what follows shows that it is whole.

    Attributes:
        done: the value is complete.
        broken: the text is no JSON from here on.
    """

    def __init__(self) -> None:
        self.done = self.broken = False
        self._out: list[str] = []
        self._pending = ""  # a comma or a key, which waits for a value
        self._stack: list[str] = []  # closing brackets
        self._expects = "value"
        self._literal = self._escape = ""
        self._high = ""  # the first half of a surrogate pair
        self._in_key = False

    def push(self, text: str) -> int:
        """More text; returns how many of its characters belong to the value."""
        at = 0
        while at < len(text) and not (self.done or self.broken):
            at = self._string(text, at) if self._expects == "string" else self._outside(text, at)
        return at

    def take(self) -> str:
        """What was found since the last call, as JSON."""
        found, self._out = "".join(self._out), []
        return found

    def close(self) -> str:
        """What makes valid JSON of all that was given out, after the value was left incomplete."""
        if self._expects == "string" and not self._in_key:
            self._lone()
            self._out.append('"')
        elif not self._stack and not self.done:
            self._end_literal()
            if not self.done:
                self._out.append("null")
        self._out += reversed(self._stack)
        self._stack, self.done = [], True
        return self.take()

    def _outside(self, text: str, at: int) -> int:
        char = text[at]
        if self._literal or (self._expects in ("value", "first") and _LITERAL.match(char)):
            found = _LITERAL.match(text, at)
            if found is None:
                self._end_literal()  # the character is looked at again
                return at
            self._literal += found[0]
            self.broken = len(self._literal) > 400
            return found.end()
        if char not in _SPACE:
            self._mark(char)
        return at if self.broken else at + 1

    def _mark(self, char: str) -> None:
        """A character that is structure."""
        expects = self._expects
        if char == '"' and expects in ("value", "first", "key", "first key"):
            self._in_key, self._expects = expects.endswith("key"), "string"
            self._put(char)
        elif char in "{[" and expects in ("value", "first") and len(self._stack) < MAX_DEPTH:
            self._put(char)
            self._stack.append("}" if char == "{" else "]")
            self._expects = "first key" if char == "{" else "first"
        elif char == ":" and expects == "colon":
            self._pending += ": "
            self._expects = "value"
        elif char == "," and expects == "next":
            self._pending = ", "
            self._expects = "key" if self._stack[-1] == "}" else "value"
        elif self._stack and char == self._stack[-1] and self._closes():
            self._pending = ""  # a comma before it
            self._out.append(self._stack.pop())
            self._ended()
        else:
            self.broken = True

    def _closes(self) -> bool:
        """Whether a bracket may close here: not between a key and its value."""
        return self._expects in ("next", "first", "first key", "key") or self._pending == ", "

    def _put(self, text: str) -> None:
        if self._in_key:
            self._pending += text
        else:
            self._out.append(self._pending + text)
            self._pending = ""

    def _ended(self) -> None:
        self._expects, self.done = "next", not self._stack

    def _end_literal(self) -> None:
        literal, self._literal = self._literal, ""
        word = _WORDS.get(literal) or (literal if _NUMBER.fullmatch(literal) else None)
        if word is None:
            self.broken = True
        else:
            self._put(word)
            self._ended()

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            return self._escaped(text[at], at)
        if found := _PLAIN.match(text, at):
            self._lone()
            self._put(found[0])
            return found.end()
        char = text[at]
        if char == "\\":
            self._escape = char
            return at + 1
        self._lone()
        if char != '"':
            self._put(json.dumps(char)[1:-1])
            return at + 1
        self._put(char)
        if self._in_key:
            self._in_key, self._expects = False, "colon"
        else:
            self._ended()
        return at + 1

    def _escaped(self, char: str, at: int) -> int:
        """One more character of an escape sequence."""
        sequence = self._escape + char
        if len(sequence) == 2 and char == "u":
            self._escape = sequence
        elif len(sequence) == 2:
            self._lone()
            self._put(sequence if char in _ESCAPES else "\\")
            self._escape = ""
            if char not in _ESCAPES:  # a backslash that was meant as such
                self._put("\\")
                return at
        elif char not in "0123456789abcdefABCDEF":
            self._lone()
            self._put("\\" + self._escape)
            self._escape = ""
            return at
        else:
            self._escape = "" if len(sequence) == 6 else sequence
            if len(sequence) == 6:
                self._unicode(sequence)
        return at + 1

    def _unicode(self, sequence: str) -> None:
        code = int(sequence[2:], 16)
        if 0xDC00 <= code < 0xE000 and self._high:
            self._put(self._high + sequence)
            self._high = ""
            return
        self._lone()
        if 0xD800 <= code < 0xDC00:
            self._high = sequence
        else:
            self._put("\\ufffd" if 0xDC00 <= code < 0xE000 else sequence)

    def _lone(self) -> None:
        """A half of a surrogate pair without its other half is no character."""
        if self._high:
            self._put("\\ufffd")
            self._high = ""
