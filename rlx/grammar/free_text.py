"""Free text up to a marker, such as `</think>` or `<tool_call>`, behind which a grammar begins.

Grammar stage, under `Constraint`. A marker may be one token or be spread over several. A token that contains its end
and more would reach into the part that the grammar rules, so such tokens are not allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.grammar.vocabulary import Words, bits

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
