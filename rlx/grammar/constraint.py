"""The state of one answer under a grammar: which tokens may come next, which must, and whether it is complete.

Grammar stage, over llguidance. The sampler asks for `mask` and tells what it chose; the engine loop asks for `forced`.

Behind a marker, such as `</think>` or `<tool_call>`, a grammar begins. A marker may be one token or be spread over
several. A token that contains its end and more would reach into the part that the grammar rules, so such tokens are not
allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx.errors import GrammarError
from rlx.grammar.package import DEAD_END, grammar_error

if TYPE_CHECKING:
    from rlx.grammar.compiler import CompiledGrammar

Words = npt.NDArray[np.int32]
"""A mask of tokens: bit i % 32 of word i // 32 is that of id i."""

_BLANK = b" \t\r\n"
_GAP = 2  # tokens of white space between the thinking and the answer


class _Part(Enum):
    """The part of the answer that the next token belongs to."""

    START = "start"  # thinking, or the answer
    THINKING = "thinking"
    FREE = "free text, in which a trigger may come"
    GAP = "white space, or the answer"
    ANSWER = "answer"


class Constraint:
    """The limit on the tokens of one answer.

        while not constraint.is_over:
            token = choose(logits, constraint.mask())
            constraint.accept(token)

    Args:
        compiled: the grammar.
        stop_ids: tokens that end the answer, allowed where the grammar is satisfied.
    """

    def __init__(self, compiled: CompiledGrammar, stop_ids: frozenset[int] = frozenset()) -> None:
        grammar, vocabulary = compiled.grammar, compiled.vocabulary
        self._compiled, self._vocabulary, self._stop_ids = compiled, vocabulary, stop_ids
        self._stops = bits(stop_ids, vocabulary.width) if stop_ids else None
        end, begin, trigger = grammar.thinking_end, grammar.thinking_begin, grammar.trigger
        self._end = compiled.marker(end, blank_after=trigger is None) if end else None
        self._begin = compiled.marker(begin, blank_after=True) if end and begin else None
        self._trigger = compiled.marker(trigger, blank_after=False) if trigger else None
        self._repeats = grammar.repeats
        self._matcher: Any = compiled.matcher.deep_copy()
        self._text = b""  # the newest bytes of free text, or the beginning that may become thinking
        self._gap = 0
        self._follows = True  # at the start: whether the text so far is one that the grammar allows
        self._has_stopped = False
        self._known: Words | None = None  # what `mask` has found
        self._is_known = False
        self._forced: list[int] | None = None  # what `forced` has found
        self._is_over: bool | None = None  # what `is_over` has found
        self._grammatical: Words | None = None  # what the grammar alone allows here, once it was asked
        self._part = _Part.START if self._begin else _Part.THINKING if self._end else self._first
        self._check()

    @property
    def _first(self) -> _Part:
        return _Part.FREE if self._trigger else _Part.ANSWER

    # ---------------------------------------------------------------------------------------------- what may come

    def mask(self) -> Words | None:
        """The tokens that may come next, int32[words]: bit i % 32 of word i // 32 is that of id i. None: any.

        Raises:
            GrammarError: the grammar is too complex at this place of the text.
        """
        if not self._is_known:
            self._known, self._is_known = self._allowed(), True
        return self._known

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; `[]` if there is a choice."""
        if self._forced is None:
            self._forced = self._only()
        return self._forced

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the grammar is satisfied and does not go on, or a stop id came."""
        if self._is_over is None:
            goes_on = self._part is not _Part.ANSWER or (self._trigger is not None and self._repeats)
            self._is_over = self._has_stopped or (not goes_on and self._is_complete())
        return self._is_over

    def _only(self) -> list[int]:
        """The tokens of the only continuation, without an end of the answer."""
        if self._part is not _Part.ANSWER or self._has_stopped:
            return []
        width = self._vocabulary.width
        found: list[int] = self._matcher.compute_ff_tokens()
        return found[: next((at for at, token in enumerate(found) if token >= width), len(found))]

    def _is_complete(self) -> bool:
        """Whether the grammar is satisfied and does not go on."""
        if self._matcher.is_stopped():
            return True
        return bool(self._matcher.is_accepting()) and not self._by_grammar().any()

    def _allowed(self) -> Words | None:
        if self._part is _Part.THINKING or self._part is _Part.FREE:
            return self._free()
        if self._part is _Part.START:
            assert self._begin is not None
            if self._trigger is not None:
                return self._free()
            found = self._begin.continuing(len(self._text), self._vocabulary.pieces)
            return found | self._in_answer() if self._follows else found
        found = self._in_answer()
        return found | self._vocabulary.blank if self._part is _Part.GAP else found

    def _free(self) -> Words | None:
        """The tokens that may come in free text: anything that does not reach beyond its marker."""
        marker = self._end if self._part is _Part.THINKING else self._trigger
        assert marker is not None
        beyond = marker.beyond(self._text)
        stops = self._stops if self._part is _Part.THINKING and self._trigger is None else None
        if beyond is None and stops is None:
            return None
        found = self._vocabulary.everything.copy()
        for excluded in (beyond, stops):
            if excluded is not None:
                found &= ~excluded
        return found

    def _in_answer(self) -> Words:
        """The tokens that the grammar allows, and stop ids where it is satisfied."""
        found = self._by_grammar()
        if self._matcher.is_accepting():
            return found if self._stops is None else found | self._stops
        if not found.any():
            raise GrammarError(DEAD_END, where=self._compiled.grammar.name)
        return found

    def _by_grammar(self) -> Words:
        """The tokens that the grammar allows, without any end of the answer."""
        if self._grammatical is not None:
            return self._grammatical
        width = self._vocabulary.width
        found = np.zeros(width // 32 + 1, np.int32)  # one id more: the end
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        self._check()
        found[width // 32] &= ~np.int32(np.uint32(1 << width % 32).view(np.int32))
        self._grammatical = found[: -(-width // 32)]
        return self._grammatical

    # ---------------------------------------------------------------------------------------------- what came

    def accept(self, token: int) -> None:
        """Goes on with a token.

        Raises:
            GrammarError: the grammar does not allow it.
        """
        piece, part = self._vocabulary.pieces[token], self._part
        self._is_known, self._grammatical, self._forced, self._is_over = False, None, None, None
        if part is _Part.START:
            part = self._started(piece, token)
        if part is _Part.THINKING or part is _Part.FREE:
            self._read(token, piece)
        elif part is _Part.GAP and not self._is_next(token) and is_blank(piece):
            self._gap += 1
            self._part = _Part.ANSWER if self._gap == _GAP else _Part.GAP
        elif part is not _Part.START:
            self._part = _Part.ANSWER
            self._consume(token)

    def _started(self, piece: bytes, token: int) -> _Part:
        """At the start of an answer, which may begin with thinking: the part that a token belongs to.

        START if it is one of the beginning, and there is nothing else to do.
        """
        assert self._begin is not None
        text = self._text + piece
        if piece and self._begin.data.startswith(text):
            if self._trigger is None:
                self._follows = self._follows and self._is_next(token)
                if self._follows:
                    self._consume(token)
            self._text = text
            if text == self._begin.data:
                self._part, self._text, self._matcher = _Part.THINKING, b"", self._compiled.matcher.deep_copy()
            return _Part.START
        if not self._follows:
            raise GrammarError(f"{piece!r} does not continue {self._begin.data!r}", where="grammar")
        self._part = self._first
        return self._first

    def _read(self, token: int, piece: bytes) -> None:
        """Goes on in free text."""
        marker = self._end if self._part is _Part.THINKING else self._trigger
        assert marker is not None
        if token in self._stop_ids:
            self._has_stopped = True
        elif not marker.found(self._text, piece):
            self._text = (self._text + piece)[-len(marker.data) :]
        elif self._part is _Part.THINKING:
            self._part, self._text = (_Part.FREE if self._trigger else _Part.GAP), b""
        else:
            self._part, self._matcher = _Part.ANSWER, self._compiled.matcher.deep_copy()

    def _consume(self, token: int) -> None:
        """Goes on in the answer."""
        if token in self._stop_ids and not self._is_next(token):
            if not self._matcher.is_accepting():
                raise GrammarError(f"the answer is not complete, and token {token} would end it", where="grammar")
            self._has_stopped = True
            return
        self._matcher.consume_token(token)
        self._check()
        if self._trigger is not None and self._repeats and self._is_complete():
            self._part, self._text = _Part.FREE, b""

    def _is_next(self, token: int) -> bool:
        """Whether the grammar allows a token."""
        return bool(self._matcher.validate_tokens([token]))

    def _check(self) -> None:
        if self._matcher.is_error():
            grammar = self._compiled.grammar
            raise grammar_error(self._matcher.get_error(), grammar.name, grammar.kind, grammar.written)


def is_blank(piece: bytes) -> bool:
    """Whether a token is white space, and nothing else."""
    return bool(piece) and not piece.strip(_BLANK)


def bits(ids: Iterable[int], width: int) -> Words:
    """A mask that allows some ids, int32[words of 32 ids]."""
    flags = np.zeros(-(-width // 32) * 32, np.uint8)
    flags[[token for token in ids if token < width]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class Marker:
    """A text that is looked for in an answer, and the tokens that reach beyond it.

    Args:
        text: the marker.
        pieces: the bytes of each id.
        blank_after: whether the token that completes it may contain white space behind it.
    """

    def __init__(self, text: str, pieces: Sequence[bytes], *, blank_after: bool) -> None:
        self.data, self._width = text.encode(), len(pieces)
        self._beyond = [self._passing(pieces, begun, blank_after) for begun in range(len(self.data))]
        self._masks: dict[tuple[int, ...], Words | None] = {}

    def _passing(self, pieces: Sequence[bytes], begun: int, blank_after: bool) -> set[int]:
        """The tokens that complete the marker, of which some bytes came before, and go on after it."""
        rest = self.data[begun:]
        if begun:
            ends = [(i, piece[len(rest) :]) for i, piece in enumerate(pieces) if piece.startswith(rest)]
        else:
            ends = [(i, piece.partition(rest)[2]) for i, piece in enumerate(pieces) if rest in piece]
        return {i for i, end in ends if (end.strip(_BLANK) if blank_after else end)}

    def found(self, before: bytes, piece: bytes) -> bool:
        """Whether a token completes the marker.

        Args:
            before: the text before it, at least the last `len(marker) - 1` bytes.
        """
        return self.data in before[max(0, len(before) - len(self.data) + 1) :] + piece

    def beyond(self, before: bytes) -> Words | None:
        """The tokens that must not come after a text because they reach beyond the marker; None if there are none."""
        begun = tuple(size for size in range(min(len(self.data) - 1, len(before)) + 1)
                      if size == 0 or before.endswith(self.data[:size]))  # fmt: skip
        if begun not in self._masks:
            ids = set[int]().union(*(self._beyond[size] for size in begun))
            self._masks[begun] = bits(ids, self._width) if ids else None
        return self._masks[begun]

    def continuing(self, size: int, pieces: Sequence[bytes]) -> Words:
        """The tokens that spell the marker further, after its first `size` bytes, and nothing else."""
        key = (-1 - size,)
        found = self._masks.get(key)
        if found is None:
            rest = self.data[size:]
            found = bits((i for i, piece in enumerate(pieces) if piece and rest.startswith(piece)), self._width)
            self._masks[key] = found
        return found
