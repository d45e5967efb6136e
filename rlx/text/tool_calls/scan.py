"""What the parsers of tool calls share: text before a call, and the pieces that are given out.

Text stage. A parser is a machine whose states are methods. Each looks at the text that is held, takes what is certain,
and says whether there is more to do before further text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlx.text.tool_calls.format import CallParser, Part, ToolCallDelta
from rlx.text.tool_calls.json_call import JsonCall

State = Callable[[], bool]


def tail_of(text: str, markers: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may begin one of the markers."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(marker.startswith(text[-n:]) for marker in markers)), 0)


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Place and text of the marker that comes first; the longest of those that begin there."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    return (min(found)[0], min(found)[2]) if found else None


class CallScanner(CallParser):
    """The text around calls. A subclass reads what follows a marker, and calls `abandon` if it is no call.

    Blanks around calls belong to neither text nor call.

    Args:
        markers: texts that begin a call.
        new_id: makes the ids of calls.
    """

    def __init__(self, markers: Sequence[str], new_id: Callable[[], str]) -> None:
        self._markers, self._new_id = tuple(markers), new_id
        self._held = ""  # not looked at yet
        self._begun = ""  # what has been read of a possible call, with the blanks before it
        self._marked = 0  # characters of it that are text in any case if it is no call
        self._state: State = self._text
        self._after_call = self._final = False
        self._parts: list[Part] = []
        self._count = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._run()

    def finish(self) -> list[Part]:
        self._final = True
        parts = self._run()
        while self._state != self._text:
            self._cut_off()
            parts += self._run()
        return parts

    def _run(self) -> list[Part]:
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    # What a subclass provides.

    def _opened(self, marker: str) -> State:
        """The state after a marker."""
        raise NotImplementedError

    def _cut_off(self) -> None:
        """The answer has ended inside a call: closes or abandons it. The state is `_text` afterwards."""
        raise NotImplementedError

    # The text between calls.

    def _text(self) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        found = first_of(self._held, self._markers)
        if found is not None:
            at, marker = found
            said = self._held[:at].rstrip()
            self._say(said)
            self._begun = self._held[len(said) : at + len(marker)]
            self._marked = len(self._begun)
            self._held = self._held[at + len(marker) :]
            self._state = self._opened(marker)
            return True
        waits = 0 if self._final else tail_of(self._held, self._markers)
        certain = self._held[: len(self._held) - waits]
        certain = certain if self._final else certain.rstrip()
        self._say(certain)
        self._held = self._held[len(certain) :]
        return False

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(self._parts[-1], str):
            text = self._parts.pop() + text  # type: ignore[operator]
        self._parts.append(text)

    def _use(self, count: int) -> str:
        """Takes characters from what is held, which belong to a possible call."""
        used, self._held = self._held[:count], self._held[count:]
        self._begun += used
        return used

    def _skip_blanks(self) -> bool:
        """Whether anything is left after the blanks."""
        self._use(len(self._held) - len(self._held.lstrip()))
        return bool(self._held)

    def _abandon(self) -> None:
        """It was no call: its marker is text, and what follows is looked at again."""
        text = self._begun + self._held
        self._say(text[: self._marked])
        self._held = text[self._marked :]
        self._begun, self._state = "", self._text

    # The call.

    def _begin(self, name: str) -> None:
        self._begun = ""
        self._parts.append(ToolCallDelta(self._count, self._new_id(), name))

    def _argue(self, fragment: str) -> None:
        """More of the arguments of the call that has begun."""
        if not fragment:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallDelta) and last.arguments and last.index == self._count:
            self._parts[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + fragment)
        else:
            self._parts.append(ToolCallDelta(self._count, arguments=fragment))

    def _read_json(self, call: JsonCall, then: State) -> bool:
        """Reads more of a call in JSON; `then` follows its end. Returns whether it has ended."""
        begun = call.begun
        self._use(call.push(self._held))
        if call.begun:
            if not begun:
                self._begin(call.name or "")
            self._argue(call.take())
        if call.done:
            self._end(then)
        elif call.bad:
            self._cut_off()
        return call.done or call.bad

    def _end(self, state: State | None = None) -> None:
        """The call is complete."""
        self._count += 1
        self._begun, self._after_call = "", True
        self._state = state or self._text


def quoted(text: str) -> str:
    """A text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
