"""Stopping conditions of a generation: stop id, stop string, callback, number of tokens, context.

Runners stage, under the generation loop. `Stopping` receives each token and decides whether it was the last.
`AnswerText` is the text of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import ArgumentError, TokenizerError

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


class Stopping:
    """The stopping conditions of one generation. The result includes the token that ends it.

        while stopping.reason is None:
            token = sampler.sample(logits, stopping.banned)
            stopping.push(token)

    If several conditions hold, the first in the order of `FinishReason` is reported.

    Args:
        max_tokens: maximum number of tokens; None for any number.
        room: how many tokens the context has room for; None if it is unlimited.
        stop_ids: tokens that end the generation.
        stop: strings that end it, at any place within tokens; one string or several.
        tokenizer: returns the tokenizer; called if there are stop strings.
        min_tokens: until there are this many tokens, `stop_ids` and `stop` have no effect, and `banned` has `stop_ids`.
        on_token: called once with every token, before the conditions are checked.
        pieces: whether to provide `piece` without stop strings, too; it stays empty if there is no tokenizer.
        keep: control tokens that `piece` has the text of.

    Attributes:
        reason: why it ended; None if it continues.
        stopped_by: the stop id or the stop string that ended it; None if it was another reason.
        count: number of tokens so far.
        piece: the text that the last token completed.
        stop_ids: the tokens that end it.

    Raises:
        ArgumentError: a number is negative or no number, `min_tokens` exceeds `max_tokens`, a stop string is empty,
            stop strings have no tokenizer, or the callback is not callable.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        room: int | None = None,
        stop_ids: Set[int] = NOTHING,
        stop: str | Sequence[str] = (),
        tokenizer: Callable[[], Tokenizer] | None = None,
        min_tokens: int = 0,
        on_token: OnToken | None = None,
        pieces: bool = False,
        keep: Set[int] = NOTHING,
    ) -> None:
        self._max, self._min = checked_count("max_tokens", max_tokens), checked_count("min_tokens", min_tokens) or 0
        if self._max is not None and self._min > self._max:
            raise ArgumentError(f"min_tokens is {self._min}, more than the {self._max} of max_tokens", where="generate")
        if on_token is not None and not callable(on_token):
            raise ArgumentError(f"on_token is {on_token!r}, expected a function of a token", where="generate")
        texts = stop_strings(stop)
        if texts and tokenizer is None:
            what = f"the stop string {texts[0]!r} needs a tokenizer, and there is none"
            raise ArgumentError(what, where="stop", hint="stop at token ids instead, or in on_token")
        self._answer = _answer(tokenizer, texts, keep) if tokenizer and (texts or pieces) else None
        self.piece = ""
        self.stopped_by: int | str | None = None
        self._room, self.stop_ids, self._on_token = room, stop_ids, on_token
        self.count = 0
        self.reason = self._full()

    @property
    def left(self) -> int | None:
        """Maximum number of further tokens; None if it is unlimited."""
        bounds = [most - self.count for most in (self._max, self._room) if most is not None]
        return min(bounds, default=None)

    @property
    def banned(self) -> Set[int]:
        """Ids that the next token must not be: the stop ids, until there are `min_tokens` tokens."""
        return self.stop_ids if self.count < self._min else NOTHING

    @property
    def text(self) -> str | None:
        """The confirmed text of the answer without the stop string; None if neither stop strings nor pieces are
        requested.

        Text that may begin a stop string is held back; it is included once the generation is over.
        """
        return self._answer.text if self._answer else None

    def push(self, token: int, is_complete: bool = False) -> FinishReason | None:
        """Adds one token; returns the finish reason if it is the last one.

        Args:
            is_complete: whether a grammar lets nothing follow.
        """
        self.count, self.piece = self.count + 1, ""
        halted = says_stop(self._on_token, token)
        found = FinishReason.GRAMMAR if is_complete else FinishReason.CALLBACK if halted else self._full()
        self.reason = self._said(token) or found
        if self._answer and self.reason is not None:
            self.piece += self._answer.finish()
        return self.reason

    def abort(self) -> None:
        """Ends it before its time, unless it is over."""
        self.reason = self.reason or FinishReason.ABORTED

    def _said(self, token: int) -> FinishReason | None:
        """The finish reason if `token` completes a stop id or a stop string."""
        if token in self.stop_ids and self.count > self._min:
            self.stopped_by = token
            return FinishReason.STOP
        if self._answer:
            self.piece = self._answer.push(token, may_stop=self.count >= self._min)
            if self._answer.stopped_at is not None:
                self.stopped_by = self._answer.stopped_at
                return FinishReason.STOP_STRING
        return None

    def _full(self) -> FinishReason | None:
        if self._max is not None and self.count >= self._max:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if self._room is not None and self.count >= self._room else None


def _answer(tokenizer: Callable[[], Tokenizer], stop: Sequence[str], keep: Set[int]) -> AnswerText | None:
    try:
        return AnswerText(tokenizer(), stop, keep)
    except TokenizerError:
        if stop:
            raise
        return None


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
        from rlx.text.detokenize import StreamDetokenizer

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
        return self._release(self._detokenizer.push(token), may_stop)

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
