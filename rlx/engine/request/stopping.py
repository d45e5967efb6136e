"""Why a generation ends, and the text of its answer, which ends before the first stop string.

Runners stage. The loop ends a request at a stop id, at the end of its grammar, its number of tokens or its context
(`Job.add`); the consumer ends it at a stop string or with its callback (`Handle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import ArgumentError
from rlx.text.tokenizer import StreamDetokenizer

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer

OnToken = Callable[[int], bool | None]
"""Called with every new token; False ends the generation."""

NOTHING: frozenset[int] = frozenset()


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model generated one of the stop ids."""
    STOP_STRING = "stop_string"
    """The text contains one of the stop strings."""
    GRAMMAR = "grammar"
    """The text is complete by its grammar, and nothing may follow."""
    CALLBACK = "callback"
    """`on_token` returned False."""
    LENGTH = "length"
    """The requested number of tokens is reached."""
    CONTEXT = "context"
    """The context is full."""
    ABORTED = "aborted"
    """It was aborted, or its stream was closed."""


def answer_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of an answer without control tokens."""
    text = AnswerText(tokenizer)
    for token in ids:
        text.push(token)
    text.finish()
    return text.text


class AnswerText:
    """Converts token ids to the text of an answer, which ends before the first stop string.

    Of several stop strings the one that is completed first counts, however the text is split into tokens; of those
    completed at the same character, the longest. Control tokens have no text, except those of `keep`.

    Attributes:
        text: the confirmed text; a possible beginning of a stop string is held back.
        stopped_at: the stop string that was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), keep: Set[int] = NOTHING) -> None:
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=True, continues=True, keep=keep)
        self._stop, self._held, self._pieces = tuple(stop), "", list[str]()
        self.stopped_at: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int, may_stop: bool = True) -> str:
        """Adds one token; returns the newly confirmed text, possibly empty.

        Args:
            may_stop: if False, a stop string that `token` completes is ordinary text.
        """
        more = self._detokenizer.push(token)
        if self._stop:
            return self._release(more, may_stop)
        self._pieces.append(more)
        return more

    def finish(self) -> str:
        """Ends the text; returns the rest of it."""
        rest = self._release(self._detokenizer.finish(), True)
        held, self._held = self._held, ""
        self._pieces.append(held)
        return rest + held

    def _release(self, more: str, may_stop: bool) -> str:
        if self.stopped_at is not None:
            return ""
        text, searched = self._held + more, 0
        while found := self._first_stop(text, searched):
            end, begin, stop = found
            if may_stop:
                self.stopped_at, self._held = stop, ""
                self._pieces.append(text[:begin])
                return text[:begin]
            searched = end
        certain = len(text) - self._beginning(text[searched:])
        self._held = text[certain:]
        self._pieces.append(text[:certain])
        return text[:certain]

    def _first_stop(self, text: str, start: int) -> tuple[int, int, str] | None:
        """(end, begin, string) of the stop string that is completed first in `text`."""
        begins = ((text.find(stop, start), stop) for stop in self._stop)
        return min(((begin + len(stop), begin, stop) for begin, stop in begins if begin >= 0), default=None)

    def _beginning(self, text: str) -> int:
        """Number of characters at the end of `text` that may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stop)), 0)


def says_stop(on_token: OnToken | None, token: int) -> bool:
    """Whether the callback returned False, or NumPy's False; None and other values continue."""
    answer = on_token(token) if on_token else None
    return isinstance(answer, bool | np.bool_) and not answer


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several as a tuple; `ArgumentError` for other types and for an empty string."""
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"stop is {stop!r}, expected a text or several", where="generate")
    if "" in texts:
        raise ArgumentError("a stop string is empty", where="generate", hint="it would end every answer at once")
    return tuple(texts)


def checked_count(name: str, value: Any) -> int | None:
    """A whole number of at least 0, or None; `ArgumentError` for anything else."""
    if value is None:
        return None
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < 0:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number of at least 0", where="generate")
    return int(value)
