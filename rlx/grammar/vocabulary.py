"""A vocabulary in the form that llguidance reads, masks of its tokens, and markers in free text.

Grammar stage, under the compiler and `Constraint`. Behind a marker, such as `</think>` or `<tool_call>`, a grammar
begins. A marker may be one token or be spread over several. A token that contains its end and more would reach into
the part that the grammar rules, so such tokens are not allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlx.text.tokenizer import TokenType

if TYPE_CHECKING:
    from rlx.text.tokenizer import Tokenizer


Words = npt.NDArray[np.int32]

_MARK = "\x02"  # in front of a text: what a tokenizer adds to the beginning of a text stands before it


class GrammarTokenizer:
    """A tokenizer as llguidance wants it.

    The end of an answer is a token of its own, behind all others. Which of the model's tokens stand for it is decided
    by the request (`Constraint`), not by the vocabulary.

    Args:
        tokenizer: the model's.
        width: number of logits. Ids without a token are never chosen.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        known = min(width, tokenizer.vocab_size)
        self._tokenizer, self.eos_token_id = tokenizer, width
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)]
        self.tokens += [b""] * (width - known) + [b"<end-of-answer>"]
        special = {*tokenizer.special_ids, *tokenizer.vocabulary.of_type(TokenType.UNUSED)}
        self.special_token_ids = [*sorted(token for token in special if token < known), width]
        self._before = tokenizer.encode_parts(_MARK, False)

    def __call__(self, text: bytes | str) -> list[int]:
        """The ids of a text within others; `[]` if the tokenizer cannot spell it so."""
        data = text.encode() if isinstance(text, str) else text
        if not data:
            return []
        size = len(self._before)
        found = self._tokenizer.encode_parts(_MARK + data.decode("utf-8", "replace"), False)
        ids = found[size:]
        if found[:size] != self._before or b"".join(self.tokens[token] for token in ids) != data:
            return self._spelled(data)
        return ids

    def _spelled(self, data: bytes) -> list[int]:
        """The ids of some bytes, the longest token first."""
        found, at = list[int](), 0
        while at < len(data):
            size, token = next(
                ((size, token) for size in range(min(len(data) - at, self._longest), 0, -1)
                 if (token := self._by_bytes.get(data[at : at + size])) is not None),
                (0, 0),
            )  # fmt: skip
            if not size:
                return []
            found.append(token)
            at += size
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        return {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)


def bits(ids: Iterable[int], width: int) -> Words:
    """A mask that allows some ids, int32[words of 32 ids]."""
    flags = np.zeros(-(-width // 32) * 32, np.uint8)
    flags[[token for token in ids if token < width]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


_BLANK = b" \t\r\n"


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
